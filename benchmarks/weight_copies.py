#!/usr/bin/env python3
"""What it saves that micro-batches in flight share one low-precision copy of the weights under ``bf16-mixed``.

One process emulates all devices, so its memory is the sum over them. The model is wide layers with few rows for each
micro-batch: its weights dominate, as those of a large model do on devices that hold few samples at a time.

Steps with and without sharing alternate in one run, for the ratio of their times; two further runs measure the largest
resident memory of each, beyond what the process had when training began.

    python benchmarks/weight_copies.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import lightning as L
import torch
from memory import resident
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_asyncpipe import ReferenceStrategy

WARMUP = 2  # steps before times count
MEBIBYTE = 2**20


class WideModel(L.LightningModule):
    """Residual layers: (rows, width) to the same, mean square error to the input."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Switch(L.Callback):
    """Turns sharing on and off, takes the time of each step, and the memory in which training began."""

    def __init__(self, sharing: str) -> None:
        self.sharing = sharing
        self.copies: Any = None
        self.begin = 0.0
        self.memory = 0
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.runner = trainer.strategy._require_assembly().runner  # type: ignore[attr-defined]
        self.copies = self.runner.copies
        self.memory = resident()
        self._set(0)

    def _set(self, step: int) -> None:
        on = step % 2 == 1 if self.sharing == "alternating" else self.sharing == "on"
        self.runner.copies = self.copies if on else None
        self.begin = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        took = time.perf_counter() - self.begin
        if trainer.global_step > WARMUP:
            self.seconds[self.runner.copies is not None].append(took)
        self._set(trainer.global_step)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train in this process; peak memory in bytes and the seconds of steps without and with sharing."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = WARMUP + 2 * args.steps if args.sharing == "alternating" else 3
    switch = Switch(args.sharing)
    strategy = ReferenceStrategy(
        args.devices,
        num_pipelines=args.pipelines,
        num_microbatches=args.microbatches,
        max_in_flight=args.max_in_flight,
    )
    trainer = L.Trainer(
        strategy=strategy,
        precision="bf16-mixed",
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[switch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    rows = args.rows * args.microbatches
    data = torch.randn(steps * rows, args.width)
    trainer.fit(WideModel(args.width, args.layers), DataLoader(data, rows))  # type: ignore[arg-type]
    return {"peak": resident("VmHWM") - switch.memory, "off": switch.seconds[False], "on": switch.seconds[True]}


def child(sharing: str) -> dict[str, Any]:
    """:func:`measure` in a process of its own; where memory is measured, what is freed goes back to the system."""
    environment = dict(os.environ)
    if sharing != "alternating":
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    command = [sys.executable, __file__, *sys.argv[1:], "--sharing", sharing]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--pipelines", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--max-in-flight", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="measured, with sharing and without it each")
    parser.add_argument("--sharing", choices=["on", "off", "alternating"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sharing:
        print(json.dumps(measure(args)))
        return
    weights = args.width**2 * args.layers
    off, on = child("off")["peak"], child("on")["peak"]
    times = child("alternating")
    without, shared = statistics.median(times["off"]), statistics.median(times["on"])
    print(f"weights: {weights * 4 / MEBIBYTE:.0f} MiB in float32, {weights * 2 / MEBIBYTE:.0f} MiB in bfloat16")
    print(f"{'':<16}{'peak memory beyond weights':>28}{'seconds a step':>16}")
    print(f"{'own copies':<16}{off / MEBIBYTE:>24.0f} MiB{without:>16.2f}")
    print(f"{'shared copies':<16}{on / MEBIBYTE:>24.0f} MiB{shared:>16.2f}")
    print(f"{'ratio':<16}{on / off:>28.2f}{shared / without:>16.2f}")


if __name__ == "__main__":
    main()
