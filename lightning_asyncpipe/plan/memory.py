"""What a device's memory holds, predicted.

Two moments can be the fullest: the midst of a window, when sums of gradients and the activations of the micro-batches
in flight are there; and its end, when gradients travel to their owners, while early forwards of the next window wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.policies import Policy
from lightning_asyncpipe.plan.profile import ModelProfile
from lightning_asyncpipe.plan.replay import Order
from lightning_asyncpipe.plan.steady import run_segment
from lightning_asyncpipe.plan.tables import BACKWARD, FORWARD, WEIGHT, Tables

EarlyWeights = Literal["live", "stash", "extrapolated", "predicted", "stepped"]
"""What early forwards run on: the weights themselves, a copy of them, or a copy that is moved on by the last update,
for which the weights before it are kept as well, or also by gradients, for which their gains are kept, too; or one that
owners work out from the optimizer's state, so that only others keep anything."""

_KEPT: dict[EarlyWeights, tuple[str, ...]] = {
    "live": (),
    "stash": (),
    "extrapolated": ("nbytes",),
    "predicted": ("nbytes", "gains"),
    "stepped": ("nbytes", "gains"),
}
"""What a device keeps all the time of the weights that are trained, where they are "stepped" of those that others own:
a copy, and gains; see :class:`Weights`."""

Held = tuple[tuple[int, int], ...]
"""Micro-batches that a device holds at some moment: (stage, how many)."""

_SEGMENTS = 4
"""Segments that are looked at; what is carried from one to the next has settled by then."""


@dataclass(frozen=True)
class Holdings:
    """What each device holds at its fullest moments; no moment left out holds more of anything.

    Attributes:
        window: per device, at any time.
        between: per device, between two windows.
    """

    window: tuple[tuple[Held, ...], ...]
    between: tuple[Held, ...]


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device.

    Attributes:
        weights: of the stages that it hosts, copies for early forwards, and low-precision copies under autocast.
        optimizer: the optimizer's state of the parameters that it owns.
        gradients: sums over the window, which the optimizer reads in the end, and those of the last step.
        activations: of the micro-batches in flight.
        buffers: gradients and weights on their way between devices, and what one backward needs on top.
        total: at the fullest moment, which need not be that of each of the others.
    """

    weights: int
    optimizer: int
    gradients: int
    activations: int
    buffers: int
    total: int


def holdings(tables: Tables, policy: Policy, microbatches: int, ahead: int) -> Holdings:
    """What devices hold in a stream of equal segments under a policy.

    A micro-batch is held from its forward to the end of its backward. The order on a device is fixed, so this does not
    depend on how long anything takes.
    """
    last = WEIGHT if tables.split else BACKWARD
    counts = [dict.fromkeys(hosted, 0) for hosted in tables.hosted]
    seen: list[set[Held]] = [set() for _ in counts]
    between: list[Held] = [() for _ in counts]
    carried: tuple[int, ...] = ()
    for segment in range(_SEGMENTS):
        current, early = run_segment(tables, policy, microbatches, ahead, carried, True)
        order = Order.of(microbatches, ahead, current, early)
        for kind, slot, _ in order.operations:
            device, stage = tables.device[slot], slot % tables.stages
            if kind == FORWARD:
                counts[device][stage] += 1
                seen[device].add(tuple(counts[device].items()))
            elif kind == last:
                counts[device][stage] -= 1
        carried = order.carry
        if segment >= 1:
            between = [_larger(a, tuple(b.items())) for a, b in zip(between, counts, strict=True)]
    return Holdings(tuple(_fullest(vectors) for vectors in seen), tuple(between))


def _larger(a: Held, b: Held) -> Held:
    before = dict(a)
    return tuple((stage, max(count, before.get(stage, 0))) for stage, count in b)


def _fullest(vectors: set[Held]) -> tuple[Held, ...]:
    """Those that no other one has at least as much of everything of."""
    ordered = sorted(vectors, key=lambda held: (-sum(n for _, n in held), held))
    kept: list[Held] = []
    for held in ordered:
        if not any(all(x <= y for (_, x), (_, y) in zip(held, other, strict=True)) for other in kept):
            kept.append(held)
    return tuple(kept)


def predict(
    profile: ModelProfile,
    cuts: Sequence[int],
    placement: Placement,
    held: Holdings,
    replicas: int = 1,
    early_weights: EarlyWeights = "live",
) -> tuple[DeviceMemory, ...]:
    """Bytes on each device of a replica at its fullest moment.

    Args:
        profile: the model.
        cuts: as for :meth:`ModelProfile.stages`.
        placement: which device hosts what.
        held: micro-batches in flight.
        replicas: data-parallel replicas, which share the optimizer's state.
        early_weights: what early forwards run on.
    """
    stages = profile.stages(cuts)
    hosts: dict[int, set[int]] = {}
    for number, stage in enumerate(stages):
        for index in stage.parameters:
            hosts.setdefault(index, set()).update(placement.hosts(number))
    result = []
    for device in range(placement.num_stages):
        mine = frozenset().union(*(stages[s].parameters for s in placement.hosted(device)))
        weights, sums = profile.total(mine, "nbytes"), profile.total(mine, "gradient")

        trained = frozenset(i for i in mine if profile.weights[i].gradient)

        def share(kind: str, trained: frozenset[int] = trained) -> int:
            """Bytes of what it owns."""
            return sum(getattr(profile.weights[i], kind) // (len(hosts[i]) * replicas) for i in trained)

        owned, state, owned_sums = share("nbytes"), share("state"), share("gradient")
        copies = sum(profile.total(trained, kind) for kind in _KEPT[early_weights])
        if early_weights == "stepped":
            copies -= sum(map(share, _KEPT[early_weights]))
        early = frozenset[int]().union(*(stages[stage].parameters for stage, n in held.between[device] if n))
        if early_weights != "live":
            copies += profile.total(trained.intersection(early), "nbytes")
        # One low-precision copy for each version of the weights that micro-batches in flight have met.
        cast_early, cast = profile.total(early, "copy"), profile.total(mine, "copy")
        flying = max((_bytes(stages, vector) for vector in held.window[device]), default=0)
        waiting = _bytes(stages, held.between[device])
        largest = max((profile.weights[i].gradient for i in trained), default=0)
        shared = frozenset(i for i in trained if len(hosts[i]) * replicas > 1)
        travelling, hosted = 0, len(placement.hosted(device))
        if shared:
            away = sum(profile.weights[i].gradient * (1 - 1 / (len(hosts[i]) * replicas)) for i in shared)
            # What one host sends, and what is sent itself, which is packed stage by stage; sums are made in place.
            travelling = owned_sums + int(away) // hosted
        # The gradients of the last step are there until the first backward of their stage.
        before = owned - owned // hosted
        window = sums + before + flying + largest + cast + cast_early
        end = sums + travelling + waiting + cast_early
        result.append(
            DeviceMemory(
                weights + copies + cast_early + (cast if window >= end else 0),
                state,
                sums + before if window >= end else sums,
                flying if window >= end else waiting,
                largest if window >= end else travelling,
                weights + copies + state + max(window, end),
            )
        )
    return tuple(result)


def _bytes(stages: Sequence[object], held: Held) -> int:
    return sum(count * stages[stage].activations for stage, count in held)  # type: ignore[attr-defined]
