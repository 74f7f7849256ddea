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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import (
    _DataFetcher,
    _DataLoaderIterDataFetcher,
    _PrefetchDataFetcher,
)
from lightning.pytorch.loops.utilities import _is_max_limit_reached
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_asyncpipe.integration import internals
from lightning_asyncpipe.integration.preparation import pass_through, prepare
from lightning_asyncpipe.integration.resuming import (
    Randomness,
    generator_states,
    set_generator_states,
)


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


class Start(NamedTuple):
    """With what loaders are started.

    Attributes:
        states: of the stateful loaders.
        random: random states.
        generators: states of the loaders' own generators.
    """

    states: list[dict[str, Any]]
    random: dict[str, Any]
    generators: list[Tensor]

    @classmethod
    def of(cls, combined_loader: CombinedLoader) -> Start:
        """Their states now."""
        # copied: a loader may return what it goes on changing
        states = copy.deepcopy(combined_loader._state_dicts())
        return cls(states, internals.collect_random_states(), generator_states(combined_loader.flattened))


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
        self._random: dict[str, Any] | None = None  # random states, before `_waiting`
        self._generators: list[Tensor] = []  # states of the loaders' own, before the iterator was made
        self._started: list[Tensor] = []  # the same, before `_waiting`
        self._handed_out = 0
        self.epoch = 0  # for which the samplers were set when the iterator was made

    @classmethod
    def adopt(cls, fetcher: _DataFetcher, trainer: Trainer, start: Start | None = None) -> LookAheadFetcher:
        """Take over a fetcher that Lightning has made and started, with what it has fetched.

        Args:
            fetcher: the fetcher.
            trainer: whose fetcher it is.
            start: the states with which it was started; None if they are not known.

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
        if start is not None:
            result._states, result._random, result._generators = start
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
            self._remember()
            try:
                self._waiting = self._fetch()
            except StopIteration:  # the loaders are shorter than their length: see `__next__`
                self._exhausted = True
                return None
        with torch.enable_grad():  # as where the loop does this
            batch = prepare(self._trainer, self._waiting.batch, dataloader_idx=0)
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

    def random_states(self, seed: int) -> Randomness:
        """With what training would go on from here."""
        before = self._random if self._waiting is not None else None
        loader = self._combined_loader  # none any more once the training has ended
        generators = [] if loader is None else generator_states(loader.flattened)
        return Randomness(seed, internals.collect_random_states(), before, generators)

    def __iter__(self) -> LookAheadFetcher:
        if self._waiting is not None and not self._handed_out:
            if not self.rewind():
                return self  # the loaders cannot give the batch again
            set_generator_states(self.combined_loader.flattened, self._started)
        return self.begin()

    def begin(self, random_states: dict[str, Any] | None = None) -> LookAheadFetcher:
        """Start the loaders.

        Args:
            random_states: from which the first batch is fetched, set once the loaders have been started.
        """
        self._generators = generator_states(self.combined_loader.flattened)
        _DataFetcher.__iter__(self)
        if random_states is not None:
            internals.set_random_states(random_states)
        if self.length is None:
            self._fetch_to_know_the_last()
        return self

    def rewind(self) -> bool:
        """Put the loaders back to where they were before a batch was fetched; it comes again once they are started.

        Returns:
            False, with the batch kept, where that is not possible: what the loaders iterate goes on by itself.
        """
        if any(isinstance(part, Iterator) for part in _sources(self.combined_loader)):
            return False
        if self._waiting is not None and self._states:
            self.combined_loader._load_state_dicts(self._states)
        set_generator_states(self.combined_loader.flattened, self._generators)
        return True

    def __next__(self) -> _Item:
        if self._exhausted or (self._waiting is None and self.done):
            self.done = True
            raise StopIteration
        item, peeked = self._waiting, self._peeked
        self._waiting, self._peeked, self._states, self._random = None, None, None, None
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
            pass_through(self._trainer, item.batch)
        return item

    def reset(self) -> None:
        super().reset()
        self._waiting, self._peeked, self._states, self._random = None, None, None, None
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
        self._remember()
        try:
            self._waiting = self._fetch()
        except StopIteration:
            self.done = True

    def _remember(self) -> None:
        """Take down from where the batch follows that is fetched next."""
        self._states = copy.deepcopy(self.combined_loader._state_dicts())  # a loader may go on changing it
        self._random = internals.collect_random_states()
        self._started = generator_states(self.combined_loader.flattened)

    def _reaches_max_steps(self) -> bool:
        fit_loop = self._trainer.fit_loop
        progress: Any = fit_loop.epoch_loop.batch_progress.current
        steps = fit_loop.epoch_loop.global_step
        if progress.ready > progress.processed and not fit_loop._should_accumulate():
            steps += 1  # the batch in progress ends with a step
        return _is_max_limit_reached(steps, fit_loop.max_steps)


def _sources(combined_loader: CombinedLoader) -> Iterator[object]:
    """The loaders, and the data sets that they read."""
    for loader in combined_loader.flattened:
        yield loader
        yield getattr(loader, "dataset", None)
