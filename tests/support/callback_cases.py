"""Trainings with Lightning's callbacks, loggers, schedulers and profilers, and what can be seen of them."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch.nn import functional as F

from tests.support.evaluated import Classifier, How, Run, points, run
from tests.support.evaluation_cases import Logs


class Diverges(Classifier):
    """Gets worse all the time."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.5, maximize=True)


class Plateau(Diverges):
    """Its learning rate falls when validation gets no better."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.5, maximize=True)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Stops(Classifier):
    """One rank decides in some place that it is enough."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _stop(self, where: str, now: bool = True) -> None:
        if where == self.where and now and self.trainer.global_rank == self.trainer.world_size - 1:
            self.trainer.should_stop = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._stop("step", batch_idx == 2)
        return F.cross_entropy(self.logits(batch[0]), batch[1])

    def on_train_start(self) -> None:
        self._stop("start")

    def on_validation_end(self) -> None:
        self._stop("validation", not self.trainer.sanity_checking)

    def on_train_epoch_end(self) -> None:
        self._stop("epoch")


class StopsAfterBatches(Stops):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stop("batch", batch_idx == 1)


class Summary(ModelSummary):
    """Takes down what it would print."""

    def __init__(self) -> None:
        super().__init__(max_depth=2)
        self.seen: Any = None

    def summarize(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.seen = args


class Bar(TQDMProgressBar):
    """Takes down how far its bars got."""

    def __init__(self) -> None:
        super().__init__(leave=False)
        self.seen: list[Any] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.seen.append((self.val_progress_bar.n, self.val_progress_bar.total))
        super().on_validation_end(trainer, module)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seen.append((self.train_progress_bar.n, self.get_metrics(trainer, module)))
        super().on_train_epoch_end(trainer, module)


def progress(done: Run) -> Any:
    trainer = done.trainer
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return trainer.global_step, trainer.current_epoch, rates, metrics


def table(directory: Path) -> list[dict[str, str]]:
    """What a CSVLogger has written, its numbers rounded."""
    with (directory / "metrics.csv").open() as file:
        return [{name: f"{float(value):.9g}" for name, value in row.items() if value} for row in csv.DictReader(file)]


def saved(done: Run) -> Any:
    """The files of a ModelCheckpoint, what it thinks of them, and what is in the best."""
    callback = done.trainer.checkpoint_callback
    assert isinstance(callback, ModelCheckpoint)
    best = torch.load(callback.best_model_path, weights_only=True)
    return (
        sorted(os.listdir(str(callback.dirpath))),
        Path(callback.best_model_path).name,
        float(callback.best_model_score),
        best["state_dict"],
        best["global_step"],
    )


def profiled(done: Run) -> Any:
    """The names of what a profiler timed, without that of the strategy."""
    profiler: Any = done.trainer.profiler
    names = getattr(profiler, "recorded_durations", None) or profiler.profiled_actions
    return sorted(name.partition("]")[0] + "]" + name.rpartition(".")[2] for name in names if "Strategy]" in name)


Callbacks = Callable[[Path], dict[str, Any]]
USES: dict[str, tuple[Callable[[], pl.LightningModule], Callbacks, Callable[[Run, Path], Any]]] = {}


def use(name: str, module: Callable[[], pl.LightningModule], see: Callable[[Run, Path], Any], **made: Any) -> None:
    """Add a use: arguments of the Trainer may be functions of a directory."""
    USES[name] = (module, lambda path: {k: v(path) if callable(v) else v for k, v in made.items()}, see)


def observe(name: str, how: How, directory: Path, **strategy: Any) -> Any:
    """Fit with a use in a directory of its own, and look at what it left."""
    module, arguments, see = USES[name]
    path = directory / how / name.replace(" ", "_")
    loaders = {"train_dataloaders": points(20), "val_dataloaders": points(14, 4, seed=1)}
    chosen = {"max_epochs": 4, **arguments(path)}
    done = run(module, how, ("fit", loaders), strategy=strategy, **chosen)
    if not done.trainer.is_global_zero and see in (logged, saved_files):
        return progress(done)
    return progress(done), see(done, path)


def nothing(done: Run, path: Path) -> Any:
    return None


def callback_seen(done: Run, path: Path) -> Any:
    return next(c.seen for c in done.trainer.callbacks if hasattr(c, "seen"))  # type: ignore[attr-defined]


def logged(done: Run, path: Path) -> Any:
    return table(path)


def saved_files(done: Run, path: Path) -> Any:
    return saved(done)


def timed(done: Run, path: Path) -> Any:
    return profiled(done)


def csv_logger(path: Path) -> CSVLogger:
    return CSVLogger(path.parent, name=path.name, version="")


use(
    "early stopping",
    Diverges,
    nothing,
    callbacks=lambda _: [EarlyStopping("val_loss", patience=2)],
)
use(
    "early stopping after so many steps",
    Diverges,
    nothing,
    callbacks=lambda _: [EarlyStopping("val_loss", patience=0)],
    min_steps=13,
    min_epochs=2,
)
use(
    "checkpoints by what is monitored",
    Classifier,
    saved_files,
    enable_checkpointing=True,
    callbacks=lambda path: [ModelCheckpoint(path, "{epoch}-{step}", "val_loss", save_top_k=2)],
)
use(
    "a logger of tables",
    Logs,
    logged,
    logger=csv_logger,
    log_every_n_steps=2,
    callbacks=lambda _: [LearningRateMonitor()],
)
use(
    "a scheduler that waits for validation",
    Plateau,
    logged,
    logger=csv_logger,
    callbacks=lambda _: [LearningRateMonitor()],
)
use(
    "accumulation that changes",
    Classifier,
    nothing,
    callbacks=lambda _: [GradientAccumulationScheduler({1: 2, 2: 5})],
)
use("a timer", Classifier, nothing, callbacks=lambda _: [Timer(timedelta(seconds=0))])
use("a timer with time", Classifier, nothing, callbacks=lambda _: [Timer(timedelta(hours=9), interval="epoch")])
use("statistics of the device", Classifier, nothing, logger=csv_logger, callbacks=lambda _: [DeviceStatsMonitor()])
use("a summary", Classifier, callback_seen, enable_model_summary=True, callbacks=lambda _: [Summary()])
use("a progress bar", Classifier, callback_seen, enable_progress_bar=True, callbacks=lambda _: [Bar()])
use("a rich progress bar", Classifier, nothing, enable_progress_bar=True, callbacks=lambda _: [RichProgressBar()])
use("a profiler", Classifier, timed, profiler=lambda path: SimpleProfiler(path, "times"))
use("a thorough profiler", Classifier, nothing, profiler=lambda path: AdvancedProfiler(path, "calls"))
use("a profiler of operations", Classifier, nothing, profiler=lambda path: PyTorchProfiler(path, "ops"), max_epochs=1)
for _place in ("start", "step", "validation", "epoch"):
    use(f"one rank stops at {_place}", lambda place=_place: Stops(place), nothing)  # type: ignore[misc]
use("one rank stops at batch", lambda: StopsAfterBatches("batch"), nothing)
