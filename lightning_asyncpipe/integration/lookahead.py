"""Look-ahead at the data fetcher: the next batch of training, one batch early.

Early forwards need batch i + 1 while Lightning trains batch i. ``LookAheadFetcher.peek`` fetches
it, converts it and moves it to the device as the loop would, and keeps it. When the loop takes it,
the loop's own ``convert_input``, ``on_before_batch_transfer`` and ``batch_to_device`` pass it
through unchanged, so that every hook sees every batch once, in order.

What the loop and checkpoints see is the batch handed out, never the peeked one: ``done`` (the
loop's ``is_last_batch``), ``fetched``, and the loader states that are saved.

The fetcher sits in ``fit_loop._data_fetcher``, behind ``CombinedLoader``. A wrapper around each
loader would not do: it knows nothing of the next batch of a ``CombinedLoader`` that cycles, hides
``state_dict`` from Lightning's runtime protocol, and sees batches past ``limit_train_batches``.

Everything private that it uses was checked on Lightning 2.6.6.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn, _set_sampler_epoch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import (
    _DataFetcher,
    _DataLoaderIterDataFetcher,
    _PrefetchDataFetcher,
)
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.utilities import _is_max_limit_reached
from lightning.pytorch.trainer import call


@dataclass(frozen=True, slots=True)
class Peeked:
    """The batch that the loop takes next.

    Attributes:
        batch: as ``training_step`` will receive it: converted and on the device. None if the loader
            yields None, for which Lightning calls no ``training_step``.
        batch_idx: its ``batch_idx``; 0 as long as the loop has taken no batch.
        is_last: whether it is known to be the last of its epoch; where the loaders have no length, that would take
            another look ahead.

    """

    batch: Any
    batch_idx: int
    is_last: bool = False


class _Item(NamedTuple):
    """What a ``CombinedLoader`` yields."""

    batch: Any
    batch_idx: int
    dataloader_idx: int


class LookAheadFetcher(_PrefetchDataFetcher):
    """Lightning's fetcher, which can also show the next batch without handing it out.

    At most one batch lies between the loaders and the loop: the peeked one or, where the loaders
    have no length, the one that must be fetched to know whether the one before was the last.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._trainer = trainer
        self._waiting: _Item | None = None  # fetched, not handed out
        self._peeked: Peeked | None = None  # `_waiting`, converted and on the device
        self._exhausted = False  # the loaders ended before their length
        self._states: list[dict[str, Any]] | None = None  # of the loaders, before `_waiting`
        self._handed_out = 0
        self.epoch = 0  # for which the samplers were set when the iterator was made

    @classmethod
    def adopt(cls, fetcher: _DataFetcher, trainer: Trainer) -> LookAheadFetcher:
        """Take over a fetcher that Lightning has made and started, with what it has fetched.

        Raises:
            MisconfigurationException: ``training_step`` takes a ``dataloader_iter``.

        """
        if isinstance(fetcher, _DataLoaderIterDataFetcher):
            raise MisconfigurationException(
                "`training_step(self, dataloader_iter)` is not supported by pipeline parallelism: "
                "the strategy has to see a batch in order to split it. Take the batch as argument: "
                "`def training_step(self, batch, batch_idx)`."
            )
        result = cls(trainer)
        result._combined_loader = fetcher._combined_loader
        result.iterator = fetcher.iterator
        result.length = fetcher.length
        result.done = fetcher.done
        waiting = getattr(fetcher, "batches", [])
        result._waiting = _Item(*waiting[0]) if waiting else None
        result.fetched = fetcher.fetched - len(waiting)
        return result

    def peek(self) -> Peeked | None:
        """The batch that the loop takes next, or None if it takes no more in this epoch.

        None at the end of the epoch, at ``limit_train_batches``, and where ``max_steps`` is reached
        with the batch in progress. Whatever the loaders or the transfer hooks raise is raised here.
        """
        if self._peeked is not None:
            return self._peeked
        if self.iterator is None or self.done or self._exhausted or self._reaches_max_steps():
            return None
        if self._waiting is None:
            self._states = self._current_states()
            try:
                self._waiting = self._fetch()
            except StopIteration:  # the loaders are shorter than their length: see `__next__`
                self._exhausted = True
                return None
        with torch.enable_grad():  # as where the loop does this
            batch = self._prepare(self._waiting.batch)
        self._waiting = self._waiting._replace(batch=batch)  # the raw one is not needed any more
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress.current
        last = self.length is not None and self.fetched + 1 >= self.length
        self._peeked = Peeked(batch, progress.ready if self._handed_out else 0, last)
        return self._peeked

    def loader_states(self) -> list[dict[str, Any]]:
        """States of the stateful loaders, from which the next batch to hand out follows."""
        if self._waiting is not None and self._states is not None:
            return self._states
        return self.combined_loader._state_dicts()

    def __iter__(self) -> LookAheadFetcher:
        _DataFetcher.__iter__(self)
        if self.length is None:
            self._fetch_to_know_the_last()
        return self

    def __next__(self) -> _Item:
        if self._exhausted or (self._waiting is None and self.done):
            self.done = True
            raise StopIteration
        item, peeked = self._waiting, self._peeked
        self._waiting, self._peeked, self._states = None, None, None
        if item is None:
            try:
                item = self._fetch()
            except StopIteration:
                self.done = True
                raise
        self.fetched += 1
        self._handed_out += 1
        if self.length is not None:
            self.done = self.fetched >= self.length
        else:
            self._fetch_to_know_the_last()
        if peeked is not None:
            self._pass_through(item.batch)
        return item

    def reset(self) -> None:
        super().reset()
        self._waiting, self._peeked, self._states = None, None, None
        self._exhausted = False
        self._handed_out = 0

    def _fetch(self) -> _Item:
        assert self.iterator is not None
        self._start_profiler()
        try:
            return _Item(*next(self.iterator))
        finally:
            self._stop_profiler()

    def _fetch_to_know_the_last(self) -> None:
        self._states = self._current_states()
        try:
            self._waiting = self._fetch()
        except StopIteration:
            self.done = True

    def _current_states(self) -> list[dict[str, Any]]:
        # a loader may return what it goes on changing
        return copy.deepcopy(self.combined_loader._state_dicts())

    def _reaches_max_steps(self) -> bool:
        fit_loop = self._trainer.fit_loop
        progress: Any = fit_loop.epoch_loop.batch_progress.current
        steps = fit_loop.epoch_loop.global_step
        if progress.ready > progress.processed and not fit_loop._should_accumulate():
            steps += 1  # the batch in progress ends with a step
        return _is_max_limit_reached(steps, fit_loop.max_steps)

    def _prepare(self, batch: Any) -> Any:
        """What ``_TrainingEpochLoop.advance`` does with a batch before it trains on it."""
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)

    def _pass_through(self, batch: Any) -> None:
        """Let the loop's own preparation of ``batch``, which follows at once, leave it as it is."""
        trainer = self._trainer
        _return_unchanged_once(trainer.precision_plugin, "convert_input", batch)
        _return_unchanged_once(trainer.lightning_module, "_on_before_batch_transfer", batch)
        _return_unchanged_once(trainer.strategy, "batch_to_device", batch)


class _LookAheadFitLoop(_FitLoop):
    """Lightning's fit loop with a fetcher that looks ahead."""

    def setup_data(self) -> None:
        loader = self._combined_loader
        super().setup_data()
        fetcher = self._adopt_fetcher()
        if fetcher is None:
            return
        if loader is not self._combined_loader:
            self._set_sampler_epochs(fetcher)  # a peek may come before Lightning does this
        elif self.is_resuming:
            self._resume(fetcher)

    def on_save_checkpoint(self) -> dict[str, Any]:
        state = super().on_save_checkpoint()
        if "combined_loader" in state and isinstance(self._data_fetcher, LookAheadFetcher):
            state["combined_loader"] = self._data_fetcher.loader_states()
        return state

    @property
    def _epoch(self) -> int:
        """The epoch for which Lightning sets the samplers."""
        progress: Any = self.epoch_progress.current
        return int(progress.processed)

    def _adopt_fetcher(self) -> LookAheadFetcher | None:
        fetcher = self._data_fetcher
        if fetcher is not None and not isinstance(fetcher, LookAheadFetcher):
            fetcher = self._data_fetcher = LookAheadFetcher.adopt(fetcher, self.trainer)
        return fetcher

    def _set_sampler_epochs(self, fetcher: LookAheadFetcher) -> None:
        fetcher.epoch = self._epoch
        for loader in fetcher.combined_loader.flattened:
            _set_sampler_epoch(loader, fetcher.epoch)

    def _resume(self, fetcher: LookAheadFetcher) -> None:
        """Start again loaders that were set up, and perhaps peeked, before the checkpoint was read.

        Lightning loads their states in ``setup_data``, which returns early where loaders exist.
        """
        saved = bool(self._combined_loader_states_to_load) and self.restarting
        if saved:
            self._load_combined_loader_states()
        if saved or fetcher.epoch != self._epoch:
            self._set_sampler_epochs(fetcher)
            iter(fetcher)


def install(trainer: Trainer) -> LookAheadFetcher | None:
    """Make ``trainer`` fit with a ``LookAheadFetcher``, now and whenever it reloads its loaders.

    Call it before or after ``fit_loop.setup_data``; again does no harm.

    Returns:
        The fetcher; None if ``setup_data`` has not run or there is nothing to train on.

    Raises:
        MisconfigurationException: ``training_step`` takes a ``dataloader_iter``.

    """
    loop = trainer.fit_loop
    if type(loop) is _FitLoop:
        loop.__class__ = _LookAheadFitLoop
    elif not isinstance(loop, _LookAheadFitLoop):  # the user's own fit loop
        loop.__class__ = type(type(loop).__name__, (_LookAheadFitLoop, type(loop)), {})
    assert isinstance(loop, _LookAheadFitLoop)
    fetcher = loop._adopt_fetcher()
    if fetcher is not None and loop._combined_loader is not None and not fetcher.fetched:
        loop._set_sampler_epochs(fetcher)
    return fetcher


def fetcher_of(trainer: Trainer) -> LookAheadFetcher | None:
    """The fetcher that ``trainer`` fits with, None if it has none that looks ahead."""
    fetcher = trainer.fit_loop._data_fetcher
    return fetcher if isinstance(fetcher, LookAheadFetcher) else None


def seed_workers(dataloader: object, replica: int) -> None:
    """Seed the workers of a loader by replica, where ``seed_everything(workers=True)`` was called.

    Lightning would seed them by global rank, and the ranks of one replica would draw different
    augmentations of the same samples. A ``worker_init_fn`` of the user's own stays.
    """
    _auto_add_worker_init_fn(dataloader, replica)


def _return_unchanged_once(owner: Any, name: str, batch: Any) -> None:
    """Make the next call of ``owner.name`` return its argument if that is ``batch``.

    The method is replaced for this one call only, so that nothing stays on the user's objects.
    """
    attributes: dict[str, Any] = vars(owner)
    replaced = name in attributes
    method: Callable[..., Any] = getattr(owner, name)

    def once(data: Any, *args: Any, **kwargs: Any) -> Any:
        if replaced:
            attributes[name] = method
        else:
            attributes.pop(name, None)
        return data if data is batch else method(data, *args, **kwargs)

    attributes[name] = once
