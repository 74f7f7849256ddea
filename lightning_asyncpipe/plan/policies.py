"""Priority rules for the list scheduler, and small changes to them.

A rule is a table of keys (``listing.Keys``). Some are the usual ones: backward first, forward first, oldest
micro-batch first, longest remaining path first. The others give every operation a due time from an even flow:
pipelines enter one after another, micro-batches advance at a fixed pace, slower than they could, and whatever is most
overdue goes first. An even flow keeps the two directions from bunching up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lightning_asyncpipe.plan.listing import Keys
from lightning_asyncpipe.plan.tables import Tables

_CLASS = 1e6
"""Larger than any key within a class of operations that goes before another class."""


class Policy(NamedTuple):
    """How the operations of a segment are chosen.

    Attributes:
        name: what it is called.
        keys: the priorities.
        overrun: how long early forwards may go on after the last device is done, in average forwards.
        limit: the most early forwards of a device.
        message: how long messages are taken to be when operations are put in order, as a multiple of what they are:
            orders made for shorter or longer ones sometimes do better.
        even: take durations that are nearly the same to be the same when operations are put in order.
        put_off: run early forwards as late as possible; more of a window's gradient is then known to them.
    """

    name: str
    keys: Keys
    overrun: float
    limit: int
    message: float = 1.0
    even: bool = False
    put_off: bool = False


class Generator:
    """A xorshift generator: the same numbers on every machine and every version of Python."""

    def __init__(self, seed: int) -> None:
        self.state = seed * 2654435761 % 2**32 or 1

    def unit(self) -> float:
        """A number in [0, 1)."""
        state = self.state
        state ^= state << 13 & 0xFFFFFFFF
        state ^= state >> 17
        state ^= state << 5 & 0xFFFFFFFF
        self.state = state
        return state / 2**32

    def below(self, bound: int) -> int:
        """A whole number in [0, bound)."""
        return int(self.unit() * bound)


def classic_rules(tables: Tables) -> Iterator[tuple[str, Keys]]:
    """The usual rules. Weight gradients come last in all of them: they fill waits."""
    last = tables.stages - 1
    stages = tables.stage
    rounds = float(4 * tables.stages)

    def keys(forward: list[float], backward: list[float], period: float) -> Keys:
        return Keys((tuple(forward), tuple(backward), (2 * _CLASS,) * len(stages)), period)

    near = [float(s) for s in stages]
    far = [float(last - s) for s in stages]
    first, second = [float(s) for s in stages], [_CLASS + s for s in stages]
    yield "backward first", keys(second, first, rounds)
    yield "forward first", keys(first, second, rounds)
    yield "forward first, late stages first", keys(far, second, rounds)
    yield "oldest first", keys([rounds / 2 + s for s in near], near, rounds)
    yield "longest path first", keys(near, [last + 1 + s for s in far], 1 / _CLASS)
    yield "shortest path first", keys([last + 1 + s for s in far], near, 1 / _CLASS)
    yield "backward first, late stages first", keys([_CLASS + s for s in far], far, rounds)


def even_flows(tables: Tables) -> Iterator[tuple[str, Keys]]:
    """Due times of flows of several paces, in units of a third of an average forward and backward.

    A pace of ``f`` per forward and ``g`` per backward takes a micro-batch ``D * (f + g)``; no wait at all is
    ``f + g = 3``, and what the bound in flight leaves is ``3 * N * w / D``.
    """
    for forward in (2.0, 1.5, 2.5, 1.0):
        for backward in (2.5, 3.0, 2.0, 3.5):
            for shift in (0.0, 1.5, 3.0):
                yield (
                    f"even flow, {forward} and {backward}, upward {shift} later",
                    _even_flow(tables, forward, backward, shift),
                )


def _even_flow(tables: Tables, forward: float, backward: float, shift: float) -> Keys:
    stages, pipelines = tables.stages, tables.pipelines
    period = 3.0 * pipelines
    due: tuple[list[float], list[float]] = ([], [])
    for pipeline in range(pipelines):
        up = tables.placement.runs_up(pipeline)
        in_direction = (pipelines + 1) // 2 if up else pipelines // 2
        enters = pipeline // 2 * period / in_direction + (shift if up else 0.0)
        for stage in range(stages):
            due[0].append(enters + stage * forward)
            due[1].append(enters + stages * forward + (stages - 1 - stage) * backward)
    return Keys((tuple(due[0]), tuple(due[1]), (2 * _CLASS,) * (pipelines * stages)), period)


def perturbed(tables: Tables, keys: Keys, generator: Generator) -> Keys:
    """Keys with one random change: a pipeline moved, the rest of one from some point on, or all jittered."""
    stages, slots = tables.stages, tables.pipelines * tables.stages
    forward, backward = list(keys.offsets[0]), list(keys.offsets[1])
    choice = generator.below(3)
    if choice == 2:
        size = 0.5 + 1.5 * generator.unit()
        for row in (forward, backward):
            for slot in range(slots):
                row[slot] += size * (generator.unit() - generator.unit())
    else:
        slot = generator.below(tables.pipelines) * stages
        begin = generator.below(2 * stages) if choice else 0
        size = 6.0 * (generator.unit() - generator.unit())
        for place in range(begin, 2 * stages):
            if place < stages:
                forward[slot + place] += size
            else:
                backward[slot + 2 * stages - 1 - place] += size
    return Keys((tuple(forward), tuple(backward), keys.offsets[2]), keys.period)
