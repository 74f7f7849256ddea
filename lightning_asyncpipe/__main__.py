"""``python -m lightning_asyncpipe``: run a script, look at a schedule or a checkpoint, make one file of parts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration.inspection import describe
from lightning_asyncpipe.integration.script import run_module, run_script
from lightning_asyncpipe.integration.sharded import consolidate
from lightning_asyncpipe.plan.costs import Costs
from lightning_asyncpipe.plan.geometry import resolve
from lightning_asyncpipe.plan.overview import MESSAGE, overview

_RUN = """\
Run a script as `python script.py ...` would, with the strategy registered: `Trainer(strategy="async_multipipe")`, or
`strategy: async_multipipe` in a configuration file, works in scripts that do not import this package. The processes of
the other ranks are started in the same way. All arguments after the script's name are its own."""
_PLAN = """\
Print the schedule of a step, and what it is simulated to cost, for stages that take the same time: a forward is 1."""
_INSPECT = """\
Print the names, shapes and types of the weights and optimizer states in a checkpoint, and how far its training had
come. Nothing that the file holds is run: one that holds more than tensors and plain values is refused."""
_CONSOLIDATE = """\
Turn a folder into which ranks have written their parts of a checkpoint into the one file that one device would have
written. The whole checkpoint passes through the memory of this machine."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line asks for."""
    parser, commands = _parsers()
    options = parser.parse_args(arguments)
    command = commands[options.command]
    if options.command == "run":
        _run(options, command)
        return
    try:
        if options.command == "plan":
            print(_plan(options))
        elif options.command == "inspect":
            print(describe(options.checkpoint))
        else:
            print(consolidate(options.folder, options.file))
    except (ValueError, PipelineError, OSError) as error:
        command.error(str(error))


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    parser = argparse.ArgumentParser("python -m lightning_asyncpipe", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    run = commands.add_parser("run", help="run a script that does not import this package", description=_RUN)
    run.add_argument("-m", dest="module", action="store_true", help="the script is a module, as in `python -m`")
    run.add_argument("script", help="file name, or with -m the name of a module")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")

    plan = commands.add_parser("plan", help="look at a schedule", description=_PLAN)
    plan.add_argument("--stages", type=int, required=True, help="D, stages and devices")
    for name, text in (
        ("pipelines", "N, pipelines that run at once"),
        ("microbatches", "M, micro-batches of a step"),
        ("in-flight", "w, micro-batches that a pipeline takes in before a backward comes back"),
    ):
        plan.add_argument(f"--{name}", type=int, help=f"{text}; as the strategy chooses if left out")
    plan.add_argument(
        "--max-staleness", type=int, choices=(0, 1), default=1, help="0 drains the pipelines at each step"
    )
    plan.add_argument("--no-split-backward", dest="split", action="store_false", help="keep backwards in one piece")
    plan.add_argument("--backward", type=float, default=2.0, help="time of a backward, in forwards (%(default)s)")
    plan.add_argument("--message", type=float, default=MESSAGE, help="time of a message (%(default)s)")
    plan.add_argument("--no-grid", dest="grid", action="store_false", help="print the figures alone")

    inspect = commands.add_parser("inspect", help="look at a checkpoint", description=_INSPECT)
    inspect.add_argument("checkpoint", type=Path, help="a file, or a folder that ranks have written in parts")

    one = commands.add_parser("consolidate", help="turn a checkpoint in parts into one file", description=_CONSOLIDATE)
    one.add_argument("folder", type=Path, help="a checkpoint saved with save_distributed_checkpoint=True")
    one.add_argument("file", type=Path, nargs="?", help="to write; the folder's name with .consolidated by default")
    return parser, {"run": run, "plan": plan, "inspect": inspect, "consolidate": one}


def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if options.module:
        run_module(options.script, options.arguments)
    elif os.path.isfile(options.script):
        run_script(options.script, options.arguments)
    else:
        parser.error(f"there is no file {options.script}; a module is run with -m")


def _plan(options: argparse.Namespace) -> str:
    split = options.split and options.stages > 1
    geometry = resolve(
        options.stages,
        options.stages,
        options.pipelines if options.pipelines is not None else "auto",
        options.microbatches if options.microbatches is not None else "auto",
        options.in_flight if options.in_flight is not None else "auto",
        split_backward=split,
    )
    costs = Costs.uniform(geometry.num_stages, backward=options.backward, message=options.message)
    return overview(geometry, costs, options.max_staleness == 0, split, options.grid)


if __name__ == "__main__":
    main(sys.argv[1:])
