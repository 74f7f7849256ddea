"""Ctrl-C for a main thread that is inside a collective, where Python does not deliver it.

Python runs signal handlers between two instructions of the main thread. One that waits in C++ for
a message that never comes ignores Ctrl-C for as long. Python's wake-up descriptor, however, gets a
byte at once, so another thread can see that the signal came and was not handled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType


class InterruptWatch:
    """Notices an interrupt (SIGINT) that the main thread does not handle.

    Does nothing where the program handles SIGINT itself, uses the wake-up descriptor itself, or
    where it is made outside the main thread.
    """

    def __init__(self) -> None:
        self._handled = False
        self._since: float | None = None
        self._read_end = -1
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        self._read_end, self._write_end = os.pipe()
        for end in (self._read_end, self._write_end):
            os.set_blocking(end, False)
        previous = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous)
            self._close_pipe()
            return
        signal.signal(signal.SIGINT, self._handle)
        _watching.add(self)

    def ignored_for(self) -> float:
        """Seconds since an interrupt that the main thread has not handled; 0 if there is none.

        To be called now and then, always by the same thread.
        """
        if self._read_end == -1:
            return 0.0
        try:
            came = signal.SIGINT in os.read(self._read_end, 4096)
        except OSError:  # nothing to read, or closed meanwhile
            came = False
        if self._handled:
            self._handled, self._since = False, None
        elif came and self._since is None:
            self._since = time.monotonic()
        return 0.0 if self._since is None else time.monotonic() - self._since

    def close(self) -> None:
        """Give the wake-up descriptor and the handler back."""
        if self._read_end == -1 or threading.current_thread() is not threading.main_thread():
            return
        _watching.discard(self)
        current = signal.set_wakeup_fd(-1)
        if current != self._write_end:
            signal.set_wakeup_fd(current)
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._close_pipe()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self._handled = True
        signal.default_int_handler(signum, frame)

    def _close_pipe(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._read_end)
            os.close(self._write_end)
        self._read_end = -1


_watching: set[InterruptWatch] = set()


def _let_go_in_fork() -> None:
    """A forked process, such as a loader's worker, must not write to the descriptor it shares."""
    if _watching:
        signal.set_wakeup_fd(-1)
        _watching.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_fork)
