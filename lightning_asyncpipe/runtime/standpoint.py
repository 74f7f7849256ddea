"""Why ranks wait for each other: they have come to different points, or hold different data.

All ranks pass the same points in the same order: the batches, the flushes between them, the collectives of callbacks.
Ranks that disagree about the size of a batch, or whether there is one, plan different segments and then wait for what
nobody sends. In the steady state nothing is exchanged to find that out. Only where a rank has stood still for a while
does a thread of its own write down the last points that it has passed, in the store of the run, and compare them with
those of others.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from lightning_asyncpipe.errors import DataMismatchError, PipelineError
from lightning_asyncpipe.runtime.cpplog import quiet_torch

_STILL = 1.0  # seconds after which a rank that has not moved says where it stands
_TOLD = 2.5  # seconds after which every rank that stands still has said so
_COMPARED = (3, 4, 6, 10, 20, 40, 80, 160)  # so many times that long without a move, it compares
_REMEMBERED = 16  # points

Path = tuple[tuple[int, "Standpoint"], ...]
"""The last points that a rank has come to, each with its number."""


class Standpoint(NamedTuple):
    """A point that all ranks come to.

    Attributes:
        where: what a rank does there, to complete a sentence: "trains batch 3".
        step: number of the batch, if it trains one, or of the one that comes next.
        microbatches: into which the batch was split.
        ahead: micro-batches of the next batch that may start early; 0 for none.
        data: a digest of the batch.
    """

    where: str
    step: int
    microbatches: int = 0
    ahead: int = 0
    data: int = 0


def mismatch(step: int, ranks: tuple[int, int], what: str = "were given different data") -> DataMismatchError:
    """The error for two ranks of one replica that do not work on the same batch."""
    return DataMismatchError(
        f"step {step}: ranks {ranks[0]} and {ranks[1]} belong to one replica but {what}. All ranks of a replica must "
        "see the same batches in the same order: seed everything that shuffles, samples or augments "
        "(lightning.seed_everything(seed, workers=True)) and do not let the data depend on the rank."
    )


SAVES = "saves a checkpoint"
"""Where a rank stands that has been asked for its part of one."""


def apart(step: int, ranks: tuple[int, int], wheres: tuple[str, str]) -> DataMismatchError:
    """The error for two ranks whose loops have come apart."""
    (one, other), (here, there) = ranks, wheres
    saving = " A rank that saves needs the others' parts: call `trainer.save_checkpoint` on every rank, not on one."
    return DataMismatchError(
        f"step {step}: rank {one} {here}, but rank {other} {there}. All ranks must get the same number of batches "
        "(check the lengths of the loaders, of each rank's part of a stream in particular) and call the same hooks and "
        f"collectives in the same order.{saving if SAVES in wheres else ''}"
    )


class Standpoints:
    """The last points that the ranks of a run have come to, as far as they stand still.

    Args:
        store: a store that all ranks reach; used from a thread as well.
        rank: this rank.
        world_size: number of ranks.
        num_stages: ranks of one replica, which must work on the same data.
        tell: given what is wrong once a comparison finds it while this rank stands still; called by a thread.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, num_stages: int, tell: Callable[[DataMismatchError], None]
    ) -> None:
        self._store = store
        self._rank = rank
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._num_stages = num_stages
        self._tell = tell
        self._path: Path = ()
        self._step = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="standpoints")
        self._thread.start()

    def train(self, step: int, microbatches: int, ahead: int, data: int) -> None:
        """This rank begins a segment; the arguments are those of :class:`Standpoint`."""
        self._move(Standpoint(f"trains batch {step}", step, microbatches, ahead, data))
        self._step = step + 1

    def meet(self, where: str) -> None:
        """This rank begins something else in which all ranks take part, between two batches."""
        self._move(Standpoint(where, self._step))

    def compare(self) -> None:
        """Raise if a rank that stands still has come to another point than this one did.

        Raises:
            DataMismatchError: names the step and the ranks.
        """
        found = self._find()
        if found is not None:
            raise found

    def explain(self) -> DataMismatchError | None:
        """What :meth:`compare` would raise once other ranks have had the time to notice that they stand still."""
        time.sleep(_TOLD)
        return self._find()

    def close(self) -> None:
        """Stop telling."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _STILL)

    def _move(self, standpoint: Standpoint) -> None:
        number = self._path[-1][0] + 1 if self._path else 0
        self._path = (*self._path[1 - _REMEMBERED :], (number, standpoint))

    def _find(self) -> DataMismatchError | None:
        own = dict(self._path)
        for peer in self._peers:
            for number, theirs in self._read(peer):
                found = self._difference(own[number], peer, theirs) if number in own else None
                if found is not None:
                    return found
        return None

    def _difference(self, own: Standpoint, peer: int, theirs: Standpoint) -> DataMismatchError | None:
        ranks = min(peer, self._rank), max(peer, self._rank)
        first, second = (own, theirs) if self._rank < peer else (theirs, own)
        if own[:2] != theirs[:2]:
            return apart(own.step, ranks, (first.where, second.where))
        if (own.ahead > 0) != (theirs.ahead > 0):
            wheres = [f"has {'a' if point.ahead else 'no'} batch {own.step + 1}" for point in (first, second)]
            return apart(own.step + 1, ranks, (wheres[0], wheres[1]))
        same_replica = peer // self._num_stages == self._rank // self._num_stages
        return mismatch(own.step, ranks) if same_replica and own != theirs else None

    def _read(self, rank: int) -> Path:
        with self._lock, quiet_torch():
            try:
                if not self._store.check([f"standpoint/{rank}"]):
                    return ()
                path = json.loads(self._store.get(f"standpoint/{rank}"))
            except (RuntimeError, ValueError):
                return ()
        return tuple((number, Standpoint(*point)) for number, point in path)

    def _watch(self) -> None:
        before: Path = ()
        still = 0
        while not self._stop.wait(_STILL):
            path = self._path
            still = still + 1 if path and path is before else 0
            before = path
            try:
                if still == 1:
                    with self._lock, quiet_torch():
                        self._store.set(f"standpoint/{self._rank}", json.dumps(path))
                elif still in _COMPARED and (found := self._find()) is not None:
                    self._tell(found)
                    return
            except (RuntimeError, ValueError):
                return  # the store is gone: the run has ended


@contextmanager
def explained(standpoints: Standpoints | None) -> Iterator[None]:
    """Around what waits for messages: that one comes which is not the expected one may be due to the data."""
    try:
        yield
    except PipelineError as error:
        if standpoints is None or type(error) is not PipelineError:
            raise
        cause = standpoints.explain()
        if cause is None:
            raise
        raise cause from None
