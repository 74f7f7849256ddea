"""Where messages arrive, and where the main thread waits for them.

The main thread must stay interruptible: by Ctrl-C, and by the failure of a rank that it is not even
waiting for. So it never waits inside a communication library, only on a queue, which other threads
fill and from which they can wake it.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.runtime.wire import Message, MessageKey

_SLICE = 0.1  # seconds between two looks for a failure
_STALLED = 2.5  # seconds after which a wait is looked into
_VERDICT = 5.0  # seconds that a lost connection may go unexplained by the failure watch


class FailureWatch(Protocol):
    """What a transport needs to know of failures elsewhere (see ``failure.FailureBoard``)."""

    def check(self) -> None:
        """Raise the first failure of the run, if there is one."""

    def suspect(self, rank: int, reason: str) -> None:
        """Take note that ``rank`` seems to be gone; does not block."""

    def on_failure(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Have ``wake`` called once a failure is known; returns how to take that back."""


class Mailbox:
    """Messages that have arrived, and the one thread that takes them.

    Any thread may deliver. ``take`` belongs to one thread: it empties a queue into a dictionary.
    """

    def __init__(self, rank: int, failures: FailureWatch | None, timeout: float) -> None:
        self._rank = rank
        self._failures = failures
        self._timeout = timeout
        self._peer_of: dict[MessageKey, int] = {}  # expected, not yet taken
        self._arrived: dict[MessageKey, Message] = {}
        #: called now and then while ``take`` waits for long; may raise what it finds
        self.on_stall: Callable[[], None] | None = None
        self._queue: queue.SimpleQueue[tuple[MessageKey, Message] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._lost: tuple[float, str] | None = None
        self._forget = failures.on_failure(self.wake) if failures is not None else lambda: None

    def expect(self, peer: int, keys: Sequence[MessageKey]) -> None:
        """Note that ``keys`` come from ``peer``.

        Raises:
            PipelineError: a key is already expected.
        """
        for key in keys:
            if key in self._peer_of:
                raise PipelineError(
                    f"rank {self._rank} expects {key} from rank {peer}, but already expects it "
                    f"from rank {self._peer_of[key]}; keys must be unique until taken"
                )
            self._peer_of[key] = peer

    def deliver(self, key: MessageKey, message: Message) -> None:
        """Hand over an arrived message, from any thread."""
        self._queue.put((key, message))

    def wake(self) -> None:
        """Make ``take`` look for failures now."""
        self._queue.put(None)

    def fail(self, error: BaseException) -> None:
        """Make every later ``take`` raise ``error``."""
        self._error = self._error or error
        self.wake()

    def lose(self, peer: int, error: BaseException) -> None:
        """Note that the connection to ``peer`` is gone; its cause may still become known."""
        if self._lost is None:
            reason = f"rank {self._rank} lost its connection to rank {peer}: {error}"
            self._lost = (time.monotonic(), reason)
            if self._failures is not None:
                self._failures.suspect(peer, reason)
        self.wake()

    def take(self, key: MessageKey) -> Message:
        """Block until ``key`` has arrived, and remove it.

        Raises:
            PeerFailure: another rank failed.
            PipelineError: nobody was announced to send ``key``, a message arrived out of order,
                or nothing arrived within the timeout.
        """
        started = time.monotonic()
        deadline = started + self._timeout
        looked = started + _STALLED
        while key not in self._arrived:
            if self.on_stall is not None and time.monotonic() > looked:
                looked += 1.0
                self.on_stall()
            if time.monotonic() > deadline:
                raise PipelineError(
                    f"rank {self._rank} waited {self._timeout:g} s for {key} from rank "
                    f"{self._peer_of.get(key)}; it may be slower than the timeout, or stuck"
                )
            self._settle(missing=key)
        self._peer_of.pop(key, None)
        return self._arrived.pop(key)

    def check(self) -> None:
        """Raise if the run has failed."""
        if self._failures is not None:
            self._failures.check()
        if self._error is not None:
            raise self._error
        if self._lost is not None:
            since, reason = self._lost
            if self._failures is None or time.monotonic() - since > _VERDICT:
                raise PipelineError(reason)

    def close(self) -> None:
        self._forget()

    def _settle(self, missing: MessageKey) -> None:
        """Move one item that has arrived to the dictionary; waits a slice of time for it."""
        if self._queue.empty():
            self.check()
            if missing not in self._peer_of:
                raise PipelineError(f"rank {self._rank} waits for {missing}, which was never expected")
        try:
            item = self._queue.get(timeout=_SLICE)
        except queue.Empty:
            return
        if item is not None:
            self._arrived[item[0]] = item[1]
