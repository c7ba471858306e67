"""What a signal does: Ctrl-C and SIGTERM end a command, its environments closed.

The first one raises KeyboardInterrupt in the main thread and is kept in mind. Where the
exception goes astray, as in a callback of a garbage collection, `check` raises it again
between two events, and where the main thread does not come back from C, a thread ends
the process. A second signal ends it at once.
"""

import contextlib
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

RESULT = {"error": "interrupted", "kind": "KeyboardInterrupt"}  # of `--json`
_GRACE_SECS = 4.0  # for the command's own `with` blocks
_LOOK_SECS = 0.1  # while others ask for patience


class _Ending:
    """What is known of this process's end; a signal is the whole process's, too."""

    number: int | None = None  # the first signal
    patience_secs = 0.0  # until when it is waited for, on the monotonic clock
    said = threading.Lock()  # taken by whoever ends the process


def check() -> None:
    """Raises KeyboardInterrupt where a signal's own was lost."""
    if _Ending.number is not None:
        raise KeyboardInterrupt


def terminated() -> bool:
    """Whether the process is ending by SIGTERM, which may be the end of a machine."""
    return _Ending.number == signal.SIGTERM


@contextlib.contextmanager
def patience(secs: float) -> Iterator[None]:
    """A first signal's end waits until the block has ended, so many seconds at most."""
    before = _Ending.patience_secs
    _Ending.patience_secs = max(before, time.monotonic() + secs)
    try:
        yield
    finally:  # and then the main thread has to come to its end
        _Ending.patience_secs = max(before, time.monotonic() + _GRACE_SECS)


class Interrupts:
    """Within it signals end the process, with status 130 (Ctrl-C) or 143 (SIGTERM).

    It ends without the interpreter's own end, which joins all threads: the `with`
    blocks inside were run by the exception, and a file that is cut off is never taken
    for a whole one.
    """

    def __init__(self, as_json: bool = False):
        self._as_json = as_json  # whether the last line is a JSON object

    def __enter__(self) -> None:
        _Ending.number = None
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        if self._before:
            # A handler waits until the main thread is back from C; a pipe does not.
            reading, self._writing = os.pipe()
            os.set_blocking(self._writing, False)
            self._fd_before = signal.set_wakeup_fd(
                self._writing, warn_on_full_buffer=False
            )
            threading.Thread(target=self._watch, args=(reading,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        if _Ending.number is not None:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            self._end(_Ending.number)
        if self._before:
            signal.set_wakeup_fd(self._fd_before)
            os.close(self._writing)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: Any) -> NoReturn:
        if _Ending.number is not None:
            self._end(_Ending.number)
        _Ending.number = number
        # What other threads say of a process that is ending explains nothing.
        threading.excepthook = sys.unraisablehook = lambda *_: None
        logging.disable()
        raise KeyboardInterrupt

    def _watch(self, reading: int) -> None:
        with open(reading, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in self._before:
                    self._wait(pipe)
                    self._end(number[0])

    def _wait(self, pipe: Any) -> None:
        """Waits for a second signal, and no longer than there is patience."""
        end, ours = time.monotonic() + _GRACE_SECS, {bytes([n]) for n in self._before}
        while time.monotonic() < max(end, _Ending.patience_secs):
            ready, _, _ = select.select([pipe], [], [], _LOOK_SECS)
            if ready and pipe.read(1) in ours:
                return

    def _end(self, number: int) -> NoReturn:
        if not _Ending.said.acquire(blocking=False):
            time.sleep(_GRACE_SECS)  # another thread is at it
        # Python's own files may be busy with what was interrupted.
        with contextlib.suppress(OSError):
            os.write(2, b"interrupted\n")
            if self._as_json:
                os.write(1, json.dumps(RESULT).encode() + b"\n")
        os._exit(128 + number)
