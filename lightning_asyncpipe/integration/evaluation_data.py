"""Look-ahead in the loops of evaluation: their next batches, and the first batch of every loader.

Pipelines are busy where several batches are on their way, and Lightning hands out one at a time. An
:class:`EvaluationFetcher` shows the next ones. The loop's own preparation of a batch that was shown leaves it as it is,
so every hook sees every batch once, in order. What the loop sees (``done``, ``fetched``) is that of the batch handed
out.

The step is also run once on the first batch of every loader before anything else, to find out how it runs in stages.
So the loaders are made when the strategy is set up, and the loop finds them made.

Everything private that it uses was checked on Lightning 2.6.6.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.prediction_loop import _PredictionLoop
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_asyncpipe.integration.preparation import pass_through, prepare

Loop = _EvaluationLoop | _PredictionLoop


class Shown(NamedTuple):
    """A batch as the step will get it: converted and on the device."""

    batch: Any
    batch_idx: int
    dataloader_idx: int


class EvaluationFetcher(_PrefetchDataFetcher):
    """Lightning's fetcher, which also shows next batches without handing them out.

    Args:
        trainer: it prepares the batches.
        made: the fetcher that Lightning has made and started.
    """

    def __init__(self, trainer: Trainer, made: _DataFetcher) -> None:
        super().__init__()
        self._trainer = trainer
        self._combined_loader = made._combined_loader
        self.iterator = made.iterator
        self.length = made.length
        self.done = made.done
        self._waiting: deque[Shown] = deque(Shown(*item) for item in getattr(made, "batches", []))
        self.fetched = made.fetched - len(self._waiting)
        self._prepared = 0  # of those that wait, from the first
        self.current: Shown | None = None  # handed out last
        self._start_profiler, self._stop_profiler = made._start_profiler, made._stop_profiler

    def peek(self, count: int) -> list[Shown]:
        """The next batches that the loop takes, at most `count`; fewer where the loaders end."""
        while len(self._waiting) < count and self._fetch():
            pass
        while self._prepared < min(count, len(self._waiting)):
            item = self._waiting[self._prepared]
            batch = prepare(self._trainer, item.batch, item.dataloader_idx)
            self._waiting[self._prepared] = item._replace(batch=batch)
            self._prepared += 1
        return [self._waiting[i] for i in range(min(count, len(self._waiting)))]

    def __next__(self) -> Any:
        if not self._waiting and (self.done or not self._fetch()):
            self.done = True
            raise StopIteration
        item = self.current = self._waiting.popleft()
        self.fetched += 1
        if self.length is None:
            self.done = not self._waiting and not self._fetch()
        else:
            self.done = self.fetched >= self.length
        if self._prepared:
            self._prepared -= 1
            pass_through(self._trainer, item.batch)
        return item

    def reset(self) -> None:
        super().reset()
        self._waiting.clear()
        self._prepared = 0

    def _fetch(self) -> bool:
        """Fetch one more batch; whether there is one."""
        if self.iterator is None:
            return False
        self._start_profiler()
        try:
            self._waiting.append(Shown(*next(self.iterator)))
        except StopIteration:
            self.iterator = None
            return False
        finally:
            self._stop_profiler()
        return True


class _Ahead:
    """A loop of evaluation whose loaders may be there already and whose fetcher looks ahead."""

    loaders_are_set_up = False

    def setup_data(self) -> None:
        if self.loaders_are_set_up:
            self.loaders_are_set_up = False
            return
        super().setup_data()  # type: ignore[misc]

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self._data_fetcher: Any = EvaluationFetcher(self.trainer, self._data_fetcher)  # type: ignore[attr-defined]


def install(loop: Loop) -> None:
    """Let a loop look ahead; again does no harm."""
    if not isinstance(loop, _Ahead):
        loop.__class__ = type(type(loop).__name__, (_Ahead, type(loop)), {})


def uninstall(loop: Loop) -> None:
    """Give a loop its own class back."""
    if isinstance(loop, _Ahead):
        loop.__class__ = type(loop).__mro__[2]
        loop.__dict__.pop("loaders_are_set_up", None)


def step_arguments(loop: Loop, step: str, shown: Shown) -> tuple[Any, ...]:
    """What the loop calls the step with for a batch."""
    several = loop.num_dataloaders > 1 and (isinstance(loop, _PredictionLoop) or loop._is_sequential)
    given = loop._build_kwargs(shown.batch, shown.batch_idx, shown.dataloader_idx if several else None)
    return loop._build_step_args_from_hook_kwargs(given, step)


def first_batches(trainer: Trainer, loop: Loop, step: str) -> Iterator[Shown]:
    """Set up a loop's loaders and yield the first batch of each, prepared.

    Of loaders that are combined to one batch, the first combined one. A loader that can be walked through only once
    keeps its first batch.

    Raises:
        MisconfigurationException: the step takes a ``dataloader_iter``.
    """
    if is_param_in_hook_signature(getattr(trainer.lightning_module, step), "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            f"`{step}(self, dataloader_iter)` is not supported by pipeline parallelism: every stage has to see the "
            f"batch. Take the batch as an argument: `def {step}(self, batch, batch_idx)`."
        )
    loop.setup_data()
    combined = loop._combined_loader
    if combined is None:
        return
    if combined._mode != "sequential":
        combined.limits = loop.max_batches
        for item in combined:
            yield Shown(prepare(trainer, item[0], item[2]), 0, item[2])
            break
        combined.reset()
        return
    for index, loader in enumerate(list(combined.flattened)):
        if loop.max_batches[index] == 0:
            continue
        iterator = iter(loader)
        for batch in iterator:
            if iterator is loader:
                loaders = list(combined.flattened)
                loaders[index] = chain([batch], iterator)
                combined.flattened = loaders
            yield Shown(prepare(trainer, batch, index), 0, index)
            break
