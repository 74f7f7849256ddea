"""One Lightning ``training_step``: a segment of the pipelines around the user's own step.

The batch (and, if it may be looked at, the next one) is split in micro-batches; the executor runs them; what the last
stages recorded is exchanged once, and every rank then logs the same values and returns the same output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration import collectives, internals
from lightning_asyncpipe.integration.agreement import Agreement
from lightning_asyncpipe.integration.lookahead import LookAheadFetcher
from lightning_asyncpipe.integration.records import joined
from lightning_asyncpipe.integration.resuming import Randomness
from lightning_asyncpipe.integration.stepcall import StepCall
from lightning_asyncpipe.integration.stopping import AgreedStop
from lightning_asyncpipe.integration.watch import ParameterWatch
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.plan.geometry import Geometry
from lightning_asyncpipe.plan.segment import SegmentPlan
from lightning_asyncpipe.runtime import microbatch
from lightning_asyncpipe.runtime.buffers import RunningStatistics
from lightning_asyncpipe.runtime.engine import Work
from lightning_asyncpipe.runtime.fingerprint import fingerprint
from lightning_asyncpipe.runtime.gradients import accumulation_dtype
from lightning_asyncpipe.runtime.stages import StageTask
from lightning_asyncpipe.runtime.staleness import StalenessCounter
from lightning_asyncpipe.runtime.timeline import Ledger, Spent


class Executor(Protocol):
    """What runs segments: the engine of one rank, or the oracle for all of them."""

    ledger: Ledger
    staleness: StalenessCounter

    def run(self, current: Work, upcoming: Work | None, steps: bool) -> SegmentPlan:
        """Run one segment."""

    def drop_carry(self) -> None:
        """Forget the early forwards."""

    def collect_gradients(self) -> dict[str, Tensor]:
        """The window's gradients of what this rank owns."""

    def stepped(self) -> None:
        """The optimizer has stepped."""

    def skipped(self) -> None:
        """The optimizer has skipped its step, on every rank: no weight has changed."""

    def settle(self) -> None:
        """Bring all replicas of all stages up to date."""

    def close(self) -> None:
        """Stop what runs in the background."""


def batch_norms(module: nn.Module) -> list[nn.Module]:
    """All layers of a module that normalise over the samples of a micro-batch."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


def fewest_samples(norms: list[nn.Module]) -> int:
    """Samples that a micro-batch must have at least: two where one of these layers is in training."""
    return 2 if any(layer.training for layer in norms) else 1


class TrainingSteps:
    """Runs the batches of ``fit``, one segment each.

    Args:
        trainer: the trainer that fits.
        geometry: numbers of stages, pipelines, micro-batches and replicas.
        executor: runs segments.
        fetcher: shows the next batch.
        call: the user's step, with what it logs and returns taken down.
        statistics: running statistics that forwards of micro-batches stage.
        world: collectives over all ranks.
        replica: the data-parallel replica of this rank.
        seed: of the randomness of steps; the same on every rank.
        max_staleness: 0 flushes the pipelines before every optimizer step.
        look_ahead: whether batches may be looked at before their own step begins.
        meet: told where this rank is before it waits for the others in a collective.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        geometry: Geometry,
        executor: Executor,
        fetcher: LookAheadFetcher,
        call: StepCall,
        statistics: RunningStatistics,
        world: World,
        replica: int,
        seed: int,
        max_staleness: int,
        look_ahead: bool,
        meet: Callable[[str], None],
    ) -> None:
        self._trainer = trainer
        self._geometry = geometry
        self._executor = executor
        self._fetcher = fetcher
        self._call = call
        self._statistics = statistics
        self._world = world
        self._replica = replica
        self.seed = seed
        self._max_staleness = max_staleness
        self._look_ahead = look_ahead
        self.termination = internals.Termination(trainer)
        self.stopping = AgreedStop(trainer, world, meet)
        self._clock = internals.ValidationClock(trainer, partial(self._decision_of_the_first, meet))
        self._agreement = Agreement(world, geometry)
        self._parameters = ParameterWatch(trainer.lightning_module)
        self._batch_norms = batch_norms(trainer.lightning_module)
        self._upcoming: tuple[Any, Work] | None = None
        self.ends_window = False
        self.count = 0

    def run(self, batch: Any, *extra: Any) -> Any:
        """Train on `batch`; called by Lightning's closure as ``strategy.training_step``.

        Returns:
            What the user's step returned, over all micro-batches; the same on every rank.
        """
        self._parameters.check()
        self._call.begin_epoch(self._trainer.current_epoch)
        index = internals.total_batch_index(self._trainer)
        self.ends_window = internals.step_follows(self._trainer)
        current = self._begun(batch)
        if current is None:
            current = self._work(batch, extra, index)
        upcoming = self._next(extra, index)
        following = None if upcoming is None else upcoming[1]
        current.recorded = partial(self._begin_agreement, current, following)
        with collectives.in_step():
            self._executor.run(current, following, self.ends_window)
        self._upcoming = upcoming
        self.count += 1
        with self._executor.ledger.counting(Spent.RECORDS):
            records, stop = self._agreement.finish(current)
        self._trainer.should_stop = stop[1]
        if stop[0]:
            rank_zero_info("Received SIGTERM: training ends after this batch on all ranks.")
            self.termination.agreed()
        self._commit_statistics(current)
        with self._trainer.precision_plugin.train_step_context():  # it may set the default type of tensors
            returned = self._call.conclude(current, joined(records), self._world)
        current.release()
        return returned

    def _begin_agreement(self, current: Work, upcoming: Work | None) -> None:
        records, stop = self._call.take(current), (self.termination.pending, bool(self._trainer.should_stop))
        with collectives.outside_step():
            self._agreement.begin(current, upcoming, self.ends_window, records, stop)

    def _begun(self, batch: Any) -> Work | None:
        """The work on `batch` if some of its forwards ran early; else drop what was begun instead."""
        upcoming, self._upcoming = self._upcoming, None
        if upcoming is None:
            return None
        if upcoming[0] is batch:
            return upcoming[1]
        self._forget(upcoming[1])
        return None

    def _forget(self, work: Work) -> None:
        self._executor.drop_carry()
        self._call.forget(work)
        work.release()

    def _next(self, extra: tuple[Any, ...], index: int) -> tuple[Any, Work] | None:
        if not self._look_ahead or (self._max_staleness == 0 and self.ends_window):
            return None
        peeked = self._fetcher.peek()
        if peeked is None or peeked.batch is None:
            return None
        work = self._work(
            peeked.batch,
            (peeked.batch_idx, *extra[1:]) if extra else (),
            index + 1,
        )
        work.early = partial(internals.one_batch_later, self._trainer, self.ends_window, peeked.is_last)
        return peeked.batch, work

    def _work(self, batch: Any, extra: tuple[Any, ...], index: int) -> Work:
        parts = microbatch.split(
            batch,
            self._geometry.num_microbatches,
            min_samples=fewest_samples(self._batch_norms),
        )
        samples = sum(part.size for part in parts)
        if not samples:
            raise PipelineError(
                f"batch {index} has no samples. Leave such a batch out in the dataset or the batch sampler, on all "
                "ranks."
            )
        share = 1.0 / (samples * self._trainer.accumulate_grad_batches * self._geometry.replicas)
        work = Work(
            tasks=[
                StageTask((part.data, *extra), {}, (self.seed, index, self._replica, part.index), part.index)
                for part in parts
            ],
            fingerprints=[fingerprint(part.data) for part in parts],
            finish=lambda _index, _value: torch.zeros(()),
            step=index,
            shares=[part.size * share for part in parts],
        )
        work.finish = partial(self._finish, work, parts, share)
        work.passed = lambda part, stage: self._call.passed(work, part, stage, self._replica)
        return work

    def _finish(self, work: Work, parts: list[microbatch.MicroBatch], share: float, index: int, value: Any) -> Tensor:
        loss = self._call.keep(work, index, parts[index].size, self._replica, value)
        # A loss in 16 bits is weighted in float32: a weight may be too small for it, or a scaled gradient too large.
        return loss.to(accumulation_dtype(loss.dtype)) * (parts[index].size * share)

    def _commit_statistics(self, work: Work) -> None:
        """Apply what running statistics saw, in the order of micro-batches, on every rank alike."""
        if not self._statistics.tensors():
            return
        # As with DDP, the statistics of the first replica are those of the run.
        own = work.batch_statistics if self._replica == 0 else {}
        parts = self._world.all_gather(
            [[index, self._statistics.pack(records)] for index, records in own.items() if records]
        )
        packed = sorted((entry for part in parts for entry in part), key=lambda entry: entry[0])
        for _, records in packed:
            self._statistics.commit(self._statistics.unpack(records))

    def _decision_of_the_first(self, meet: Callable[[str], None], mine: bool) -> bool:
        meet("asks whether it is time to validate")
        return bool(self._world.broadcast(mine))

    def random_states(self) -> Randomness:
        """With what training would go on from here."""
        return self._fetcher.random_states(self.seed)

    def close(self) -> None:
        """Give the trainer back as it was."""
        self.termination.restore()
        self.stopping.restore()
        self._clock.restore()

    def flush(self) -> None:
        """Forget early forwards and bring all replicas up to date; all ranks call it at the same point."""
        upcoming, self._upcoming = self._upcoming, None
        if upcoming is not None:
            self._forget(upcoming[1])
        self._executor.settle()
        self._executor.ledger.pause()
