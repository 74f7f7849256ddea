#!/usr/bin/env python3
"""Real compute on two devices of one thread each: this strategy beside one process, DDP and torch's schedules.

A GPT is trained with AdamW on random tokens, with the same model, batch and number of micro-batches everywhere: by one
single-threaded process and by two with Lightning's DDP, both through the Trainer; by this strategy with two devices, as
one pipeline and as two, for which both devices hold the whole model; and by ``torch.distributed.pipelining``'s 1F1B and
ZBV driven by hand, stages of as many blocks each. *Two apart* are two processes that train a model each and exchange
nothing: what the machine's two cores can do at most, since they share memory and its bandwidth. Every case runs in
processes of its own, in turn, several times over, so that what else the machine does meets all of them. Memory is the
most that the resident memory of a process grew by from before the model was built, in a run of its own; of all
processes of a case the largest. Needs Linux and two cores.

    python benchmarks/real.py --repeats 5
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from child import command
from memory import MB, Block, forget_peak, resident
from peers import V_SHAPED, free_port, spread
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader

from lightning_asyncpipe import AsyncMultiPipeStrategy

DEVICES, VOCABULARY = 2, 1024
PIPELINES = {"async_multipipe, N = 1": 1, "async_multipipe, N = 2": 2}
ONE, APART = "one process", "two apart"
WITH_TRAINER = (ONE, APART, "ddp", *PIPELINES)
CASES = (*WITH_TRAINER, "1F1B", "ZBVZeroBubble")
WARMUP = 3  # optimizer steps that are not measured
# Of the C library's allocator. Giving freed memory back to the system and getting it again takes time, much and not
# the same in every run; keeping it hides what is in use. So speed and memory are measured in runs of their own.
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class Embedding(nn.Module):
    """Tokens (samples, length) to (samples, length, width)."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.token(tokens) + self.position.weight
        return embedded


def layers(args: argparse.Namespace) -> list[nn.Module]:
    """The model's layers, with the same weights in every process."""
    torch.manual_seed(0)
    blocks = [Block(args.width) for _ in range(args.blocks)]
    return [Embedding(args.width, args.length), *blocks, nn.Linear(args.width, VOCABULARY)]


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def tokens_of(args: argparse.Namespace, steps: int) -> Tensor:
    return torch.randint(VOCABULARY, (steps * args.batch, args.length), generator=torch.Generator().manual_seed(1))


class Model(L.LightningModule):
    """The GPT as a LightningModule."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers(args))
        self.step_ends: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.layers(batch), batch)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.step_ends.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.parameters())


class Meter:
    """Measures the memory of this process from now on, and writes what was measured."""

    def __init__(self, result: Path) -> None:
        self._result = result
        forget_peak()
        self._before = resident()

    def write(self, rank: int, ends: list[float]) -> None:
        """`ends`: when each optimizer step ended."""
        seconds = [after - before for before, after in itertools.pairwise(ends[WARMUP - 1 :])]
        measured = {"seconds": statistics.median(seconds), "memory": (resident("VmHWM") - self._before) / MB}
        self._result.with_suffix(f".{rank}").write_text(json.dumps(measured))


def run_with_trainer(args: argparse.Namespace) -> None:
    """One process, DDP or this strategy."""
    meter = Meter(args.result)
    pipelines = PIPELINES.get(args.case)
    strategy: Any = "ddp" if args.case == "ddp" else "auto"
    if pipelines is not None:
        strategy = AsyncMultiPipeStrategy(num_pipelines=pipelines, num_microbatches=args.microbatches)
    alone = args.case in (ONE, APART)
    devices = 1 if alone else DEVICES
    accumulated = args.microbatches if alone else args.microbatches // DEVICES if args.case == "ddp" else 1
    rows = args.batch // args.microbatches if pipelines is None else args.batch
    steps = WARMUP + args.steps
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        max_steps=steps,
        accumulate_grad_batches=accumulated,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Model(args)
    # Lightning hands a batch to optimizer_step only where it steps, so ends are those of optimizer steps.
    trainer.fit(module, DataLoader(tokens_of(args, steps), batch_size=rows))  # type: ignore[arg-type]
    meter.write(trainer.global_rank, module.step_ends)


def run_by_hand(rank: int, args: argparse.Namespace, port: int) -> None:
    """A rank of a schedule of torch's."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=DEVICES)
    meter = Meter(args.result)
    kind: Any = get_schedule_class(args.case)
    v_shaped = args.case in V_SHAPED
    total = 2 * DEVICES if v_shaped else DEVICES
    indices = [rank, total - 1 - rank] if v_shaped else [rank]
    parts = []
    for index in indices:
        every = layers(args)
        first, last = index * args.blocks // total, (index + 1) * args.blocks // total
        begin, end = (first + 1 if index else 0), (last + 1 if index < total - 1 else args.blocks + 2)
        parts.append(nn.Sequential(*every[begin:end]))
        del every
    stages = [PipelineStage(part, i, total, torch.device("cpu")) for part, i in zip(parts, indices, strict=True)]
    schedule = kind(stages if v_shaped else stages[0], n_microbatches=args.microbatches, loss_fn=loss_of)
    optimizer = optimizer_of([p for part in parts for p in part.parameters()])
    ends = []
    for batch in tokens_of(args, WARMUP + args.steps).view(-1, args.batch, args.length):
        losses: list[Tensor] = []
        inputs = (batch,) if any(stage.is_first for stage in stages) else ()
        targets = {"target": batch, "losses": losses} if any(stage.is_last for stage in stages) else {}
        schedule.step(*inputs, **targets)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    meter.write(rank, ends)
    dist.barrier()
    dist.destroy_process_group()


def run_case(args: argparse.Namespace) -> None:
    """Runs in the process of a case."""
    torch.set_num_threads(1)
    if args.case in WITH_TRAINER:
        run_with_trainer(args)
    else:
        spawn(run_by_hand, args=(args, free_port()), nprocs=DEVICES)  # type: ignore[no-untyped-call]


def run(case: str, args: argparse.Namespace, allocator: dict[str, str]) -> list[dict[str, float]]:
    """What the ranks of a case measure; there are two runs of one rank where nothing is exchanged."""
    with tempfile.TemporaryDirectory() as directory:
        names = ("width", "blocks", "length", "batch", "microbatches", "steps")
        given = {name: getattr(args, name) for name in names}
        running = [
            subprocess.Popen(
                command(__file__, {**given, "case": case, "result": Path(directory) / f"result{copy}"}),
                env=os.environ | {"OMP_NUM_THREADS": "1"} | allocator,
                stdout=subprocess.DEVNULL,
            )
            for copy in range(DEVICES if case == APART else 1)
        ]
        for process in running:
            process.wait()
        if any(process.returncode for process in running):
            raise SystemExit(f"{case} failed")
        return [json.loads(path.read_text()) for path in Path(directory).glob("result*.*")]


def seconds_of(case: str, args: argparse.Namespace) -> float:
    """Seconds a step: the largest of all processes."""
    slowest = max(rank["seconds"] for rank in run(case, args, KEEPING))
    return slowest / DEVICES if case == APART else slowest


def megabytes_of(case: str, args: argparse.Namespace) -> float:
    """MB: the largest of all processes."""
    return max(rank["memory"] for rank in run(case, args, GIVING_BACK))


def main() -> None:
    parser = argparse.ArgumentParser(description="Real compute on two devices.")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="samples in an optimizer step")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps that are measured in each run")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    # set in the process of a case
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        run_case(args)
        return
    memory = {case: megabytes_of(case, args) for case in args.cases}
    found: dict[str, list[float]] = {case: [] for case in args.cases}
    for _ in range(args.repeats):
        for case in args.cases:
            found[case].append(seconds_of(case, args))
            print(json.dumps({"case": case, "seconds": found[case][-1]}), flush=True)
    print(
        f"\n{args.repeats} runs: smallest / median / largest; speed as a multiple of the one process in the same turn"
    )
    print(f"{'':<24}{'seconds a step':>26}{'samples a second':>26}{'times one process':>26}{'memory, MB':>12}")
    for case, seconds in found.items():
        times = [alone / each for alone, each in zip(found.get(ONE, []), seconds, strict=False)]
        cells = spread(seconds, 2), spread([args.batch / s for s in seconds], 2), spread(times, 2) if times else "-"
        print(f"{case:<24}" + "".join(f"{cell:>26}" for cell in cells) + f"{memory[case]:>12,.0f}")


if __name__ == "__main__":
    main()
