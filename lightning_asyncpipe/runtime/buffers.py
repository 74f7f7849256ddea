"""Running statistics of normalisation layers, staged per micro-batch and applied in order.

Micro-batches of several pipelines pass a stage on several devices, some of them early. Their batch statistics are
recorded, exactly, and the running ones are changed later by all of them in the order of the micro-batches: as on one
device that runs them one after the other, where a part that activation checkpointing runs again counts a second time,
as it does there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from lightning_asyncpipe._private import CallImpl, Interception, intercept

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class BufferRecord:
    """What one call of a normalisation layer saw.

    Attributes:
        module: name of the layer.
        statistics: mean and unbiased variance per feature, [2, features], in the type of the running ones.
    """

    module: str
    statistics: Tensor


_LISTED = 3


def _warn(names: Sequence[str]) -> None:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    warnings.warn(
        f"The step changes the buffers {', '.join(map(repr, names[:_LISTED]))}{more}. Only running statistics of "
        "normalisation layers are kept equal on all ranks; other buffers get what the micro-batches of their own rank "
        "make of them.",
        stacklevel=2,
    )


class RunningStatistics:
    """Records the statistics of all layers of a model that keep running ones, and applies them.

    Layers: batch normalisation of any dimension and instance normalisation, with
        ``track_running_stats``, in training.
    Outside :meth:`begin` and :meth:`end` they work as ever.

    Args:
        model: its layers are intercepted until :meth:`close`.
        on_other_change: called with the names of other buffers that a forward changes, once with each.
    """

    def __init__(self, model: nn.Module, on_other_change: Callable[[Sequence[str]], None] | None = None) -> None:
        self._layers: dict[str, _NormBase] = {
            name: module for name, module in model.named_modules() if isinstance(module, _NormBase)
        }
        self._on_other_change = on_other_change or _warn
        self._reported: set[str] = set()
        self._records: list[BufferRecord] | None = None
        own = {id(buffer) for buffer in self.tensors()}
        self._others = [
            (module, key, f"{name}.{key}" if name else key)
            for name, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and id(buffer) not in own
        ]
        self._versions: list[tuple[int, int]] = []
        self._interceptions: list[Interception] = [
            intercept(layer, self._around(name, layer)) for name, layer in self._layers.items()
        ]

    def tensors(self) -> list[Tensor]:
        """The running statistics themselves."""
        found = []
        for layer in self._layers.values():
            found += [b for k in _STATISTICS if (b := layer._buffers.get(k)) is not None]
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls in here are not recorded and change nothing that is kept."""
        records, self._records = self._records, [] if self._records is not None else None
        try:
            yield
        finally:
            self._records = records

    def close(self) -> None:
        """Stop intercepting."""
        for interception in self._interceptions:
            interception.remove()

    def begin(self, watch: bool = True) -> None:
        """Stage the statistics of all calls until :meth:`end`.

        Args:
            watch: report other buffers that change.
        """
        self._records = []
        self._versions = self._state() if watch else []

    def end(self) -> list[BufferRecord]:
        """What was seen since :meth:`begin`, in the order of the calls."""
        records, self._records = self._records or [], None
        if self._versions:
            now = self._state()
            if now != self._versions:
                self._report(now)
        return records

    def _state(self) -> list[tuple[int, int]]:
        state = []
        for module, key, _ in self._others:
            buffer = module._buffers.get(key)
            state.append((0, 0) if buffer is None else (id(buffer), _version(buffer)))
        return state

    def _report(self, now: list[tuple[int, int]]) -> None:
        changed = [
            name
            for (_, _, name), before, after in zip(self._others, self._versions, now, strict=True)
            if before != after and name not in self._reported
        ]
        if changed:
            self._reported.update(changed)
            self._on_other_change(changed)

    def _around(self, name: str, layer: _NormBase) -> Callable[[CallImpl], CallImpl]:
        def wrap(call: CallImpl) -> CallImpl:
            def staged(*args: Any, **kwargs: Any) -> Any:
                records = self._records
                if records is None or not _tracks(layer):
                    return call(*args, **kwargs)
                statistics, result = _observe(layer, call, args, kwargs)
                records.append(BufferRecord(name, statistics))
                return result

            return staged

        return wrap

    def commit(self, records: Iterable[BufferRecord]) -> None:
        """Change the running statistics as these calls, one after the other, would have.

        Args:
            records: of all micro-batches, in their order; those of layers that the model does not have are left out.
        """
        with torch.no_grad():
            for record in records:
                layer = self._layers.get(record.module)
                if layer is not None and layer.running_mean is not None:
                    _apply(layer, record.statistics)

    def pack(self, records: Sequence[BufferRecord]) -> Tensor:
        """Records as one tensor of float64, [numbers], to be sent; :meth:`unpack` is the inverse."""
        names = list(self._layers)
        parts = [torch.tensor([float(len(records))], dtype=torch.float64)]
        for record in records:
            header = [float(names.index(record.module)), float(record.statistics.shape[1])]
            parts.append(torch.tensor(header, dtype=torch.float64))
            parts.append(record.statistics.detach().reshape(-1).to("cpu", torch.float64))
        return torch.cat(parts)

    def unpack(self, packed: Tensor) -> list[BufferRecord]:
        """The records in a tensor that :meth:`pack` made for a model with the same layers."""
        names = list(self._layers)
        packed = packed.to("cpu")
        position = 1
        records = []
        for _ in range(int(packed[0])):
            name, features = names[int(packed[position])], int(packed[position + 1])
            position += 2
            mean = self._layers[name].running_mean
            assert mean is not None
            statistics = packed[position : position + 2 * features].reshape(2, features)
            records.append(BufferRecord(name, statistics.to(mean.device, mean.dtype)))
            position += 2 * features
        return records


@contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """The buffers of a model are afterwards what they were before."""
    saved = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    versions = [_version(buffer) for _, _, buffer, _ in saved]
    try:
        yield
    finally:
        with torch.no_grad():
            for (registered, name, buffer, content), version in zip(saved, versions, strict=True):
                if _version(buffer) != version or not torch.equal(buffer, content):
                    buffer.copy_(content)
                registered[name] = buffer


def _version(buffer: Tensor) -> int:
    """How often a buffer was written to in place, as far as that is counted: one made in inference mode has none."""
    return 0 if buffer.is_inference() else buffer._version


def _tracks(layer: _NormBase) -> bool:
    return layer.training and layer.track_running_stats and layer.running_mean is not None


def _observe(layer: _NormBase, call: CallImpl, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
    """Run a layer on other running statistics: with momentum 1, from zero, they become the batch's own."""
    buffers, momentum = layer._buffers, layer.momentum
    saved = {key: buffers.get(key) for key in _STATISTICS}
    mean, variance, batches = (saved[key] for key in _STATISTICS)
    assert mean is not None
    assert variance is not None
    statistics = torch.zeros(2, *mean.shape, dtype=mean.dtype, device=mean.device)
    buffers["running_mean"], buffers["running_var"] = statistics[0], statistics[1]
    if batches is not None:
        buffers["num_batches_tracked"] = torch.zeros_like(batches)
    layer.momentum = 1.0
    try:
        return statistics, call(*args, **kwargs)
    finally:
        layer.momentum = momentum
        buffers.update(saved)


def _apply(layer: _NormBase, statistics: Tensor) -> None:
    mean, variance, batches = layer.running_mean, layer.running_var, layer.num_batches_tracked
    assert mean is not None
    assert variance is not None
    factor = layer.momentum
    if isinstance(layer, _BatchNorm) and batches is not None:
        batches.add_(1)
        if factor is None:
            factor = 1.0 / float(batches)
    if factor is None:
        return
    mean.mul_(1 - factor).add_(statistics[0].to(mean.device), alpha=factor)
    variance.mul_(1 - factor).add_(statistics[1].to(variance.device), alpha=factor)
