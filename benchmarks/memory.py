#!/usr/bin/env python3
"""What each process holds of a model that is built in ``configure_model``: predicted, and measured as resident memory.

A GPT of about 1.5 GB of float32 parameters is trained by a process for each device. Printed are, per process: what
resident memory grew by until training begins (the weights), the most that it grew by on the way there, the bytes of the
optimizer's state, and the most that it grew by in training, beside what the plan predicts. Allocations go back to the
system when they are freed (``MALLOC_MMAP_THRESHOLD_``), so that resident memory is what is used. Needs Linux, and about
15 GB of memory for the full model.

    python benchmarks/memory.py [--width 1920 --blocks 8] [--precision bf16-mixed]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_asyncpipe import AsyncMultiPipeStrategy

LENGTH, VOCABULARY = 16, 5632
MB = 1e6


class Block(nn.Module):
    """A block of a GPT: (samples, length, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        changed: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return changed


class Model(L.LightningModule):
    """A GPT whose layers are built where the strategy can do it without memory."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers: Any = None

    def configure_model(self) -> None:
        if self.layers is None:
            width, blocks = self.hparams["width"], self.hparams["blocks"]
            middle = [Block(width) for _ in range(blocks)]
            self.layers = nn.Sequential(nn.Embedding(VOCABULARY, width), *middle, nn.Linear(width, VOCABULARY))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layers(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def resident(kind: str = "VmRSS") -> int:
    """Bytes of this process that are in memory (``VmRSS``), or the most that were (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def forget_peak() -> None:
    """Count the most memory in use from now on."""
    Path("/proc/self/clear_refs").write_text("5")


class Meter(L.Callback):
    """Takes down this process's memory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.found: dict[str, Any] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.start = resident()
        forget_peak()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.found["weights"] = resident() - self.start
        self.found["setup_peak"] = resident("VmHWM") - self.start
        self.found["model"] = sum(p.nbytes for p in pl_module.parameters())
        forget_peak()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.found["peak"] = resident("VmHWM") - self.start
        state = trainer.optimizers[0].state.values()
        tensors = [value for entry in state for value in entry.values() if isinstance(value, Tensor)]
        self.found["optimizer"] = sum(tensor.nbytes for tensor in tensors)
        self.found["predicted"] = trainer.strategy.describe()["devices"][trainer.global_rank]["memory"]
        (self.directory / f"{trainer.global_rank}.json").write_text(json.dumps(self.found))


def train(args: argparse.Namespace) -> None:
    """Train in this process and its launcher's; each writes what it measured."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=AsyncMultiPipeStrategy(
            num_pipelines=args.pipelines,
            num_microbatches=args.microbatches,
            partition=args.partition,
            staleness_correction="extrapolate",
        ),
        devices=args.devices,
        accelerator="cpu",
        precision=args.precision,
        max_steps=args.steps,
        callbacks=[Meter(args.result)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.randint(VOCABULARY, (args.microbatches * args.steps, LENGTH + 1))
    trainer.fit(Model(args.width, args.blocks), DataLoader(tokens, batch_size=args.microbatches))  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of each process, predicted and measured.")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--pipelines", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--width", type=int, default=1920)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--partition", default="profile")
    parser.add_argument("--precision", default="32-true")
    # set in the process of a run
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.result is not None:
        train(args)
        return

    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, os.fspath(Path(__file__).resolve()), *sys.argv[1:], "--result", directory]
        subprocess.run(command, check=True, env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"})
        found = [json.loads((Path(directory) / f"{rank}.json").read_text()) for rank in range(args.devices)]
    model = found[0]["model"]
    print(f"model {model / MB:,.0f} MB; {args.devices} processes, {args.pipelines} pipelines")
    columns = (
        f"{'weights':>16} {'most in setup':>16} {'optimizer state':>18} {'peak':>9} {'predicted':>10} {'ratio':>6}"
    )
    print(f"{'':>7} {columns}")
    for rank, each in enumerate(found):
        share = each["optimizer"] / (2 * model / args.devices)
        total = each["predicted"]["total"]
        print(
            f"rank {rank:>2} {each['weights'] / MB:>8,.0f} ({each['weights'] / model:>4.0%}) "
            f"{each['setup_peak'] / MB:>8,.0f} ({each['setup_peak'] / model:>4.0%}) "
            f"{each['optimizer'] / MB:>7,.0f} ({share:.2f} of 1/D) "
            f"{each['peak'] / MB:>8,.0f} {total / MB:>10,.0f} {each['peak'] / total:>6.2f}"
        )


if __name__ == "__main__":
    main()
