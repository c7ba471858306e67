"""The errors a caller is meant to read: one line that says what to change."""


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work."""


class StreamError(ValueError):
    """A gradient stream was told something that cannot be true."""


class ServerError(RuntimeError):
    """A server that samples or teaches has failed, and nothing can take its place."""
