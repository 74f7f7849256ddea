"""Modules that are evaluated, and one way to run them on one device, on emulated devices or as one of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
import torchmetrics as tm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_asyncpipe import AsyncMultiPipeStrategy, ReferenceStrategy

CLASSES, WIDTH, STAGES = 3, 6, 3
How = Literal["one", "emulated", "ranks"]


class Classified(Dataset[tuple[Tensor, Tensor]]):
    """Points with one of three classes; a function of their number alone."""

    def __init__(self, count: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
        self.y = (self.x[:, 0] > 0).long() + (self.x[:, 1] > 0.5).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def points(count: int, batch_size: int = 4, seed: int = 0) -> DataLoader[Any]:
    """A loader whose last batch is smaller, unless the sizes divide."""
    return DataLoader(Classified(count, seed), batch_size=batch_size)


class Classifier(pl.LightningModule):
    """A tower of layers, trained without logging anything."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.seen: list[Any] = []

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def forward(self, batch: Any) -> Tensor:
        return self.logits(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.logits(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", F.cross_entropy(self.logits(batch[0]), batch[1]), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.3)


class Takes(pl.Callback):
    """Takes down what was logged, when, and whether the module evaluates."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _take(self, trainer: pl.Trainer, what: str) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        bars = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
        logged = {name: float(value) for name, value in trainer.logged_metrics.items()}
        self.seen.append((what, trainer.global_step, trainer.sanity_checking, values, bars, logged))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *idx: int) -> None:
        assert not module.training
        assert not torch.is_grad_enabled()
        self.seen.append((idx, outputs))

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._take(trainer, "validation")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._take(trainer, "epoch")

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        assert module.training
        self._take(trainer, "batch")


class Run(NamedTuple):
    """What a run gave back."""

    trainer: pl.Trainer
    module: pl.LightningModule
    results: list[Any]


def run(
    module: Callable[[], pl.LightningModule],
    how: How,
    *calls: tuple[str, dict[str, Any]],
    strategy: dict[str, Any] | None = None,
    **trainer_arguments: Any,
) -> Run:
    """Make a module and a Trainer and call its methods.

    Args:
        module: builds it.
        how: on one device, on emulated devices, or as one of several ranks.
        calls: names of the Trainer's methods and their arguments beside the module.
        strategy: arguments of the strategy; synchronous whole batches by default, which equal one device.
        trainer_arguments: of the Trainer.
    """
    torch.manual_seed(3)
    made = module()
    options: dict[str, Any] = {"num_microbatches": 1, "max_staleness": 0, **(strategy or {})}
    chosen: Any = "auto"
    if how == "emulated":
        chosen = ReferenceStrategy(options.pop("num_stages", STAGES), **options)
    elif how == "ranks":
        chosen = AsyncMultiPipeStrategy(**options)
    devices = options.get("num_stages", STAGES) * options.get("data_parallel_size", 1) if how == "ranks" else 1
    trainer = pl.Trainer(
        strategy=chosen,
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "devices": devices,
            "precision": "64-true",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            **trainer_arguments,
        },
    )
    return Run(trainer, made, [getattr(trainer, name)(made, **arguments) for name, arguments in calls])


def assert_same(found: Any, expected: Any, where: str = "", tolerance: float = 1e-9) -> None:
    """Equal to rounding, through containers."""
    assert isinstance(found, type(expected)) or isinstance(expected, type(found)), (where, found, expected)
    if isinstance(expected, dict):
        assert set(found) == set(expected), (where, set(found) ^ set(expected))
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]", tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), (where, len(found), len(expected))
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{i}]", tolerance)
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.allclose(found, expected, atol=tolerance, rtol=tolerance, equal_nan=True), where
    elif isinstance(expected, float):
        same = found == expected or (found != found and expected != expected)
        assert same or abs(found - expected) <= tolerance * max(1.0, abs(expected)), (where, found, expected)
    else:
        assert found == expected, (where, found, expected)


def metrics_of_all_kinds() -> tm.MetricCollection:
    """Three metrics, two of which have the same state."""
    return tm.MetricCollection(
        {
            "precision": tm.Precision("multiclass", num_classes=CLASSES, average="macro"),
            "recall": tm.Recall("multiclass", num_classes=CLASSES, average="macro"),
            "matrix": tm.Accuracy("multiclass", num_classes=CLASSES),
        },
        prefix="m_",
    )
