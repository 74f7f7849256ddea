"""An interrupt that the main thread handles is its own affair; one that it cannot is noticed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_asyncpipe.runtime.interrupts import InterruptWatch


@pytest.fixture
def watch() -> Iterator[InterruptWatch]:
    watch = InterruptWatch()
    yield watch
    watch.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)


def test_a_handled_interrupt_is_not_noticed(watch: InterruptWatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert watch.ignored_for() == 0.0
    assert watch.ignored_for() == 0.0


def test_an_interrupt_is_noticed_while_the_main_thread_is_stuck(watch: InterruptWatch) -> None:
    seen: list[float] = []

    def look() -> None:
        deadline = time.monotonic() + 5
        while not seen and time.monotonic() < deadline:
            if watch.ignored_for() > 0.2:
                seen.append(watch.ignored_for())

    thread = threading.Thread(target=look)
    thread.start()
    # As inside a collective: the signal has come, but no Python instruction follows to handle it.
    watch._handle = lambda signum, frame: None  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, watch._handle)
    interrupt()
    thread.join()
    assert seen


def test_a_fork_does_not_pass_its_interrupts_on(watch: InterruptWatch) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            interrupt()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert watch.ignored_for() == 0.0
    time.sleep(0.05)
    assert watch.ignored_for() == 0.0


def test_a_programs_own_handler_is_left_alone() -> None:
    own = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        watch = InterruptWatch()
        interrupt()
        assert watch.ignored_for() == 0.0
        watch.close()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, own)
