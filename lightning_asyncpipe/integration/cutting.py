"""Rank 0 runs the step of one micro-batch to find where it can be cut, and tells all ranks the plan."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_asyncpipe.errors import CutError, PeerFailure
from lightning_asyncpipe.integration import collectives
from lightning_asyncpipe.integration.loss_check import warn_unless_mean
from lightning_asyncpipe.integration.measurements import measure_link
from lightning_asyncpipe.integration.partitioning import Partition, PartitionMaker, way_of
from lightning_asyncpipe.integration.stepcall import StepCall
from lightning_asyncpipe.integration.steps import batch_norms, fewest_samples
from lightning_asyncpipe.plan.choice import MemoryLimitError
from lightning_asyncpipe.plan.profile import Link
from lightning_asyncpipe.plan.saved import PlanError
from lightning_asyncpipe.runtime import microbatch
from lightning_asyncpipe.runtime.buffers import RunningStatistics
from lightning_asyncpipe.runtime.candidates import find_cuts
from lightning_asyncpipe.runtime.divisible import divisible_stages
from lightning_asyncpipe.runtime.program import StageProgram
from lightning_asyncpipe.runtime.stages import StageTask
from lightning_asyncpipe.runtime.step_state import changed, step_state
from lightning_asyncpipe.runtime.trace import trace_step

if TYPE_CHECKING:
    from lightning_asyncpipe.strategy import AsyncMultiPipeStrategy


def find_partition(
    strategy: AsyncMultiPipeStrategy,
    module: pl.LightningModule,
    call: StepCall,
    batch: Any,
    batch_idx: int,
    statistics: RunningStatistics,
    look_ahead: bool,
) -> Partition:
    """Rank 0 cuts the model; all ranks get the same plan, or the same error.

    Args:
        strategy: which is set up.
        module: the user's.
        call: calls its step.
        batch: the first one.
        batch_idx: its number.
        statistics: what the trial runs must not count in.
        look_ahead: whether the next batch can be known before a step.

    Raises:
        MisconfigurationException: the model cannot be cut as asked.
        PeerFailure: the step failed on rank 0.
    """
    world = strategy.world
    found: dict[str, Any] = {}
    link = measure_link(world) if world.broadcast(way_of(strategy)) == "profile" else None
    if world.rank == 0:
        try:
            found = _cut(strategy, module, call, batch, batch_idx, statistics, look_ahead, link).to_message()
        except (CutError, PlanError, MemoryLimitError) as error:
            found["error"] = str(error)
        except BaseException:
            world.broadcast({})  # the other ranks wait for it
            raise
    found = world.broadcast(found)
    if not found:
        raise PeerFailure("rank 0 failed while it ran the step to find cuts")
    if "error" in found:
        raise MisconfigurationException(found["error"])
    return Partition.from_message(found)


def _cut(
    strategy: AsyncMultiPipeStrategy,
    module: pl.LightningModule,
    call: StepCall,
    batch: Any,
    batch_idx: int,
    statistics: RunningStatistics,
    look_ahead: bool,
    link: Link | None,
) -> Partition:
    geometry, context = strategy.geometry, strategy.precision_plugin.train_step_context
    fewest = fewest_samples(batch_norms(module))
    parts = microbatch.split(batch, geometry.num_microbatches, min_samples=fewest)
    part = parts[0]
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    arguments = (part.data, batch_idx) if takes_index else (part.data,)
    returned: list[Any] = []

    def step(*given: Any) -> Any:
        returned.append(call(*given))
        return returned[0]

    statistics.begin(watch=False)
    try:
        with collectives.in_step():
            trace = trace_step(module, step, arguments, context=context, ignored=statistics.tensors())
    finally:
        statistics.end()
    call.read(returned.pop(), part.index, part.size, batch_idx)

    def in_halves(program: StageProgram) -> frozenset[int]:
        """The stages whose backwards can be run in halves."""
        if not strategy.split_backward or program.num_stages == 1:
            return frozenset()

        def loss(value: Any) -> Tensor:
            found = call.read(value, part.index, part.size, batch_idx).loss
            assert isinstance(found, Tensor)
            return found

        with collectives.in_step():
            found = divisible_stages(module, program, call, StageTask(arguments), context, loss)
        whole = sorted(set(range(program.num_stages)) - found)
        if whole and strategy.split_backward is True:
            rank_zero_info(f"The backwards of the stages {whole} cannot be run in halves: they are run whole.")
        return found

    samples = part.size, sum(each.size for each in parts)
    maker = PartitionMaker(
        strategy, find_cuts(trace), module, call, StageTask(arguments), samples, look_ahead, link, in_halves
    )
    before = step_state(module)  # what the first run set once, as a cache, is set by now
    partition = maker.make()
    call.name_changes(changed(before, step_state(module)))
    further = arguments[1:]
    warn_unless_mean(module, lambda given: call.observed(given, *further).value, batch, len(parts), context)
    gc.collect()  # what the runs made is held by cycles
    return partition
