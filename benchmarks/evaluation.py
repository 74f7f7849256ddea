#!/usr/bin/env python3
"""What validation inside ``fit`` costs on emulated devices.

The devices are those of ``emulated.py``. Every few optimizer steps some batches are validated. Printed are

* the utilisation of the validation: each batch costs every device one forward, so forward time over the time for a
  batch; with batches looked ahead, and one by one, as where ``on_validation_batch_start`` is overridden;
* what draining the pipelines costs: by how much the step after a validation takes longer than other steps, in forwards.

    python benchmarks/evaluation.py --devices 4 --forward-ms 20
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from child import measured
from emulated import SleepingModel
from peers import SAMPLES, WIDTH
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_asyncpipe import AsyncMultiPipeStrategy

STEPS, EVERY, VALIDATED = 24, 4, 32  # optimizer steps, steps between validations, batches of a validation


class Validated(SleepingModel):
    """Validates with the same layers."""

    def __init__(self, depth: int, forward_seconds: float) -> None:
        super().__init__(depth, forward_seconds)
        self.validations: list[tuple[float, float]] = []

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        x = batch + self.embedding
        for layer in self.layers:
            x = layer(x)
        self.log("validation", (x - batch).square().mean())

    def on_validation_epoch_start(self) -> None:
        self.started = time.perf_counter()

    def on_validation_epoch_end(self) -> None:
        self.validations.append((self.started, time.perf_counter()))


class OneByOne(Validated):
    """Has code that runs before each batch, so that none may start before it."""

    def on_validation_batch_start(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        pass


def train(devices: int, forward_seconds: float, look_ahead: bool, result: Path) -> None:
    """Fit in this process and its launcher's; rank 0 writes what it measured."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    cuts = [f"layers.{stage}" for stage in range(1, devices)]
    trainer = L.Trainer(
        strategy=AsyncMultiPipeStrategy(num_microbatches=4 * devices, cuts=cuts),
        devices=devices,
        accelerator="cpu",
        max_steps=STEPS,
        val_check_interval=EVERY,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = (Validated if look_ahead else OneByOne)(devices, forward_seconds)
    size = SAMPLES * 4 * devices
    training: Any = torch.zeros(size * STEPS, WIDTH)
    validation: Any = torch.zeros(SAMPLES * VALIDATED, WIDTH)
    trainer.fit(module, DataLoader(training, size), DataLoader(validation, SAMPLES))
    if trainer.is_global_zero:
        result.write_text(json.dumps({"ends": module.step_ends, "validations": module.validations}))


def measure(devices: int, forward_seconds: float, look_ahead: bool) -> tuple[float, float]:
    """Utilisation of validation, and the forwards that a step after it takes longer than others; medians."""
    found = measured(__file__, devices=devices, forward_ms=forward_seconds * 1e3, one_by_one=not look_ahead)
    ends, validations = found["ends"], found["validations"]
    busy = [VALIDATED * forward_seconds / (end - start) for start, end in validations[1:]]
    after = [ends[EVERY * (i + 1)] - validations[i][1] for i in range(1, len(validations) - 1)]
    others = [ends[i] - ends[i - 1] for i in range(EVERY, len(ends)) if i % EVERY]
    return statistics.median(busy), (statistics.median(after) - statistics.median(others)) / forward_seconds


def main() -> None:
    """Measure, or be one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--one-by-one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    seconds = arguments.forward_ms / 1e3
    if arguments.result is not None:
        train(arguments.devices, seconds, not arguments.one_by_one, arguments.result)
        return
    ahead, drained = measure(arguments.devices, seconds, True)
    alone, _ = measure(arguments.devices, seconds, False)
    print(
        f"utilisation of validation, {VALIDATED} batches, D = {arguments.devices}: {ahead:.3f}; one by one: {alone:.3f}"
    )
    print(f"a step after validation takes {drained:.1f} forwards longer, of {12 * arguments.devices} that a step takes")


if __name__ == "__main__":
    main()
