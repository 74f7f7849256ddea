"""From the first batch to running pipelines.

All ranks build the program of the same partition; every rank then keeps the weights of the stages that it hosts and
lets go of the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_asyncpipe.integration import guards, internals
from lightning_asyncpipe.integration.averaging import AveragedParts, averages_in_parts
from lightning_asyncpipe.integration.checkpoint import WholeModel, synchronise
from lightning_asyncpipe.integration.clipping import InstalledGradients
from lightning_asyncpipe.integration.cutting import find_partition
from lightning_asyncpipe.integration.evaluation_call import Kind
from lightning_asyncpipe.integration.evaluation_data import Loop
from lightning_asyncpipe.integration.evaluation_setup import Evaluation, Held, find_evaluation
from lightning_asyncpipe.integration.lookahead import fetcher_of
from lightning_asyncpipe.integration.metric_states import LocalMetrics
from lightning_asyncpipe.integration.partitioning import STALENESS_TOLERANCE, announce
from lightning_asyncpipe.integration.precision import loss_scale, shared_copies
from lightning_asyncpipe.integration.stepcall import StepCall
from lightning_asyncpipe.integration.steps import Executor, TrainingSteps
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.plan.schedule import Planner
from lightning_asyncpipe.runtime.buffers import RunningStatistics
from lightning_asyncpipe.runtime.hollow import hollow
from lightning_asyncpipe.runtime.ownership import Ownership, ParameterInfo, assign
from lightning_asyncpipe.runtime.program import StageProgram
from lightning_asyncpipe.runtime.stages import StageRunner
from lightning_asyncpipe.runtime.staleness import share_and_largest

if TYPE_CHECKING:
    from lightning_asyncpipe.strategy import AsyncMultiPipeStrategy

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
        statistics: running statistics that forwards stage.
        local: metrics are complete on every rank.
        validation: what validation runs on; None where there is none.
        averages: of weights, that callbacks keep.
        gradients: what has become ``.grad``, until the step is over.
        awaits_step: whether a window's gradients were handed over and no step has followed yet.
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
    statistics: RunningStatistics
    local: LocalMetrics
    validation: Evaluation | None
    averages: list[AveragedParts]
    gradients: InstalledGradients = field(default_factory=InstalledGradients)
    awaits_step: bool = False

    @property
    def names_by_id(self) -> dict[int, str]:
        """The first name of every parameter, by identity."""
        return {id(parameter): name for name, parameter in self.parameters.items()}

    def run_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch; where the module's own ``optimizer_step`` has not stepped before, that step was skipped."""
        if self.awaits_step:
            self.step_is_over(skipped=True)
        if not self.steps.count:
            self.runner.random.refresh()  # hooks that ran before the first batch may have made generators
        return self.steps.run(*args, **kwargs)

    def step_is_over(self, skipped: bool) -> None:
        """The optimizer has stepped, or the step was left out, on every rank alike."""
        self.awaits_step = False
        self.gradients.clear()
        if skipped:
            self.executor.skipped()
        else:
            self.executor.stepped()

    def install_gradients(self) -> None:
        """At a window's end, make what was gathered the ``.grad`` of the parameters that this rank owns."""
        if not self.steps.ends_window:
            return
        self.awaits_step = True
        for name, gradient in self.executor.collect_gradients().items():
            self.gradients.install(self.parameters[name], gradient)

    def collect_statistics(self) -> dict[str, Any]:
        """What all ranks measured; every rank has to call it.

        Returns:
            utilisation (mean over ranks of the share of time spent in forwards and backwards), time_shares (mean
            over ranks of the share of time by what it was spent on, see ``runtime.timeline``), steps (batches),
            microbatches, stale_microbatches (those that met two weight versions in some stage), stale_share (of stage
            forwards), stale_share_by_stage, max_staleness (the largest number of updates between a forward and its
            backward).
        """
        mine = self.executor.staleness
        parts = self.world.all_gather(
            {
                "utilisation": self.executor.ledger.utilisation,
                "time_shares": self.executor.ledger.shares,
                "lags": [[stage, lag, count] for (stage, lag), count in sorted(mine.counts.items())],
            }
        )
        lags = [entry for part in parts for entry in part["lags"]]
        stale_share, max_staleness = share_and_largest((lag, n) for _, lag, n in lags)
        return {
            "utilisation": sum(part["utilisation"] for part in parts) / len(parts),
            "time_shares": {
                name: sum(part["time_shares"][name] for part in parts) / len(parts) for name in parts[0]["time_shares"]
            },
            "steps": self.steps.count,
            "microbatches": mine.microbatches,
            "stale_microbatches": mine.stale_microbatches,
            "stale_share": stale_share,
            "stale_share_by_stage": [
                share_and_largest((lag, n) for at, lag, n in lags if at == stage)[0]
                for stage in range(self.geometry.num_stages)
            ],
            "max_staleness": max_staleness,
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
        if self.validation is not None:
            self.validation.close()
        for average in self.averages:
            average.close()
        self.runner.close()
        self.statistics.close()
        self.local.restore()
        self.executor.close()


@dataclass
class EvaluationAssembly:
    """All that one ``validate``, ``test`` or ``predict`` runs on.

    Attributes:
        evaluation: the loop and how its step runs.
        whole: puts the whole model together again; None where every rank has kept it.
        statistics: running statistics, should a layer be in training.
        local: metrics are complete on every rank.
    """

    evaluation: Evaluation
    whole: WholeModel | None
    statistics: RunningStatistics
    local: LocalMetrics

    def close(self, restore: bool) -> None:
        """The run has ended: give the module back as an ordinary one; `restore` as for :meth:`Assembly.close`."""
        if restore and self.whole is not None:
            self.whole.restore()
        self.evaluation.close()
        self.statistics.close()
        self.local.restore()


def align_ranks(module: nn.Module, world: World) -> None:
    """Give every rank the weights, buffers and random states of rank 0."""
    synchronise(module, world)
    internals.set_random_states(world.broadcast(internals.collect_random_states()))


def assemble(strategy: AsyncMultiPipeStrategy, trainer: pl.Trainer) -> Assembly:
    """Look at the first batch, cut the model, and build what runs the pipelines.

    All ranks call it at the same point, after :func:`align_ranks` and :func:`install`. What loaders drew at random
    stays drawn; what the runs of the step drew does not.
    """
    module = strategy.lightning_module
    assert module is not None
    world, resumed = strategy.world, strategy.resumed
    seed = world.broadcast(torch.initial_seed()) & _SEED_MASK if resumed is None else resumed.seed
    internals.set_up_training_data(trainer)
    fetcher = fetcher_of(trainer)
    peeked = fetcher.peek() if fetcher is not None else None
    if fetcher is None or peeked is None or peeked.batch is None:
        raise MisconfigurationException(
            f"{type(strategy).__name__} plans from the first training batch, and there is none: check the training "
            "dataloader, `limit_train_batches` and `max_steps`."
        )
    states = internals.collect_random_states()
    statistics = RunningStatistics(module)
    local = LocalMetrics(module, world, strategy.geometry.num_stages)
    call = StepCall(module, local)
    overriding = guards.runs_before_forwards(trainer, strategy.max_staleness == 0)
    partition = find_partition(strategy, module, call, peeked.batch, peeked.batch_idx, statistics, overriding is None)
    program, geometry, in_halves = partition.program, partition.geometry, partition.in_halves
    strategy.use_partition(partition)
    announce(partition)
    validation: Evaluation | None = None
    held = Held(program)
    if internals.validation_in_fit(trainer):
        loop = trainer.fit_loop.epoch_loop.val_loop
        validation = find_evaluation(strategy, trainer, "validation", loop, statistics, held)
    internals.set_random_states(states)
    parameters = dict(module.named_parameters())
    ownership = _keep_hosted(strategy, held, parameters)
    hosted = strategy.hosted_by_this_process(ownership)
    strategy.deferred.fill(module, hosted, world)
    strategy.load_weights()
    plugin = strategy.precision_plugin
    copies, scale = shared_copies(plugin, module, program), loss_scale(plugin)
    runner = StageRunner(module, program, call, plugin.train_step_context, statistics, copies=copies, loss_scale=scale)
    runner.in_halves = in_halves
    planner = Planner(
        geometry.placement,
        geometry.max_in_flight,
        partition.costs,
        split_backward=bool(in_halves),
        tolerance=STALENESS_TOLERANCE,
    )
    trained = {n: p for n, p in parameters.items() if n in hosted and p.requires_grad}
    executor = strategy.make_executor(geometry, planner, runner, ownership, trained)
    if overriding is not None and (strategy.max_staleness or guards.accumulates(trainer)):
        rank_zero_info(
            f"`{overriding}` runs between batches, so forwards of a batch are not started before it: the pipelines "
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
        strategy.meet,
    )
    buffer_owners = _buffer_owners(module, program, geometry)
    whole = WholeModel(module, ownership, buffer_owners, world)
    averages = averages_in_parts(trainer, module, ownership, buffer_owners, world, steps.flush)
    owned = ownership.owned(world.rank) if world.size > 1 else frozenset(parameters)
    if validation is not None:
        forwards = strategy.make_forward_executor(geometry)
        termination = steps.termination
        validation.connect(
            strategy,
            trainer,
            geometry,
            forwards,
            statistics,
            seed,
            local,
            whole,
            lambda: termination.pending,
            termination.agreed,
        )
    return Assembly(
        geometry,
        program,
        ownership,
        runner,
        executor,
        steps,
        whole,
        world,
        parameters,
        owned,
        statistics,
        local,
        validation,
        averages,
    )


def _keep_hosted(strategy: AsyncMultiPipeStrategy, held: Held, parameters: dict[str, nn.Parameter]) -> Ownership:
    """Say who owns which parameter, and let go of those that this process does not keep."""
    geometry = strategy.geometry
    ownership = assign(
        [
            ParameterInfo(
                name,
                parameter.numel(),
                parameter.dtype,
                parameter.requires_grad,
                held.of(name),
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
    return ownership


def assemble_evaluation(
    strategy: AsyncMultiPipeStrategy, trainer: pl.Trainer, kind: Kind, loop: Loop
) -> EvaluationAssembly:
    """Look at the first batches of a loop, cut the model by its step, and build what runs it, without training.

    All ranks call it at the same point, after :func:`align_ranks`.
    """
    module = strategy.lightning_module
    assert module is not None
    world, geometry = strategy.world, strategy.geometry
    seed = world.broadcast(torch.initial_seed()) & _SEED_MASK
    statistics = RunningStatistics(module)
    states = internals.collect_random_states()
    evaluation = find_evaluation(strategy, trainer, kind, loop, statistics)
    internals.set_random_states(states)
    whole: WholeModel | None = None
    parameters = dict(module.named_parameters())
    needed = frozenset(parameters)
    if evaluation.held is not None and not evaluation.runs_whole:
        program = next(iter(evaluation.found.values())).program
        ownership = _keep_hosted(strategy, evaluation.held, parameters)
        needed = strategy.hosted_by_this_process(ownership)
        whole = WholeModel(module, ownership, _buffer_owners(module, program, geometry), world)
    strategy.deferred.fill(module, needed, world)
    strategy.load_weights()
    forwards = strategy.make_forward_executor(geometry)
    local = LocalMetrics(module, world, geometry.num_stages)
    evaluation.connect(strategy, trainer, geometry, forwards, statistics, seed, local, whole)
    return EvaluationAssembly(evaluation, whole, statistics, local)


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
