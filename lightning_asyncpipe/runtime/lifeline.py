"""Processes that end with the one that started them.

On Linux the kernel does it (``PR_SET_PDEATHSIG``), also where the process is stuck in C++ code.
Elsewhere, and where the starting *thread* may end before its process does (the kernel's signal
follows the thread), a thread watches the parent.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_POLL = 0.5  # seconds


def kernel_lifeline() -> Callable[[], None] | None:
    """A function that ties the calling process to its parent thread's life; None if unsupported.

    It only makes system calls, so that it can run between fork and exec.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    kill, parent = int(signal.SIGKILL), os.getpid()

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return tie


def tie_to_parent(pid: int) -> None:
    """End this process, by a thread, once process ``pid``, its parent, has ended.

    Where a wrapper stands between the two, whether ``pid`` exists is all that can be asked.
    """
    direct = os.getppid() == pid

    def watch() -> None:
        while os.getppid() == pid if direct else _exists(pid):
            time.sleep(_POLL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def tie_to_multiprocessing_parent() -> None:
    """The same for a process that ``multiprocessing`` started, by whichever start method.

    A forkserver's children have the server as their parent; the sentinel is the main process's.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()
