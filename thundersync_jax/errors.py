"""The errors a caller is meant to read: one line that says what to change."""


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work."""


class StreamError(ValueError):
    """A gradient stream was told something that cannot be true."""
