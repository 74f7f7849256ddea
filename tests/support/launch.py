"""Runs a function as several ranks, each a process as an external launcher would start it."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_asyncpipe"])


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _main(function: Callable[..., Any], rank: int, size: int, port: int, results: Any, args: tuple[Any, ...]) -> None:
    os.environ.update(
        LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    gc.freeze()  # as in tests/conftest.py
    try:
        saved = io.BytesIO()
        torch.save(function(*args), saved)
        results.put((rank, saved.getvalue(), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def run_ranks(function: Callable[..., Any], size: int, *args: Any, timeout: float = 240.0) -> list[Any]:
    """What `function(*args)` returns on each of `size` ranks, in their order.

    `function` is importable, and what it returns can be pickled; tensors go by value.

    Raises:
        AssertionError: with the traceback of the first rank that raised, or if a rank died or ran out of time.
    """
    port, results = free_port(), _context.Queue()
    processes = [
        _context.Process(target=_main, args=(function, rank, size, port, results, args), daemon=False)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(found) < size:
            try:
                rank, value, failure = results.get(timeout=1.0)
            except queue.Empty:
                dead = [r for r, p in enumerate(processes) if p.exitcode is not None and r not in found]
                assert not dead, f"ranks {dead} died: {[processes[r].exitcode for r in dead]}"
                assert time.monotonic() < deadline, f"ranks {sorted(set(range(size)) - set(found))} did not end"
                continue
            assert failure is None, f"rank {rank}:\n{failure}"
            found[rank] = torch.load(io.BytesIO(value), weights_only=False)
        return [found[rank] for rank in range(size)]
    finally:
        for process in processes:
            process.join(5.0 if len(found) == size else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
