"""A script as a user starts it; ``python popen_script.py SCENARIO DIRECTORY WORLD_SIZE``.

It uses the launcher without a Trainer: what is in ``train`` stands for ``trainer.fit``. Each rank
leaves a file with its pid in the directory; ``failing`` holds the time of the failure.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_asyncpipe.integration.popen_launcher import PopenLauncher
from lightning_asyncpipe.runtime.channels import GlooTransport, MessageKey
from lightning_asyncpipe.runtime.failure import FailureBoard

WORLD = int(sys.argv[3])
LAST = WORLD - 1
KEY = MessageKey(0, 0, 0, 0, 0)


class Boom(Exception):
    """The error of the rank that fails first."""


def main(scenario: str, directory: Path) -> None:
    torch.set_num_threads(1)
    environment = LightningEnvironment()
    launcher = PopenLauncher(environment, WORLD, 1)
    launcher.launch(train, launcher, environment, scenario, directory)
    if scenario == "one_works_on_after_the_run" and environment.local_rank() == 1:
        time.sleep(2)
        (directory / "worked-on").touch()
    if scenario == "one_raises_after_the_run" and environment.local_rank() == 1:
        raise Boom("late")


def train(launcher: PopenLauncher, environment: LightningEnvironment, scenario: str, directory: Path) -> None:
    rank = environment.local_rank()
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    if scenario == "one_raises_before_the_start" and rank == 1:
        failing(directory)
        raise Boom("early")
    if scenario == "all_raise_before_the_start":
        failing(directory)
        raise Boom("everywhere")
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    launcher.board = board = FailureBoard.over_default_store()
    transport = GlooTransport(dist.new_group(backend="gloo"), failures=board)
    if scenario == "one_is_killed" and rank == LAST:
        time.sleep(0.3)
        failing(directory)
        os.kill(os.getpid(), signal.SIGKILL)
    if scenario == "one_exits" and rank == LAST:
        failing(directory)
        os._exit(7)
    if scenario == "one_raises" and rank == LAST:
        failing(directory)
        raise Boom("first")
    if scenario == "the_first_raises" and rank == 0:
        failing(directory)
        raise Boom("first")
    if scenario == "waits":
        dist.barrier()
        if rank == 0:
            failing(directory)
    if scenario in ("one_works_on_after_the_run", "one_raises_after_the_run"):
        transport.close()
        board.close()
        return
    if rank == 1 or WORLD == 2:
        dist.barrier()  # cannot be woken
    transport.expect((rank + 1) % WORLD, [KEY])
    transport.take(KEY)


def failing(directory: Path) -> None:
    (directory / "failing").write_text(str(time.time()))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
