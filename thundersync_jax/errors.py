"""The errors a caller is meant to read: one line that says what to change."""

import traceback

_REASON_CHARACTERS = 300  # of an exception's text; reasons are one line


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work."""


class StreamError(ValueError):
    """A gradient stream was told something that cannot be true."""


class ServerError(RuntimeError):
    """A server that samples or teaches has failed, and nothing can take its place."""


def one_line(error: BaseException) -> str:
    """Returns the exception's type and the first line of its text."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.splitlines()[0][:_REASON_CHARACTERS]
