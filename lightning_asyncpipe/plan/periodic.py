"""Orders that repeat without idle time, as keys: tiled, known, or annealed while planning."""

from __future__ import annotations

import math

from lightning_asyncpipe.plan.anneal import Chains, Cooling, Cycle, anneal
from lightning_asyncpipe.plan.catalogue import catalogued
from lightning_asyncpipe.plan.listing import Keys
from lightning_asyncpipe.plan.pattern import lattice
from lightning_asyncpipe.plan.tables import Tables


def periodic(tables: Tables, moves: int) -> tuple[Keys | None, int]:
    """A strict order with little or no idle time for forwards of 1 and backwards of 2, or halves of 1.

    Args:
        tables: the placement, the bound in flight, and whether backwards are split.
        moves: how many moves annealing may take; split backwards are not annealed.

    Returns:
        The order, or None where none was found, and how many moves were made.
    """
    placement, split = tables.placement, tables.split
    known = catalogued(placement, tables.max_in_flight, split)
    if known is not None:
        return cyclic_keys(*known), 0
    if split:
        return None, 0
    tiled = lattice(placement, tables.max_in_flight)
    if tiled is not None or tables.max_in_flight * tables.pipelines <= tables.stages:
        return tiled, 0  # without time to spare in a chain there is hardly ever a pattern
    cycle = Cycle(placement, tables.max_in_flight)
    chains, made = anneal(cycle, Cooling(moves))
    return None if chains is None else cyclic_keys(cycle, chains), made


def cyclic_keys(cycle: Cycle, chains: Chains) -> Keys:
    """Due times, for strict order, of a pattern."""
    stages = cycle.placement.num_stages
    forward = [float(time) for chain in chains for time in chain[:stages]]
    backward = [float(time) for chain in chains for time in reversed(chain[stages:])]
    weight = _weights(cycle, chains) if cycle.weight else [math.inf] * len(forward)
    return Keys((tuple(forward), tuple(backward), tuple(weight)), float(cycle.period), strict=True)


def _weights(cycle: Cycle, chains: Chains) -> list[float]:
    """Weight gradients in what is left of each circle, in the order of the input gradients, as early as can be."""
    stages, period = cycle.placement.num_stages, cycle.period
    weights = [0.0] * (len(chains) * stages)
    for device in range(stages):
        busy: list[tuple[int, int]] = []
        ready: list[tuple[int, int, int]] = []
        for pipeline, stage in cycle.placement.slots(device):
            backward = chains[pipeline][2 * stages - 1 - stage]
            busy += [(chains[pipeline][stage] % period, cycle.forward), (backward % period, cycle.backward)]
            end = backward + cycle.backward
            ready.append((end % period, end, pipeline * stages + stage))
        busy.sort()
        ready.sort()
        room: list[int] = []
        for (begin, duration), (following, _) in zip(busy, [*busy[1:], (busy[0][0] + period, 0)], strict=True):
            room += range(begin + duration, following - cycle.weight + 1, cycle.weight)
        room.sort()
        turns = [time + turn * period for turn in range(-1, 3) for time in room]
        shift = next(s for s in range(len(turns)) if all(turns[s + k] >= r[0] for k, r in enumerate(ready)))
        for k, (within, end, slot) in enumerate(ready):
            weights[slot] = float(end + turns[shift + k] - within)
    return weights
