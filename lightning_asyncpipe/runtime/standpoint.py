"""Why ranks wait for each other: they stand at different points, or hold different data.

Ranks that disagree about the size of a batch plan different segments, and then wait for messages that nobody sends. In
the steady state nothing is exchanged to find that out. Only where a rank has stood still for a while does a thread of
its own write down where it stands, in the store of the run; a rank that waits compares.
"""

from __future__ import annotations

import json
import threading
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from lightning_asyncpipe.errors import DataMismatchError

_STILL = 1.0  # seconds after which a rank that has not moved says where it stands


class Standpoint(NamedTuple):
    """Where a rank stands.

    Attributes:
        step: number of the batch.
        microbatches: into which it was split.
        ahead: micro-batches of the next batch that may start early; 0 for none.
        data: a digest of the batch.
    """

    step: int
    microbatches: int
    ahead: int
    data: int


def mismatch(step: int, ranks: tuple[int, int], what: str = "were given different data") -> DataMismatchError:
    """The error for two ranks of one replica that do not work on the same batch."""
    return DataMismatchError(
        f"step {step}: ranks {ranks[0]} and {ranks[1]} belong to one replica but {what}. All ranks of a replica must "
        "see the same batches in the same order: seed everything that shuffles, samples or augments "
        "(lightning.seed_everything(seed, workers=True)) and do not let the data depend on the rank."
    )


class Standpoints:
    """Where the ranks of one replica stand, as far as they stand still.

    Args:
        store: a store that all ranks reach; used from a thread as well.
        rank: this rank.
        peers: the ranks of the same replica.
    """

    def __init__(self, store: Store, rank: int, peers: range) -> None:
        self._store = store
        self._rank = rank
        self._peers = peers
        self._now: Standpoint | None = None
        self._told: Standpoint | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="standpoints")
        self._thread.start()

    def move(self, standpoint: Standpoint) -> None:
        """This rank begins a segment."""
        self._now = standpoint

    def compare(self) -> None:
        """Raise if a peer that stands still at the same step does not work on the same batch.

        Raises:
            DataMismatchError: names the step and the ranks.
        """
        own = self._now
        if own is None:
            return
        for peer in self._peers:
            theirs = self._read(peer) if peer != self._rank else None
            if theirs is not None and theirs.step == own.step and theirs != own:
                raise mismatch(own.step, (min(peer, self._rank), max(peer, self._rank)))

    def close(self) -> None:
        """Stop telling."""
        self._stop.set()
        self._thread.join(2 * _STILL)

    def _read(self, rank: int) -> Standpoint | None:
        with self._lock:
            try:
                if not self._store.check([f"standpoint/{rank}"]):
                    return None
                return Standpoint(*json.loads(self._store.get(f"standpoint/{rank}")))
            except (RuntimeError, ValueError):
                return None

    def _watch(self) -> None:
        before: Standpoint | None = None
        while not self._stop.wait(_STILL):
            now = self._now
            if now is not None and now is before and now is not self._told:
                with self._lock:
                    try:
                        self._store.set(f"standpoint/{self._rank}", json.dumps(now))
                    except (RuntimeError, ValueError):
                        return
                self._told = now
            before = now
