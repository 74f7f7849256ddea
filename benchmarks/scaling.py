#!/usr/bin/env python3
"""How cost grows, simulated: utilisation and planning time up to 32 devices and 256 micro-batches, and large GPTs.

A forward takes 1, each half of a backward 1, a message a tenth. Segments of M micro-batches follow one another, each
with an optimizer step, until nothing changes; utilisation is that of the devices then, early the share of forwards that
run before the step preceding their batch. Planning is the processor time for the first segment. 1F1B is its formula,
M / (M + D - 1), without messages.

The second table is what the planner makes of a GPT of width 2,048 with sequences of 1,024 tokens, a vocabulary of
50,257 and one sequence a micro-batch, in 16 bits, from numbers of operations: devices that do 100 Tflop/s, links of
20 GB/s and 10 us. The head is a unit of its own that weighs as much as two blocks, so that stages are not even. Beside
it, the same model in stages of as many units under 1F1B, whose longest stage sets the pace; its optimizer and its
messages take no time.

    python benchmarks/scaling.py [--devices 4 8 16 32]
"""

from __future__ import annotations

import argparse
import math
import time

from schedules import MESSAGE, settled

from lightning_asyncpipe.plan.choice import Request, choose_plan
from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.geometry import resolve
from lightning_asyncpipe.plan.profile import Boundary, Link, ModelProfile, Unit, Weights
from lightning_asyncpipe.plan.schedule import Planner, SegmentSpec

WIDTH, LENGTH, VOCABULARY = 2048, 1024, 50257
FLOPS, LINK = 100e12, Link(10e-6, 20e9)
SEGMENTS, SETTLED = 8, 3


def planning_seconds(planner: Planner, microbatches: int) -> float:
    """Processor time of planning the first segment."""
    started = time.process_time()
    planner.segment(SegmentSpec(microbatches, microbatches, updated=False))
    return time.process_time() - started


def growth(sizes: list[int]) -> None:
    """Prints the table over devices, pipelines and micro-batches."""
    print("  D   N   w    M |  utilisation  early  planning | 1F1B")
    for devices in sizes:
        for pipelines in sorted({2, devices // 2}):
            geometry = resolve(devices, num_pipelines=pipelines, split_backward=True)
            placement, costs = geometry.placement, Costs.uniform(devices, message=MESSAGE)
            for microbatches in [m for m in (devices, 2 * devices, 4 * devices, 256) if m <= 256]:
                planner = Planner(placement, geometry.max_in_flight, costs, True)
                seconds = planning_seconds(planner, microbatches)
                utilisation, early = settled(planner, microbatches, SEGMENTS, SETTLED)
                print(
                    f"{devices:3d} {pipelines:3d} {geometry.max_in_flight:3d} {microbatches:4d} |"
                    f"     {utilisation:.3f}     {early:.3f}   {seconds:5.2f} s |"
                    f" {microbatches / (microbatches + devices - 1):.3f}",
                    flush=True,
                )


def gpt(blocks: int) -> ModelProfile:
    """A GPT's profile, from numbers of operations and of bytes."""
    message = LENGTH * WIDTH * 2
    per_block, per_head = 12 * WIDTH**2, VOCABULARY * WIDTH
    attention = 2 * LENGTH**2 * WIDTH  # of scores and of values, half of them masked
    forward = [0.0] + [(2 * per_block * LENGTH + attention) / FLOPS] * blocks + [2 * per_head * LENGTH / FLOPS]
    saved = [0] + [12 * message] * blocks + [LENGTH * VOCABULARY * 2]
    names = ["embedding", *(f"block {i}" for i in range(blocks)), "head"]
    units = tuple(Unit(n, f, f, f, 0.0, s, (i,)) for i, (n, f, s) in enumerate(zip(names, forward, saved, strict=True)))
    sizes = [per_head, *[per_block] * blocks, per_head]
    weights = tuple(Weights(n, size, 2 * size, 4 * size, 12 * size) for n, size in zip(names, sizes, strict=True))
    return ModelProfile(units, (Boundary(message, "bfloat16", (1, LENGTH, WIDTH)),) * (blocks + 1), weights, LINK)


def one_f_one_b(profile: ModelProfile, devices: int, microbatches: int) -> float:
    """Utilisation of 1F1B on stages of as many units: the longest one's pace, and filling and draining."""
    count = len(profile.units)
    cuts = [round(stage * count / devices) - 1 for stage in range(1, devices)]
    stages = profile.stages(cuts)
    longest = max(stage.forward + stage.input_grad + stage.weight_grad for stage in stages)
    whole = sum(profile.work())
    return microbatches * whole / devices / ((microbatches - 1) * longest + whole)


def paper_scale() -> None:
    """Prints the table of large models."""
    print("\nblocks  D    M | N   w  step     utilisation  early | 1F1B, equal stages")
    for blocks in (24, 48):
        profile = gpt(blocks)
        for devices in (4, 8):
            for factor in (1, 4):
                microbatches = factor * devices
                request = Request(devices, "auto", microbatches, "auto", split_backward=True)
                chosen = choose_plan(profile, request)
                _, early = settled(chosen.planner, microbatches, SEGMENTS, SETTLED)
                utilisation = microbatches * math.fsum(profile.work()) / devices / chosen.step_seconds
                print(
                    f"{blocks:6d} {devices:2d} {microbatches:4d} | {chosen.geometry.num_pipelines:d} "
                    f"{chosen.geometry.max_in_flight:3d} {chosen.step_seconds * 1e3:6.1f} ms     {utilisation:.3f}     "
                    f"{early:.3f} | {one_f_one_b(profile, devices, microbatches):.3f}",
                    flush=True,
                )


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", default=[4, 8, 16, 32], help="sizes of the first table")
    growth(parser.parse_args().devices)
    paper_scale()


if __name__ == "__main__":
    main()
