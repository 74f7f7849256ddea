"""Runs a function as several ranks of a gloo process group, each in a forked process."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    barrier: bool = True,
) -> list[Any]:
    """Return what ``function(rank, *args)`` returned on each rank.

    With ``barrier``, no process ends before all ranks have returned.

    Forked, because importing torch takes longer than most tests. A rank that raises fails the test
    with its traceback; ranks still alive after ``timeout`` seconds are killed, and fail it too.
    """
    context, port = multiprocessing.get_context("fork"), free_port()
    ends = [context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        context.Process(
            target=_rank_main,
            args=(function, rank, world_size, port, ends[rank][1], barrier, args),
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    deadline, outcomes = time.monotonic() + timeout, []
    try:
        for rank, (end, _) in enumerate(ends):
            if not end.poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"rank {rank} gave no answer within {timeout} s: {outcomes}")
            outcomes.append(end.recv())
    finally:
        for process in processes:
            process.join(2)
            process.kill()
            process.join()
    errors = [text for failed, text in outcomes if failed]
    assert not errors, "\n".join(errors)
    return [result for _, result in outcomes]


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    answer: Connection,
    barrier: bool,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
        result = function(rank, *args)
        if barrier:
            dist.barrier()
        answer.send((False, result))
    except BaseException:
        answer.send((True, f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        os._exit(0)
