"""Repeating patterns without idle time, for placements that are made of equal parts.

If ``k`` divides the number of devices and of pipelines in either direction, the placement is the same after every
``D / k`` devices, and a pattern for one part, an endless lattice in devices and time, serves for all. In it a stage
``D / k`` further runs its forward a whole number ``a`` of the part's periods later, and its backward ``c`` periods
earlier; a micro-batch then takes ``k * (a + c)`` of them, which the bound in flight allows if ``a + c <= w``. The
``k`` copies of a part's pipeline meet on every device and must not collide: their forwards are ``a`` apart and their
backwards ``c``, so that both must be prime to ``k``.

The part's pattern is found in a reservation table: every device's time, modulo the period, must be filled by one
forward and one backward of each of the part's pipelines. Forwards take 1 unit and backwards 2, as in the even flows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

from lightning_asyncpipe.plan.listing import Keys
from lightning_asyncpipe.plan.placement import Placement

_FORWARD, _BACKWARD = 1, 2
_BUDGET = 20_000
"""Placements of single operations that a search may try."""
_LARGEST = 64
"""Operations of a part beyond which a search is not worth its while."""


def lattice(placement: Placement, max_in_flight: int) -> Keys | None:
    """Due times, for strict order, of a pattern without idle time; None where none of this form was found."""
    devices, pipelines = placement.num_stages, placement.num_pipelines
    up, down = (pipelines + 1) // 2, pipelines // 2
    parts = gcd(devices, up, down)
    for number in sorted((k for k in range(1, parts + 1) if parts % k == 0), reverse=True):
        part = [p for p in range(pipelines) if p // 2 < (up if placement.runs_up(p) else down) // number]
        stages = devices // number
        if 2 * stages * len(part) > _LARGEST:
            continue
        period = (_FORWARD + _BACKWARD) * len(part)
        for forward_shift in range(1, max_in_flight):
            backward_shift = max_in_flight - forward_shift
            if gcd(forward_shift, number) > 1 or gcd(backward_shift, number) > 1:
                continue
            search = _Search(placement, part, stages, period, forward_shift, backward_shift)
            if search.run():
                return _tile(placement, search, number)
    return None


@dataclass
class _Search:
    """Depth-first search for the chains of one part's pipelines, one operation after another."""

    placement: Placement
    part: list[int]
    stages: int
    period: int
    forward_shift: int
    backward_shift: int
    budget: int = _BUDGET
    chains: dict[int, list[int]] = field(default_factory=dict)
    taken: set[tuple[int, int]] = field(default_factory=set)

    def run(self) -> bool:
        """Whether a pattern was found: ``chains`` then holds, per pipeline, ``2 * stages`` times."""
        if self.forward_shift * self.period < self.stages * _FORWARD:
            return False
        if self.backward_shift * self.period < self.stages * _BACKWARD:
            return False
        return self.place(0, [])

    def place(self, index: int, chain: list[int]) -> bool:
        """Extends the chain of a pipeline by its next operation in every way, and then the next pipeline's."""
        if index == len(self.part):
            return True
        stages, number = self.stages, len(chain)
        if number == 2 * stages:
            self.chains[self.part[index]] = chain
            return self.place(index + 1, [])
        forward = number < stages
        duration = _FORWARD if forward else _BACKWARD
        stage = number if forward else 2 * stages - 1 - number
        device = self.placement.device(self.part[index], stage) % stages
        if not chain:
            earliest, latest = 0, self.period - 1
        else:
            earliest = chain[-1] + (_FORWARD if number <= stages else _BACKWARD)
            shift = self.forward_shift if forward else self.forward_shift + self.backward_shift
            rest = (stages if forward else 2 * stages) - number
            latest = chain[0] + shift * self.period - rest * duration
            if number > stages:
                latest = min(latest, chain[stages] + self.backward_shift * self.period - rest * duration)
        for time in range(earliest, latest + 1):
            cells = {(device, (time + unit) % self.period) for unit in range(duration)}
            if cells & self.taken:
                continue
            if self.budget == 0:
                return False
            self.budget -= 1
            self.taken |= cells
            if self.place(index, [*chain, time]):
                return True
            self.taken -= cells
        return False


def _tile(placement: Placement, search: _Search, number: int) -> Keys:
    """The part's pattern, repeated for all stages and pipelines."""
    stages, period = search.stages, search.period
    up, down = (placement.num_pipelines + 1) // 2, placement.num_pipelines // 2
    forward: list[float] = []
    backward: list[float] = []
    for pipeline in range(placement.num_pipelines):
        runs_up = placement.runs_up(pipeline)
        like = pipeline // 2 % ((up if runs_up else down) // number)
        chain = next(
            chain
            for other, chain in search.chains.items()
            if placement.runs_up(other) == runs_up and other // 2 == like
        )
        for stage in range(placement.num_stages):
            part, within = divmod(stage, stages)
            forward.append(chain[within] + part * search.forward_shift * period)
            backward.append(
                chain[2 * stages - 1 - within]
                + (number - 1) * search.forward_shift * period
                + (number - 1 - part) * search.backward_shift * period
            )
    late = (float("inf"),) * len(forward)
    return Keys((tuple(forward), tuple(backward), late), float(period * number), strict=True)
