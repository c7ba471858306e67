"""Ctrl-C and SIGTERM: one line, a status, and nothing left running.

A KeyboardInterrupt in the middle of orbax, asyncio or an import may be swallowed, or
become another error, or leave a thread behind that never ends.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

_GRACE_SECS = 4.0  # for the command's own `with` blocks


class Interrupts:
    """Within it a signal raises KeyboardInterrupt, whatever then becomes of that.

    At its end the process ends with status 130 (Ctrl-C) or 143 (SIGTERM) if there was a
    signal. It ends without the interpreter's own end, which joins all threads: the
    `with` blocks inside were run by the exception, and a file that is cut off is never
    taken for a whole one. A second signal, or too long a wait, ends it at once.
    """

    def __enter__(self) -> None:
        self._status: int | None = None
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
        if self._status is not None:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            _end(self._status)
        if self._before:
            signal.set_wakeup_fd(self._fd_before)
            os.close(self._writing)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: Any) -> NoReturn:
        if self._status is not None:
            _end(self._status)
        self._status = 128 + number
        # What other threads say of a process that is ending explains nothing.
        threading.excepthook = sys.unraisablehook = lambda *_: None
        logging.disable()
        raise KeyboardInterrupt

    def _watch(self, reading: int) -> None:
        with open(reading, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in self._before:
                    time.sleep(_GRACE_SECS)
                    _end(128 + number[0])


def _end(status: int) -> NoReturn:
    os.write(2, b"interrupted\n")  # sys.stderr may be busy with what was interrupted
    os._exit(status)
