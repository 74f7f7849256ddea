"""The first failure of a run, made known to every rank, and the end of ranks that cannot react.

A rank that raises, or dies, leaves the others waiting for it: in :meth:`Mailbox.take`, where they
can be woken, or inside a collective, where they cannot. So the first failure is written to a key of
the run's store, a thread on every rank watches that key, wakes what can be woken, and ends the
process where the main thread does not react within a grace time. What a user sees is the traceback
of the rank that failed first, once, as the last thing on the terminal.

Later failures are mostly consequences (a peer's connection is gone), so they are only a suspicion
until the cause has had a second to become known.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from lightning_asyncpipe._private import default_store, own_connection
from lightning_asyncpipe.errors import DataMismatchError, PeerFailure, PipelineError
from lightning_asyncpipe.runtime.cpplog import quiet_torch
from lightning_asyncpipe.runtime.interrupts import InterruptWatch

_CAUSE_WAIT = 1.0  # seconds that a consequence waits for its cause to be reported
_CLEANUP = 5.0  # seconds beyond the grace time that a main thread which reacted has to end
_LEAVE_WAIT = 2.0  # seconds that the rank with the store waits for the others to let go of it
_TEXT_LIMIT = 65536  # characters of a traceback; the end is kept
_LOST = "ConnectionLost"
_FAILURE, _LEFT, _SEEN = "failure", "left", "seen"
_LEAVING = "leaving"  # in the place of a failure: the run ended well, and its store goes away
_CONNECTION_ERRORS = ("Connection closed", "Connection reset", "Broken pipe", "connection to rank")

_runs = itertools.count()


class Failure(NamedTuple):
    """What is known of the rank that failed first."""

    rank: int
    kind: str  # name of the exception's type
    text: str  # its traceback; one sentence for a rank that could not report, and for what concerns all ranks

    @classmethod
    def lost(cls, rank: int, sentence: str) -> Failure:
        """The failure of a rank that is gone without having reported."""
        return cls(rank, _LOST, sentence)

    @property
    def is_lost(self) -> bool:
        """Whether the rank is gone without having reported."""
        return self.kind == _LOST

    @property
    def message(self) -> str:
        """For people; ends with the failed rank's own traceback, where that tells more than a sentence."""
        concerns_all = self.kind == DataMismatchError.__name__
        return self.text if self.is_lost or concerns_all else f"rank {self.rank} failed:\n\n{self.text}"


class FailureBoard:
    """One rank's view of the first failure.

    Args:
        store: the store of the process group. A TCPStore is given a connection of its own, since a
            blocking call of another thread would hold this one up.
        rank: global rank. Rank 0 is taken to hold the store.
        world_size: number of ranks.
        owns_terminal: whether this rank speaks for the run where it has to end by force; by default
            rank 0 does.
        poll: seconds between two looks at the store.
        grace: seconds that the main thread has to react to a failure.
        name: the same on all ranks and different for each board of a run; by default the number of
            boards that this process has made.

    Attributes:
        ending: set where the run ends well: from then on a rank may be gone without having failed.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        owns_terminal: bool | None = None,
        poll: float = 0.2,
        grace: float = 3.0,
        name: str | None = None,
    ) -> None:
        self.rank = rank
        self.ending = False
        self.owns_terminal = rank == 0 if owns_terminal is None else owns_terminal
        self._world_size = world_size
        self._poll = poll
        self._grace = grace
        prefix = f"asyncpipe/board/{next(_runs) if name is None else name}"
        self._store = PrefixStore(prefix, own_connection(store))
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._known = threading.Event()
        self._known_since = 0.0
        self._suspicion: tuple[float, int, str] | None = None
        self._wakers: list[Callable[[], None]] = []
        self._reacted = False
        self._left = False
        self._interrupts = InterruptWatch()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="failure-board")
        _boards.add(self)
        self._thread.start()

    @classmethod
    def over_default_store(cls, **options: Any) -> FailureBoard:
        """The board of this rank over the default process group's store; ``options``: the keyword arguments above."""
        return cls(default_store(), dist.get_rank(), dist.get_world_size(), **options)

    @property
    def failure(self) -> Failure | None:
        """The first failure, as far as this rank knows."""
        return self._failure

    @property
    def active(self) -> bool:
        """Whether failures still reach the other ranks: not after ``close`` or the run's end."""
        return not (self._left or self._stop.is_set())

    def report(self, error: BaseException) -> Failure:
        """Tell all ranks that this one failed; returns the failure that came first.

        To be called by the main thread, which thereby counts as having reacted. An error that looks
        like the consequence of another rank's end waits a second for that to be reported.
        """
        self._reacted = True
        if not self.active and self._failure is None:
            return failure_of(self.rank, error)
        if self._failure is None and _is_consequence(error):
            self._known.wait(_CAUSE_WAIT + self._poll)
        return self._failure or self._settle(failure_of(self.rank, error))

    def report_lost(self, rank: int, sentence: str) -> None:
        """Tell all ranks that ``rank`` is gone without having reported; ``sentence`` says how."""
        if self._failure is None and self.active:
            self._settle(Failure.lost(rank, sentence))

    def suspect(self, rank: int, reason: str) -> None:
        """Take note that ``rank`` seems to be gone; reported if no cause is known in a second."""
        if self._suspicion is None:
            self._suspicion = (time.monotonic(), rank, reason)

    def check(self) -> None:
        """Raise the first failure, if there is one.

        Raises:
            PeerFailure: ends with the failed rank's own traceback.
        """
        if self._failure is not None:
            self._reacted = True
            raise PeerFailure(self._failure.message)

    def on_failure(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Have ``wake`` called, by any thread, once a failure is known; at once if it is.

        Returns a function that takes this back.
        """
        with self._lock:
            known = self._failure is not None
            if not known:
                self._wakers.append(wake)
        if known:
            wake()
        return lambda: self._wakers.remove(wake) if wake in self._wakers else None

    def seen_by_rank_0(self, timeout: float) -> bool:
        """Whether rank 0 knows of the failure, and will print it; waits ``timeout`` at most."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                with quiet_torch():
                    if self._store.check([_SEEN]):
                        return True
            except (RuntimeError, ValueError):
                return False
            time.sleep(0.05)
        return False

    def close(self) -> None:
        """End watching; this rank is done, and whatever happens later is no failure of the run.

        Rank 0, with which the store goes away, waits until the others no longer look at it.
        """
        if self._stop.is_set():
            return
        try:
            with quiet_torch():
                self._leave()
        except (RuntimeError, ValueError):
            pass  # the store is gone already
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._interrupts.close()

    # ------------------------------------------------------------------------------------ agreeing

    def _settle(self, failure: Failure) -> Failure:
        """Write ``failure`` unless there is one already; returns and adopts the first."""
        try:
            with quiet_torch():
                first = self._store.compare_set(_FAILURE, "", json.dumps(failure))
            if first.decode() != _LEAVING:
                failure = Failure(*json.loads(first))
        except (RuntimeError, ValueError):
            pass  # without a store the others will see that it is gone
        self._adopt(failure)
        return failure

    def _adopt(self, failure: Failure) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure, self._known_since = failure, time.monotonic()
            wakers = list(self._wakers)
        self._known.set()
        for wake in wakers:
            wake()
        if self.rank == 0:
            try:
                with quiet_torch():
                    self._store.set(_SEEN, "1")
            except (RuntimeError, ValueError):
                pass

    def _leave(self) -> None:
        if self.rank != 0:
            self._let_go()
            return
        if self._store.compare_set(_FAILURE, "", _LEAVING).decode() != _LEAVING:
            return
        deadline = time.monotonic() + _LEAVE_WAIT
        while self._store.add(_LEFT, 0) < self._world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.02)

    def _let_go(self) -> None:
        with self._lock:
            if self._left:
                return
            self._left = True
        self._store.add(_LEFT, 1)

    # ------------------------------------------------------------------------------------ watching

    def _watch(self) -> None:
        while not self._stop.wait(self._poll):
            if self._failure is not None:
                self._enforce()
            elif self._interrupts.ignored_for() > _CAUSE_WAIT:
                self._settle(Failure(self.rank, "KeyboardInterrupt", "KeyboardInterrupt"))
            elif not self._left:
                self._look()

    def _look(self) -> None:
        try:
            with quiet_torch():
                found = self._store.get(_FAILURE) if self._store.check([_FAILURE]) else b""
                if found.decode() == _LEAVING:
                    if self.rank != 0:
                        self._let_go()
                    return
        except (RuntimeError, ValueError) as error:
            if not self._stop.is_set():
                reason = f"rank 0 has ended: its store cannot be reached ({error})"
                self._adopt(Failure.lost(0, reason))
            return
        if found:
            self._adopt(Failure(*json.loads(found)))
        elif self._suspicion is not None:
            since, rank, reason = self._suspicion
            if time.monotonic() - since > _CAUSE_WAIT:
                self._settle(Failure.lost(rank, reason))

    def _enforce(self) -> None:
        """End the process if the main thread has not, in time, after a failure."""
        assert self._failure is not None
        limit = self._grace + (_CLEANUP if self._reacted else 0.0)
        if time.monotonic() - self._known_since < limit or self._stop.is_set():
            return
        if self.owns_terminal:
            print(self._failure.message, file=sys.stderr, flush=True)
        os._exit(1)


_boards: weakref.WeakSet[FailureBoard] = weakref.WeakSet()


@atexit.register
def _stop_watching() -> None:
    """Let no thread return from the store's C++ side once the interpreter is being taken down.

    See ``exits``, which this follows.
    """
    for board in list(_boards):
        board._stop.set()
        board._thread.join(1.0)


def failure_of(rank: int, error: BaseException) -> Failure:
    """The failure of ``rank`` by an exception that was raised there."""
    concerns_all = isinstance(error, DataMismatchError)
    text = str(error) if concerns_all else "".join(traceback.format_exception(error))[-_TEXT_LIMIT:]
    return Failure(rank, type(error).__name__, text)


def _is_consequence(error: BaseException) -> bool:
    """Whether ``error`` looks like what a rank gets when another one is gone."""
    if isinstance(error, PeerFailure):
        return True
    lost = any(phrase in str(error) for phrase in _CONNECTION_ERRORS)
    return lost and isinstance(error, (RuntimeError, PipelineError))
