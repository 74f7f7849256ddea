"""Choosing everything that was left open: stages, pipelines, micro-batches.

The fastest plan whose memory fits wins. Plans whose simulated steps are within a tolerance of the fastest one's count
as equally fast, since no simulation is truer than that: of these the one with the fewest forwards on old weights is
taken, and then the one with the fewest replicas of the weights. The number of micro-batches is not chosen by time:
fewer of them would often be faster, but each then counts for more where it meets two versions of the weights. More of
them are taken only where the memory for activations is short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_asyncpipe.plan.geometry import Auto, Geometry, resolve
from lightning_asyncpipe.plan.memory import DeviceMemory, EarlyWeights, holdings, predict
from lightning_asyncpipe.plan.profile import ModelProfile
from lightning_asyncpipe.plan.schedule import Planner, SegmentSpec
from lightning_asyncpipe.plan.search import choose
from lightning_asyncpipe.plan.solver import EFFORT, Cuts, Setting, judge, solve
from lightning_asyncpipe.plan.tables import Tables

TIE = 0.01
"""Simulated steps that differ by no more than this are equally long."""

_RETRIES = 3


class MemoryLimitError(ValueError):
    """No plan fits; the message says the smallest limit that one was found for.

    Attributes:
        smallest: that limit, in bytes.
    """

    def __init__(self, message: str, smallest: int) -> None:
        super().__init__(message)
        self.smallest = smallest


@dataclass(frozen=True)
class Request:
    """What the user asked for; see :func:`resolve` for what "auto" means.

    Attributes:
        num_stages: D.
        num_pipelines, num_microbatches, max_in_flight: N, M, w.
        replicas: R.
        cuts: those that the user named, as indices of boundaries; None: free.
        samples: of a batch, the most micro-batches that there can be.
        memory_limit: bytes on each device; None: no limit.
        look_ahead, early_weights, split_backward: as in :class:`Setting`.
        tolerance: the share of time that the schedule gives up for fewer forwards on old weights.
        effort: simulated operations for each search for stages, and for the schedule.
    """

    num_stages: int
    num_pipelines: int | Auto
    num_microbatches: int | Auto
    max_in_flight: int | Auto
    replicas: int = 1
    cuts: Cuts | None = None
    samples: int = 1
    memory_limit: int | None = None
    look_ahead: bool = True
    early_weights: EarlyWeights = "live"
    split_backward: bool = False
    tolerance: float = 0.03
    effort: int = EFFORT


@dataclass(frozen=True)
class Chosen:
    """The plan.

    Attributes:
        geometry: the numbers.
        cuts: indices of boundaries.
        planner: of its schedules.
        step_seconds: of a window, simulated.
        early: forwards of a window that an update overtakes, weighted by their work.
        shares: per stage, the share of its forwards that an update overtakes.
        memory: of each device, predicted.
    """

    geometry: Geometry
    cuts: Cuts
    planner: Planner
    step_seconds: float
    early: float
    shares: tuple[float, ...]
    memory: tuple[DeviceMemory, ...]


def choose_plan(profile: ModelProfile, request: Request) -> Chosen:
    """The best plan for a request.

    Args:
        profile: for micro-batches as ``request.num_microbatches`` makes them.
        request: what to choose.

    Raises:
        MemoryLimitError: nothing fits.
        ValueError: there are fewer units than stages.
    """
    smallest: Chosen | None = None
    for geometry, scaled in _sizes(profile, request):
        found = _fastest(scaled, geometry, request)
        if found is not None:
            return found
        for candidate in _geometries(geometry, request):
            least = _smallest(scaled, candidate, request)
            if smallest is None or _peak(least) < _peak(smallest):
                smallest = least
    assert smallest is not None
    g = smallest.geometry
    raise MemoryLimitError(
        f"memory_limit={request.memory_limit} bytes on each device is too small for this model on {g.num_stages} "
        f"devices: the smallest limit that a plan was found for is {_peak(smallest)} bytes, with "
        f"num_pipelines={g.num_pipelines} and num_microbatches={g.num_microbatches}. Raise the limit, use more "
        "devices, smaller batches, or activation checkpointing.",
        _peak(smallest),
    )


def _peak(chosen: Chosen) -> int:
    return max(device.total for device in chosen.memory)


def _resolve(request: Request, pipelines: int | Auto, microbatches: int | Auto) -> Geometry:
    return resolve(
        request.num_stages * request.replicas,
        request.num_stages,
        pipelines,
        microbatches,
        request.max_in_flight,
        request.replicas,
        request.split_backward,
    )


def _sizes(profile: ModelProfile, request: Request) -> Iterator[tuple[Geometry, ModelProfile]]:
    """The usual number of micro-batches, then ever more, as far as the samples and the memory ask for it."""
    geometry = _resolve(request, request.num_pipelines, request.num_microbatches)
    yield geometry, profile
    if request.num_microbatches != "auto" or request.memory_limit is None:
        return
    number = geometry.num_microbatches
    while number < request.samples and profile.samples > 1:
        number = min(2 * number, request.samples)
        yield replace(geometry, num_microbatches=number), profile.scaled(-(-request.samples // number))


def _geometries(geometry: Geometry, request: Request) -> list[Geometry]:
    """The numbers of pipelines to try: one, or even ones that leave a device half the model at most."""
    stages = geometry.num_stages
    numbers: list[int | Auto] = [request.num_pipelines]
    if request.num_pipelines == "auto":
        even = range(2, stages // 2 + 1, 2)
        numbers = [1, *(n for n in even if n & (n - 1) == 0 or n == stages // 2)]
    return [_resolve(request, n, geometry.num_microbatches) for n in numbers]


def _setting(geometry: Geometry, request: Request, limit: int | None) -> Setting:
    return Setting(
        geometry.placement,
        geometry.max_in_flight,
        geometry.num_microbatches,
        request.look_ahead,
        limit,
        request.replicas,
        request.early_weights,
        request.split_backward,
    )


def _fastest(profile: ModelProfile, geometry: Geometry, request: Request) -> Chosen | None:
    """The best plan for a number of micro-batches, None if none fits."""
    candidates = _geometries(geometry, request)
    tried: list[tuple[float, float, int, Geometry, Cuts]] = []
    for candidate in candidates:
        alone = len(candidates) == 1
        setting = _setting(candidate, request, request.memory_limit)
        effort = request.effort if alone else request.effort // 3
        found = (
            solve(profile, setting, effort) if request.cuts is None else judge(profile, request.cuts, setting, effort)
        )
        time, early = found.verdict.time, 0.0
        if not alone:
            tables = Tables(
                candidate.placement,
                candidate.max_in_flight,
                profile.costs(found.cuts, candidate.placement, candidate.replicas),
                request.split_backward,
            )
            m = candidate.num_microbatches
            state = choose(tables, m, request.look_ahead, True, effort // 2, request.tolerance).state
            time, early = min(time, state.time), state.early
        tried.append((time, early, candidate.num_pipelines, candidate, found.cuts))
    while tried:
        best = min(time for time, *_ in tried)
        equal = [entry for entry in tried if entry[0] <= best * (1 + TIE)]
        work = geometry.num_microbatches * geometry.num_stages
        chosen = min(equal, key=lambda entry: (round(entry[1] / work, 2), entry[2]))
        plan = _fitting(profile, chosen[3], chosen[4], request)
        if plan is not None:
            return plan
        tried.remove(chosen)
    return None


def _fitting(profile: ModelProfile, geometry: Geometry, cuts: Cuts, request: Request) -> Chosen | None:
    """The plan with these cuts, or with others that take less memory, under the schedule that will really run."""
    plan = _plan(profile, geometry, cuts, request)
    limit = request.memory_limit
    if limit is None or _peak(plan) <= limit:
        return plan
    if request.cuts is not None:
        return None
    stricter = limit
    for _ in range(_RETRIES):
        stricter -= _peak(plan) - limit
        if stricter <= 0:
            break
        plan = _plan(
            profile, geometry, solve(profile, _setting(geometry, request, stricter), request.effort // 2).cuts, request
        )
        if _peak(plan) <= limit:
            return plan
    plan = _smallest(profile, geometry, request)
    return plan if _peak(plan) <= limit else None


def _smallest(profile: ModelProfile, geometry: Geometry, request: Request) -> Chosen:
    """A plan that takes little memory, whatever its time."""
    cuts = request.cuts
    if cuts is None:
        cuts = solve(profile, _setting(geometry, request, 0), request.effort // 4).cuts
    return _plan(profile, geometry, cuts, request)


def _plan(profile: ModelProfile, geometry: Geometry, cuts: Cuts, request: Request) -> Chosen:
    placement, m = geometry.placement, geometry.num_microbatches
    costs = profile.costs(cuts, placement, geometry.replicas)
    planner = Planner(
        placement, geometry.max_in_flight, costs, request.split_backward, request.effort, request.tolerance
    )
    ahead = m if request.look_ahead else 0
    choice = planner.choice(SegmentSpec(m, ahead))
    tables = Tables(placement, geometry.max_in_flight, costs, request.split_backward)
    held = holdings(tables, choice.policy, m, ahead)
    memory = predict(profile, cuts, placement, held, geometry.replicas, request.early_weights)
    return Chosen(geometry, cuts, planner, choice.state.time, choice.state.early, choice.state.shares, memory)
