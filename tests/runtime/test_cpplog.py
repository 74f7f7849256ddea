"""Quiet is kept for as long as any thread wants it."""

from __future__ import annotations

import threading

import pytest

from lightning_asyncpipe.runtime import cpplog
from lightning_asyncpipe.runtime.cpplog import quiet_torch


@pytest.mark.skipif(cpplog._LEVEL is None, reason="this build of torch has no such level")
def test_a_thread_that_leaves_first_does_not_end_the_quiet_of_another() -> None:
    assert cpplog._LEVEL is not None
    loud = cpplog._LEVEL.value
    entered, leave = threading.Event(), threading.Event()

    def be_quiet() -> None:
        with quiet_torch():
            entered.set()
            leave.wait(10)

    other = threading.Thread(target=be_quiet)
    with quiet_torch():
        other.start()
        entered.wait(10)
    assert cpplog._LEVEL.value >= cpplog._ERROR
    leave.set()
    other.join()
    assert cpplog._LEVEL.value == loud
