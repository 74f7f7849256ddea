"""Counts, for every stage, which weight versions forwards and backwards met, and holds them to the bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lightning_asyncpipe.errors import ScheduleError
from lightning_asyncpipe.plan.schedule import SegmentPlan


class StalenessCounter:
    """Version k of a stage is its weights after k updates.

    Args:
        max_staleness: how many updates may lie between a micro-batch's forward and its backward.

    Attributes:
        counts: how often a stage saw (forward version, backward version) that far apart: ``{(stage, lag): n}``.
        microbatches: micro-batches that have finished.
        stale_microbatches: those of them that met two versions in at least one stage.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.counts: Counter[tuple[int, int]] = Counter()
        self.microbatches = 0
        self.stale_microbatches = 0
        self._versions: Counter[int] = Counter()

    def updated(self, stage: int) -> None:
        """The stage has its next version."""
        self._versions[stage] += 1

    def forward(self, stage: int) -> int:
        """The version on which a forward runs now."""
        return self._versions[stage]

    def backward(self, stage: int, version: int) -> None:
        """A backward of a forward on `version` runs now.

        Raises:
            ScheduleError: if they are further apart than the bound.
        """
        lag = self._versions[stage] - version
        if lag > self.max_staleness:
            raise ScheduleError(
                f"stage {stage}: a backward runs {lag} updates after its forward, and max_staleness is "
                f"{self.max_staleness}. This is a fault of the schedule; please report it with the plan's arguments."
            )
        self.counts[stage, lag] += 1

    def close_segment(self, plan: SegmentPlan) -> None:
        """All micro-batches of the segment's batch have finished."""
        self.microbatches += plan.spec.microbatches
        if plan.spec.updated:
            self.stale_microbatches += sum(1 for stages in plan.spec.carried if stages)


def share_and_largest(lags: Iterable[tuple[int, int]]) -> tuple[float, int]:
    """The share of stage forwards whose backward met a newer version, and the largest lag in updates.

    Args:
        lags: pairs of a lag and how often it was seen, of any stages and ranks; a lag may come several times.
    """
    seen = [(lag, count) for lag, count in lags if count]
    total = sum(count for _, count in seen)
    stale = sum(count for lag, count in seen if lag)
    return (stale / total if total else 0.0), max((lag for lag, _ in seen), default=0)
