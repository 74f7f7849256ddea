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
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch import nn
from torch.nn import functional as F

from tests.support.evaluated import WIDTH, Classifier, How, Run, points, run
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


class Normalised(Classifier):
    """Has tied weights, a frozen layer and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(WIDTH), self.net)
        self.net[1][3][0].weight = self.net[1][0][0].weight
        self.net[1][2].requires_grad_(False)
        self.double()  # callbacks copy the model before its precision is set


def averaged(done: Run, path: Path) -> Any:
    """The weights that a training has ended with, before and after it is validated once more, and what it saved."""
    before = {name: tensor.clone() for name, tensor in done.module.state_dict().items()}
    validated = done.trainer.validate(done.module, points(14, 4, seed=1), verbose=False)
    return before, dict(done.module.state_dict()), validated, done.trainer.is_global_zero and all_saved(done, path)


class Holds(EMAWeightAveraging):
    """Tells the module of which parameters it holds averages."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        assert self._average_model is not None
        averages = self._average_model.module.named_parameters()
        module.seen = [name for name, parameter in averages if parameter.device.type != "meta"]


def averaged_and_resumed(how: How, path: Path, **strategy: Any) -> list[Any]:
    """What a training with a moving average ends with, also once it was interrupted and resumed; and what it held."""

    def trained(**loaded: Any) -> tuple[dict[str, Any], list[str]]:
        callbacks = [Holds(decay=0.6), ModelCheckpoint(path, "{step}", save_top_k=-1)]
        loaders = {"train_dataloaders": points(20), "val_dataloaders": points(14, 4, seed=1)}
        call = ("fit", {**loaders, **loaded})
        arguments = {"max_epochs": 3, "enable_checkpointing": True, "callbacks": callbacks}
        done = run(Normalised, how, call, strategy={"num_stages": 2, **strategy}, **arguments)
        return dict(done.module.state_dict()), done.module.seen

    (whole, held), (resumed, _) = trained(), trained(ckpt_path=path / "step=10.ckpt")
    return [whole, resumed, held]


class Called(LambdaCallback):
    """Takes down when its functions are called."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        super().__init__(
            on_train_epoch_end=lambda trainer, module: self.seen.append(("epoch", trainer.current_epoch)),
            on_validation_end=lambda trainer, module: self.seen.append(("validation", trainer.global_step)),
        )


class RichSummary(RichModelSummary):
    """Takes down what it would print."""

    def __init__(self) -> None:
        super().__init__(max_depth=2)
        self.seen: Any = None

    def summarize(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        self.seen = args


class KeepsMore(Classifier):
    """Puts something of its own in checkpoints, and brings callbacks that do."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["more"] = self.global_step

    def configure_callbacks(self) -> Any:
        return [Keeps()]


class Keeps(pl.Callback):
    """Counts batches, and keeps the count in checkpoints."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["and more"] = self.count


class SavesInValidation(pl.Callback):
    """Saves while batches of a validation are under way, and at its end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def _save(self, trainer: pl.Trainer, when: str) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.directory / f"{when}-{trainer.global_step}.ckpt")

    def on_validation_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        if batch_idx == 1:
            self._save(trainer, "middle")

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._save(trainer, "end")


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


def all_saved(done: Run, path: Path) -> Any:
    """What is in all checkpoints below a directory, but for the names of directories."""
    found = {str(file.relative_to(path)): torch.load(file, weights_only=True) for file in path.rglob("*.ckpt")}
    assert found
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "epoch", "global_step", "more", "and more")
    kept += ("current_model_state", "averaging_state")
    return {
        name: {"Keeps": checkpoint["callbacks"].get("Keeps"), **{key: checkpoint.get(key) for key in kept}}
        for name, checkpoint in found.items()
    }


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
    if not done.trainer.is_global_zero and see in (logged, saved_files, all_saved):
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
    "checkpoints in the course of validation",
    Plateau,
    all_saved,
    enable_checkpointing=True,
    val_check_interval=2,
    max_epochs=2,
    callbacks=lambda path: [
        SavesInValidation(path),
        ModelCheckpoint(path, "best-{step}", "val_loss", save_top_k=2, save_last=True),
        ModelCheckpoint(path, "often-{step}", "val_loss", save_top_k=-1, every_n_train_steps=3),
    ],
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
use(
    "throughput",
    Classifier,
    nothing,
    logger=csv_logger,
    log_every_n_steps=1,
    callbacks=lambda _: [ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=4)],
)
use("a watch for spikes", Classifier, nothing, callbacks=lambda _: [SpikeDetection(rtol=9.0, atol=9.0)])
use(
    "a moving average of weights",
    Normalised,
    averaged,
    enable_checkpointing=True,
    max_epochs=2,
    val_check_interval=2,
    callbacks=lambda path: [EMAWeightAveraging(decay=0.6), ModelCheckpoint(path, "{step}", save_top_k=-1)],
)
use(
    "an average of weights",
    Normalised,
    averaged,
    accumulate_grad_batches=2,
    enable_checkpointing=True,
    callbacks=lambda path: [WeightAveraging(use_buffers=False), ModelCheckpoint(path, "{step}", save_top_k=-1)],
)
use("functions as callbacks", Classifier, callback_seen, callbacks=lambda _: [Called()])
use("a rich summary", Classifier, callback_seen, enable_model_summary=True, callbacks=lambda _: [RichSummary()])
use(
    "checkpoints where nothing is said",
    KeepsMore,
    all_saved,
    default_root_dir=lambda path: path,
    enable_checkpointing=True,
    enable_autolog_hparams=False,
    benchmark=True,
    max_time={"hours": 9},
    model_registry="a-name",
    max_epochs=2,
)
use(
    "checkpoints by the clock",
    Classifier,
    all_saved,
    enable_checkpointing=True,
    max_epochs=1,
    callbacks=lambda path: [ModelCheckpoint(path, save_top_k=-1, train_time_interval=timedelta(0))],
)
use("a summary", Classifier, callback_seen, enable_model_summary=True, callbacks=lambda _: [Summary()])
use("a progress bar", Classifier, callback_seen, enable_progress_bar=True, callbacks=lambda _: [Bar()])
use("a rich progress bar", Classifier, nothing, enable_progress_bar=True, callbacks=lambda _: [RichProgressBar()])
use("a profiler", Classifier, timed, profiler=lambda path: SimpleProfiler(path, "times"))
use("a thorough profiler", Classifier, nothing, profiler=lambda path: AdvancedProfiler(path, "calls"))
use("a profiler of operations", Classifier, nothing, profiler=lambda path: PyTorchProfiler(path, "ops"), max_epochs=1)
for _place in ("start", "step", "validation", "epoch"):
    use(f"one rank stops at {_place}", lambda place=_place: Stops(place), nothing)  # type: ignore[misc]
use("one rank stops at batch", lambda: StopsAfterBatches("batch"), nothing)
