"""Transfers from device to device: one at a time on each rank, and no circle of ranks that wait.

The processes of NCCL are threads here, and its operations are those of a network that has NCCL's rules and breaks none
quietly: an operation occupies its rank until its counterpart runs, and a second one on the rank is an error.
"""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.runtime import channels, payloads, wire
from lightning_asyncpipe.runtime.channels import GlooTransport, MessageKey
from lightning_asyncpipe.runtime.devices import FOREVER, Device
from lightning_asyncpipe.runtime.payloads import DevicePayloads
from tests.runtime.processes import run_ranks

CPU = torch.device("cpu")


class Broken(RuntimeError):
    """An operation was aborted."""


class Tokens:
    """A group that buffers what is sent, as gloo may."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self._rank = network, rank

    def rank(self) -> int:
        return self._rank

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Operation:
        self.network.buffers[self._rank, peer, tag].put(tensors[0].clone())
        return Operation(lambda: None)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Operation:
        arriving = self.network.buffers[peer, self._rank, tag]
        return Operation(lambda: tensors[0].copy_(self.network.wait(arriving)))


class Data(Tokens):
    """A group whose operations occupy the rank until they are over."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Operation:
        self.network.occupy(self._rank)
        self.network.buffers[self._rank, peer, "data"].put(tensors[0].clone())
        return self._over(lambda: self.network.wait(self.network.buffers[peer, self._rank, "taken"]))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Operation:
        self.network.occupy(self._rank)

        def take() -> None:
            tensors[0].copy_(self.network.wait(self.network.buffers[peer, self._rank, "data"]))
            self.network.buffers[self._rank, peer, "taken"].put(torch.ones(1))

        return self._over(take)

    def _over(self, finish: Callable[[], Any]) -> Operation:
        def wait() -> None:
            time.sleep(self.network.random.random() * 1e-3)
            finish()
            self.network.free(self._rank)

        return Operation(wait)

    def abort(self) -> None:
        self.network.aborted.set()


class Operation:
    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish = finish

    def wait(self, timeout: timedelta = FOREVER) -> None:
        self._finish()


class Network:
    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.buffers: defaultdict[Any, queue.SimpleQueue[Tensor]] = defaultdict(queue.SimpleQueue)
        self.aborted = threading.Event()
        self.errors: list[BaseException] = []
        self._occupied: set[int] = set()
        self._lock = threading.Lock()

    def payloads(self, rank: int) -> DevicePayloads:
        return DevicePayloads(Tokens(self, rank), Data(self, rank), Device(CPU))  # type: ignore[arg-type]

    def occupy(self, rank: int) -> None:
        with self._lock:
            if rank in self._occupied:
                raise AssertionError(f"rank {rank} takes part in two transfers at once")
            self._occupied.add(rank)

    def free(self, rank: int) -> None:
        with self._lock:
            self._occupied.discard(rank)

    def wait(self, arriving: queue.SimpleQueue[Tensor]) -> Tensor:
        while True:
            try:
                return arriving.get(timeout=0.05)
            except queue.Empty:
                if self.aborted.is_set():
                    raise Broken("aborted") from None

    def run(self, jobs: list[Callable[[], None]], timeout: float) -> bool:
        """Whether all jobs, each a thread, end in time; those that do not are broken off."""

        def guarded(job: Callable[[], None]) -> None:
            try:
                job()
            except BaseException as error:
                self.errors.append(error)

        threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        ended = not any(thread.is_alive() for thread in threads)
        self.aborted.set()
        for thread in threads:
            thread.join(1.0)
        return ended


def all_pairs(network: Network, ranks: int, count: int) -> list[Callable[[], None]]:
    """Every rank sends to every other one, all at once; each end of an ordered pair is a thread."""
    each = [network.payloads(rank) for rank in range(ranks)]

    def sends(source: int, target: int) -> None:
        for number in range(count):
            each[source].send(target, torch.full((3, 5), float(source * 100 + number)))

    def receives(source: int, target: int) -> None:
        for number in range(count):
            tensor = torch.empty(3, 5)
            each[target].receive(source, tensor)
            assert tensor.unique().tolist() == [source * 100 + number]

    pairs = list(itertools.permutations(range(ranks), 2))
    network.random.shuffle(pairs)
    return [lambda job=job, pair=pair: job(*pair) for pair in pairs for job in (sends, receives)]  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(4))
def test_transfers_between_all_ranks_at_once_all_end_one_at_a_time_on_each(seed: int) -> None:
    network = Network(seed)
    assert network.run(all_pairs(network, 5, 10), timeout=20.0)
    assert network.errors == []


def test_a_rank_whose_partner_does_not_expect_the_message_yet_is_free_for_others() -> None:
    network = Network()
    middle, early, late = (network.payloads(rank) for rank in (1, 0, 2))
    given = torch.arange(6.0)
    jobs = [lambda: middle.send(0, given), lambda: middle.send(2, given)]
    sending = threading.Thread(target=jobs[0], daemon=True)
    sending.start()  # nobody receives this one before the other has passed
    found = torch.empty(6)
    assert network_passes(network, [jobs[1], lambda: late.receive(1, found)])
    assert found.equal(given)
    found.zero_()
    early.receive(1, found)
    sending.join(2.0)
    assert not sending.is_alive()
    assert found.equal(given)


def network_passes(network: Network, jobs: list[Callable[[], None]]) -> bool:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5.0)
    return not any(thread.is_alive() for thread in threads)


def test_a_transfer_whose_other_end_is_gone_is_broken_off_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "_PATIENCE", 0.2)
    network = Network()
    sender = network.payloads(0)
    Tokens(network, 1).send([torch.zeros(1)], 0, payloads._READY)  # ready, and then no more
    raised: list[BaseException] = []

    def send() -> None:
        try:
            sender.send(1, torch.zeros(4))
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    time.sleep(0.1)
    sender.close()
    thread.join(2.0)
    assert not thread.is_alive()
    assert isinstance(raised[0], Broken)


def test_closing_breaks_off_nothing_that_ends_by_itself() -> None:
    network = Network()
    payload = network.payloads(0)
    payload.close()
    assert not network.aborted.is_set()


# ------------------------------------------------------------------------------------ over channels


def key(batch: int) -> MessageKey:
    return MessageKey(1, 2, 3, batch, 0)


class Late(Device):
    """A device on which a tensor is there only when the test says so, and memory of the host is written late too."""

    immediate = False
    computing = threading.Event()

    def computed(self, tensor: Tensor) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            self.computing.wait()
            return tensor.fill_(7.0)

        return wait

    to_host = computed


def _late(rank: int, direct: bool) -> None:
    channels.device_of = Late  # type: ignore[assignment]
    data = dist.new_group(backend="gloo") if direct else None
    transport = GlooTransport(dist.new_group(backend="gloo"), CPU, data=data)
    if rank == 0:
        started = time.monotonic()
        transport.send(1, key(0), torch.zeros(50_000))
        transport.send(1, key(1), None)  # keeps its place behind the other
        assert time.monotonic() - started < 0.2  # who computes does not wait
        time.sleep(0.3)
        Late.computing.set()
        transport.drain()
    else:
        transport.expect(0, [key(0), key(1)])
        assert transport.take(key(1)).tensor is None
        found = transport.take(key(0)).tensor
        assert found is not None
        assert found.unique().tolist() == [7.0]
    transport.close()


@pytest.mark.parametrize("direct", [False, True])
def test_a_tensor_leaves_once_it_has_been_computed(direct: bool) -> None:
    run_ranks(_late, 2, direct)


def _large_ones_only(rank: int) -> None:
    passed: list[int] = []
    through = DevicePayloads.send

    def counted(self: DevicePayloads, peer: int, tensor: Tensor) -> None:
        passed.append(tensor.nbytes)
        through(self, peer, tensor)

    DevicePayloads.send = counted  # type: ignore[method-assign]
    transport = GlooTransport(dist.new_group(backend="gloo"), data=dist.new_group(backend="gloo"))
    limit = wire.INLINE_SIZE
    sizes = [1, limit, limit + 1, 3 * limit]
    transport.expect(1 - rank, [key(n) for n in range(len(sizes))])
    for number, size in enumerate(sizes):
        transport.send(1 - rank, key(number), torch.full((size,), rank, dtype=torch.uint8))
    for number, size in enumerate(sizes):
        found = transport.take(key(number)).tensor
        assert found is not None
        assert (found.numel(), found.unique().tolist()) == (size, [1 - rank])
    transport.drain()
    assert passed == sizes[2:]
    transport.close()


def test_small_tensors_travel_with_their_header() -> None:
    run_ranks(_large_ones_only, 2)


def _lost(rank: int) -> None:
    transport = GlooTransport(dist.new_group(backend="gloo"), data=dist.new_group(backend="gloo"))
    if rank == 1:
        time.sleep(0.3)
        return  # its process ends while rank 0 waits for it to be ready
    transport.send(1, key(0), torch.zeros(50_000))
    with pytest.raises(PipelineError, match="rank 0 lost its connection to rank 1"):
        transport.drain()
    transport.close()


def test_a_peer_that_ends_before_a_transfer_is_a_lost_connection() -> None:
    run_ranks(_lost, 2, barrier=False)


def _one_sided(rank: int) -> None:
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    transport = GlooTransport(groups[0], data=groups[1] if rank == 0 else None)
    if rank == 0:
        transport.send(1, key(0), torch.zeros(50_000))
        dist.barrier()
        return
    transport.expect(0, [key(0)])
    with pytest.raises(PipelineError, match="`message_backend` must be the same on every rank"):
        transport.take(key(0))
    dist.barrier()


def test_ranks_that_differ_in_what_carries_tensors_are_told() -> None:
    run_ranks(_one_sided, 2)
