"""Repeating patterns without idle time, by simulated annealing.

Time is whole numbers here, modulo the period: the time that a device needs for one micro-batch of every pipeline, and
for idle units if there are to be any. Every device's circle is always full, so that no device waits for anything else;
what is wrong at first is that operations begin before what they depend on is over. The sum of all that is missing is
the energy; a pattern is where it is 0. A move swaps two neighbours on a device's circle, or turns a whole circle by one
unit. Each move changes few dependencies, which makes it cheap, and an operation that has been moved far out of its
place finds back through small steps.

This is modulo scheduling (Rau, 1994), with the starts of a device's operations on a circle, and without idle units.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.policies import Generator

_MASK = 0xFFFFFFFF
_TURN = 0xFC000000
"""One random number in 64 is at least this: a circle is turned."""
_STEPS = 256
"""How often the temperature changes."""
_FAR = 200
"""More than this a move is never allowed to make worse."""
_FREE = 1 << 40
"""The time to spare of what nothing depends on."""

Chains = tuple[tuple[int, ...], ...]
"""Per pipeline the starts of a micro-batch's forwards, first stage first, and of its backwards, last stage first."""


@dataclass(frozen=True)
class Cycle:
    """What is to be repeated: one micro-batch of every pipeline, with durations in whole units of any kind.

    ``weight`` is the duration of a weight gradient: 0 where the backward is not split. ``message`` is from the end of
    an operation until another device can use what it gave. ``idle`` is how many units every device may be idle.
    """

    placement: Placement
    max_in_flight: int
    forward: int = 1
    backward: int = 2
    weight: int = 0
    message: int = 0
    idle: int = 0

    @property
    def period(self) -> int:
        """The units after which everything happens again."""
        return self.placement.num_pipelines * (self.forward + self.backward + self.weight) + self.idle

    def device(self, pipeline: int, place: int) -> int:
        """The device of an operation of a chain, of which there are ``2 * D``."""
        stages = self.placement.num_stages
        return self.placement.device(pipeline, place if place < stages else 2 * stages - 1 - place)

    def duration(self, place: int) -> int:
        """The duration of an operation of a chain."""
        return self.forward if place < self.placement.num_stages else self.backward


@dataclass(frozen=True)
class Cooling:
    """How to anneal: ``moves`` in all; a move that makes things worse by ``e`` is made with probability ``q ** e``.

    ``q`` falls evenly from ``hot`` to ``cold``. Powers of it are products: the same on every machine.
    """

    moves: int
    seed: int = 1
    hot: float = 0.12
    cold: float = 0.03


def anneal(cycle: Cycle, cooling: Cooling) -> tuple[Chains | None, int]:
    """Looks for a pattern; returns it, or None where the moves were not enough, and how many moves were made."""
    circles = _Circles(cycle, Generator(cooling.seed))
    for step in range(_STEPS):
        q = cooling.hot + (cooling.cold - cooling.hot) * step / _STEPS
        if circles.run(cooling.moves // _STEPS, q):
            break
    return circles.chains() if circles.energy == 0 else None, circles.moves


class _Circles:
    """All operations and where they are.

    Operations of chains are numbered ``pipeline * 2 D + place``. The others depend on nothing and fill the rest of
    the circles: idle units, and weight gradients, since any is as good as another. ``slack`` is the time
    between an operation and the one that depends on it, ``after``: the chain's next one, or, for the last one, the
    first one of the micro-batch that its end lets in.
    """

    def __init__(self, cycle: Cycle, generator: Generator) -> None:
        self.cycle = cycle
        self.generator = generator
        self.moves = 0
        stages, pipelines = cycle.placement.num_stages, cycle.placement.num_pipelines
        self.places = 2 * stages
        fillers = [cycle.weight] * pipelines * (cycle.weight > 0) + [1] * cycle.idle
        self.per_device = 2 * pipelines + len(fillers)
        chained = pipelines * self.places
        self.duration = [cycle.duration(x % self.places) for x in range(chained)] + fillers * stages
        device = [cycle.device(*divmod(x, self.places)) for x in range(chained)]
        device += [stage for stage in range(stages) for _ in fillers]
        everything = range(len(device))
        self.after, self.before = list(everything), list(everything)
        for x in range(chained):
            after = x + 1 if (x + 1) % self.places else x + 1 - self.places
            self.after[x], self.before[after] = after, x
        due = self._due() + [generator.below(cycle.period) for _ in fillers * stages]
        self.start = [0] * len(device)
        self.line: list[int] = []  # per device, its operations around the circle
        for at in range(stages):
            time = 0
            for _, x in sorted((due[x] % cycle.period, x) for x in everything if device[x] == at):
                self.line.append(x)
                self.start[x] = time + due[x] // cycle.period * cycle.period
                time += self.duration[x]
        self.slack = [_FREE] * len(device)
        for x in range(chained):
            after = self.after[x]
            turns = 0 if after > x else cycle.max_in_flight * cycle.period
            message = cycle.message if device[after] != device[x] else 0
            self.slack[x] = self.start[after] + turns - self.start[x] - self.duration[x] - message
        self.energy = -sum(slack for slack in self.slack if slack < 0)

    def _due(self) -> list[int]:
        """An even flow as slow as the bound in flight allows: pipelines enter evenly, upward ones shifted."""
        cycle, placement = self.cycle, self.cycle.placement
        shift = self.generator.below(cycle.period)
        latency = cycle.max_in_flight * cycle.period
        whole = placement.num_stages * (cycle.forward + cycle.backward)
        due = []
        for pipeline in range(placement.num_pipelines):
            up = placement.runs_up(pipeline)
            in_direction = (placement.num_pipelines + up) // 2
            enters = pipeline // 2 * cycle.period // in_direction + (shift if up else 0)
            done = 0
            for place in range(self.places):
                due.append(enters + latency * done // whole)
                done += cycle.duration(place)
        return due

    def run(self, moves: int, q: float) -> bool:
        """Makes moves at one temperature, fewer if the energy gets 0; returns whether it is."""
        likely = [2.0**32]
        while len(likely) <= _FAR:
            likely.append(likely[-1] * q)
        before, start, slack, line = self.before, self.start, self.slack, self.line
        duration, per_device, size, energy = self.duration, self.per_device, len(self.line), self.energy
        state = self.generator.state
        made = 0
        while made < moves and energy:
            made += 1
            state ^= state << 13 & _MASK
            state ^= state >> 17
            state ^= state << 5 & _MASK
            turned = state >= _TURN
            if turned:
                begin = state % (size // per_device) * per_device
                by = 1 if state & 0x10000 else -1
                shifts = [(x, by) for x in line[begin : begin + per_device]]
            else:
                at = state % size
                to = at + 1 if (at + 1) % per_device else at + 1 - per_device
                x, y = line[at], line[to]
                shifts = [(x, duration[y]), (y, -duration[x])]
            change = 0
            for x, by in shifts:
                for arc, more in ((x, -by), (before[x], by)):
                    old = slack[arc]
                    slack[arc] = new = old + more
                    if old < 0:
                        change += old
                    if new < 0:
                        change -= new
            if change > 0:
                state ^= state << 13 & _MASK
                state ^= state >> 17
                state ^= state << 5 & _MASK
                if change > _FAR or state >= likely[change]:
                    for x, by in shifts:
                        slack[x] += by
                        slack[before[x]] -= by
                    continue
            energy += change
            for x, by in shifts:
                start[x] += by
            if not turned:
                line[at], line[to] = line[to], line[at]
        self.generator.state = state
        self.energy = energy
        self.moves += made
        return energy == 0

    def chains(self) -> Chains:
        """The starts, those of first forwards within the first period."""
        rows = []
        for begin in range(0, self.cycle.placement.num_pipelines * self.places, self.places):
            chain = self.start[begin : begin + self.places]
            turns = chain[0] // self.cycle.period * self.cycle.period
            rows.append(tuple(time - turns for time in chain))
        return tuple(rows)
