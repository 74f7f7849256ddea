"""Keeps torch's C++ side from writing to stderr where the answer "no connection" is expected.

A store client whose server is gone throws, which is what we ask it for, but also logs a warning
with a C++ stack, on every rank, over the one traceback that a user should see.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ERROR = 2  # c10's severities: info 0, warning 1, error 2


def _log_level() -> ctypes.c_int | None:
    """torch's minimum severity, a global of libc10; None where this build has none."""
    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(path), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


_LEVEL = _log_level()


_lock = threading.Lock()
_inside = 0  # threads that want quiet now
_before = 0  # the severity to go back to when the last one has left


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Let torch's C++ side log errors only; for the few microseconds of one store operation.

    ``FLAGS_caffe2_log_level``, checked on torch 2.13. It is process-wide: a warning that another
    thread logs at the same moment is lost. Several threads may want quiet at a time.
    """
    global _inside, _before
    if _LEVEL is None:
        yield
        return
    with _lock:
        if _inside == 0:
            _before, _LEVEL.value = _LEVEL.value, max(_LEVEL.value, _ERROR)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _LEVEL.value = _before
