"""What ``self.log`` says during micro-batches, and one log call per batch that every rank makes.

While a micro-batch runs, a ``Recorder`` stands in the place of ``module.log``. A call counts on the
stage to which its place in ``training_step`` belongs: stages before that do not come so far, and
those after it may compute the value from dummy values. What a stage says becomes a
``MicroBatchRecord``. A ``StepExchange`` gives all ranks all records, ``merge`` reduces them to the
values of the batch, and ``replay`` logs these on every rank alike:

* ``mean``, the default: the mean over the micro-batches, weighted by their ``batch_size``, so that
  one with the ``batch_size`` 0 does not count;
* ``sum``, ``max``, ``min``: the same over the micro-batches;
* ``batch_size``: the sum of theirs, which by default are their samples.

A key that only some micro-batches log is reduced over those. A key logged more than once by a
micro-batch is replayed as often, n-th call with n-th call, and Lightning's rule holds: the last is
the step's value, all enter the epoch's.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector import result
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_asyncpipe.integration.step_exchange import LogCall, MicroBatchRecord, StepExchange, joined

__all__ = [
    "LogCall",
    "MergedCall",
    "MicroBatchRecord",
    "Recorder",
    "StepExchange",
    "joined",
    "merge",
    "replay",
]

_REDUCTIONS: dict[Any, str] = {
    **{name: name for name in ("mean", "sum", "max", "min")},
    "avg": "mean",
    torch.mean: "mean",
    **dict.fromkeys((torch.sum, sum), "sum"),
    **dict.fromkeys((torch.max, max), "max"),
    **dict.fromkeys((torch.min, min), "min"),
}


class Recorder:
    """Takes down the ``self.log`` calls of one micro-batch.

    Args:
        size: samples of the micro-batch, the default of ``batch_size``.
        keep: asked at each call whether it counts; one that does not is dropped unseen.
        path_of: the path of a metric object in the module, None for one that is not there.

    """

    def __init__(
        self,
        size: int = 1,
        keep: Callable[[], bool] = lambda: True,
        path_of: Callable[[Metric], str | None] = lambda metric: None,
    ) -> None:
        self.size = size
        self.keep = keep
        self._path_of = path_of
        self.calls: list[LogCall] = []
        self.values: list[float | Tensor] = []
        self.batch_sizes: list[float] = []

    @contextmanager
    def recording(self, module: LightningModule) -> Iterator[None]:
        """Stand in for ``module.log``, and so for ``log_dict``, in here."""

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if self.keep() and not module.trainer.barebones:
                self._log(module, name, value, *args, **kwargs)

        attributes = vars(module)
        before = attributes.get("log")
        attributes["log"] = log
        try:
            yield
        finally:
            if before is None:
                attributes.pop("log", None)
            else:
                attributes["log"] = before

    def record(
        self,
        index: int,
        loss: float | Tensor,
        replica: int = 0,
        extra: bool = False,
        metrics: bool = False,
        stage: int = 0,
    ) -> MicroBatchRecord:
        """The record of the micro-batch with this index, see ``MicroBatchRecord``."""
        calls = tuple(self.calls)
        return MicroBatchRecord(
            index, self.size, loss, calls, self.values, self.batch_sizes, replica, extra, metrics, stage
        )

    def _log(
        self,
        module: LightningModule,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """``LightningModule.log``; ``sync_dist`` has no meaning, since all ranks log the same."""
        metric: str | None = None
        if isinstance(value, Metric):
            metric = self._path_of(value)
            if metric is None:
                raise MisconfigurationException(
                    f"`self.log({name!r}, ...)` was called with a {type(value).__name__} that is no attribute of the "
                    "module. Make it one, so that Lightning finds it and every rank gets its state."
                )
            value = 0.0
        scalar, dtype = _scalar(module, name, value)
        key = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
        reduction = _REDUCTIONS.get(key) if key.__hash__ is not None else None
        if reduction is None:
            raise MisconfigurationException(
                "Only `self.log(..., reduce_fx={min,max,mean,sum})` are supported. "
                f"Found: {reduce_fx} for the key {name!r}"
            )
        self.calls.append(
            LogCall(
                name,
                prog_bar,
                logger,
                on_step,
                on_epoch,
                reduction,
                enable_graph,
                add_dataloader_idx,
                metric_attribute,
                rank_zero_only,
                dtype,
                metric,
            )
        )
        self.values.append(scalar)
        self.batch_sizes.append(self.size if batch_size is None else batch_size)


def _default_dtype() -> str:
    return "float64" if torch.get_default_dtype() is torch.float64 else "float32"


def _scalar(module: Any, name: str, value: Any) -> tuple[float | Tensor, str]:
    """``value`` as a number or a float64 scalar, and the dtype in which Lightning stores it."""
    if isinstance(value, MetricCollection):
        raise MisconfigurationException(
            f"`self.log({name!r}, ...)` was called with a MetricCollection. Use `self.log_dict(collection)`."
        )
    if isinstance(value, Tensor):
        if value.numel() != 1:
            module._LightningModule__to_tensor(value, name)  # raises Lightning's error
        is_double = value.dtype is torch.float64
        scalar = value.detach().to(torch.float64, copy=True).reshape(())
        dtype = "float64" if is_double else "float32" if value.dtype is torch.float32 else None
        return (scalar.item() if scalar.device.type == "cpu" else scalar), dtype or _default_dtype()
    if isinstance(value, numbers.Number):
        return float(value), _default_dtype()  # type: ignore[arg-type]
    module._LightningModule__check_allowed(value, name, value)
    raise AssertionError("unreachable: the line above raises Lightning's error")


# Merging and replaying


@dataclass(frozen=True, slots=True)
class MergedCall:
    """One log call of a batch."""

    call: LogCall
    value: float
    batch_size: float


def merge(records: Sequence[MicroBatchRecord]) -> list[MergedCall]:
    """The log calls of a batch from the records of its micro-batches, in order.

    Raises:
        MisconfigurationException: micro-batches log one key with different arguments.

    """
    if not records:
        return []
    calls = records[0].calls
    if all(record.calls == calls for record in records):
        values = np.array([[float(v) for v in r.values] for r in records], dtype=np.float64)
        sizes = np.array([r.batch_sizes for r in records], dtype=np.float64)
        return [_reduced(call, values[:, i], sizes[:, i]) for i, call in enumerate(calls)]
    return _merge_unequal(records)


def _merge_unequal(records: Sequence[MicroBatchRecord]) -> list[MergedCall]:
    found: dict[tuple[str, int], tuple[LogCall, list[float], list[float]]] = {}
    for record in records:
        seen: dict[str, int] = {}
        for call, value, size in zip(record.calls, record.values, record.batch_sizes, strict=True):
            occurrence = seen[call.name] = seen.get(call.name, -1) + 1
            entry = found.setdefault((call.name, occurrence), (call, [], []))
            if entry[0]._replace(dtype=call.dtype) != call:
                raise MisconfigurationException(_inconsistent(entry[0], call))
            entry[1].append(float(value))
            entry[2].append(size)
    return [_reduced(call, np.array(values), np.array(sizes)) for call, values, sizes in found.values()]


def _inconsistent(one: LogCall, other: LogCall) -> str:
    differing = [
        f"{name}={a!r} and {name}={b!r}"
        for name, a, b in zip(LogCall._fields, one, other, strict=True)
        if a != b and name != "dtype"
    ]
    return (
        f"You called `self.log({one.name!r}, ...)` in the micro-batches of one batch with "
        f"different arguments: {'; '.join(differing)}. Use the same ones whatever the data."
    )


def _reduced(call: LogCall, values: Any, sizes: Any) -> MergedCall:
    total = float(sizes.sum())
    if len(values) == 1:
        return MergedCall(call, float(values[0]), total)
    if call.reduce_fx == "sum":
        value = values.sum()
    elif call.reduce_fx == "max":
        value = values.max()
    elif call.reduce_fx == "min":
        value = values.min()
    elif total:
        # the mean of nothing, 0 / 0, is not a number and has no weight
        value = (np.where(sizes == 0.0, 0.0, values) * sizes).sum() / total
    else:
        value = values.mean()
    return MergedCall(call, float(value), total)


def replay(
    module: LightningModule, merged: Sequence[MergedCall], metric: Callable[[str], Metric] | None = None
) -> None:
    """Call ``module.log`` for each merged call, without synchronising.

    Args:
        module: the module.
        merged: the calls.
        metric: gives the metric object at a path.

    Call it inside ``strategy.training_step``: Lightning logs under the hook that is running.
    Whatever it raises for the arguments (``on_step`` and ``on_epoch`` both False, ...) is raised
    here, on every rank.
    """
    for entry in merged:
        call = entry.call
        _advise_no_sync_dist(call.name)
        value: Tensor | Metric
        if call.metric is None:
            value = torch.tensor(entry.value, dtype=getattr(torch, call.dtype), device=module.device)
        else:
            assert metric is not None
            value = metric(call.metric)
        module.log(
            call.name,
            value,
            prog_bar=call.prog_bar,
            logger=call.logger,
            on_step=call.on_step,
            on_epoch=call.on_epoch,
            reduce_fx=call.reduce_fx,
            enable_graph=call.enable_graph,
            sync_dist=False,
            add_dataloader_idx=call.add_dataloader_idx,
            batch_size=_as_int(entry.batch_size),
            metric_attribute=call.metric_attribute,
            rank_zero_only=call.rank_zero_only,
        )


def _as_int(number: float) -> Any:
    return int(number) if number.is_integer() else number


def _advise_no_sync_dist(name: str) -> None:
    """Keep Lightning from recommending ``sync_dist=True`` for a value that all ranks share.

    Marks the message of ``_ResultCollection._get_cache`` (2.6.6) as given.
    """
    result.warning_cache.add(
        f"It is recommended to use `self.log({name!r}, ..., sync_dist=True)`"
        " when logging on epoch level in distributed setting to accumulate the metric across"
        " devices."
    )
