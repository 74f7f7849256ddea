"""What actions cost, for planning and simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Durations in any one unit of time.

    Attributes:
        forward, backward, input_grad, weight_grad: per stage; a whole backward is its two halves together.
        message: from the issue of a send until the tensor can be used, whichever pair of devices.
        reduce: from a device's ``REDUCE`` of a stage until its gradients are with their owners.
        update: from the end of the segment, or of a reduction that takes longer, until new weights are on every host.

    Raises:
        ValueError: for lengths that differ, negative or non-finite values, or halves that do not add up.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    message: float = 0.0
    reduce: float = 0.0
    update: float = 0.0

    def __post_init__(self) -> None:
        rows = (self.forward, self.backward, self.input_grad, self.weight_grad)
        if len({len(row) for row in rows}) != 1:
            raise ValueError(f"costs of {[len(row) for row in rows]} stages: give one of each per stage")
        for value in (*(value for row in rows for value in row), self.message, self.reduce, self.update):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"a cost is {value}: costs are finite and not negative")
        for stage, whole in enumerate(self.backward):
            halves = self.input_grad[stage] + self.weight_grad[stage]
            if not math.isclose(whole, halves, rel_tol=1e-6, abs_tol=1e-12):
                raise ValueError(f"stage {stage}: backward is {whole}, but input_grad + weight_grad is {halves}")
        if self.forward and max(self.forward) + max(self.backward) == 0:
            raise ValueError("all forward and backward costs are 0: give at least one that is not")

    @property
    def num_stages(self) -> int:
        """For how many stages costs are given."""
        return len(self.forward)

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward: float = 1.0,
        backward: float = 2.0,
        message: float = 0.0,
        reduce: float = 0.0,
        update: float = 0.0,
        input_grad: float | None = None,
    ) -> Costs:
        """The same costs for every stage; ``input_grad`` is half of ``backward`` unless it is given."""
        half = backward / 2 if input_grad is None else input_grad
        return cls(
            (forward,) * num_stages,
            (backward,) * num_stages,
            (half,) * num_stages,
            (backward - half,) * num_stages,
            message,
            reduce,
            update,
        )
