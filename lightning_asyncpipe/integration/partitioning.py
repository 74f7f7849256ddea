"""Which stages, how many pipelines: decided on rank 0 once the places to cut are known.

Three ways. *By operations*: the operations of the traced micro-batch are counted and stages are made even; nothing is
measured, so the same model and batch give the same plan everywhere. *By profile*: units are measured on the device and
the plan with the shortest simulated step within the memory is taken. *By a file*: as a plan that was saved says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_asyncpipe.errors import CutError
from lightning_asyncpipe.integration.early_weights import update_rules
from lightning_asyncpipe.integration.measurements import memory_of, optimizer_costs
from lightning_asyncpipe.integration.plan_quality import poor, stage_work
from lightning_asyncpipe.integration.precision import shared_copies
from lightning_asyncpipe.integration.saved_plans import NAME, plan_to_resume, target_of
from lightning_asyncpipe.integration.stepcall import StepCall
from lightning_asyncpipe.plan.choice import Chosen, Request, choose_plan
from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.plan.profile import Link, ModelProfile
from lightning_asyncpipe.plan.report import (
    add_predictions,
    describe_devices,
    describe_geometry,
    describe_stages,
    table,
    with_predictions,
)
from lightning_asyncpipe.plan.saved import check_plan, costs_of, geometry_of, read_plan
from lightning_asyncpipe.runtime.candidates import Candidates, Cut
from lightning_asyncpipe.runtime.cuts import choose_cuts
from lightning_asyncpipe.runtime.profile import profile_model
from lightning_asyncpipe.runtime.program import StageProgram, build_program
from lightning_asyncpipe.runtime.proof import confirm, prove, proven_program
from lightning_asyncpipe.runtime.stages import StageTask

if TYPE_CHECKING:
    from lightning_asyncpipe.integration.planned import PlannedStrategy
    from lightning_asyncpipe.strategy import AsyncMultiPipeStrategy

Way = Literal["profile", "operations"]
Halves = Callable[[StageProgram], frozenset[int]]
WAYS = ("auto", "profile", "operations")
VARIABLE = "ASYNC_MULTIPIPE_PARTITION"
"""Environment variable that sets what ``partition="auto"`` means."""

MESSAGE_SHARE = 0.05
"""What a message is taken to last where none was measured, in forwards of a stage."""

BANDWIDTH = 2e9
"""Bytes a second that a message is taken to travel at where none was measured."""

STALENESS_TOLERANCE = 0.01
"""The share of time that schedules give up for fewer forwards on old weights."""


@dataclass
class Partition:
    """What rank 0 decided.

    Attributes:
        program: how the step is split into stages.
        geometry: the numbers of the run.
        costs: of its schedules: seconds where they were measured, else any unit.
        in_halves: the stages whose backwards are run in halves.
        description: the plan as plain data.
    """

    program: StageProgram
    geometry: Geometry
    costs: Costs
    in_halves: frozenset[int] = frozenset()
    description: dict[str, Any] = field(default_factory=dict)

    def to_message(self) -> dict[str, Any]:
        """What the other ranks are sent; the costs as a tensor, to the last bit."""
        c = self.costs
        rows = [*c.forward, *c.backward, *c.input_grad, *c.weight_grad, c.message, c.reduce, c.update]
        return {
            "program": json.dumps(self.program.to_dict()),
            "geometry": asdict(self.geometry),
            "costs": torch.tensor(rows, dtype=torch.float64),
            "in_halves": sorted(self.in_halves),
            "description": json.dumps(self.description),
        }

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Partition:
        """The inverse of :meth:`to_message`; the same on every rank, rank 0 too."""
        geometry = Geometry(**message["geometry"])
        rows, stages = message["costs"].tolist(), geometry.num_stages
        forward, backward, inputs, weights = (tuple(rows[i * stages : (i + 1) * stages]) for i in range(4))
        costs = Costs(forward, backward, inputs, weights, *rows[4 * stages :])
        program = StageProgram.from_dict(json.loads(message["program"]))
        return cls(program, geometry, costs, frozenset(message["in_halves"]), json.loads(message["description"]))


def check_arguments(partition: str, memory_limit: int | None, plan: object, cuts: object) -> None:
    """Refuse values that cannot be.

    Raises:
        MisconfigurationException: with the value and what would do.
    """
    if partition not in WAYS:
        raise MisconfigurationException(f"partition={partition!r}: choose one of {', '.join(map(repr, WAYS))}")
    whole = isinstance(memory_limit, int) and not isinstance(memory_limit, bool)
    if memory_limit is not None and not (whole and memory_limit > 0):
        raise MisconfigurationException(
            f"memory_limit={memory_limit!r}: give the bytes of each device that may be used, such as "
            "16 * 2**30, or None"
        )
    if plan is not None and not isinstance(plan, (str, os.PathLike)):
        raise MisconfigurationException(f"plan={plan!r}: give the path of a file that `strategy.save_plan(path)` wrote")
    given = {"partition": partition != "auto", "memory_limit": memory_limit is not None, "cuts": cuts != "auto"}
    if plan is not None and any(given.values()):
        named = " and ".join(f"`{name}`" for name, is_given in given.items() if is_given)
        raise MisconfigurationException(
            f"plan={os.fspath(plan)!r} says how the model is partitioned, and where it is cut: leave {named} out, or "
            "the plan"
        )


def way_of(strategy: PlannedStrategy) -> Way:
    """How to partition; what measures is left out where two runs should be the same to the last bit."""
    way: str = strategy.partition
    if way == "auto":
        way = os.environ.get(VARIABLE, "auto")
        if way not in WAYS:
            raise MisconfigurationException(f"{VARIABLE}={way!r}: choose one of {', '.join(map(repr, WAYS))}")
    if way == "auto":
        alone = strategy.world.size == 1 or strategy.geometry.num_stages == 1
        fixed = alone or torch.are_deterministic_algorithms_enabled()
        way = "operations" if fixed and strategy.memory_limit is None else "profile"
    return "profile" if way == "profile" else "operations"


@dataclass(eq=False)
class PartitionMaker:
    """Decides, on rank 0, how the model is cut and placed.

    Attributes:
        strategy: what the user asked for.
        candidates: the places to cut.
        module: the user's module.
        call: its step.
        task: one micro-batch.
        samples: of the micro-batch, and of the batch.
        look_ahead: whether batches may be looked at before their own step begins.
        link: messages between devices, if they were measured.
        in_halves: the stages of a program whose backwards can be run in halves, if they should be.
    """

    strategy: AsyncMultiPipeStrategy
    candidates: Candidates
    module: pl.LightningModule
    call: StepCall
    task: StageTask
    samples: tuple[int, int]
    look_ahead: bool
    link: Link | None
    in_halves: Halves

    def __post_init__(self) -> None:
        self.context = self.strategy.precision_plugin.train_step_context
        self.names = None if isinstance(self.strategy.cuts, str) else list(self.strategy.cuts)
        self.geometry = self.strategy.geometry

    def make(self) -> Partition:
        """The plan, with a warning if it is a poor one.

        Raises:
            CutError: the model cannot be cut as asked.
            ValueError: a plan is for something else, or nothing fits the memory.
        """
        partition = self.make_any()
        work = stage_work(self.candidates, partition.program)
        fault = poor(work, partition.geometry, partition.description)
        if fault is not None:
            rank_zero_warn(fault)
        return partition

    def make_any(self) -> Partition:
        """The plan, good or poor."""
        if self.strategy.plan is not None:
            return self.from_file(self.strategy.plan)
        if way_of(self.strategy) == "profile":
            return self.resumed() or self.by_profile(timed=True)
        if self.strategy.memory_limit is not None:
            return self.by_profile(timed=False)
        program = proven_program(
            self.candidates,
            self.geometry.num_stages,
            self.module,
            self.call.observed,
            self.task,
            self.names,
            self.context,
        )
        in_halves = self.in_halves(program)
        stages = self.geometry.num_stages
        geometry = self.strategy.resolved(split_backward=len(in_halves) == stages)
        description = self.describe(program, geometry, "operations")
        return Partition(program, geometry, uniform_costs(stages, in_halves), in_halves, description)

    def from_file(self, path: str | os.PathLike[str]) -> Partition:
        strategy = self.strategy
        content = read_plan(Path(path))
        asked = {name: value for name, value in strategy.asked_numbers().items() if value != "auto"}
        asked["num_stages"] = self.geometry.num_stages
        check_plan(path, content, target_of(strategy, self.module), asked)
        return self.from_content(content, f"the plan {str(path)!r}", f"the file {os.fspath(path)}")

    def resumed(self) -> Partition | None:
        """The plan that the checkpoint holds from which this run goes on, if it fits."""
        entry = self.strategy.resumed_plan
        if entry is None:
            return None
        content = plan_to_resume(entry, self.strategy, self.module, "profile")
        if content is None:
            return None
        try:
            return self.from_content(content, NAME, "profile")
        except CutError as error:
            rank_zero_info(f"{error}. The model is planned anew.")
            return None

    def from_content(self, content: Mapping[str, Any], name: str, way: str) -> Partition:
        """The plan that a file or a checkpoint holds.

        Args:
            content: checked.
            name: what it is called in messages.
            way: how it came about, for the description.

        Raises:
            CutError: the step of this model cannot be cut there.
        """
        known = {json.dumps(_identity(cut)): cut for cut in self.candidates.cuts}
        chosen = []
        for cut in content["cuts"]:
            found = known.get(json.dumps(cut))
            if found is None:
                raise CutError(
                    f"{name} is for another model: it has a cut at {cut}, and the step of this one cannot be cut there"
                )
            chosen.append(found)
        geometry = replace(geometry_of(content), replicas=self.geometry.replicas)
        program = build_program(self.candidates, chosen)
        prove(self.module, program, self.call.observed, self.task, self.context, None)
        description = self.describe(program, geometry, way)
        description = with_predictions(description, content.get("description"))
        return Partition(program, geometry, costs_of(content), self.in_halves(program), description)

    def by_profile(self, timed: bool) -> Partition:
        failed: Exception | None = None
        try:
            profile, chosen, program, in_halves = self.best(timed)
        except ValueError:
            raise
        except Exception as error:
            if self.names is not None:
                raise
            failed = error
        if failed is not None:
            # Some place may only seem to be one to cut at: leave those out that a run in stages shows to be wrong.
            before = self.candidates
            self.candidates = confirm(before, self.module, self.call.observed, self.task, self.context)
            if self.candidates is before:
                raise failed
            profile, chosen, program, in_halves = self.best(timed)
        way = "profile" if timed else "operations"
        description = self.describe(program, chosen.geometry, way)
        if timed:
            add_predictions(description, profile, chosen)
        else:
            for entry, memory in zip(description["devices"], chosen.memory, strict=True):
                entry["memory"] = vars(memory).copy()
        costs = undivided(chosen.planner.costs, in_halves)
        return Partition(program, chosen.geometry, costs, in_halves, description)

    def best(self, timed: bool) -> tuple[ModelProfile, Chosen, StageProgram, frozenset[int]]:
        """The profile, the best plan for it, its program, and the stages whose backwards are run in halves."""
        state, seconds = optimizer_costs(self.strategy.optimizers, next(self.module.parameters()).device)
        profile = profile_model(
            self.candidates,
            self.module,
            self.call,
            self.task,
            self.context,
            state_bytes=state,
            step_seconds=seconds if timed else 0.0,
            samples=self.samples[0],
            timed=timed,
            copies=partial(shared_copies, self.strategy.precision_plugin, self.module),
            gain_bytes=update_rules(self.strategy.optimizers, dict(self.module.named_parameters())).gain_bytes,
        )
        forward = sum(unit.forward for unit in profile.units) / self.geometry.num_stages
        profile = replace(profile, link=self.link or Link(MESSAGE_SHARE * forward, BANDWIDTH))
        named = None
        if self.names is not None:
            cuts = choose_cuts(self.candidates, self.geometry.num_stages, self.names)
            named = tuple(self.candidates.cuts.index(cut) for cut in cuts)
        elif len(self.candidates.cuts) < self.geometry.num_stages - 1:
            choose_cuts(self.candidates, self.geometry.num_stages)  # says what is wrong
        wanted = bool(self.strategy.split_backward)
        chosen, program = self.choose(profile, named, wanted)
        in_halves = self.in_halves(program)
        if wanted and len(in_halves) < program.num_stages:
            chosen, program = self.choose(profile, named, False)
            in_halves = self.in_halves(program)
        return profile, chosen, program, in_halves

    def choose(self, profile: ModelProfile, named: tuple[int, ...] | None, split: bool) -> tuple[Chosen, StageProgram]:
        """The best plan with backwards in halves or whole, and its program, proved."""
        chosen = choose_plan(profile, self.request(named, split))
        program = build_program(self.candidates, [self.candidates.cuts[i] for i in chosen.cuts])
        prove(self.module, program, self.call.observed, self.task, self.context, None)
        return chosen, program

    def request(self, cuts: tuple[int, ...] | None, split: bool) -> Request:
        strategy = self.strategy
        asked = strategy.asked_numbers()
        return Request(
            self.geometry.num_stages,
            asked["num_pipelines"],
            asked["num_microbatches"],
            asked["max_in_flight"],
            self.geometry.replicas,
            cuts,
            self.samples[1],
            strategy.memory_limit or memory_of(strategy.root_device),
            self.look_ahead and strategy.max_staleness > 0,
            strategy.early_weights,
            split,
            STALENESS_TOLERANCE,
        )

    def describe(self, program: StageProgram, geometry: Geometry, way: str) -> dict[str, Any]:
        sizes = {name: parameter.numel() for name, parameter in self.module.named_parameters()}
        times = [cut.time for cut in program.cuts]
        counts = [
            sum(low < cut.time <= high for cut in self.candidates.cuts)
            for low, high in zip([-1, *times], [*times, self.candidates.trace.end], strict=True)
        ]
        counts[-1] += 1  # what follows the last place
        liveness, calls = self.candidates.liveness, self.candidates.trace.calls
        first = next((call.key.name for i, call in enumerate(calls) if liveness.unit[i] == i), "")
        stages = describe_stages(
            geometry,
            [first, *(cut.begins for cut in program.cuts)],
            counts,
            [sum(sizes[name] for name in names) for names in program.parameters],
            [(cut.shape, cut.dtype, _nbytes(cut)) for cut in program.cuts],
        )
        return {
            **describe_geometry(geometry),
            "planned_by": "the user's cuts" if self.names is not None and way == "operations" else way,
            "step_ms": None,
            "message_ms": None,
            "early_forwards": None,
            "stages": stages,
            "devices": describe_devices(geometry),
            "cuts": [_identity(cut) for cut in program.cuts],
        }


def _nbytes(cut: Cut) -> int:
    dtype: torch.dtype = getattr(torch, cut.dtype)
    return torch.Size(cut.shape).numel() * dtype.itemsize


def _identity(cut: Cut) -> list[Any]:
    """What tells a cut from all others of a model, for a file."""
    return [cut.begins, cut.way, list(cut.call), list(cut.positions)]


def uniform_costs(num_stages: int, in_halves: frozenset[int]) -> Costs:
    """All stages alike, a backward twice a forward; the first stage's input needs no gradient."""
    costs = Costs.uniform(num_stages, message=MESSAGE_SHARE)
    inputs = (0.0, *costs.input_grad[1:])
    weights = tuple(whole - half for whole, half in zip(costs.backward, inputs, strict=True))
    return undivided(replace(costs, input_grad=inputs, weight_grad=weights), in_halves)


def undivided(costs: Costs, in_halves: frozenset[int]) -> Costs:
    """The same costs, but for stages whose whole backward is run where others run its first half."""
    stages = range(costs.num_stages)
    inputs = tuple(costs.input_grad[s] if s in in_halves else costs.backward[s] for s in stages)
    weights = tuple(costs.weight_grad[s] if s in in_halves else 0.0 for s in stages)
    return replace(costs, input_grad=inputs, weight_grad=weights)


def announce(partition: Partition) -> None:
    """Print the plan, on rank 0."""
    rank_zero_info(table(partition.description))
