"""Leaving a process in which gloo still has operations under way.

At its exit a process waits for gloo's threads, and they wait for their peers: two ranks that exit after a failure may
wait for each other. And a Python thread that returns from gloo while the interpreter is taken down cannot get the
interpreter's lock, is unwound through C++ code that must not be, and the process aborts (Python before 3.14). So an
exit waits a little: the peers end too, and their connections with them, which ends the waits. Then it leaves at once.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable

_EXIT_WAIT = 2.0  # seconds that an exit waits for operations; two ranks that exit wait for each other

_under_way: dict[int, Callable[[], bool]] = {}


def watch(key: object, may_be_in_gloo: Callable[[], bool]) -> None:
    """Have an exit of the process wait while `may_be_in_gloo` returns True, until :func:`forget`."""
    _under_way[id(key)] = may_be_in_gloo


def forget(key: object) -> None:
    """Take :func:`watch` back."""
    _under_way.pop(id(key), None)


@atexit.register
def _leave_gloo() -> None:
    deadline = time.monotonic() + _EXIT_WAIT
    while any(may_be_in_gloo() for may_be_in_gloo in list(_under_way.values())):
        if time.monotonic() > deadline:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        time.sleep(0.02)
