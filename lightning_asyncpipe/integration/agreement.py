"""What the ranks tell each other once per batch: records of micro-batches, and that they agree.

Each rank begins to tell as soon as its last stage has run all micro-batches of the batch, so that by the end of the
segment everything has arrived and nobody waits.

Ranks that were given different data, or that have reached different points of the loop, would train on mixed-up labels
or wait for each other without end. A few numbers beside the records of every batch find that out.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_asyncpipe.integration.records import MicroBatchRecord, StepExchange
from lightning_asyncpipe.integration.step_exchange import Begun
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.runtime.engine import Work
from lightning_asyncpipe.runtime.standpoint import apart, mismatch


class Agreement:
    """One exchange for each segment.

    Args:
        world: collectives over all ranks.
        geometry: numbers of stages and replicas.
    """

    def __init__(self, world: World, geometry: Geometry) -> None:
        self._exchange = StepExchange(world.begin_all_gather, payload_words=7)
        self._stages = geometry.num_stages
        self._begun: Begun | None = None

    def begin(
        self,
        current: Work,
        upcoming: Work | None,
        steps: bool,
        local: Sequence[MicroBatchRecord],
        stop: tuple[bool, bool] = (False, False),
    ) -> None:
        """Begin to exchange this rank's records of the batch `current`, and whether it has to stop.

        `stop`: whether this rank was asked to end the run, and whether to end the training.
        """
        words = (
            current.step,
            int(steps),
            len(current.tasks),
            -1 if upcoming is None else len(upcoming.tasks),
            current.digest,
            0 if upcoming is None else upcoming.digest,
            stop[0] + 2 * stop[1],
        )
        self._begun = self._exchange.begin(local, words)

    def finish(self, current: Work) -> tuple[list[MicroBatchRecord], tuple[bool, bool]]:
        """All ranks' records of the batch `current`, by replica, micro-batch and stage; whether any rank has to stop.

        Raises:
            DataMismatchError: if ranks disagree; names the step and the ranks.
        """
        begun, self._begun = self._begun, None
        assert begun is not None
        records, payloads = self._exchange.finish(begun)
        for rank, theirs in enumerate(payloads):
            self._compare(current.step, rank, theirs, payloads)
        stops = (any(theirs[6] & 1 for theirs in payloads), any(theirs[6] & 2 for theirs in payloads))
        return records, stops

    def _compare(self, step: int, rank: int, theirs: tuple[int, ...], payloads: list[tuple[int, ...]]) -> None:
        """Raise if a rank is not where rank 0 is, or has not the data of the first rank of its replica."""
        if theirs[:2] != payloads[0][:2]:
            here, there = (
                f"trains batch {words[0]}, {'the last' if words[1] else 'not the last'} of its window"
                for words in (payloads[0], theirs)
            )
            raise apart(step, (0, rank), (here, there))
        if (theirs[3] < 0) != (payloads[0][3] < 0):
            here, there = (f"has {'no' if words[3] < 0 else 'a'} batch {step + 1}" for words in (payloads[0], theirs))
            raise apart(step + 1, (0, rank), (here, there))
        first = rank // self._stages * self._stages
        if theirs[2:6] != payloads[first][2:6]:
            this_batch = theirs[4] != payloads[first][4]
            raise mismatch(step + (0 if this_batch else 1), (first, rank))
