"""Choosing a policy: simulate the steady state under many, keep the best.

Time is one objective and early forwards are another, since those that an optimizer step overtakes run on old weights:
of all policies whose time is within a tolerance of the best one's, the one with the fewest early forwards is taken.
The effort is counted in simulated operations, not in seconds, so that the choice is the same on every machine.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import chain, product
from typing import NamedTuple

from lightning_asyncpipe.plan.listing import Keys
from lightning_asyncpipe.plan.pattern import lattice
from lightning_asyncpipe.plan.periodic import periodic
from lightning_asyncpipe.plan.policies import (
    Generator,
    Policy,
    classic_rules,
    even_flows,
    perturbed,
)
from lightning_asyncpipe.plan.steady import SteadyState, outlook, settle
from lightning_asyncpipe.plan.tables import Tables

EFFORT = 300_000
"""Simulated operations per search: about half a second of Python."""
TOLERANCE = 0.002
"""The share of time that fewer early forwards may cost."""

_OVERRUNS = (0.0, 1.0, 2.0, 3.0)
_MESSAGES = (1.0, 0.0, 2.0)
_SEGMENTS = (3, 10)
"""The fewest and the most segments that a policy gets to settle."""
_SHARE = 16
"""Into how many policies the effort should go at least, where the fewest segments allow it."""
_CANDIDATES = 600
_REMEMBERED = 256
"""How many choices a process keeps; one takes some kilobytes, as many as there are stages of pipelines."""
_ANNEALING = 4
"""Which part of the effort may go into annealing; a move is about as much work as an operation."""


class Choice(NamedTuple):
    """A policy and what it settles to."""

    policy: Policy
    state: SteadyState


def choose(
    tables: Tables,
    microbatches: int,
    look_ahead: bool,
    steps: bool,
    effort: int = EFFORT,
    tolerance: float = TOLERANCE,
) -> Choice:
    """The best policy for a stream of equal segments; the same one at once when asked for again.

    Args:
        tables: the placement and its costs.
        microbatches: per segment.
        look_ahead: whether early forwards are allowed.
        steps: whether an optimizer step follows each segment.
        effort: simulated operations to spend; at least one policy is simulated.
        tolerance: the share of time that fewer early forwards may cost.
    """
    return _choose(tables, microbatches, look_ahead, steps, effort, tolerance)


@functools.lru_cache(_REMEMBERED)
def _choose(tables: Tables, microbatches: int, look_ahead: bool, steps: bool, effort: int, tolerance: float) -> Choice:
    search = _Search(tables, microbatches, look_ahead, steps, effort, tolerance)
    search.run()
    search.put_off()
    return search.best()


def _staleness(state: SteadyState) -> tuple[float, float]:
    return round(state.early, 6), round(state.uninformed, 6)


class _Search:
    def __init__(
        self,
        tables: Tables,
        microbatches: int,
        look_ahead: bool,
        steps: bool,
        effort: int,
        tolerance: float,
    ) -> None:
        self.tables = tables
        self.microbatches = microbatches
        self.ahead = microbatches if look_ahead else 0
        self.steps = steps
        self.effort = self.left = effort
        self.tolerance = tolerance
        self.tried = 0
        rows = tables.forward, tables.backward, tables.weight
        work = sum(sum(row) for row in rows) / tables.stages
        self.ideal = work * microbatches / tables.pipelines
        self.front: list[Choice] = []  # no other is faster, less early and better informed
        self.operations = (3 if tables.split else 2) * microbatches * tables.stages
        fewest, most = _SEGMENTS
        self.segments = min(most, max(fewest, effort // _SHARE // self.operations))

    def run(self) -> None:
        """Simulate policies until :meth:`spent`."""
        for policy in chain(self.of_even_costs(), self.candidates()):
            self.simulate(policy)
            if self.spent():
                break

    def of_even_costs(self) -> Iterator[Policy]:
        """What is best where durations that are nearly the same are the same.

        Measured durations differ by chance, and so do the times at which operations become ready. Rules that take what
        is ready pass over one that is ready a moment later, and are thrown off a pattern that would have been regular.
        """
        even = self.tables.taken_as(1.0, True)
        if even is self.tables or 2 * _SHARE * _SEGMENTS[0] * self.operations > self.effort:
            return
        search = _Search(even, self.microbatches, self.ahead > 0, self.steps, self.effort // 2, self.tolerance)
        search.run()
        self.left -= search.effort - search.left
        for policy, _ in search.front:
            yield policy._replace(even=True)

    def spent(self) -> bool:
        """Whether to stop: no effort left, or nothing left to gain."""
        best = self.best()
        perfect = best.state.time <= self.ideal * (1 + 1e-9) and best.state.early == 0
        return self.left <= 0 or self.tried >= _CANDIDATES or perfect

    def best(self) -> Choice:
        """The least early of those that are fast enough, of these the one whose early forwards know most."""
        fastest = min(choice.state.time for choice in self.front)
        enough = [c for c in self.front if c.state.time <= fastest * (1 + self.tolerance)]
        return min(enough, key=lambda choice: (*_staleness(choice.state), choice.state.time))

    def simulate(self, policy: Policy) -> None:
        """Settles a policy, and keeps it if no other is better in time, early forwards and what these know."""
        state = settle(self.tables, policy, self.microbatches, self.ahead, self.steps, self.segments)
        self.left -= state.operations
        self.tried += 1
        if any(c.state.time <= state.time and _staleness(c.state) <= _staleness(state) for c in self.front):
            return
        self.front = [c for c in self.front if c.state.time < state.time or _staleness(c.state) < _staleness(state)]
        self.front.append(Choice(policy, state))

    def put_off(self) -> None:
        """The best policies once more, with early forwards as late as possible, which may cost no time at all."""
        for policy, state in list(self.front) if self.ahead else []:
            limit = min(policy.limit, state.most_early)  # what ends later may not become more
            for overrun in _OVERRUNS[:3] if limit else ():
                self.simulate(policy._replace(put_off=True, overrun=overrun, limit=limit))

    def candidates(self) -> Iterator[Policy]:
        """Policies in the order in which to try them; later ones build on the best so far."""
        overruns = _OVERRUNS if self.ahead else _OVERRUNS[:1]
        messages = _MESSAGES if self.tables.message else _MESSAGES[:1]
        unlimited = self.tables.max_in_flight * self.tables.pipelines
        rules = self.shortlist()
        first = list(product(messages, overruns[:2]))
        for variants in (first, list(product(messages[:1], overruns[2:]))):
            for name, keys in rules:
                for message, overrun in variants:
                    if self.left > 0.25 * self.effort or not self.front:
                        yield Policy(name, keys, overrun, unlimited, message)
        if self.ahead:
            yield from self.fewer_early()
        generator = Generator(self.tables.stages * 1000 + self.tables.pipelines)
        while True:
            policy = self.best().policy
            keys = policy.keys
            if not keys.strict:  # what is strict must be an order that can be kept
                keys = perturbed(self.tables, keys, generator)
            overrun, limit, message, even = policy.overrun, policy.limit, policy.message, policy.even
            if generator.unit() < 0.25:
                overrun = overruns[generator.below(len(overruns))]
            if generator.unit() < 0.25:
                limit = generator.below(min(unlimited, 2 * limit) + 1)
            if generator.unit() < 0.25:
                message = messages[generator.below(len(messages))]
            yield Policy(policy.name, keys, overrun, limit, message, even)

    def shortlist(self) -> list[tuple[str, Keys]]:
        """All rules; where there is not the effort to settle them all, the most promising ones first."""
        rules: list[tuple[str, Keys]] = []
        if not self.ahead:  # with look-ahead, looser orders have done better, and annealing takes effort from them
            pattern, moves = periodic(self.tables, self.effort // _ANNEALING)
            self.left -= moves
            rules += [] if pattern is None else [("without idle time", pattern)]
        elif not self.tables.split:
            pattern = lattice(self.tables.placement, self.tables.max_in_flight)
            rules += [] if pattern is None else [("lattice", pattern)]
        rules += [*classic_rules(self.tables), *even_flows(self.tables)]
        if len(rules) * self.segments * self.operations < self.effort / 2:
            return rules
        ranked = []
        for rank, (_, keys) in enumerate(rules):
            time, operations = outlook(self.tables, keys, self.microbatches)
            self.left -= operations
            ranked.append((time, rank))
            if self.left < self.effort / 2:
                break
        return [rules[rank] for _, rank in sorted(ranked)]

    def fewer_early(self) -> Iterator[Policy]:
        """The fastest policies again, with ever higher limits on early forwards."""
        for policy, state in sorted(self.front, key=lambda choice: choice.state.time)[:3]:
            limit = 0
            while limit < state.most_early:
                for overrun in _OVERRUNS[:3]:
                    yield policy._replace(limit=limit, overrun=overrun)
                limit += max(1, limit // 3)
