"""The user's ``training_step`` on micro-batches, with what it logs, returns and appends taken down.

Only the last stage of a micro-batch reaches the end of the step; everywhere else the step is left at the exit of the
stage, and what it said until then counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration import outputs
from lightning_asyncpipe.integration.evaluation_call import said_tensors
from lightning_asyncpipe.integration.growth import GrowthWatch
from lightning_asyncpipe.integration.metric_states import LocalMetrics, MetricWatch, pack_updates, unpack_updates
from lightning_asyncpipe.integration.outputs import MicroBatchOutput
from lightning_asyncpipe.integration.records import MicroBatchRecord, Recorder, merge, replay
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.runtime.batch import samples
from lightning_asyncpipe.runtime.engine import Work
from lightning_asyncpipe.runtime.proof import Observed
from lightning_asyncpipe.runtime.stages import within_stage


class StepCall:
    """Calls ``module.training_step`` and keeps what came out, batch by batch.

    Args:
        module: the user's module.
        local: knows which metrics are complete on every rank.
    """

    def __init__(self, module: pl.LightningModule, local: LocalMetrics) -> None:
        self._module = module
        self._growth = GrowthWatch(module)
        self._metrics = MetricWatch(module, "training_step")
        self._local = local
        self._epoch = -1
        self._recorder = Recorder()
        self._records: dict[int, dict[tuple[int, int], MicroBatchRecord]] = {}
        self._updates: dict[int, list[list[Any]]] = {}
        self._outputs: dict[int, dict[int, MicroBatchOutput]] = {}

    def __call__(self, *args: Any) -> Any:
        """The step itself, as stages run it.

        It gets a copy of its micro-batch: it may write to it (``batch.pop("labels")``, ``x += noise``), and the same
        micro-batch is run again after a flush.
        """
        batch = apply_to_collection(args[0], Tensor, torch.clone)
        self._recorder = Recorder(samples(batch), within_stage, self._metrics.path_of)
        with self._recorder.recording(self._module), self._growth.watching(), self._metrics.watching():
            return self._module.training_step(batch, *args[1:])

    def observed(self, *args: Any) -> Observed:
        """The step with what it says among its results, for a proof."""
        value = self(*args)
        said = said_tensors(self._recorder.calls, self._recorder.values, self._metrics.take())
        return Observed(said, value)

    def name_changes(self, names: Iterable[str]) -> None:
        """Warn of what the step changes in submodules, and in objects of the user's own, of which it is known."""
        for name in names:
            if "." in name:  # the module's own attributes are watched in every step
                self._growth.name_change(name)

    def read(self, value: Any, index: int, size: int, step: int, replica: int = 0) -> MicroBatchOutput:
        """Check what the step of one micro-batch returned; see :func:`outputs.read`.

        Raises:
            PipelineError: also if the loss has no gradient.
        """
        output = outputs.read(value, index, size, step, replica)
        assert isinstance(output.loss, Tensor)
        if not output.loss.requires_grad:
            raise PipelineError(
                f"the loss of micro-batch {index} of batch {step} depends on no parameter that is trained: it was "
                "detached, or made of integers or under `torch.no_grad()`, or all parameters that it depends on have "
                "`requires_grad=False`. Where only some samples have a loss, add a zero that depends on the model, "
                "such as `0.0 * output.sum()`."
            )
        return output

    def keep(self, work: Work, index: int, size: int, replica: int, value: Any) -> Tensor:
        """Take down what the step of one micro-batch gave on its last stage; returns its loss with its graph."""
        output = self.read(value, index, size, work.step, replica)
        assert isinstance(output.loss, Tensor)
        loss, output.loss = output.loss, output.loss.detach()
        output.grown = self._growth.take()
        self._outputs.setdefault(id(work), {})[index] = output
        return loss

    def passed(self, work: Work, index: int, stage: int, replica: int) -> None:
        """Take down what one stage of one micro-batch said: logged, gave to metrics."""
        output = self._outputs.get(id(work), {}).get(index)
        updates = self._metrics.take()
        if output is None and not self._recorder.calls and not updates:
            return
        if updates:
            packed = pack_updates(updates, "training_step")
            self._updates.setdefault(id(work), []).append([replica, index, stage, packed])
        loss = 0.0 if output is None else output.loss
        extra = output is not None and output.needs_exchange
        self._records.setdefault(id(work), {})[index, stage] = self._recorder.record(
            index, loss, replica, extra, bool(updates), stage
        )

    def begin_epoch(self, epoch: int) -> None:
        """Before a batch: metrics may have been made or replaced since the last epoch."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._metrics.refresh()
            self._local.refresh()

    def take(self, work: Work) -> list[MicroBatchRecord]:
        """This rank's records of a batch that has finished."""
        return list(self._records.pop(id(work), {}).values())

    def forget(self, work: Work) -> None:
        """Drop what early forwards of a batch gave."""
        self._records.pop(id(work), None)
        self._outputs.pop(id(work), None)
        self._updates.pop(id(work), None)

    def conclude(self, work: Work, records: Sequence[MicroBatchRecord], world: World) -> Any:
        """Log on every rank what the batch's micro-batches logged, and return what the step returns for the batch."""
        mine = list(self._outputs.pop(id(work), {}).values())
        given = self._updates.pop(id(work), [])
        if any(record.metrics for record in records):
            self._apply(world.all_gather(given), records)
        if any(record.extra for record in records):
            every = outputs.exchange(mine, world.all_gather, self._module.device)
        else:
            every = [MicroBatchOutput(r.index, r.size, float(r.loss), replica=r.replica) for r in records]
        replay(self._module, merge(records), self._metrics.metric)
        self._growth.commit(every)
        dtype = torch.float64 if self._module.dtype == torch.float64 else torch.float32
        return outputs.combine(every, self._module.device, dtype)

    def _apply(self, given: list[list[list[Any]]], records: Sequence[MicroBatchRecord]) -> None:
        """Give every rank's metrics what the micro-batches gave, in their order."""
        parts = sorted((part for parts in given for part in parts), key=lambda part: part[:3])
        updates = [unpack_updates(part[3], self._module.device) for part in parts]
        for path in {path for part in updates for path in part}:
            self._local.complete(self._metrics.metric(path))
        calls = [call for record in records for call in record.calls]
        self._metrics.apply(updates, frozenset(c.metric for c in calls if c.metric and c.on_step is not False))
