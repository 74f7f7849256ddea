"""A loop of evaluation that looks ahead sees what it would see without."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities import CombinedLoader

from lightning_asyncpipe.integration.evaluation_data import EvaluationFetcher, first_batches, install, uninstall


class Strategy:
    """Puts a batch on its device by marking it."""

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return [*batch, "moved"]


class Precision:
    def convert_input(self, batch: Any) -> Any:
        return [*batch, "converted"]


class Prepared:
    """As much of a Trainer as prepares batches."""

    def __init__(self) -> None:
        self.precision_plugin = Precision()
        self.lightning_module = LightningModule()
        self.strategy = Strategy()
        self.profiler = PassThroughProfiler()
        self.lightning_module.on_before_batch_transfer = lambda batch, dataloader_idx: [*batch, "hooked"]  # type: ignore


class Unsized:
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Sized(Unsized):
    def __len__(self) -> int:
        return len(self.items)


def fetcher(loaders: list[Any], limits: list[float]) -> _PrefetchDataFetcher:
    combined = CombinedLoader(loaders, "sequential")
    combined.limits = limits  # type: ignore[assignment]
    made = _PrefetchDataFetcher()
    made.setup(combined)
    iter(made)
    return made


@st.composite
def data(draw: st.DrawFn) -> tuple[list[list[Any]], list[bool], list[float], list[int]]:
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    loaders = [[[f"{i}.{j}"] for j in range(length)] for i, length in enumerate(lengths)]
    sized = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    limits: list[float] = [
        draw(st.integers(0, length)) if has else draw(st.sampled_from([1, 2, float("inf")]))
        for length, has in zip(lengths, sized, strict=True)
    ]
    return loaders, sized, limits, draw(st.lists(st.integers(0, 5), max_size=14))


@settings(deadline=None)
@given(data())
def test_batches_and_ends_are_those_of_lightnings_fetcher(given_data: Any) -> None:
    loaders, sized, limits, peeks = given_data

    def make() -> list[Iterable[Any]]:
        return [Sized(x) if has else Unsized(x) for x, has in zip(loaders, sized, strict=True)]

    expected = fetcher(make(), limits)
    trainer: Any = Prepared()
    found = EvaluationFetcher(trainer, fetcher(make(), limits))
    for peek in [*peeks, *[0] * 14]:
        shown = found.peek(peek)
        assert [item.batch[1:] for item in shown] == [["converted", "hooked", "moved"]] * len(shown)
        try:
            item = next(expected)
        except StopIteration:
            assert shown == []
            with pytest.raises(StopIteration):
                next(found)
            assert found.done
            break
        handed = next(found)
        assert handed[0][:1] == item[0]
        assert handed[1:] == item[1:]
        assert found.done == expected.done
        assert found.fetched == expected.fetched or not all(
            sized
        )  # where there is no length it counts what is prefetched
        if shown:
            assert handed == shown[0]
            batch = trainer.precision_plugin.convert_input(handed[0])
            batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
            assert trainer.strategy.batch_to_device(batch) is handed[0]


class Evaluates(LightningModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def test_a_loop_gets_its_own_class_back() -> None:
    loop = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu").validate_loop
    install(loop)
    install(loop)
    assert type(loop) is not _EvaluationLoop
    uninstall(loop)
    assert type(loop) is _EvaluationLoop


def test_a_step_that_fetches_batches_itself_is_refused() -> None:
    class Fetches(Evaluates):
        def validation_step(self, dataloader_iter: Any) -> None: ...

    trainer: Any = Prepared()
    trainer.lightning_module = Fetches()
    loop: Any = None
    with pytest.raises(MisconfigurationException, match=r"`validation_step\(self, dataloader_iter\)`.*batch_idx"):
        next(first_batches(trainer, loop, "validation_step"))
