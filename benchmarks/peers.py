#!/usr/bin/env python3
"""Utilisation of the schedules in ``torch.distributed.pipelining`` on emulated devices.

A device is a process whose compute is a sleep, so that as many devices as one likes fit on few
cores; autograd and the messages (gloo, small on purpose) are real. The forward, the input gradient
and the weight gradient of a stage each take the same time. Utilisation is the compute that a step
asks of each device, micro-batches x 3 x forward time, over the time that the step took.

    python benchmarks/peers.py --devices 4 --microbatches 4 8 16 --forward-ms 20
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.multiprocessing.spawn import spawn

WIDTH = 256  # numbers in one sample of a message
SAMPLES = 4  # samples in a micro-batch
WARMUP = 1  # steps that are not measured: the first one also exchanges shapes and opens connections
SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first and the last stage are both on rank 0


class SleepInForwardAndInputGradient(torch.autograd.Function):
    """Identity that takes ``seconds`` forwards, and again where its input's gradient is found."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0].clone(), None


class SleepInWeightGradient(torch.autograd.Function):
    """Identity on a weight that takes ``seconds`` where the weight's gradient is computed."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0].clone(), None


class SleepingLayer(nn.Module):
    """(samples, ``WIDTH``) to the same; F, I and W take ``seconds`` each, B = I + W twice that."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = SleepInForwardAndInputGradient.apply(x, self.seconds)  # type: ignore[no-untyped-call]
        weight: Tensor = SleepInWeightGradient.apply(self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return shifted + weight


@dataclass(frozen=True)
class Case:
    """One schedule on ``devices`` devices with ``microbatches`` micro-batches in a step."""

    schedule: str
    devices: int
    microbatches: int
    forward_seconds: float
    steps: int

    def possible(self) -> bool:
        """DualPipeV asks for two micro-batches a device at least."""
        return self.schedule != "DualPipeV" or self.microbatches >= 2 * self.devices


@dataclass(frozen=True)
class Row:
    """What is printed of a case: its median step, and the share of it that a device computes."""

    schedule: str
    devices: int
    microbatches: int
    step_ms: float
    utilisation: float


def row(case: Case, step_seconds: float) -> Row:
    ideal = case.microbatches * 3 * case.forward_seconds
    return Row(
        case.schedule,
        case.devices,
        case.microbatches,
        round(step_seconds * 1e3, 1),
        round(ideal / step_seconds, 3),
    )


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _stages(case: Case, rank: int) -> list[PipelineStage]:
    """The stages of a rank; where the schedule has two to a rank, each has half the work."""
    single = issubclass(get_schedule_class(case.schedule), PipelineScheduleSingle)
    if single:
        indices = [rank]
    elif case.schedule in V_SHAPED:
        indices = [rank, 2 * case.devices - 1 - rank]
    else:
        indices = [rank, case.devices + rank]
    total = case.devices * len(indices)
    seconds = case.forward_seconds / len(indices)
    return [PipelineStage(SleepingLayer(seconds), index, total, torch.device("cpu")) for index in indices]


def _device(rank: int, case: Case, port: int, result: str) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=case.devices)
    stages = _stages(case, rank)
    kind: Any = get_schedule_class(case.schedule)
    schedule = kind(
        stages[0] if issubclass(kind, PipelineScheduleSingle) else stages,
        n_microbatches=case.microbatches,
        loss_fn=_squared_error,
    )
    batch = torch.zeros(SAMPLES * case.microbatches, WIDTH)
    inputs = (batch,) if any(stage.is_first for stage in stages) else ()
    targets = {"target": batch, "losses": []} if any(stage.is_last for stage in stages) else {}
    seconds = []
    for _ in range(WARMUP + case.steps):
        dist.barrier()
        start = time.perf_counter()
        schedule.step(*inputs, **targets)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        Path(result).write_text(str(statistics.median(seconds[WARMUP:])))
    dist.destroy_process_group()


def free_port() -> int:
    """A TCP port that nothing listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def measure(case: Case) -> Row:
    """Run a case in processes of its own."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "seconds"
        arguments = (case, free_port(), str(result))
        spawn(_device, args=arguments, nprocs=case.devices)  # type: ignore[no-untyped-call]
        return row(case, float(result.read_text()))


def measure_all(
    devices: int,
    microbatches: list[int],
    forward_seconds: float,
    steps: int = 4,
    names: tuple[str, ...] = SCHEDULES,
) -> Iterator[Row]:
    """Every schedule at every number of micro-batches, as far as it can run there."""
    for number in microbatches:
        for name in names:
            case = Case(name, devices, number, forward_seconds, steps)
            if case.possible():
                yield measure(case)


def spread(values: list[float], digits: int) -> str:
    """The smallest, the median and the largest; the value if there is one."""
    shown = values if len(values) == 1 else (min(values), statistics.median(values), max(values))
    return " / ".join(f"{value:,.{digits}f}" for value in shown)


def main() -> None:
    parser = argparse.ArgumentParser(description="Utilisation of torch.distributed.pipelining.")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--forward-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    args = parser.parse_args()
    for result in measure_all(
        args.devices,
        args.microbatches,
        args.forward_ms / 1e3,
        args.steps,
        tuple(args.schedules),
    ):
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
