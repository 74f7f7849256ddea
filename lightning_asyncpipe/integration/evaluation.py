"""Batches of validation, testing and prediction, through the stages.

A batch is never split: its step sees all of it, as on one device, and gives one device's values whatever it computes
from them. Instead several batches are on their way at once, each in one of the pipelines. When the loop asks for the
result of one, every rank runs its part of what the next few need, and of what fits in beside it of the batches behind
them. Then one exchange gives every rank what the steps said and returned, and the loop gets the results one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_asyncpipe.errors import DataMismatchError, PipelineError
from lightning_asyncpipe.integration import collectives, guards
from lightning_asyncpipe.integration.evaluation_call import EvaluationCall, Kind, Said, joined
from lightning_asyncpipe.integration.evaluation_data import EvaluationFetcher, Loop, Shown, step_arguments
from lightning_asyncpipe.integration.messages import pack, unpack
from lightning_asyncpipe.integration.metric_states import LocalMetrics
from lightning_asyncpipe.integration.records import merge, replay
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.runtime.buffers import BufferRecord, RunningStatistics
from lightning_asyncpipe.runtime.fingerprint import fingerprint
from lightning_asyncpipe.runtime.forwards import ForwardExecutor, Passage
from lightning_asyncpipe.runtime.stages import StageForward, StageRunner, StageTask
from lightning_asyncpipe.runtime.standpoint import mismatch

_KINDS: tuple[Kind, ...] = ("validation", "test", "predict")


@dataclass
class Way:
    """How the step of one loader runs.

    Attributes:
        runner: runs its stages.
        stages: for each of them the stage of the placement whose devices hold its weights; None where each device
            runs whole steps, since all of them hold all weights.
    """

    runner: StageRunner
    stages: tuple[int, ...] | None

    def route(self, placement: Placement, number: int) -> tuple[int, ...]:
        """The devices that batch `number` visits."""
        if self.stages is None:
            return (number % placement.num_stages,)
        pipeline = placement.pipeline_of(number)
        return tuple(placement.device(pipeline, stage) for stage in self.stages)


@dataclass(eq=False)
class _Batch:
    """A batch in the window.

    Attributes:
        data: as the loop hands it out.
        passage: its way.
        said: what each stage said that ran here, by stage.
        returned: what the step returned, where its last stage ran here.
        statistics: what running statistics saw here, by stage.
    """

    data: Any
    passage: Passage
    said: dict[int, Said] = field(default_factory=dict)
    returned: Any = None
    has_returned: bool = False
    statistics: dict[int, list[BufferRecord]] = field(default_factory=dict)


@dataclass
class _Result:
    """What all ranks know of a batch in the end."""

    said: list[Said]
    statistics: list[torch.Tensor]
    returned: Any


class EvaluationSteps:
    """Runs the batches of one loop.

    Args:
        kind: which loop.
        trainer: the trainer.
        loop: the loop.
        ways: how its step runs, by loader.
        call: its step.
        executor: runs passages.
        placement: which device hosts what.
        world: collectives over all ranks.
        replica: of this rank.
        statistics: running statistics, should a layer be in training.
        seed: of what the steps draw at random.
        local: knows which metrics are complete on every rank.
        context: what the precision plugin puts around the step.
        meet: told where this rank is before it waits for the others.
        stopping: whether this rank was asked to end.
        stop: called on all ranks if any was.
    """

    def __init__(
        self,
        kind: Kind,
        trainer: pl.Trainer,
        loop: Loop,
        ways: Mapping[int, Way],
        call: EvaluationCall,
        executor: ForwardExecutor,
        placement: Placement,
        world: World,
        replica: int,
        statistics: RunningStatistics,
        seed: int,
        local: LocalMetrics,
        context: Callable[[], AbstractContextManager[Any]],
        meet: Callable[[str], None],
        stopping: Callable[[], bool] = lambda: False,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        self.kind = kind
        self._trainer = trainer
        self._loop = loop
        self._ways = ways
        self._call = call
        self._executor = executor
        self._placement = placement
        self._world = world
        self._replica = replica
        self._statistics = statistics
        self._seed = seed
        self._local = local
        self._context = context
        self._meet = meet
        self._stopping = stopping
        self._stop = stop
        overriding = guards.overrides(trainer, f"on_{kind}_batch_start")
        self._looks_ahead = overriding is None
        if overriding is not None and placement.num_stages > 1:
            rank_zero_info(
                f"`{overriding}` runs before each batch, so the next batches do not start before it: one batch at a "
                "time passes the stages."
            )
        self._returns = kind == "predict" or guards.overrides(trainer, f"on_{kind}_batch_end") is not None
        self._window: deque[_Batch] = deque()
        self._results: deque[_Result] = deque()
        self._count = 0

    def start(self) -> None:
        """An evaluation begins."""
        self._window.clear()
        self._results.clear()
        self._call.metrics.refresh()
        self._local.refresh()

    def run(self, batch: Any, *extra: Any) -> Any:
        """The step of one batch, called by the loop as ``strategy.validation_step`` and the like.

        Returns:
            What the step returned, on every rank of the replica; None if no hook would see it.
        """
        if not self._results:
            self._advance(batch, extra)
        done = self._window.popleft()
        if done.data is not batch:
            raise PipelineError(
                f"the {self.kind} loop went on with another batch than the one that was shown next: something other "
                "than Lightning's loop and the hooks of the transfer changes batches"
            )
        return self._conclude(self._results.popleft())

    def _advance(self, batch: Any, extra: tuple[Any, ...]) -> None:
        fetcher = self._loop._data_fetcher
        assert isinstance(fetcher, EvaluationFetcher)
        if not self._window:
            assert fetcher.current is not None
            self._append(fetcher.current._replace(batch=batch), (batch, *extra))
        if self._looks_ahead:
            for shown in fetcher.peek(2 * self._placement.num_stages - 2)[len(self._window) - 1 :]:
                self._append(shown, step_arguments(self._loop, self._call.name, shown))
        needed = min(self._placement.num_stages, len(self._window))
        self._meet(f"evaluates batches up to {self._count} ({self.kind})")
        with collectives.in_step(self._call.name):
            self._executor.run([entry.passage for entry in self._window], needed)
        self._exchange(needed)

    def _append(self, shown: Shown, arguments: tuple[Any, ...]) -> None:
        way = self._ways.get(shown.dataloader_idx)
        if way is None:
            raise PipelineError(f"loader {shown.dataloader_idx} had no batch when the {self.kind} loop was set up")
        number, self._count = self._count, self._count + 1
        key = (self._seed, 1 + _KINDS.index(self.kind), shown.dataloader_idx, number, self._replica)
        passage = Passage(
            way.runner,
            way.route(self._placement, number),
            StageTask(arguments, {}, key),
            fingerprint(shown.batch),
            lambda forward: self._passed(entry, forward),
            number,
        )
        entry = _Batch(shown.batch, passage)
        self._window.append(entry)

    def _passed(self, entry: _Batch, forward: StageForward) -> None:
        said = self._call.take()
        if said:
            entry.said[forward.stage] = said
        if forward.buffer_records:
            entry.statistics[forward.stage] = forward.buffer_records
        if forward.stage == len(entry.passage.route) - 1:
            entry.returned, entry.has_returned = forward.value, True

    # What every rank gets to know

    def _exchange(self, needed: int) -> None:
        batches = [self._window[i] for i in range(needed)]
        mine = [self._first_part(i, entry) for i, entry in enumerate(batches)]
        head = [self._count, len(self._window), needed, *(entry.passage.fingerprint for entry in batches)]
        stopping = self._stopping()
        parts = self._world.all_gather([self._replica, head, stopping, mine])
        self._compare(parts)
        if any(part[2] for part in parts):
            rank_zero_info("Received SIGTERM: evaluation ends after this batch on all ranks.")
            self._stop()
        returned = self._shared_values(batches, parts)
        device = self._trainer.strategy.root_device
        for i, entry in enumerate(batches):
            said: list[Said] = []
            statistics: list[torch.Tensor] = []
            for replica in range(max(part[0] for part in parts) + 1):
                of_stages = sorted(
                    (stage, spoken, seen)
                    for part in parts
                    if part[0] == replica
                    for stage, spoken, seen, _ in part[3][i]
                )
                spoken = [self._received(words, device) for _, words, _ in of_stages if words]
                if spoken:
                    said.append(joined(spoken))
                if replica == 0:  # as with DDP, the statistics of the first replica are those of the run
                    statistics += [seen for _, _, seen in of_stages if seen is not None]
            self._results.append(_Result(said, statistics, returned[i]))
            entry.said.clear()

    def _first_part(self, index: int, entry: _Batch) -> list[Any]:
        """For each stage of a batch that ran here what it said, what its statistics saw, whether it returned."""
        found: list[Any] = []
        last = len(entry.passage.route) - 1
        for stage in sorted({*entry.said, *entry.statistics, *([last] if entry.has_returned else [])}):
            said = entry.said.get(stage)
            words: Any = []
            if said is not None:
                words = said.to_list(self._call.name) if self._world.size > 1 else said
            records = entry.statistics.get(stage)
            seen = None if records is None else self._statistics.pack(records)
            found.append((stage, words, seen, stage == last and entry.has_returned))
        return found

    @staticmethod
    def _received(words: Any, device: torch.device) -> Said:
        return words if isinstance(words, Said) else Said.from_list(words, device)

    def _compare(self, parts: list[Any]) -> None:
        """Raise if ranks are not at the same batch, or ranks of a replica have other data."""
        for rank, (replica, head, _, _) in enumerate(parts):
            if head[:3] != parts[0][1][:3]:
                raise DataMismatchError(
                    f"{self.kind}: rank 0 has begun {parts[0][1][0]} batches and rank {rank} {head[0]}. All ranks must "
                    "get the same number of batches: check the lengths of the loaders, and of each replica's part."
                )
            first = next(i for i, part in enumerate(parts) if part[0] == replica)
            if head != parts[first][1]:
                number = next(i for i, (a, b) in enumerate(zip(head[3:], parts[first][1][3:], strict=True)) if a != b)
                ranks = (first, rank)
                raise mismatch(head[0] - head[1] + number, ranks, f"were given different data to {self.kind}")

    def _shared_values(self, batches: list[_Batch], parts: list[Any]) -> list[Any]:
        """What the steps returned, for the batches of this rank's own replica; collective."""
        if not self._returns:
            return [None] * len(batches)
        if self._world.size == 1:
            return [entry.returned for entry in batches]
        what = f"what `{self._call.name}` returns"
        device = self._trainer.strategy.root_device
        values: list[Any] = [None] * len(batches)
        for rank, part in enumerate(parts):
            holds = [i for i, stages in enumerate(part[3]) if any(returned for *_, returned in stages)]
            if not holds:
                continue
            packed: Any = None
            if rank == self._world.rank:
                packed = [pack(batches[i].returned, what) for i in holds]
            packed = self._world.broadcast(packed, rank)
            if part[0] != self._replica:
                continue
            for i, content in zip(holds, packed, strict=True):
                values[i] = batches[i].returned if rank == self._world.rank else unpack(content, device)
        return values

    def _conclude(self, result: _Result) -> Any:
        """Say on every rank what the step said, and return what it returned."""
        for packed in result.statistics:
            self._statistics.commit(self._statistics.unpack(packed))
        merged = merge([said.record(replica) for replica, said in enumerate(result.said)])
        valued = frozenset(entry.call.metric for entry in merged if entry.call.metric and entry.call.on_step)
        updates = [part for said in result.said for part in said.metrics]
        metrics = self._call.metrics
        for path in {path for update in updates for path in update}:
            self._local.complete(metrics.metric(path))
        with self._context():  # it may set the default type of tensors
            metrics.apply(updates, valued)
            replay(self._trainer.lightning_module, merged, metrics.metric)
        for said in result.said:
            self._call.append(said.grown)
        return result.returned
