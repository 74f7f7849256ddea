"""A project that is driven by a configuration file, and does not know of this package.

The strategy is named in ``configured.yaml``; the script is started by the command that registers it:

    python -m lightning_asyncpipe run examples/configured.py fit --config examples/configured.yaml

Every value can be changed on the command line, such as ``--trainer.strategy.init_args.max_staleness 0``, and ``--help``
and ``--print_config`` show what there is. ``--trainer.strategy async_multipipe`` is the strategy with its defaults. Go
on from a checkpoint with ``--ckpt_path``.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(self.norm(x))  # type: ignore[no-any-return]


class Spirals(L.LightningDataModule):
    """Points on spirals in a plane, one spiral for each class.

    Args:
        classes: number of spirals.
        points: number of points in the training set; the others have a quarter as many.
        batch_size: points in a batch.
        noise: how far points lie beside their spiral.
    """

    def __init__(self, classes: int = 3, points: int = 1024, batch_size: int = 64, noise: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.classes, self.points, self.noise = classes, points, noise

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self._points(self.points, 0), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self._points(self.points // 4, 1), self.batch_size)

    def test_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self._points(self.points // 4, 2), self.batch_size)

    def predict_dataloader(self) -> DataLoader[Batch]:
        return self.test_dataloader()

    def _points(self, count: int, seed: int) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(seed)
        label = torch.randint(self.classes, (count,), generator=generator)
        radius = torch.rand(count, generator=generator)
        angle = 6 * radius + label * (2 * torch.pi / self.classes)
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
        return TensorDataset(points + 0.1 * self.noise * torch.randn(count, 2, generator=generator), label)


class Classifier(L.LightningModule):
    """A tower of residual layers.

    Args:
        classes: number of classes.
        width: of the layers.
        depth: number of residual layers.
        learning_rate: of AdamW, at its highest.
    """

    def __init__(self, classes: int = 3, width: int = 32, depth: int = 6, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.stem = nn.Linear(2, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))  # type: ignore[no-any-return]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        points, label = batch
        loss = F.cross_entropy(self(points), label)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)  # type: ignore[no-any-return]

    def _evaluate(self, batch: Batch, stage: str) -> None:
        points, label = batch
        logits = self(points)
        self.log(f"{stage}_loss", F.cross_entropy(logits, label), prog_bar=True)
        self.log(f"{stage}_accuracy", (logits.argmax(1) == label).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


if __name__ == "__main__":
    LightningCLI(Classifier, Spirals)
