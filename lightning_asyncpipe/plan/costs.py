"""What actions cost, for planning and simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

_ALIKE = 0.1
"""Durations that differ by less than this part of an average forward are nearly the same."""


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

    def evened(self, split_backward: bool) -> Costs:
        """The same, but for durations that are nearly the same, which are the same: each the mean of its group.

        Groups lie a tenth of an average forward apart. Those of whole backwards are told by the whole.
        """
        rows = (self.forward, self.input_grad, self.weight_grad) if split_backward else (self.forward, self.backward)
        means = _means(sorted(duration for row in rows for duration in row), _ALIKE * fmean(self.forward))
        forward, *backwards = (tuple(means[duration] for duration in row) for row in rows)
        if split_backward:
            inputs, weights = backwards
        else:
            shares = [
                part / whole if whole else 0.0 for part, whole in zip(self.input_grad, self.backward, strict=True)
            ]
            inputs = tuple(whole * share for whole, share in zip(backwards[0], shares, strict=True))
            weights = tuple(whole - part for whole, part in zip(backwards[0], inputs, strict=True))
        whole = tuple(a + b for a, b in zip(inputs, weights, strict=True))
        return replace(self, forward=forward, backward=whole, input_grad=inputs, weight_grad=weights)

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


def _means(durations: Sequence[float], apart: float) -> dict[float, float]:
    """For each of some ascending durations the mean of its group; groups lie at least `apart` from each other."""
    groups: list[list[float]] = []
    for duration in durations:
        if groups and duration - groups[-1][-1] < apart:
            groups[-1].append(duration)
        else:
            groups.append([duration])
    # The mean of equal numbers may be another one, by rounding.
    means = [group[0] if group[0] == group[-1] else fmean(group) for group in groups]
    return {duration: mean for group, mean in zip(groups, means, strict=True) for duration in group}
