"""The errors a caller is meant to read: one line that says what to change."""

import errno
import os
import traceback

_REASON_CHARACTERS = 300  # of an exception's text; reasons are one line


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work."""


class StreamError(ValueError):
    """A gradient stream was told something that cannot be true."""


class ServerError(RuntimeError):
    """A server that samples or teaches has failed, and nothing can take its place."""


class InfrastructureFault(Exception):
    """An environment's: what its attempt needs is away, and may be back soon."""


class PolicyFault(Exception):
    """An environment's: the policy has ended its attempt, which is never tried again.

    It is verified, or has this reward.
    """

    reward: float | None = None  # also of a subclass that does not call this `__init__`

    def __init__(self, reason: str = "", reward: float | None = None):
        super().__init__(reason)
        self.reward = reward


def full(error: BaseException) -> str | None:
    """What an error says where a disk, or one's share of it, is full; else None."""
    # Libraries that write in threads of their own pass on the system's words alone.
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        if getattr(error, "errno", None) == code or os.strerror(code) in str(error):
            return os.strerror(code)
    return None


def one_line(error: BaseException) -> str:
    """Returns the exception's type and the first line of its text."""
    text = "".join(traceback.format_exception_only(error)).strip()
    return text.splitlines()[0][:_REASON_CHARACTERS]
