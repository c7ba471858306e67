"""How long an object may be used, and by whom."""

import contextlib
import threading
from collections.abc import Iterator


class Lifetime:
    """Of a stream: one thread, and until it has ended.

    Attributes:
      ended: What became of it, as "is finished"; None while it goes on.
    """

    def __init__(self):
        self.ended: str | None = None
        self._thread = threading.get_ident()

    def check(self) -> None:
        """Raises ValueError in another thread, and after the end."""
        if threading.get_ident() != self._thread:
            raise ValueError(
                f"called from thread {threading.current_thread().name!r}; the thread "
                "that made a GradientStream owns it, pass events to it in a queue"
            )
        if self.ended:
            raise ValueError(f"this stream {self.ended}; make a new one for every step")

    @contextlib.contextmanager
    def or_end(self) -> Iterator[None]:
        """A decision that is half carried out leaves no step to go on with."""
        try:
            yield
        except BaseException as error:
            self.ended = f"stopped at {type(error).__name__}"
            raise
