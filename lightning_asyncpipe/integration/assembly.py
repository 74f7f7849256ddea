"""From the first batch to running pipelines.

Where the model can be cut is found by running the step once on the first micro-batch. Rank 0 decides and all ranks
build the same program; every rank then keeps the weights of the stages that it hosts and lets go of the others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_asyncpipe.errors import CutError, PeerFailure
from lightning_asyncpipe.integration import guards, internals
from lightning_asyncpipe.integration.checkpoint import WholeModel, synchronise
from lightning_asyncpipe.integration.lookahead import install
from lightning_asyncpipe.integration.stepcall import StepCall
from lightning_asyncpipe.integration.steps import Executor, TrainingSteps, batch_norms, fewest_samples
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.plan.schedule import Planner
from lightning_asyncpipe.runtime import microbatch
from lightning_asyncpipe.runtime.buffers import RunningStatistics
from lightning_asyncpipe.runtime.candidates import find_cuts
from lightning_asyncpipe.runtime.divisible import divisible_stages
from lightning_asyncpipe.runtime.hollow import hollow
from lightning_asyncpipe.runtime.ownership import Ownership, ParameterInfo, assign
from lightning_asyncpipe.runtime.program import StageProgram
from lightning_asyncpipe.runtime.proof import proven_program
from lightning_asyncpipe.runtime.stages import StageRunner, StageTask
from lightning_asyncpipe.runtime.trace import trace_step

if TYPE_CHECKING:
    from lightning_asyncpipe.strategy import AsyncMultiPipeStrategy

MESSAGE_COST = 0.05
"""What schedules assume a message between two stages to take, in forwards of a stage."""

STALENESS_TOLERANCE = 0.03
"""The share of time that schedules give up for fewer forwards on old weights."""

_SEED_MASK = (1 << 62) - 1


@dataclass
class Assembly:
    """All that one ``fit`` runs on.

    Attributes:
        geometry: numbers of stages, pipelines, micro-batches and replicas.
        program: how the step is split into stages.
        ownership: the owner of every parameter.
        runner: runs stages of the step.
        executor: runs segments.
        steps: runs batches.
        whole: puts the whole model together.
        names_by_id: the first name of every parameter, by identity.
        owned: names of the parameters that this rank steps.
    """

    geometry: Geometry
    program: StageProgram
    ownership: Ownership
    runner: StageRunner
    executor: Executor
    steps: TrainingSteps
    whole: WholeModel
    world: World
    parameters: dict[str, nn.Parameter]
    owned: frozenset[str]

    @property
    def names_by_id(self) -> dict[int, str]:
        """The first name of every parameter, by identity."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def install_gradients(self) -> None:
        """At a window's end, make what was gathered the ``.grad`` of the parameters that this rank owns."""
        if not self.steps.ends_window:
            return
        for name, gradient in self.executor.collect_gradients().items():
            parameter = self.parameters[name]
            parameter.grad = gradient.to(parameter.dtype)

    def collect_statistics(self) -> dict[str, Any]:
        """What all ranks measured; every rank has to call it.

        Returns:
            utilisation (mean over ranks of the share of time spent in forwards and backwards), time_shares (mean
            over ranks of the share of time by what it was spent on, see ``runtime.timeline``), steps (batches),
            microbatches, stale_microbatches (those that met two weight versions in some stage), stale_share (of stage
            forwards), max_staleness (the largest number of updates between a forward and its backward).
        """
        mine = self.executor.staleness
        parts = self.world.all_gather(
            {
                "utilisation": self.executor.ledger.utilisation,
                "time_shares": self.executor.ledger.shares,
                "lags": [[lag, count] for (_, lag), count in sorted(mine.counts.items())],
            }
        )
        lags = [(lag, count) for part in parts for lag, count in part["lags"]]
        total = sum(count for _, count in lags)
        return {
            "utilisation": sum(part["utilisation"] for part in parts) / len(parts),
            "time_shares": {
                name: sum(part["time_shares"][name] for part in parts) / len(parts) for name in parts[0]["time_shares"]
            },
            "steps": self.steps.count,
            "microbatches": mine.microbatches,
            "stale_microbatches": mine.stale_microbatches,
            "stale_share": sum(count for lag, count in lags if lag) / total if total else 0.0,
            "max_staleness": max((lag for lag, count in lags if count), default=0),
        }

    def close(self, restore: bool) -> None:
        """The run has ended: give the module back as an ordinary one.

        Args:
            restore: give every rank the whole model; after a failure, ranks cannot be asked for their parts.
        """
        if restore:
            self.steps.flush()
            self.whole.restore()
        self.steps.close()
        self.runner.close()
        self.executor.close()


def align_ranks(module: nn.Module, world: World) -> None:
    """Give every rank the weights, buffers and random states of rank 0."""
    synchronise(module, world)
    internals.set_random_states(world.broadcast(internals.collect_random_states()))


def assemble(strategy: AsyncMultiPipeStrategy, trainer: pl.Trainer) -> Assembly:
    """Look at the first batch, cut the model, and build what runs the pipelines.

    All ranks call it at the same point, after :func:`align_ranks`. What loaders drew at random stays drawn; what the
    runs of the step drew does not.
    """
    module = strategy.lightning_module
    assert module is not None
    world, geometry = strategy.world, strategy.geometry
    seed = world.broadcast(torch.initial_seed()) & _SEED_MASK
    internals.set_up_training_data(trainer)
    fetcher = install(trainer)
    peeked = fetcher.peek() if fetcher is not None else None
    if fetcher is None or peeked is None or peeked.batch is None:
        raise MisconfigurationException(
            f"{type(strategy).__name__} plans from the first training batch, and there is none: check the training "
            "dataloader, `limit_train_batches` and `max_steps`."
        )
    states = internals.collect_random_states()
    statistics = RunningStatistics(module)
    call = StepCall(module)
    program, in_halves = _program(strategy, module, call, peeked.batch, peeked.batch_idx, statistics)
    geometry = strategy.resolved(split_backward=len(in_halves) == geometry.num_stages)
    internals.set_random_states(states)
    parameters = dict(module.named_parameters())
    ownership = assign(
        [
            ParameterInfo(
                name,
                parameter.numel(),
                parameter.dtype,
                parameter.requires_grad,
                tuple(s for s, names in enumerate(program.parameters) if name in names),
            )
            for name, parameter in parameters.items()
        ],
        geometry.placement,
        geometry.replicas,
    )
    hosted = strategy.hosted_by_this_process(ownership)
    for name, parameter in parameters.items():
        if name not in hosted:
            hollow(parameter)
    runner = StageRunner(module, program, call, strategy.precision_plugin.train_step_context, statistics)
    runner.in_halves = in_halves
    planner = Planner(
        geometry.placement,
        geometry.max_in_flight,
        _costs(geometry.num_stages, in_halves),
        split_backward=bool(in_halves),
        tolerance=STALENESS_TOLERANCE,
    )
    held = {n: p for n, p in parameters.items() if n in hosted and p.requires_grad}
    executor = strategy.make_executor(geometry, planner, runner, ownership, held)
    overriding = guards.overrides_train_batch_start(trainer)
    if overriding is not None and strategy.max_staleness:
        rank_zero_info(
            f"`{overriding}` runs before each batch, so forwards of a batch are not started before it: the pipelines "
            "are flushed at every batch."
        )
    steps = TrainingSteps(
        trainer,
        geometry,
        executor,
        fetcher,
        call,
        statistics,
        world,
        strategy.global_rank // geometry.num_stages if world.size > 1 else 0,
        seed,
        strategy.max_staleness,
        overriding is None,
    )
    whole = WholeModel(module, ownership, _buffer_owners(module, program, geometry), world)
    owned = ownership.owned(world.rank) if world.size > 1 else frozenset(parameters)
    return Assembly(geometry, program, ownership, runner, executor, steps, whole, world, parameters, owned)


def _program(
    strategy: AsyncMultiPipeStrategy,
    module: pl.LightningModule,
    call: StepCall,
    batch: Any,
    batch_idx: int,
    statistics: RunningStatistics,
) -> tuple[StageProgram, frozenset[int]]:
    """Rank 0 cuts the model; all ranks get the same program and stages in halves, or the same error."""
    world = strategy.world
    found: dict[str, Any] = {}
    if world.rank == 0:
        try:
            program, in_halves = _cut(strategy, module, call, batch, batch_idx, statistics)
            found["program"] = json.dumps(program.to_dict())
            found["in_halves"] = sorted(in_halves)
        except CutError as error:
            found["error"] = str(error)
        except BaseException:
            world.broadcast({})  # the other ranks wait for it
            raise
    found = world.broadcast(found)
    if not found:
        raise PeerFailure("rank 0 failed while it ran the step to find cuts")
    if "error" in found:
        raise MisconfigurationException(found["error"])
    return StageProgram.from_dict(json.loads(found["program"])), frozenset(found["in_halves"])


def _cut(
    strategy: AsyncMultiPipeStrategy,
    module: pl.LightningModule,
    call: StepCall,
    batch: Any,
    batch_idx: int,
    statistics: RunningStatistics,
) -> tuple[StageProgram, frozenset[int]]:
    geometry, context = strategy.geometry, strategy.precision_plugin.train_step_context
    fewest = fewest_samples(batch_norms(module))
    part = microbatch.split(batch, geometry.num_microbatches, min_samples=fewest)[0]
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    arguments = (part.data, batch_idx) if takes_index else (part.data,)
    returned: list[Any] = []

    def step(*given: Any) -> Any:
        returned.append(call(*given))
        return returned[0]

    statistics.begin(watch=False)
    try:
        with guards.in_step():
            trace = trace_step(module, step, arguments, context=context, ignored=statistics.tensors())
    finally:
        statistics.end()
    call.read(returned.pop(), part.index, part.size, batch_idx)
    names = None if isinstance(strategy.cuts, str) else list(strategy.cuts)
    task = StageTask(arguments)
    program = proven_program(find_cuts(trace), geometry.num_stages, module, call, task, names, context)
    in_halves: frozenset[int] = frozenset()
    if strategy.split_backward and geometry.num_stages > 1:

        def loss(value: Any) -> Tensor:
            found = call.read(value, part.index, part.size, batch_idx).loss
            assert isinstance(found, Tensor)
            return found

        with guards.in_step():
            in_halves = divisible_stages(module, program, call, task, context, loss)
        whole = sorted(set(range(geometry.num_stages)) - in_halves)
        if whole and strategy.split_backward is True:
            rank_zero_info(f"The backwards of the stages {whole} cannot be run in halves: they are run whole.")
    for metric in (m for m in module.modules() if isinstance(m, Metric)):
        metric.reset()  # what the runs above told it is not training
    return program, in_halves


def _costs(num_stages: int, in_halves: frozenset[int]) -> Costs:
    """All stages alike, a backward twice a forward; the first stage's input needs no gradient."""
    first_halves = tuple((1.0 if stage else 0.0) if stage in in_halves else 2.0 for stage in range(num_stages))
    return Costs(
        forward=(1.0,) * num_stages,
        backward=(2.0,) * num_stages,
        input_grad=first_halves,
        weight_grad=tuple(2.0 - half for half in first_halves),
        message=MESSAGE_COST,
    )


def _buffer_owners(module: nn.Module, program: StageProgram, geometry: Geometry) -> dict[str, int]:
    """For each buffer the first rank that runs the unit it belongs to."""
    stages = {node.key.name: node.first for node in reversed(program.nodes) if not node.opened}
    owners: dict[str, int] = {}
    for name, _ in module.named_buffers():
        prefix = name
        while prefix and prefix not in stages:
            prefix = prefix.rpartition(".")[0]
        owners[name] = geometry.placement.hosts(stages[prefix])[0] if prefix else 0
    return owners
