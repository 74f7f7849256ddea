#!/usr/bin/env python3
"""An existing Lightning project, and the one line that changes.

A small residual network learns to tell nine kinds of generated pictures apart. It has what a
project usually has: a LightningModule that logs a loss and a metric, an optimizer with a scheduler,
a ModelCheckpoint that keeps the best epoch, and a prediction on new data from the checkpoint that
was kept.

    python examples/existing_project.py

The changed line is marked in ``main``. Beside it there is one import, without which Lightning does
not know the strategy's name.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_asyncpipe  # noqa: F401  (registers the name "async_multipipe")

SIZE, CLASSES = 16, 9


def pictures(count: int, seed: int) -> TensorDataset:
    """Noisy gratings: the class says which of 3 directions and which of 3 widths the stripes have.

    Images of shape (count, 1, ``SIZE``, ``SIZE``), labels of shape (count,) from 0 to ``CLASSES`` -
    1.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angles = (labels % 3) * torch.pi / 3
    frequencies = 0.5 + 0.4 * (labels // 3)
    phases = 2 * torch.pi * torch.rand(count, generator=generator)
    ys, xs = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = xs * angles.cos()[:, None, None] + ys * angles.sin()[:, None, None]
    images = torch.sin(frequencies[:, None, None] * along + phases[:, None, None])
    images = images + 2.0 * torch.randn(images.shape, generator=generator)
    return TensorDataset(images[:, None], labels)


class Residual(nn.Module):
    """Two convolutions and a shortcut; (batch, channels, height, width) to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y


class Classifier(L.LightningModule):
    def __init__(self, channels: int = 16, depth: int = 6, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Conv2d(1, channels, 3, stride=2, padding=1),
            *(Residual(channels) for _ in range(depth)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_accuracy", accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        assert self.trainer.max_epochs is not None
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return [optimizer], [scheduler]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an image classifier on generated pictures.")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--directory", default="lightning_logs/existing_project")
    args = parser.parse_args()

    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    checkpoint = ModelCheckpoint(dirpath=args.directory, monitor="train_loss_epoch", mode="min", save_last=True)
    trainer = L.Trainer(
        strategy="async_multipipe",  # <- the changed line; before: strategy="auto"
        devices=args.devices,
        accelerator="cpu",
        max_epochs=args.epochs,
        logger=CSVLogger(args.directory),
        callbacks=[checkpoint, LearningRateMonitor()],
        log_every_n_steps=10,
    )
    loader = DataLoader(pictures(args.samples, seed=1), batch_size=64, shuffle=True)
    trainer.fit(Classifier(), loader)

    if trainer.is_global_zero:
        model = Classifier.load_from_checkpoint(
            checkpoint.best_model_path, map_location="cpu", weights_only=True
        ).eval()
        images, labels = pictures(1024, seed=2).tensors
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == labels).float().mean()
        print(f"best epoch: {checkpoint.best_model_path}")
        print(f"its accuracy on new pictures: {accuracy:.3f}")


if __name__ == "__main__":
    main()
