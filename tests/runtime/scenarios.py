"""Runs of three ranks that fail in one way or another, as programs of their own.

``python -m tests.runtime.scenarios`` reads lines "SCENARIO STDOUT-FILE STDERR-FILE" and forks a
session for each (importing torch takes longer than most scenarios), whose pid and exit code it
writes. That process is rank 0 and forks the others, as a launching process would, but without a
launcher: what ends the processes here is the board alone. ``failing TIME`` on its stdout tells when.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from lightning_asyncpipe.errors import PeerFailure
from lightning_asyncpipe.runtime.channels import GlooTransport, MessageKey
from lightning_asyncpipe.runtime.failure import FailureBoard
from lightning_asyncpipe.runtime.lifeline import tie_to_parent
from tests.runtime.processes import free_port

WORLD = 3
KEY = MessageKey(0, 0, 0, 0, 0)
Rank = Callable[[int, FailureBoard, GlooTransport], None]


class Boom(Exception):
    """The error of the rank that fails first."""


def failing() -> None:
    time.sleep(0.5)  # the others have come to where they wait
    print("failing", time.time(), flush=True)


def waits_in_take(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    transport.expect((rank + 1) % WORLD, [KEY])
    transport.take(KEY)


def raises_while_others_take(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    if rank == 2:
        failing()
        raise Boom("first")
    waits_in_take(rank, board, transport)


def raises_while_others_are_in_a_barrier(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    if rank == 2:
        failing()
        try:
            raise Boom("first")
        except Boom as error:
            board.report(error)
            time.sleep(60)  # alive, so that the others' barrier does not notice
    dist.barrier()


def is_killed_while_others_take(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    if rank == 2:
        failing()
        os.kill(os.getpid(), signal.SIGKILL)
    waits_in_take(rank, board, transport)


def is_killed_while_others_are_in_a_barrier(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    if rank == 2:
        failing()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def rank_0_raises(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    if rank == 0:
        failing()
        raise Boom("first")
    if rank == 1:
        dist.barrier()
    waits_in_take(rank, board, transport)


def rank_0_is_killed(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    if rank == 0:
        failing()
        os.kill(os.getpid(), signal.SIGKILL)
    waits_in_take(rank, board, transport)


def all_raise(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    raise Boom(f"of rank {rank}")


def is_interrupted(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    if rank == 2:
        failing()
        os.killpg(0, signal.SIGINT)
        time.sleep(60)
    if rank == 1:
        dist.barrier()
    waits_in_take(rank, board, transport)


def is_interrupted_in_a_deadlock(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    if rank == 0:
        threading.Timer(0.5, lambda: (failing(), os.kill(os.getpid(), signal.SIGINT))).start()
    if rank != 2:
        dist.barrier()
    dist.recv(torch.ones(1), src=0)


def hangs_in_cleanup(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    if rank == 2:
        failing()
        raise Boom("first")
    try:
        waits_in_take(rank, board, transport)
    finally:
        dist.barrier()


def ends_well(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    transport.send((rank + 2) % WORLD, KEY, torch.ones(1))
    waits_in_take(rank, board, transport)
    transport.drain()


def rank_0_ends_first(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    ends_well(rank, board, transport)
    if rank:
        time.sleep(1 + rank)


def rank_0_ends_last(rank: int, board: FailureBoard, transport: GlooTransport) -> None:
    ends_well(rank, board, transport)
    if rank == 0:
        time.sleep(2)


SCENARIOS: dict[str, Rank] = {
    function.__name__: function
    for function in (
        raises_while_others_take,
        raises_while_others_are_in_a_barrier,
        is_killed_while_others_take,
        is_killed_while_others_are_in_a_barrier,
        rank_0_raises,
        rank_0_is_killed,
        all_raise,
        is_interrupted,
        is_interrupted_in_a_deadlock,
        hangs_in_cleanup,
        ends_well,
        rank_0_ends_first,
        rank_0_ends_last,
    )
}


def run(rank: int, scenario: Rank) -> None:
    """What a strategy and a launcher do around the run of a rank."""
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    board = FailureBoard.over_default_store()
    transport = GlooTransport(dist.new_group(backend="gloo"), failures=board)
    try:
        scenario(rank, board, transport)
    except BaseException as error:
        failure = board.report(error)
        if failure.rank == rank:
            raise
        if failure.kind == "KeyboardInterrupt":
            raise KeyboardInterrupt from None
        raise PeerFailure(failure.message) from None
    transport.close()
    board.close()


def main(scenario: Rank) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    torch.set_num_threads(1)
    parent, rank = os.getpid(), 0
    for child in range(1, WORLD):
        if os.fork() == 0:
            rank = child
            tie_to_parent(parent)
            break
    if rank == 0:
        run(rank, scenario)
        return
    # Ranks other than 0 end quietly; the failure is on the board.
    try:
        run(rank, scenario)
    except BaseException:
        os._exit(1)
    os._exit(0)


def serve() -> Rank | None:
    """Fork a session for each line; returns its scenario in the session, None at the end."""
    while line := sys.stdin.readline():
        name, output, errors = line.split()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for descriptor, path in ((1, output), (2, errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
            return SCENARIOS[name]
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(pid, code, flush=True)
    return None


if __name__ == "__main__":
    asked = serve()
    if asked is not None:
        main(asked)
