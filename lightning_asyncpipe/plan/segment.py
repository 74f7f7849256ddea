"""What a segment is asked to do, and the plan of one.

A segment is what every device executes between two calls of Lightning's loop: all that is left of one batch, and early
forwards of the next. Optimizer steps lie between segments, never inside one.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_asyncpipe.plan.actions import Action


@dataclass(frozen=True)
class SegmentSpec:
    """What a segment has to do.

    Attributes:
        microbatches: micro-batches of the batch to finish, at least 1.
        ahead: micro-batches of the next batch that may be started (0: none, the segment drains the pipelines).
        carried: for each micro-batch of this batch, how many stages have run its forward already; ``()``: none.
        updated: an optimizer step preceded: every device waits for new weights before its first use of a stage.
        steps: an optimizer step follows: every device gives its gradients of a stage away after its last backward.

    Raises:
        ValueError: for values out of range.
    """

    microbatches: int
    ahead: int = 0
    carried: tuple[int, ...] = ()
    updated: bool = True
    steps: bool = True

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches is {self.microbatches}: a batch has at least one")
        if self.ahead < 0:
            raise ValueError(f"ahead is {self.ahead}: it is a number of micro-batches, 0 for none")
        if self.carried and len(self.carried) != self.microbatches:
            raise ValueError(
                f"carried names {len(self.carried)} micro-batches of a batch of {self.microbatches}:"
                " give one number for each, or () for none"
            )
        if any(done < 0 for done in self.carried):
            raise ValueError(f"carried is {self.carried}: numbers of stages are not negative")


@dataclass(frozen=True)
class SegmentPlan:
    """The actions of a segment.

    Attributes:
        spec: what was asked for.
        actions: for each device, its actions in the order in which it issues them.
        carry: for each of the ``spec.ahead`` micro-batches, how many stages have run its forward: ``carried`` of the
            segment that finishes it.
    """

    spec: SegmentSpec
    actions: tuple[tuple[Action, ...], ...]
    carry: tuple[int, ...]
