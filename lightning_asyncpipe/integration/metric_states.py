"""Metric objects of torchmetrics in steps: what one step adds to them is taken back, sent, and added on every rank.

A step that updates a metric runs on one rank for one part of the data, and perhaps early. So while it runs, the metrics
that it touches are empty; afterwards they are what they were. What the step gave them becomes a :class:`MetricUpdate`,
and every rank applies the updates of all parts in the order of the data. From then on every rank's metric is one
device's, at every point of the loop: ``compute`` gives the same number everywhere and needs no synchronisation of its
own.

Where torchmetrics says that a metric's state is a reduction of the states of batches (``full_state_update = False``),
the state travels. For others (a metric of the user's own, a wrapper around metrics) what was given to ``update``
travels, and every rank calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.metric import CompositionalMetric
from torchmetrics.wrappers.abstract import WrapperMetric

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration import internals
from lightning_asyncpipe.integration.messages import pack, unpack
from lightning_asyncpipe.integration.outputs import detached
from lightning_asyncpipe.integration.world import World
from lightning_asyncpipe.runtime.stages import within_stage

_METHODS = ("update", "forward", "compute", "reset")


@dataclass
class MetricUpdate:
    """What one run of a step gave one metric.

    Attributes:
        count: how often it was updated.
        state: its state after these updates alone; None where `calls` are sent instead.
        calls: (method, positional arguments, keyword arguments).
        valued: whether the value of these updates alone was asked for, by calling the metric.
        reset: whether the step emptied it before.
    """

    count: int = 0
    state: dict[str, Any] | None = None
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    valued: bool = False
    reset: bool = False

    def to_list(self) -> list[Any]:
        """Plain containers, numbers and tensors; :meth:`from_list` is the inverse."""
        return [self.count, self.state, [list(call) for call in self.calls], self.valued, self.reset]

    @classmethod
    def from_list(cls, data: Sequence[Any]) -> MetricUpdate:
        """The update that :meth:`to_list` gave."""
        count, state, calls, valued, reset = data
        return cls(count, state, [(method, tuple(args), kwargs) for method, args, kwargs in calls], valued, reset)


def pack_updates(updates: Mapping[str, MetricUpdate], step: str) -> dict[str, Any]:
    """What a step gave to metrics, by path, in types that travel; :func:`unpack_updates` is the inverse."""
    return {
        path: pack(update.to_list(), f"what `{step}` gives to the metric `{path}`") for path, update in updates.items()
    }


def unpack_updates(packed: Mapping[str, Any], device: torch.device) -> dict[str, MetricUpdate]:
    """What :func:`pack_updates` was called on, its tensors on a device."""
    return {path: MetricUpdate.from_list(unpack(update, device)) for path, update in packed.items()}


class _Touched:
    """A metric in the course of a step."""

    def __init__(self, metric: Metric) -> None:
        self.saved = internals.metric_attributes(metric)
        self.update = MetricUpdate()
        self.real = False


class MetricWatch:
    """Finds the metrics of a module, and watches what steps do with them.

    Attributes are modules and, in the LightningModule itself, entries of lists, tuples and dicts.

    Args:
        module: the module.
        step: name of the step, for messages.
    """

    def __init__(self, module: LightningModule, step: str) -> None:
        self._module = module
        self._step = step
        self._by_path: dict[str, Metric] = {}
        self._metrics: dict[str, Metric] = {}
        self._collections: list[MetricCollection] = []
        self._paths: dict[int, str] = {}
        self._touched: dict[str, _Touched] = {}
        self._updates: dict[str, MetricUpdate] = {}
        self._inside = False
        self.refresh()

    def refresh(self) -> None:
        """Look for metrics again; they may be made or replaced between two epochs."""
        self._by_path = dict(metrics_of(self._module))
        self._paths = {id(metric): name for name, metric in self._by_path.items()}
        # Metrics inside a wrapper are its own business; a sum of metrics has nothing but its parts.
        wrappers = [m for m in self._by_path.values() if isinstance(m, WrapperMetric)]
        inner = {id(part) for metric in wrappers for part in metric.modules() if part is not metric}
        self._metrics = {
            name: m
            for name, m in self._by_path.items()
            if id(m) not in inner and not isinstance(m, CompositionalMetric)
        }
        self._collections = [m for m in self._module.modules() if isinstance(m, MetricCollection)]

    def path_of(self, metric: Metric) -> str | None:
        """Where a metric is in the module; None if it is not there."""
        return self._paths.get(id(metric))

    def metric(self, path: str) -> Metric:
        """The metric at a path that :meth:`path_of` gave, perhaps on another rank."""
        return self._by_path[path]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around one run of the step: no metric is changed afterwards."""
        self._touched, self._updates = {}, {}
        self._inside = False
        groups = [(collection, collection._groups) for collection in self._collections]
        for collection, _ in groups:
            collection._groups = {}
            collection.__dict__["update"] = _each(collection)
        replaced = [(m, name, self._replace(path, m, name)) for path, m in self._metrics.items() for name in _METHODS]
        try:
            yield
        finally:
            for path, touched in self._touched.items():
                metric = self._metrics[path]
                if touched.real:
                    self._updates[path] = self._finished(metric, touched.update)
                internals.set_metric_attributes(metric, touched.saved)
            for metric, name, before in replaced:
                if before is None:
                    metric.__dict__.pop(name, None)
                else:
                    metric.__dict__[name] = before
            for collection, before in groups:
                del collection.__dict__["update"]
                collection._groups = before

    def take(self) -> dict[str, MetricUpdate]:
        """What the last run of the step gave the metrics, where its code belongs to the stage that ran it."""
        updates, self._updates = self._updates, {}
        return updates

    def apply(self, updates: Sequence[dict[str, MetricUpdate]], valued: frozenset[str] = frozenset()) -> None:
        """Give this rank's metrics what the parts of a batch gave.

        Args:
            updates: of all parts, in their order.
            valued: paths of the metrics whose value for the batch alone is wanted, as Lightning logs it for a step.
        """
        found: dict[str, list[MetricUpdate]] = {}
        for part in updates:
            for path, update in part.items():
                found.setdefault(path, []).append(update)
        for path, given in found.items():
            metric = self.metric(path)
            value: Any = None
            if path in valued and any(update.valued for update in given):
                value = _value_of(metric, given)
            for update in given:
                _add(metric, update, alone=len(given) == 1)
            if value is not None:
                metric._forward_cache = value

    # Inside a step

    def _replace(self, path: str, metric: Metric, name: str) -> Any:
        before = metric.__dict__.get(name)
        original = getattr(metric, name)

        def replacement(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside = True
            try:
                return self._call(path, metric, name, original, args, kwargs)
            finally:
                self._inside = False

        metric.__dict__[name] = replacement
        return before

    def _call(
        self,
        path: str,
        metric: Metric,
        name: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        touched = self._touched.get(path)
        if touched is None:
            touched = self._touched[path] = _Touched(metric)
            _empty(metric)
        real = within_stage()
        if real and not touched.real:
            _empty(metric)  # of what was computed from zeros
            touched.real = True
        update = touched.update
        if name == "reset":
            touched.update = MetricUpdate(reset=True)
            _empty(metric)
            return None
        if name == "compute":
            if real and not update.reset:
                raise PipelineError(
                    f"`{path}.compute()` was called inside `{self._step}`. There the metric holds what this call of "
                    f"the step gave it, not the batches before. Log the metric itself, `self.log(name, self.{path})`, "
                    "or call `compute` in a hook such as the end of the epoch; `value = self."
                    f"{path}(...)` gives the value of the batch."
                )
            return original()
        if real and _is_replayed(metric):
            update.calls.append((name, detached(args), detached(kwargs)))
        update.valued |= name == "forward"
        return original(*args, **kwargs)

    @staticmethod
    def _finished(metric: Metric, update: MetricUpdate) -> MetricUpdate:
        update.count = metric.update_count
        if not _is_replayed(metric):
            update.state = {name: detached(value) for name, value in metric.metric_state.items()}
        return update


def metrics_of(module: LightningModule) -> list[tuple[str, Metric]]:
    """All metrics of a module with their paths: submodules first, then those in its lists, tuples and dicts."""
    found = [(name, m) for name, m in module.named_modules() if isinstance(m, Metric)]
    for name, value in vars(module).items():
        if name in ("_modules", "_parameters", "_buffers"):
            continue
        if isinstance(value, (list, tuple)):
            found += [(f"{name}[{i}]", entry) for i, entry in enumerate(value) if isinstance(entry, Metric)]
        elif type(value) is dict:
            found += [(f"{name}[{key!r}]", entry) for key, entry in value.items() if isinstance(entry, Metric)]
    return found


def _is_replayed(metric: Metric) -> bool:
    """Whether the arguments of updates are sent, because states of batches do not add up to one of all."""
    if isinstance(metric, WrapperMetric) or metric.full_state_update is not False or any(metric.children()):
        return True
    return not all(internals.is_reducible(metric, name) for name in metric._defaults)


def _each(collection: MetricCollection) -> Callable[..., None]:
    """``collection.update`` without groups of metrics that share a state."""

    def update(*args: Any, **kwargs: Any) -> None:
        for metric in nn.ModuleDict.values(collection):
            assert isinstance(metric, Metric)
            metric.update(*args, **metric._filter_kwargs(**kwargs))

    return update


def _empty(metric: Metric) -> None:
    """Reset a metric without writing to the lists that hold its state."""
    for part in metric.modules():
        if isinstance(part, Metric):
            for name, default in part._defaults.items():
                if isinstance(default, list):
                    setattr(part, name, [])
    type(metric).reset(metric)


def _add(metric: Metric, update: MetricUpdate, alone: bool) -> None:
    """Give a metric what an update holds.

    Args:
        metric: the metric.
        update: on the CPU or on the metric's device.
        alone: whether it is all that a batch gave; then the metric is called as the step called it.
    """
    if update.reset:
        metric.reset()
    if update.state is None:
        for method, args, kwargs in _on_device(update.calls, metric.device):
            if method == "forward" and alone:
                metric(*args, **kwargs)
            else:
                metric.update(*args, **kwargs)
        return
    before = metric.metric_state
    metric._update_count += update.count
    for name, value in _on_device(update.state, metric.device).items():
        setattr(metric, name, value)
    internals.reduce_metric_states(metric, before)


def _value_of(metric: Metric, updates: Sequence[MetricUpdate]) -> Any:
    """The value of these updates alone."""
    saved = internals.metric_attributes(metric)
    try:
        _empty(metric)
        for update in updates:
            _add(metric, update, alone=False)
        return metric.compute()
    finally:
        internals.set_metric_attributes(metric, saved)


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on_device(entry, device) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_device(entry, device) for entry in value)
    return value


class LocalMetrics:
    """Switches the synchronisation of a module's metrics off, since every rank has the whole state.

    With several data-parallel replicas, metrics that hooks update, each rank with the batches of its own replica, are
    still synchronised when they are computed, between one rank of each replica.

    Args:
        module: the module.
        world: collectives over all ranks.
        num_stages: ranks of one replica.
    """

    def __init__(self, module: LightningModule, world: World, num_stages: int) -> None:
        self._module = module
        self._world = world
        self._num_stages = num_stages
        self._replicas = world.size // num_stages
        self._before: dict[int, tuple[Metric, Any, Any]] = {}
        self._complete: set[int] = set()

    def refresh(self) -> None:
        """Do it for metrics that were made meanwhile as well."""
        if self._world.size == 1:
            return
        for _, metric in metrics_of(self._module):
            if id(metric) not in self._before:
                self._before[id(metric)] = metric, metric.distributed_available_fn, metric.dist_sync_fn
                metric.distributed_available_fn = self._available(id(metric))
                metric.dist_sync_fn = self._gather

    def complete(self, metric: Metric) -> None:
        """Steps update this metric: it has the data of all replicas."""
        self._complete |= {id(part) for part in metric.modules()}

    def restore(self) -> None:
        """Give the metrics their own settings back."""
        for metric, available, gather in self._before.values():
            metric.distributed_available_fn, metric.dist_sync_fn = available, gather
        self._before.clear()

    def _available(self, key: int) -> Callable[[], bool]:
        return lambda: self._replicas > 1 and key not in self._complete

    def _gather(self, tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        parts = self._world.all_gather(tensor)
        return [part.to(tensor.device) for part in parts[:: self._num_stages]]
