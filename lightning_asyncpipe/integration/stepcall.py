"""The user's ``training_step`` on micro-batches, with what it logs, returns and appends taken down.

Only the last stage of a micro-batch reaches the end of the step; everywhere else the step is left at the exit of the
stage, and what it said until then counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration import outputs
from lightning_asyncpipe.integration.growth import GrowthWatch
from lightning_asyncpipe.integration.outputs import MicroBatchOutput
from lightning_asyncpipe.integration.records import MicroBatchRecord, Recorder, merge, replay
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.runtime import microbatch
from lightning_asyncpipe.runtime.engine import Work


class StepCall:
    """Calls ``module.training_step`` and keeps what came out, batch by batch.

    Args:
        module: the user's module.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._growth = GrowthWatch(module)
        self._recorder = Recorder()
        self._records: dict[int, dict[int, MicroBatchRecord]] = {}
        self._outputs: dict[int, dict[int, MicroBatchOutput]] = {}

    def __call__(self, *args: Any) -> Any:
        """The step itself, as stages run it.

        It gets a copy of its micro-batch: it may write to it (``batch.pop("labels")``, ``x += noise``), and the same
        micro-batch is run again after a flush.
        """
        batch = apply_to_collection(args[0], Tensor, torch.clone)
        self._recorder = Recorder(microbatch.batch_size(batch))
        with self._recorder.recording(self._module), self._growth.watching():
            return self._module.training_step(batch, *args[1:])

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
        record = self._recorder.record(index, output.loss, replica, output.needs_exchange)
        self._records.setdefault(id(work), {})[index] = record
        self._outputs.setdefault(id(work), {})[index] = output
        return loss

    def take(self, work: Work) -> list[MicroBatchRecord]:
        """This rank's records of a batch that has finished."""
        return list(self._records.pop(id(work), {}).values())

    def forget(self, work: Work) -> None:
        """Drop what early forwards of a batch gave."""
        self._records.pop(id(work), None)
        self._outputs.pop(id(work), None)

    def conclude(self, work: Work, records: Sequence[MicroBatchRecord], world: World) -> Any:
        """Log on every rank what the batch's micro-batches logged, and return what the step returns for the batch."""
        mine = list(self._outputs.pop(id(work), {}).values())
        if any(record.extra for record in records):
            every = outputs.exchange(mine, world.all_gather, self._module.device)
        else:
            every = [MicroBatchOutput(r.index, r.size, float(r.loss), replica=r.replica) for r in records]
        replay(self._module, merge(records))
        self._growth.commit(every)
        dtype = torch.float64 if self._module.dtype == torch.float64 else torch.float32
        return outputs.combine(every, self._module.device, dtype)
