#!/usr/bin/env python3
"""What asynchrony costs in quality: final validation losses against one device, at equal steps.

Every run is one process that executes the schedule of D devices on one copy of the weights (``ReferenceStrategy``), so
nothing but the numerics differs; there are as many pipelines as the strategy takes for stages that cost the same, two
for four devices and four for eight. ``one device`` has no strategy and is run once for all D and M; ``synchronous``
(``max_staleness=0``) must equal it to rounding, and so must ``distributed``, D processes with the default settings,
equal ``predict``. ``perturbed`` is the noise floor: one device whose first weights are each changed by a ten-thousandth
of their size. A difference between two methods that is no larger means nothing. The other columns are named after what
the strategy is given, and after the methods of ``rivals.py``. A cell is the mean over seeds, in per cent of the loss of
one device with the same seed, and half the range of the seeds; "stale" is the share of stage forwards whose backward
met newer weights, "time" that of a step against a synchronous one, simulated (a backward takes two forwards, a message
.05 of one).

    python benchmarks/convergence.py --tasks gpt --optimizers adamw --factors 1 4 --seeds 0 1 2

Trainings run in an order in which the most telling ones come first. With ``--output results.jsonl`` each is written
down when it ends, those that are there already are not run again, and the table is of all that the file holds of what
was asked for. So a large table can be made in parts: ``--minutes`` ends a part, ``--minutes 0`` prints the table alone.
The models, their data and their learning rates are in ``tasks.py``. Muon takes matrices only: all other weights stay as
they begin, and the convolutional network has no Muon.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import logging
import math
import os
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import rivals
import torch
from schedules import equal_segments
from tasks import TASKS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_asyncpipe import AsyncMultiPipeStrategy, ReferenceStrategy
from lightning_asyncpipe.integration.partitioning import STALENESS_TOLERANCE
from lightning_asyncpipe.plan.choice import Request, choose_plan
from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.geometry import resolve
from lightning_asyncpipe.plan.profile import Boundary, Link, ModelProfile, Unit
from lightning_asyncpipe.plan.schedule import Planner
from lightning_asyncpipe.plan.simulator import simulate

BATCH = 16  # samples a step, unless there are more micro-batches
VALIDATION = 512  # samples
PERTURBATION = 1e-4  # of a weight, relative
MESSAGE = 0.05  # how long one takes, in forwards of a stage

REFERENCE, FLOOR, DISTRIBUTED, DEFAULT = "one device", "perturbed", "distributed", "predict"
MODES: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    FLOOR: {},
    "synchronous": {"max_staleness": 0},
    "none": {"staleness_correction": "none"},
    "stash": {"weight_stash": True},
    "extrapolate": {"staleness_correction": "extrapolate"},
    "predict": {"staleness_correction": "predict"},
    # A measured plan may differ from run to run.
    DISTRIBUTED: {"partition": "operations", "start_method": "spawn"},
}
OPTIMIZERS = ("adamw", "sgd", "muon")


class Trained(L.LightningModule):
    """A task's model with its loss and one optimizer: a linear warm-up, then a cosine down to a tenth."""

    def __init__(self, model: nn.Module, optimizer: str, rate: float, steps: int, mode: str) -> None:
        super().__init__()
        self.model, self.optimizer, self.rate, self.steps, self.mode = model, optimizer, rate, steps, mode
        if optimizer == "muon":
            for parameter in model.parameters():
                parameter.requires_grad_(parameter.ndim == 2)

    def loss(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        logits = self.model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer: torch.optim.Optimizer
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(trained, lr=self.rate, momentum=0.9)
        elif self.optimizer == "muon":
            optimizer = torch.optim.Muon(trained, lr=self.rate, weight_decay=0.01)
        else:
            changed = rivals.optimizer(self.mode, trained, self.rate)
            optimizer = changed or torch.optim.AdamW(trained, lr=self.rate, betas=rivals.BETAS)
        warmup = max(1, self.steps // 5)

        def factor(step: int) -> float:
            progress = (step - warmup) / max(1, self.steps - warmup)
            return (step + 1) / warmup if step < warmup else 0.55 + 0.45 * math.cos(math.pi * min(1.0, progress))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        factor: the number of micro-batches a step over that of devices.
        pipelines: as many as the strategy takes if 0.
    """

    task: str
    optimizer: str
    high: bool
    devices: int
    factor: int
    mode: str
    seed: int
    steps: int
    pipelines: int = 0

    @property
    def batch(self) -> int:
        """Samples a step."""
        return max(BATCH, self.factor * self.devices)

    def shared(self) -> Case:
        """The case that is run for this one: without early forwards, numbers of devices make no difference."""
        if self.mode in (REFERENCE, FLOOR) or self.mode.startswith("synchronous"):
            return replace(self, devices=4, factor=self.batch // 4 if self.batch > BATCH else 1, pipelines=0)
        return self


@torch.no_grad()
def perturb(module: nn.Module) -> None:
    """Change each weight a little, as rounding might in the course of training."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.mul_(1 + PERTURBATION * torch.randn(parameter.shape, generator=generator))


def train(case: Case) -> dict[str, float]:
    """The validation loss after the training, and the share of stale forwards."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    task = TASKS[case.task]
    L.seed_everything(case.seed, verbose=False)
    rate = task.rates[case.optimizer][case.high]
    module = Trained(task.model(), case.optimizer, rate, case.steps, case.mode)
    if case.mode == FLOOR:
        perturb(module)
    microbatches = case.factor * case.devices
    options = {**MODES, **rivals.MODES}[case.mode] | {"num_microbatches": microbatches}
    options["num_pipelines"] = case.pipelines or usual_pipelines(case.devices, microbatches)
    strategy: AsyncMultiPipeStrategy | None = None
    if case.mode == DISTRIBUTED:
        strategy = AsyncMultiPipeStrategy(**options)
    elif case.mode not in (REFERENCE, FLOOR):
        strategy = rivals.STRATEGIES.get(case.mode, ReferenceStrategy)(case.devices, **options)
    trainer = L.Trainer(
        strategy=strategy or "auto",
        devices=case.devices if case.mode == DISTRIBUTED else 1,
        accelerator="cpu",
        max_steps=case.steps,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        use_distributed_sampler=False,  # the same samples in the same order on one device
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(*task.data(case.batch * case.steps, case.seed, False))
    trainer.fit(module, DataLoader(data, case.batch))
    module.eval()
    parts = DataLoader(TensorDataset(*task.data(VALIDATION, 1_000_003, True)), 64)
    with torch.no_grad():
        loss = statistics.fmean(float(module.loss(batch)) for batch in parts)
    statistics_of = {} if strategy is None else strategy.statistics()
    return {"loss": loss, "stale": float(statistics_of.get("stale_share", 0.0))}


@functools.cache
def usual_pipelines(devices: int, microbatches: int) -> int:
    """How many the strategy takes for a model whose stages cost the same, where the memory is enough."""
    units = tuple(Unit(str(index), 1.0, 1.0, 1.0) for index in range(devices))
    profile = ModelProfile(units, (Boundary(1),) * (devices - 1), link=Link(MESSAGE))
    request = Request(devices, "auto", microbatches, "auto", split_backward=True, tolerance=STALENESS_TOLERANCE)
    return choose_plan(profile, request).geometry.num_pipelines


def step_time(devices: int, pipelines: int, microbatches: int, synchronous: bool) -> float:
    """Of a step after several equal ones, simulated, in forwards of a stage."""
    geometry = resolve(devices, devices, pipelines, microbatches, "auto", 1, True)
    costs = Costs.uniform(devices, message=MESSAGE)
    planner = Planner(geometry.placement, geometry.max_in_flight, costs, True, tolerance=STALENESS_TOLERANCE)
    segments = equal_segments(planner, microbatches, 0 if synchronous else microbatches, 8)
    return simulate(geometry.placement, segments, costs).time_per_segment(4)


def table(cases: Iterable[Case], results: dict[Case, dict[str, float]], modes: list[str]) -> str:
    """One row for each task, optimizer, learning rate, number of devices and of micro-batches."""
    rows: dict[tuple[Any, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        found, reference = results.get(case.shared()), results.get(replace(case, mode=REFERENCE).shared())
        if found is None or reference is None:
            continue
        row = rows[case.task, case.optimizer, case.high, case.devices, case.factor, case.pipelines]
        loss = found["loss"]
        row[case.mode].append(loss if case.mode == REFERENCE else 100 * (loss / reference["loss"] - 1))
        if found["stale"]:
            row["stale"].append(found["stale"])
    columns = [mode for mode in modes if mode != REFERENCE]
    lines = [f"{'':<34}{REFERENCE:>13}" + "".join(f"{mode:>28}" for mode in columns) + f"{'stale':>8}{'time':>6}"]
    for (name, optimizer, high, devices, factor, pipelines), cells in sorted(rows.items()):
        number = pipelines or usual_pipelines(devices, factor * devices)
        title = f"{name} {optimizer} {'high' if high else 'ordinary'} D={devices} N={number} M={factor}D"
        line = f"{title:<34}"
        line += f"{statistics.fmean(cells[REFERENCE]):>13.4f}"
        for mode in columns:
            values = cells[mode]
            spread = (max(values) - min(values)) / 2 if values else 0.0
            line += f"{statistics.fmean(values):>+18.2f} % ± {spread:<5.2f}" if values else f"{'-':>28}"
        line += f"{statistics.fmean(cells['stale']):>8.1%}" if cells["stale"] else f"{'':>8}"
        lines.append(line + f"{_time_share(devices, number, factor * devices):>6.2f}")
    return "\n".join(lines)


@functools.cache
def _time_share(devices: int, pipelines: int, microbatches: int) -> float:
    return step_time(devices, pipelines, microbatches, False) / step_time(devices, pipelines, microbatches, True)


def in_order(cases: Iterable[Case]) -> list[Case]:
    """The most telling ones first: the default, the floor, and few deviations from an ordinary case."""

    def rank(case: Case) -> tuple[Any, ...]:
        unusual = (case.optimizer != "adamw") + case.high + (case.factor > 1) + (case.devices > 4)
        other = case.mode not in (REFERENCE, FLOOR, DEFAULT)
        return (2 * unusual + other + (2 * case.seed if unusual else 0), case.seed, unusual, case.devices, case.factor)

    return sorted(cases, key=rank)


def read(path: Path | None) -> dict[Case, dict[str, float]]:
    """What a file of earlier trainings holds."""
    if path is None or not path.exists():
        return {}
    found = {}
    for entry in map(json.loads, path.read_text().splitlines()):
        values = {key: entry.pop(key) for key in ("loss", "stale")}
        found[Case(**entry)] = values
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Final losses of asynchronous training against one device.")
    emulated = [mode for mode in MODES if mode != DISTRIBUTED]
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--rates", nargs="+", choices=["ordinary", "high"], default=["ordinary", "high"])
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--pipelines", type=int, default=0, help="0: as many as the strategy takes")
    parser.add_argument("--factors", nargs="+", type=int, default=[1, 2, 4], help="micro-batches a step, over devices")
    parser.add_argument("--modes", nargs="+", choices=[*MODES, *rivals.MODES], default=emulated)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="trainings at a time")
    parser.add_argument("--output", type=Path, help="file of results, to which new ones are added")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no training after that time")
    args = parser.parse_args()
    modes = [REFERENCE, *(mode for mode in args.modes if mode != REFERENCE)]
    wanted = in_order(
        Case(task, optimizer, rate == "high", devices, factor, mode, seed, args.steps, args.pipelines)
        for task, optimizer, rate, devices, factor, mode, seed in itertools.product(
            args.tasks, args.optimizers, args.rates, args.devices, args.factors, modes, args.seeds
        )
        if optimizer in TASKS[task].rates and (optimizer == "adamw" or mode in MODES)
    )
    results = read(args.output)
    end = time.monotonic() + 60 * args.minutes
    left = iter([case for case in dict.fromkeys(case.shared() for case in wanted) if case not in results])
    with ProcessPoolExecutor(args.processes) as pool:
        running: dict[Future[dict[str, float]], Case] = {}
        while True:
            while len(running) < args.processes and time.monotonic() < end and (case := next(left, None)):
                running[pool.submit(train, case)] = case
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                case = running.pop(future)
                results[case] = future.result()
                line = json.dumps(asdict(case) | results[case])
                print(line, flush=True)
                if args.output is not None:
                    with args.output.open("a") as file:
                        file.write(line + "\n")
    print(f"\n{table(wanted, results, modes)}")


if __name__ == "__main__":
    main()
