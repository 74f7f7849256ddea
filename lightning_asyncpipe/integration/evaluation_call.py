"""The user's own step of evaluation, with what it says besides what it returns taken down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_asyncpipe.integration.growth import GrowthWatch
from lightning_asyncpipe.integration.messages import pack, unpack
from lightning_asyncpipe.integration.metric_states import MetricUpdate, MetricWatch, pack_updates, unpack_updates
from lightning_asyncpipe.integration.records import LogCall, MicroBatchRecord, Recorder
from lightning_asyncpipe.runtime.batch import batch_size
from lightning_asyncpipe.runtime.proof import Observed
from lightning_asyncpipe.runtime.stages import within_stage

Kind = Literal["validation", "test", "predict"]


@dataclass
class Said:
    """What one stage of the step of one batch said.

    Attributes:
        size: samples of the batch.
        calls: what it logged.
        values: of the calls.
        batch_sizes: of the calls.
        metrics: what it gave to metrics, by path; one entry for each stage that gave something.
        grown: what it appended to lists of the module, by attribute.
    """

    size: int = 1
    calls: tuple[LogCall, ...] = ()
    values: list[float | Tensor] = field(default_factory=list)
    batch_sizes: list[float] = field(default_factory=list)
    metrics: list[dict[str, MetricUpdate]] = field(default_factory=list)
    grown: dict[str, list[Any]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.calls or any(self.metrics) or self.grown)

    def to_list(self, step: str) -> list[Any]:
        """In types that travel; :meth:`from_list` is the inverse."""
        return [
            self.size,
            [tuple(call) for call in self.calls],
            [float(value) for value in self.values],
            [float(size) for size in self.batch_sizes],
            [pack_updates(part, step) for part in self.metrics],
            {name: pack(tail, f"what `{step}` appends to `self.{name}`") for name, tail in self.grown.items()},
        ]

    @classmethod
    def from_list(cls, data: list[Any], device: torch.device) -> Said:
        """What :meth:`to_list` was called on."""
        size, calls, values, batch_sizes, metrics, grown = data
        return cls(
            size,
            tuple(LogCall(*call) for call in calls),
            values,
            batch_sizes,
            [unpack_updates(part, device) for part in metrics],
            {name: unpack(tail, device) for name, tail in grown.items()},
        )

    def record(self, replica: int) -> MicroBatchRecord:
        """What it logged, as :func:`records.merge` takes it."""
        return MicroBatchRecord(0, self.size, 0.0, self.calls, self.values, self.batch_sizes, replica)


def joined(parts: list[Said]) -> Said:
    """What all stages of one batch said, from what each one did, in the order of the stages."""
    if len(parts) == 1:
        return parts[0]
    grown: dict[str, list[Any]] = {}
    for part in parts:
        for name, tail in part.grown.items():
            grown.setdefault(name, []).extend(tail)
    return Said(
        max((part.size for part in parts), default=1),
        tuple(call for part in parts for call in part.calls),
        [value for part in parts for value in part.values],
        [size for part in parts for size in part.batch_sizes],
        [updates for part in parts for updates in part.metrics],
        grown,
    )


def said_tensors(
    calls: Sequence[LogCall], values: Sequence[float | Tensor], metrics: Mapping[str, MetricUpdate]
) -> dict[str, list[Tensor]]:
    """What a step said as tensors that a proof can compare: logged values by name, states of metrics by path."""
    tensors: dict[str, list[Tensor]] = {}
    for logged, number in zip(calls, values, strict=True):
        tensors.setdefault(logged.name, []).append(torch.as_tensor(number, dtype=torch.float64))
    for path, update in metrics.items():
        for name, state in (update.state or {}).items():
            parts = state if isinstance(state, list) else [state]
            tensors[f"{path}.{name} after {update.count}"] = [part for part in parts if isinstance(part, Tensor)]
    return tensors


class EvaluationCall:
    """Calls ``module.validation_step`` and the like.

    Args:
        module: the user's module.
        kind: which of its steps.
        metrics: its metrics.
    """

    def __init__(self, module: pl.LightningModule, kind: Kind, metrics: MetricWatch) -> None:
        self.kind: Kind = kind
        self.name = f"{kind}_step"
        self.metrics = metrics
        self._module = module
        self._logs = kind != "predict"  # where Lightning has an error of its own
        self._growth = GrowthWatch(module, self.name)
        self._recorder = Recorder()

    def __call__(self, *args: Any) -> Any:
        """The step itself, as stages run it, on a copy of its batch that it may write to."""
        batch = apply_to_collection(args[0], Tensor, torch.clone)
        self._recorder = Recorder(batch_size(batch), within_stage, self.metrics.path_of)
        with ExitStack() as stack:
            if self._logs:
                stack.enter_context(self._recorder.recording(self._module))
            # The fused attention of evaluation mode calls none of the modules in it, and packs sequences.
            stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            stack.enter_context(self._growth.watching())
            stack.enter_context(self.metrics.watching())
            return getattr(self._module, self.name)(batch, *args[1:])

    def take(self) -> Said:
        """What the last call said."""
        recorder = self._recorder
        return Said(
            recorder.size,
            tuple(recorder.calls),
            recorder.values,
            recorder.batch_sizes,
            [self.metrics.take()],
            self._growth.take(),
        )

    def observed(self, *args: Any) -> Observed:
        """The step with what it says among its results, for a proof."""
        value = self(*args)
        said = self.take()
        return Observed(said_tensors(said.calls, said.values, said.metrics[0]), value)

    def append(self, grown: dict[str, list[Any]]) -> None:
        """Append to the module's lists what a batch appended."""
        self._growth.append(grown)
