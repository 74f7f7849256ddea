"""The tasks of ``convergence.py``: models whose children are called one after the other, data, and learning rates.

Two models learn bytes of the standard library's sources, the next one or hidden ones, two to classify noisy pictures.

The high learning rate of a task is the largest of a doubling grid with which one device ends within 5 % of the grid's
best loss (1 % for the encoder, whose losses span little) and with a floor below 1 %: with twice it, training is worse
or no longer reproducible.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_gpt import GPT, RandomCrops, standard_library_files

LENGTH = 64  # bytes of a text
MASK, MASKED = 0, 0.15  # the byte that hides another one, and the share that is hidden
SIDE, CLASSES = 16, 10  # of an image, of a classification
NOISE = 1.6  # of a pixel, whose signal has a standard deviation of 1


class Encoder(nn.Module):
    """A BERT-like encoder of bytes, normalised before each part: (batch, time) to logits (batch, time, 256)."""

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class VisionTransformer(nn.Module):
    """Images (batch, 1, SIDE, SIDE) to logits (batch, CLASSES)."""

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIDE // 4) ** 2, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


class Residual(nn.Module):
    """A convolution beside which its input goes on, at first alone: (batch, channels, height, width) to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, channels)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.convolution(x)))


class ConvolutionalNetwork(nn.Module):
    """A small residual network with group normalisation; images (batch, 1, SIDE, SIDE) to logits (batch, CLASSES)."""

    def __init__(self, channels: int = 16, depth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.layers = nn.ModuleList(Residual(channels) for _ in range(depth))
        self.norm, self.head = nn.GroupNorm(4, channels), nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(F.relu(self.norm(x)).mean((2, 3)))
        return logits


def texts(count: int, seed: int, held_out: bool) -> Tensor:
    """Crops of the standard library's sources, (count, LENGTH + 1) bytes; every tenth file is held out."""
    contents = [path.read_bytes() for i, path in enumerate(standard_library_files()) if (i % 10 == 9) == held_out]
    crops = RandomCrops(torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8), LENGTH, count, seed)
    return torch.stack([crops[i] for i in range(count)])


def language(count: int, seed: int, held_out: bool) -> list[Tensor]:
    crops = texts(count, seed, held_out)
    return [crops[:, :-1], crops[:, 1:]]


def masked_language(count: int, seed: int, held_out: bool) -> list[Tensor]:
    """Every sample hides the same number of bytes, so that means over samples and over bytes agree."""
    targets = texts(count, seed, held_out)[:, :-1]
    generator = torch.Generator().manual_seed(seed + 7)
    hidden = torch.rand(targets.shape, generator=generator).argsort(1) < round(MASKED * LENGTH)
    return [torch.where(hidden, MASK, targets), torch.where(hidden, targets, -100)]


def pictures(count: int, seed: int, held_out: bool) -> list[Tensor]:
    """Noisy pictures of two waves each, whose directions make the class."""
    generator = torch.Generator().manual_seed(2 * seed + held_out)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    images = torch.zeros(count, SIDE, SIDE)
    for multiple in (1, 3):
        angle = (labels * multiple * math.pi / CLASSES)[:, None, None]
        phase = 2 * math.pi * torch.rand(count, 1, 1, generator=generator)
        images += torch.sin(0.9 * multiple**0.5 * (rows * angle.cos() + columns * angle.sin()) + phase)
    noise = NOISE * torch.randn(images.shape, generator=generator)
    return [(images + noise)[:, None], labels]


@dataclass(frozen=True)
class Task:
    """A model, its data, and an ordinary and a high learning rate for each optimizer."""

    model: Callable[[], nn.Module]
    data: Callable[[int, int, bool], list[Tensor]]
    rates: dict[str, tuple[float, float]]


TASKS = {
    "gpt": Task(
        lambda: GPT(64, 8, 4, LENGTH),
        language,
        {"adamw": (2e-3, 1.2e-2), "sgd": (0.05, 0.4), "muon": (0.01, 0.04)},
    ),
    "bert": Task(Encoder, masked_language, {"adamw": (2e-3, 1.2e-2), "sgd": (0.1, 0.2), "muon": (0.02, 0.08)}),
    "vit": Task(VisionTransformer, pictures, {"adamw": (1e-3, 4e-3), "sgd": (0.05, 0.1), "muon": (0.005, 0.02)}),
    "cnn": Task(ConvolutionalNetwork, pictures, {"adamw": (3e-3, 1.2e-2), "sgd": (0.05, 0.1)}),
}
