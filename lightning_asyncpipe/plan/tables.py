"""A placement and its costs as flat lists, which the schedulers' inner loops read.

A *slot* is one stage of one pipeline, numbered ``pipeline * D + stage``; a slot is on exactly one device. An
*operation* is one computation with its simulated times. Operations are plain tuples, since a search makes millions.
"""

from __future__ import annotations

import copy

from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.placement import Placement

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
"""Kinds of operations. ``BACKWARD`` is the whole backward, or its input half where backwards are split."""


Operation = tuple[float, float, int, int, int]
"""One computation of a device: start, end, kind (one of the above), slot, micro-batch."""


class Tables:
    """Lists indexed by slot: ``device``, and durations ``forward``, ``backward`` and ``weight``.

    Two are equal if they are made of equal placements and costs.
    """

    def __init__(self, placement: Placement, max_in_flight: int, costs: Costs, split_backward: bool) -> None:
        self._others: dict[tuple[float, bool], Tables] = {}
        stages = placement.num_stages
        self.placement = placement
        self.costs = costs
        self.split = split_backward
        self.max_in_flight = max_in_flight
        self.stages = stages
        self.pipelines = placement.num_pipelines
        slots = [(p, s) for p in range(self.pipelines) for s in range(stages)]
        self.device = [placement.device(p, s) for p, s in slots]
        self.stage = [s for _, s in slots]
        self.forward = [costs.forward[s] for _, s in slots]
        self.backward = [(costs.input_grad if split_backward else costs.backward)[s] for _, s in slots]
        self.weight = [costs.weight_grad[s] if split_backward else 0.0 for _, s in slots]
        self.message = costs.message if stages > 1 else 0.0
        self.mean_forward = sum(costs.forward) / stages
        self.hosted = [placement.hosted(d) for d in range(stages)]

    def _made_of(self) -> tuple[Placement, int, Costs, bool, float]:
        return self.placement, self.max_in_flight, self.costs, self.split, self.message

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tables) and self._made_of() == other._made_of()

    def __hash__(self) -> int:
        return hash(self._made_of())

    def taken_as(self, message: float, even: bool) -> Tables:
        """The same, but for costs by which operations are put in order.

        Args:
            message: how many times as long messages are taken to take.
            even: whether durations that are nearly the same are taken to be the same; times are in another unit then.
        """
        other = self._others.get((message, even))
        if other is None:
            other = self
            if even:
                costs = self.costs.evened(self.split)
                other = self if costs is self.costs else Tables(self.placement, self.max_in_flight, costs, self.split)
            if message != 1 and self.message:
                other = copy.copy(other)
                other.message = message * self.message
            self._others[message, even] = other
        return other
