"""Training with look-ahead sees the same batches, flags and hooks as training without."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_asyncpipe.integration.lookahead import (
    LookAheadFetcher,
    fetcher_of,
    install,
    seed_workers,
)

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore")


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, n: int, offset: int = 0) -> None:
        self.n, self.offset = n, offset

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> torch.Tensor:
        if not 0 <= i < self.n:
            raise IndexError(i)
        return torch.tensor([float(i + self.offset)])


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter([torch.tensor([float(i)]) for i in range(first, self.n, step)])


class OverstatedStream(Stream):
    """Says that it has two samples more than it has."""

    def __len__(self) -> int:
        return self.n + 2


class Batches:
    """A loader that is no ``DataLoader``."""

    def __init__(self, *batches: torch.Tensor | None) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Recording(LightningModule):
    """Notes what every hook sees, with the loop's state at that time."""

    def __init__(self, loaders: Callable[[], Any]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.loaders = loaders
        self.events: list[Any] = []
        self.peeks: list[Any] = []

    def train_dataloader(self) -> Any:
        return self.loaders()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def note(self, name: str, batch: Any) -> None:
        self.events.append((name, plain(batch)))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("before", batch)
        return moved(batch, 1000)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        self.note("transfer", batch)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("after", batch)
        return moved(batch, 0.5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("start", batch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        state = (self.current_epoch, batch_idx, progress.is_last_batch, self.global_step)
        self.events.append(("step", plain(batch), state))
        return self.layer(first_tensor(batch)).sum() * 0.0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("end", batch)


class LookingAhead(SingleDeviceStrategy):
    """Peeks in ``setup`` and in every ``training_step``, as the pipeline does."""

    def __init__(self, install_first: bool = False) -> None:
        super().__init__("cpu")
        self.install_first = install_first
        self.peeked: list[Any] = []

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self.install_first:
            assert install(trainer) is None
        states = torch.get_rng_state(), random.getstate()
        trainer.fit_loop.setup_data()
        fetcher = fetcher_of(trainer) if self.install_first else install(trainer)
        if fetcher is not None:
            fetcher.peek()
        torch.set_rng_state(states[0])
        random.setstate(states[1])

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        trainer = self.lightning_module.trainer
        fetcher = fetcher_of(trainer)
        assert fetcher is not None
        before = fetcher.done, fetcher.fetched
        assert fetcher.fetched == args[1] + 1
        peeked = fetcher.peek()
        assert fetcher.peek() is peeked
        assert (fetcher.done, fetcher.fetched) == before
        self.peeked.append(None if peeked is None else (plain(peeked.batch), peeked.batch_idx))
        return output


def plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.flatten().tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [plain(value) for value in batch]
    return batch


def moved(batch: Any, by: float) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch + by
    if isinstance(batch, dict):
        return {key: moved(value, by) for key, value in batch.items()}
    return batch


def first_tensor(batch: Any) -> torch.Tensor:
    if isinstance(batch, dict):
        return next(value for value in batch.values() if value is not None)
    return batch


def combined(mode: Any) -> Callable[[], CombinedLoader]:
    def make() -> CombinedLoader:
        loaders = {
            "a": shuffled(Numbers(7)),
            "b": DataLoader(Numbers(5, 100), batch_size=1),
        }
        return CombinedLoader(loaders, mode)

    return make


def shuffled(dataset: Any, **kwargs: Any) -> DataLoader[Any]:
    """With an order of its own: one drawn from the global generator would depend on when."""
    generator = torch.Generator().manual_seed(5)
    return DataLoader(dataset, batch_size=2, shuffle=True, generator=generator, **kwargs)


def loader(dataset: Any, **kwargs: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(dataset, batch_size=2, **kwargs)


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "map": (loader(Numbers(9)), {}),
    "shuffled": (lambda: shuffled(Numbers(9)), {}),
    "workers": (loader(Numbers(9), num_workers=2), {"max_epochs": 2}),
    "persistent workers": (
        loader(Numbers(9), num_workers=1, persistent_workers=True),
        {"max_epochs": 2},
    ),
    "stream": (loader(Stream(9)), {}),
    "stream of one batch": (loader(Stream(2)), {}),
    "stream with workers": (loader(Stream(8), num_workers=2), {"max_epochs": 2}),
    "overstated length": (loader(OverstatedStream(6)), {}),
    "custom loader": (lambda: Batches(*torch.arange(6.0).reshape(3, 2, 1)), {}),
    "yields None": (lambda: Batches(torch.ones(2, 1), None, torch.zeros(2, 1), None), {}),
    "max_size_cycle": (combined("max_size_cycle"), {}),
    "min_size": (combined("min_size"), {}),
    "max_size": (combined("max_size"), {}),
    "cycled streams": (
        lambda: CombinedLoader({"a": loader(Stream(7))(), "b": loader(Numbers(4))()}, "max_size_cycle"),
        {},
    ),
    "limit as a number": (loader(Numbers(9)), {"limit_train_batches": 3}),
    "limit as a share": (loader(Numbers(9)), {"limit_train_batches": 0.5}),
    "limited stream": (loader(Stream(9)), {"limit_train_batches": 3}),
    "limited cycle": (combined("max_size_cycle"), {"limit_train_batches": 2}),
    "max_steps": (loader(Numbers(9)), {"max_steps": 7, "max_epochs": -1}),
    "max_steps of a stream": (loader(Stream(9)), {"max_steps": 7, "max_epochs": -1}),
    "accumulation": (
        loader(Numbers(9)),
        {"max_steps": 5, "max_epochs": -1, "accumulate_grad_batches": 2},
    ),
    "reload every epoch": (
        lambda: shuffled(Numbers(9)),
        {"reload_dataloaders_every_n_epochs": 1},
    ),
    "reload every second epoch": (
        loader(Stream(6)),
        {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 5},
    ),
    "overfit": (loader(Numbers(9)), {"overfit_batches": 2}),
    "fast_dev_run": (loader(Numbers(9)), {"fast_dev_run": True}),
}


def quiet(strategy: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_epochs": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(accelerator="cpu", strategy=strategy, **{**settings, **options})


def fit(
    make: Callable[[], Any], look_ahead: bool, module: type[Recording] = Recording, **options: Any
) -> tuple[Recording, Trainer]:
    torch.manual_seed(3)
    random.seed(3)
    model = module(make)
    strategy = LookingAhead() if look_ahead else SingleDeviceStrategy("cpu")
    ckpt_path = options.pop("ckpt_path", None)
    trainer = quiet(strategy, **options)
    trainer.fit(model, ckpt_path=ckpt_path, weights_only=False)
    return model, trainer


def of(events: list[Any], *names: str) -> list[Any]:
    return [event for event in events if event[0] in names]


@pytest.mark.parametrize("case", CASES)
def test_batches_flags_and_hooks_are_those_of_an_ordinary_run(case: str) -> None:
    make, options = CASES[case]
    ordinary, _ = fit(make, False, **options)
    ahead, _ = fit(make, True, **options)
    assert ordinary.events
    # The loop's view, in order; and each transfer hook sees each batch once, in order.
    for names in [("start", "step", "end"), ("before",), ("transfer",), ("after",)]:
        assert of(ahead.events, *names) == of(ordinary.events, *names)


@pytest.mark.parametrize("case", CASES)
def test_a_peek_shows_the_next_batch_of_the_epoch_or_none_at_its_end(case: str) -> None:
    make, options = CASES[case]
    ahead, trainer = fit(make, True, **options)
    strategy = trainer.strategy
    assert isinstance(strategy, LookingAhead)
    taken = [plus(batch, 0.5) for _, batch in of(ahead.events, "after")]
    steps = of(ahead.events, "step")
    expected: list[Any] = []
    position = -1
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        position = taken.index(step[1], position + 1)
        upcoming = taken[position + 1] if position + 1 < len(taken) else None
        same_epoch = following is not None and following[2][0] == step[2][0]
        if same_epoch or (case == "yields None" and upcoming is None):
            expected.append((upcoming, step[2][1] + 1))
        else:
            expected.append(None)
    assert strategy.peeked == expected


def plus(values: Any, by: float) -> Any:
    """As ``moved``, of what ``plain`` gives."""
    if isinstance(values, dict):
        return {key: plus(value, by) for key, value in values.items()}
    if isinstance(values, list):
        return [plus(value, by) for value in values]
    return None if values is None else values + by


class Interrupted(Exception):
    pass


class FailsAt(Numbers):
    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 4:
            raise Interrupted("sample 4")
        return super().__getitem__(i)


class FailingTransfer(Recording):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if first_tensor(batch)[0] == 1004.0:
            raise Interrupted("batch 2")
        return super().on_after_batch_transfer(batch, dataloader_idx)


@pytest.mark.parametrize(
    ("make", "module"),
    [(loader(FailsAt(9)), Recording), (loader(Numbers(9)), FailingTransfer)],
    ids=["loader", "hook"],
)
def test_an_error_of_loader_or_hook_is_raised_as_it_is_at_the_peek(
    make: Callable[[], Any], module: type[Recording]
) -> None:
    with pytest.raises(Interrupted) as raised:
        fit(make, True, module)
    assert "peek" in [entry.name for entry in raised.traceback]


def test_a_loader_that_fails_at_once_fails_where_the_first_batch_is_peeked() -> None:
    class FailsAtOnce(Numbers):
        def __getitem__(self, i: int) -> torch.Tensor:
            raise Interrupted("nothing there")

    with pytest.raises(Interrupted, match="nothing there"):
        fit(loader(FailsAtOnce(4)), True)


def test_dataloader_iter_is_refused_with_what_to_do() -> None:
    class TakesIterator(Recording):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return None

    with pytest.raises(MisconfigurationException, match=r"def training_step\(self, batch"):
        fit(loader(Numbers(4)), True, TakesIterator)


class Counting:
    """A stateful loader of consecutive numbers, with or without a length."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.state = {"next": 0}

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.state["next"] < self.n:
            i = self.state["next"]
            self.state["next"] += 1
            yield torch.full((2, 1), float(i))
        self.state["next"] = 0

    def state_dict(self) -> dict[str, int]:
        return self.state  # changed in place: a copy has to be taken

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


class SizedCounting(Counting):
    def __len__(self) -> int:
        return self.n


class SaveAfter(Callback):
    def __init__(self, path: str, batch_idx: int) -> None:
        self.path, self.batch_idx = path, batch_idx

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if args[3] == self.batch_idx and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("kind", [SizedCounting, Counting])
@pytest.mark.parametrize("saved_after", [0, 2])
def test_a_resumed_run_continues_with_the_batch_after_the_one_trained(
    kind: type[Counting], saved_after: int, tmp_path: Any
) -> None:
    path = str(tmp_path / "saved.ckpt")
    whole, _ = fit(lambda: kind(5), True, max_epochs=1, callbacks=[SaveAfter(path, saved_after)])
    saved = torch.load(path, weights_only=False)["loops"]["fit_loop"]["state_dict"]
    assert saved["combined_loader"] == [{"next": saved_after + 1}]

    resumed, _ = fit(lambda: kind(5), True, max_epochs=1, ckpt_path=path)
    steps = of(whole.events, "step")
    assert of(resumed.events, "step") == steps[saved_after + 1 :]


def epochs_of_a_distributed_sampler() -> DataLoader[Any]:
    sampler: Any = DistributedSampler(Numbers(8), num_replicas=2, rank=1, shuffle=True)
    return DataLoader(Numbers(8), batch_size=2, sampler=sampler)


@pytest.mark.parametrize("epoch", [0, 1])
def test_samplers_are_set_to_the_epoch_also_after_resuming_from_its_end(epoch: int, tmp_path: Any) -> None:
    class SaveAtEnd(Callback):
        def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.current_epoch == epoch:
                trainer.save_checkpoint(tmp_path / "saved.ckpt")

    ordinary, _ = fit(epochs_of_a_distributed_sampler, False)
    ahead, _ = fit(epochs_of_a_distributed_sampler, True, callbacks=[SaveAtEnd()])
    assert of(ahead.events, "step") == of(ordinary.events, "step")

    resumed, _ = fit(epochs_of_a_distributed_sampler, True, ckpt_path=tmp_path / "saved.ckpt")
    assert of(resumed.events, "step") == of(ordinary.events, "step")[2 * (epoch + 1) :]


def test_a_sampler_that_was_left_at_another_epoch_starts_at_the_first() -> None:
    def used() -> DataLoader[Any]:
        dataloader = epochs_of_a_distributed_sampler()
        dataloader.sampler.set_epoch(5)  # type: ignore[attr-defined]
        return dataloader

    ordinary, _ = fit(used, False, max_epochs=1)
    for strategy in (LookingAhead(), LookingAhead(install_first=True)):
        ahead = Recording(used)
        quiet(strategy, max_epochs=1).fit(ahead)
        assert of(ahead.events, "step") == of(ordinary.events, "step")


def test_transfer_hooks_run_with_gradients_enabled_as_in_the_loop() -> None:
    enabled: list[bool] = []

    class Noting(Recording):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            enabled.append(torch.is_grad_enabled())
            return batch

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            fetcher = fetcher_of(self.trainer)
            assert fetcher is not None
            with torch.no_grad():
                fetcher.peek()
            return super().training_step(batch, batch_idx)

    fit(loader(Numbers(6)), True, Noting, max_epochs=1)
    assert enabled == [True] * 3


def test_only_the_peeked_batch_passes_through_unchanged() -> None:
    class Aside(Recording):
        def on_train_start(self) -> None:
            fetcher = fetcher_of(self.trainer)
            assert fetcher is not None
            batch, _, _ = next(fetcher)
            strategy = self.trainer.strategy
            assert plain(strategy.batch_to_device(torch.zeros(1))) == [0.5]
            assert plain(strategy.batch_to_device(batch)) == [1001.0, 1002.0]

    fit(loader(Numbers(2)), True, Aside, max_epochs=1, limit_train_batches=1)


def test_a_second_fit_of_one_trainer_goes_on_as_without_look_ahead() -> None:
    def twice(strategy: Any) -> Recording:
        model = Recording(epochs_of_a_distributed_sampler)
        trainer = quiet(strategy, max_epochs=2)
        trainer.fit(model)
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_epochs = 4  # type: ignore
        trainer.fit(model)
        return model

    ordinary, ahead = twice(SingleDeviceStrategy("cpu")), twice(LookingAhead())
    assert of(ahead.events, "step") == of(ordinary.events, "step")


def test_transfer_hooks_of_a_datamodule_run_once_per_batch() -> None:
    class Module(LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def train_dataloader(self) -> DataLoader[Any]:
            return loader(Numbers(5))()

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.seen.append(plain(batch))
            return batch + 0.25

    data = Module()
    model = Recording(lambda: None)
    quiet(LookingAhead(), max_epochs=1).fit(model, datamodule=data)
    assert data.seen == [[0, 1], [2, 3], [4]]
    assert [step[1] for step in of(model.events, "step")] == [[0.75, 1.75], [2.75, 3.75], [4.75]]


def test_hooks_that_draw_random_numbers_draw_once_per_batch() -> None:
    class Noisy(Recording):
        def __init__(self, loaders: Any) -> None:
            super().__init__(loaders)
            self.generator = torch.Generator().manual_seed(1)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch + torch.rand(batch.shape, generator=self.generator)

    ordinary, _ = fit(loader(Stream(9)), False, Noisy)
    ahead, _ = fit(loader(Stream(9)), True, Noisy)
    assert of(ahead.events, "start", "step", "end") == of(ordinary.events, "start", "step", "end")


def test_convert_input_runs_once_per_batch() -> None:
    converted: list[Any] = []

    class Counted(Recording):
        def setup(self, stage: str) -> None:
            plugin: Any = self.trainer.precision_plugin
            original = plugin.convert_input

            def convert_input(data: Any) -> Any:
                converted.append(plain(data))
                return original(data)

            plugin.convert_input = convert_input

    model, _ = fit(loader(Numbers(6)), True, Counted, max_epochs=1, precision="64-true")
    assert converted == [[0, 1], [2, 3], [4, 5]]
    assert len(of(model.events, "step")) == 3


def test_nothing_stays_on_the_users_objects() -> None:
    class Checked(Recording):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            trainer = self.trainer
            for owner in (self, trainer.strategy, trainer.precision_plugin):
                replaced = {"convert_input", "_on_before_batch_transfer", "batch_to_device"}
                assert not replaced & set(vars(owner))
            return super().training_step(batch, batch_idx)

    model, _ = fit(loader(Stream(6)), True, Checked)
    assert len(of(model.events, "step")) == 9
    model.loaders = None  # type: ignore[assignment]
    pickle.dumps(model.state_dict())


def test_where_nothing_is_trained_there_is_no_fetcher() -> None:
    model, trainer = fit(loader(Numbers(4)), True, limit_train_batches=0)
    assert install(trainer) is None
    assert fetcher_of(trainer) is None
    assert model.events == []


def test_an_empty_loader_shows_nothing() -> None:
    model, _ = fit(loader(Stream(0)), True)
    assert of(model.events, "step") == []


def test_a_fit_loop_of_the_users_own_keeps_its_methods() -> None:
    class Loop(_FitLoop):
        advanced = 0

        def advance(self) -> None:
            self.advanced += 1
            super().advance()

    trainer = quiet(LookingAhead(), max_epochs=2)
    loop = Loop(trainer, max_epochs=2)
    trainer.fit_loop = loop
    trainer.fit(Recording(loader(Numbers(4))))
    assert loop.advanced == 2
    assert isinstance(loop, Loop)


def test_fetchers_of_a_reload_look_ahead_too() -> None:
    fetchers: list[Any] = []

    class Noting(Recording):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            fetcher = fetcher_of(self.trainer)
            if fetcher not in fetchers:
                fetchers.append(fetcher)
            return super().training_step(batch, batch_idx)

    fit(loader(Numbers(4)), True, Noting, reload_dataloaders_every_n_epochs=1)
    assert len(fetchers) == 3
    assert all(isinstance(fetcher, LookAheadFetcher) for fetcher in fetchers)


def first_numbers_of_workers(replica: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    class Random(Numbers):
        def __getitem__(self, i: int) -> torch.Tensor:
            return torch.rand(1)

    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    torch.manual_seed(0)
    dataloader: DataLoader[torch.Tensor] = DataLoader(Random(4), num_workers=2)
    seed_workers(dataloader, replica)
    return [batch.item() for batch in dataloader]


def test_workers_are_seeded_by_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    first = first_numbers_of_workers(0, monkeypatch)
    assert first == first_numbers_of_workers(0, monkeypatch)
    assert first != first_numbers_of_workers(1, monkeypatch)


def test_a_worker_init_fn_of_the_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    own = DataLoader(Numbers(4), num_workers=1, worker_init_fn=print)
    seed_workers(own, 1)
    assert own.worker_init_fn is print
    seed_workers([1, 2], 1)  # no `DataLoader`: nothing to seed
