"""Contiguous stages with the shortest simulated step, within each device's memory.

A device hosts one stage of every pipeline, so that what must come out even is the work of devices, not of stages; and a
step is longer than its dearest device's work by what the schedule cannot hide. So: begin with the split whose dearest
stage is cheapest, move cuts until devices are even, then let the simulator of the schedule judge small moves. Where
there are few splits, all that could be better are judged. Effort is counted in simulated operations, so that all
machines find the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import comb
from operator import mul
from typing import NamedTuple

from lightning_asyncpipe.plan.balance import split
from lightning_asyncpipe.plan.memory import EarlyWeights, Holdings, holdings, predict
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.policies import Generator
from lightning_asyncpipe.plan.profile import ModelProfile
from lightning_asyncpipe.plan.search import Choice, choose
from lightning_asyncpipe.plan.steady import settle
from lightning_asyncpipe.plan.tables import Tables

EFFORT = 300_000
"""Simulated operations per search: about half a second of Python."""

_FEW = 3000
"""The most splits that are looked at one by one."""
_RULES = 12
"""The fewest policies that a judgement needs to be one of its own; otherwise one policy is used for all."""
_EVALUATIONS = 40
"""Into how many judgements the effort should go at least."""
_FINALISTS = 3
_RESERVE = 0.4
"""The share of the effort that is kept for judging the best few again, more closely."""
_SEGMENTS = 3
_STARTS = 8
_SMALL = 400
"""Stages times places to cut up to which it pays to level other splits than the first one."""

Cuts = tuple[int, ...]


class Verdict(NamedTuple):
    """How good a split is; smaller is better.

    ``excess``: bytes by which the fullest device is over its limit. ``time``: seconds of a step. ``early``: forwards in
    it that run on old weights.
    """

    excess: int
    time: float
    early: float


@dataclass(frozen=True)
class Setting:
    """What a split is judged for.

    Attributes:
        placement: which device hosts what.
        max_in_flight: micro-batches that a pipeline takes in before a backward returns.
        microbatches: in a window.
        look_ahead: whether early forwards are allowed.
        memory_limit: bytes on each device; None: no limit.
        replicas: data-parallel replicas.
        early_weights: what early forwards run on.
        split_backward: the backward's halves are apart.
    """

    placement: Placement
    max_in_flight: int
    microbatches: int
    look_ahead: bool = True
    memory_limit: int | None = None
    replicas: int = 1
    early_weights: EarlyWeights = "live"
    split_backward: bool = False


@dataclass(frozen=True)
class Solution:
    """A split and how it does.

    Attributes:
        cuts: cut `i` lies between ``units[i]`` and ``units[i + 1]``.
        verdict: of the simulator.
        held: micro-batches that devices hold.
    """

    cuts: Cuts
    verdict: Verdict
    held: Holdings


def solve(profile: ModelProfile, setting: Setting, effort: int = EFFORT) -> Solution:
    """The best split that was found.

    Args:
        profile: the units and what they cost.
        setting: for what.
        effort: simulated operations to spend.

    Raises:
        ValueError: there are fewer units than stages.
    """
    search = _Search(profile, setting, effort)
    stages, gaps = setting.placement.num_stages, len(profile.units) - 1
    if comb(gaps, stages - 1) <= _FEW:
        search.try_all()
    else:
        search.climb()
    search.compare_closely()
    return search.solution()


def judge(profile: ModelProfile, cuts: Sequence[int], setting: Setting, effort: int = EFFORT) -> Solution:
    """How a given split does."""
    search = _Search(profile, setting, effort, tuple(cuts))
    return search.solution()


class _Search:
    def __init__(self, profile: ModelProfile, setting: Setting, effort: int, given: Cuts | None = None) -> None:
        self.profile = profile
        self.setting = setting
        self.placement = setting.placement
        stages = self.placement.num_stages
        self.effort = self.left = effort
        operations = (3 if setting.split_backward else 2) * setting.microbatches * stages
        each = effort // _EVALUATIONS
        self.each = each if each >= _RULES * operations else 0
        self.verdicts: dict[Cuts, Verdict] = {}
        self.loads: dict[Cuts, tuple[float, ...]] = {}
        self.totals = [0.0, *accumulate(profile.work())]
        self.shares = _shares(self.placement, setting.microbatches)
        messages = [profile.link.seconds(boundary.nbytes) for boundary in profile.boundaries]
        start = given or (split(profile.work(), stages, messages) if stages > 1 else ())
        self.reserve = _RESERVE * effort
        self.policy = self.choose(start, effort // 8 if given is None else effort).policy
        self.held = holdings(
            self.tables(start), self.policy, setting.microbatches, setting.microbatches if setting.look_ahead else 0
        )
        self.start = start
        self.best = start
        self.judge(start)

    def solution(self) -> Solution:
        return Solution(self.best, self.verdicts[self.best], self.held)

    def tables(self, cuts: Cuts) -> Tables:
        setting = self.setting
        costs = self.profile.costs(cuts, self.placement, setting.replicas)
        return Tables(self.placement, setting.max_in_flight, costs, setting.split_backward)

    def choose(self, cuts: Cuts, effort: int) -> Choice:
        setting = self.setting
        self.left -= effort
        return choose(self.tables(cuts), setting.microbatches, setting.look_ahead, True, effort, 0.0)

    # What is known of a split

    def judge(self, cuts: Cuts) -> Verdict:
        """The simulator's verdict; keeps the split if it is the best one so far."""
        found = self.verdicts.get(cuts)
        if found is None:
            if self.each:
                state = self.choose(cuts, self.each).state
            else:
                m = self.setting.microbatches
                ahead = m if self.setting.look_ahead else 0
                state = settle(self.tables(cuts), self.policy, m, ahead, True, _SEGMENTS)
                self.left -= state.operations
            found = self.verdicts[cuts] = Verdict(self.excess(cuts), max(state.time, self.load(cuts)[0]), state.early)
        if found < self.verdicts.get(self.best, found):
            self.best = cuts
        return found

    def excess(self, cuts: Cuts) -> int:
        setting = self.setting
        if setting.memory_limit is None:
            return 0
        memory = predict(self.profile, cuts, self.placement, self.held, setting.replicas, setting.early_weights)
        return max(0, max(device.total for device in memory) - setting.memory_limit)

    def load(self, cuts: Cuts) -> tuple[float, ...]:
        """The work of devices in a step, in seconds, the dearest first: no step takes less than the first one.

        Devices that host the same are named once.
        """
        found = self.loads.get(cuts)
        if found is None:
            totals, units = self.totals, self.profile.units
            begins = [0, *(cut + 1 for cut in cuts)]
            ends = [*begins[1:], len(units)]
            work = [totals[e] - totals[b] + units[b].entry for b, e in zip(begins, ends, strict=True)]
            loads = [sum(map(mul, map(work.__getitem__, hosted), often)) for hosted, often in self.shares]
            found = self.loads[cuts] = tuple(sorted(loads, reverse=True))
        return found

    # Searches

    def try_all(self) -> None:
        """Judge every split that can be better than the best one, the most even first."""
        stages, gaps = self.placement.num_stages, len(self.profile.units) - 1
        every = sorted(combinations(range(gaps), stages - 1), key=lambda cuts: (self.excess(cuts), self.load(cuts)))
        for cuts in every:
            best = self.verdicts[self.best]
            if self.left <= self.reserve:
                break
            if (self.excess(cuts), self.load(cuts)[0]) < best[:2]:
                self.judge(cuts)

    def climb(self) -> None:
        """Even out the devices, then take moves that the simulator finds better."""
        levelled = {self.level(start) for start in self.starts()}
        for cuts in sorted(levelled, key=lambda cuts: (self.excess(cuts), self.load(cuts))):
            if self.left > self.effort // 2:
                self.judge(cuts)
        moved = True
        while moved and self.left > self.reserve:
            moved = False
            best = self.verdicts[self.best]
            moves = sorted((self.excess(cuts), self.load(cuts), cuts) for cuts in set(self.moves(self.best)))
            for excess, load, cuts in moves:
                if self.left <= self.reserve or cuts in self.verdicts or (excess, load[0]) >= best[:2]:
                    continue
                if self.judge(cuts) < best:
                    moved = True
                    break

    def starts(self) -> Iterator[Cuts]:
        """The first split, and a few at random."""
        yield self.start
        stages, gaps = self.placement.num_stages, len(self.profile.units) - 1
        generator = Generator(stages * 1000 + gaps)
        for _ in range(_STARTS if stages * gaps <= _SMALL else 0):
            chosen: set[int] = set()
            while len(chosen) < stages - 1:
                chosen.add(generator.below(gaps))
            yield tuple(sorted(chosen))

    def compare_closely(self) -> None:
        """Judge the best few again, each with as much effort as is left for it."""
        if not self.each:
            return
        finalists = sorted(self.verdicts, key=lambda cuts: self.verdicts[cuts])[:_FINALISTS]
        self.each = max(self.each, int(self.left / len(finalists)))
        for cuts in finalists:
            first = self.verdicts.pop(cuts)
            self.best = cuts
            self.verdicts[cuts] = min(first, self.judge(cuts))
        self.best = min(finalists, key=lambda cuts: self.verdicts[cuts])

    def level(self, cuts: Cuts) -> Cuts:
        """The nearest split whose devices' work no single move makes more even."""
        return _descend(cuts, self.moves, lambda c: (self.excess(c), self.load(c)))

    def moves(self, cuts: Cuts) -> Iterator[Cuts]:
        """Splits with one cut elsewhere by one or two units, or several neighbouring ones by one."""
        limits = (-1, *cuts, len(self.profile.units) - 1)
        for first in range(len(cuts)):
            for last in range(first, len(cuts)):
                for step in (-1, 1) if last > first else (-1, 1, -2, 2):
                    low, high = cuts[first] + step, cuts[last] + step
                    if limits[first] < low and high < limits[last + 2]:
                        yield (*cuts[:first], *(cut + step for cut in cuts[first : last + 1]), *cuts[last + 1 :])


def _shares(placement: Placement, microbatches: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What devices do in a step: stages, and for how many micro-batches each; once for devices that do the same."""
    found: dict[tuple[tuple[int, int], ...], None] = {}
    for device in range(placement.num_stages):
        often: Counter[int] = Counter()
        for pipeline, stage in placement.slots(device):
            often[stage] += len(range(pipeline, microbatches, placement.num_pipelines))
        found[tuple(sorted(often.items()))] = None
    return [(tuple(stage for stage, _ in share), tuple(count for _, count in share)) for share in found]


def _descend(start: Cuts, moves: Callable[[Cuts], Iterator[Cuts]], value: Callable[[Cuts], tuple[object, ...]]) -> Cuts:
    """Go to the best neighbour until none is better."""
    best, reached = start, value(start)
    while True:
        found = min(moves(best), key=value, default=best)
        if value(found) >= reached:
            return best
        best, reached = found, value(found)
