"""What actions cost, for planning and simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
        """The costs by which to order operations where durations differ by chance; the same object if none does.

        Durations that are nearly the same become the same, the mean of their group, and one that is nearly a multiple
        of the shortest becomes a multiple. The unit of time is the shortest, and all are sums of powers of two, so that
        ways through a schedule that take equally long do so to the last bit. Groups lie a tenth of an average forward
        apart. Halves of backwards are only told apart if they are split.
        """
        rows = (self.forward, self.input_grad, self.weight_grad) if split_backward else (self.forward, self.backward)
        apart = _ALIKE * fmean(self.forward)
        means = _means(sorted(duration for row in rows for duration in row), apart)
        unit = min(mean for mean in means.values() if mean > 0)
        even = {duration: _multiple(mean, unit, apart) for duration, mean in means.items()}
        if all(multiple * unit == duration for duration, multiple in even.items()):
            return self
        forward, *backwards = (tuple(even[duration] for duration in row) for row in rows)
        inputs = backwards[0]
        weights = backwards[1] if split_backward else (0.0,) * len(inputs)
        whole = tuple(a + b for a, b in zip(inputs, weights, strict=True))
        others = (_rounded(seconds / unit) for seconds in (self.message, self.reduce, self.update))
        return Costs(forward, whole, inputs, weights, *others)

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


def _multiple(duration: float, unit: float, apart: float) -> float:
    """A duration in units, whole ones if it is less than `apart` for each of them from that."""
    whole = round(duration / unit)
    return float(whole) if abs(duration - whole * unit) < apart * max(1, whole) else _rounded(duration / unit)


def _rounded(units: float) -> float:
    """To what sums do not round."""
    return round(units * 1024) / 1024
