"""What the ranks tell each other once per batch: records of micro-batches, and that they agree.

Ranks that were given different data, or that have reached different points of the loop, would train on mixed-up labels
or wait for each other without end. A few numbers beside the records of every batch find that out.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_asyncpipe.errors import DataMismatchError
from lightning_asyncpipe.integration.records import MicroBatchRecord, StepExchange
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.runtime.engine import Work
from lightning_asyncpipe.runtime.standpoint import mismatch


class Agreement:
    """The exchange at the end of a segment.

    Args:
        world: collectives over all ranks.
        geometry: numbers of stages and replicas.
    """

    def __init__(self, world: World, geometry: Geometry) -> None:
        self._exchange = StepExchange(world.all_gather_tensor, payload_words=7)
        self._stages = geometry.num_stages
        self._single = world.size == 1

    def exchange(
        self,
        current: Work,
        upcoming: Work | None,
        steps: bool,
        local: Sequence[MicroBatchRecord],
        stop: bool = False,
    ) -> tuple[list[MicroBatchRecord], bool]:
        """All ranks' records of the batch `current`, by replica and micro-batch; whether any rank has to `stop`.

        Raises:
            DataMismatchError: if ranks disagree; names the step and the ranks.
        """
        words = (
            current.step,
            int(steps),
            len(current.tasks),
            -1 if upcoming is None else len(upcoming.tasks),
            current.digest,
            0 if upcoming is None else upcoming.digest,
            int(stop),
        )
        records, payloads = self._exchange.exchange(local, words)
        for rank, theirs in enumerate(payloads):
            if theirs[:2] != payloads[0][:2]:
                raise DataMismatchError(
                    f"step {current.step}: rank 0 is at batch {payloads[0][0]} and rank {rank} at batch {theirs[0]}, "
                    "or only one of them ends its window: the ranks' loaders or loops run differently"
                )
            first = rank // self._stages * self._stages
            if theirs[2:6] != payloads[first][2:6]:
                this_batch = theirs[4] != payloads[first][4]
                raise mismatch(current.step + (0 if this_batch else 1), (first, rank))
        return records, any(theirs[6] for theirs in payloads)
