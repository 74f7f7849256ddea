"""All transports carry messages exactly, in the announced order, and never wait deaf."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_asyncpipe.errors import PeerFailure, PipelineError
from lightning_asyncpipe.runtime import wire
from lightning_asyncpipe.runtime.channels import GlooTransport, MessageKey, Transport
from lightning_asyncpipe.runtime.loopback import LoopbackNetwork
from tests.runtime.processes import run_ranks

Body = Callable[[int, Transport], Any]
TIMEOUT = 20.0


def key(batch: int = 0, microbatch: int = 0) -> MessageKey:
    return MessageKey(kind=1, stage=2, pipeline=3, batch=batch, microbatch=microbatch)


def _over_gloo(rank: int, body: Body, timeout: float, direct: bool) -> Any:
    data = dist.new_group(backend="gloo") if direct else None
    transport = GlooTransport(dist.new_group(backend="gloo"), timeout=timeout, data=data)
    result = body(rank, transport)
    transport.close()
    return result


def _over_loopback(body: Body, world_size: int, timeout: float) -> list[Any]:
    network = LoopbackNetwork(world_size, timeout=timeout)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        transport = network.transport(rank)
        try:
            results[rank] = body(rank, transport)
        except BaseException as error:
            errors.append(error)
            network.fail(error)
        transport.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.fixture(params=["gloo", "direct", "loopback"])
def run(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Calls a body on every rank, over one of the transports; "direct" sends large tensors from device to device."""

    def over(body: Body, world_size: int = 2, timeout: float = TIMEOUT) -> list[Any]:
        if request.param != "loopback":
            return run_ranks(_over_gloo, world_size, body, timeout, request.param == "direct")
        return _over_loopback(body, world_size, timeout)

    return over


def exchange(rank: int, transport: Transport, tensors: list[torch.Tensor | None]) -> list[Any]:
    """Rank 0 sends all, rank 1 returns what it took."""
    if rank == 0:
        for index, tensor in enumerate(tensors):
            transport.send(1, key(index), tensor, fingerprint=-index)
        transport.drain()
        return []
    transport.expect(0, [key(index) for index in range(len(tensors))])
    return [transport.take(key(index)) for index in range(len(tensors))]


# ------------------------------------------------------------------------------------- what travels


def _dtypes(rank: int, transport: Transport) -> None:
    floats = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    tensors = [torch.randn(5, generator=torch.Generator().manual_seed(1)).to(d) for d in floats]
    tensors += [torch.arange(5).to(d) for d in (torch.int64, torch.int8, torch.uint8, torch.bool)]
    for sent, message in zip(tensors, exchange(rank, transport, tensors), strict=False):
        assert message.tensor.dtype == sent.dtype
        assert torch.equal(message.tensor, sent)


def _sizes(rank: int, transport: Transport) -> None:
    limit = wire.INLINE_SIZE
    shapes = [(), (0,), (2, 0, 3), (1,), (limit - 1,), (limit,), (limit + 1,), (3, 1_000_003)]
    shapes.append((1,) * 8)
    tensors: list[torch.Tensor | None] = []
    for shape in shapes:
        count = int(torch.tensor(shape).prod()) if shape else 1
        tensors.append((torch.arange(count) % 251).to(torch.uint8).reshape(shape))
    tensors.append(None)
    messages = exchange(rank, transport, tensors)
    for index, message in enumerate(messages):
        sent = tensors[index]
        assert message.fingerprint == -index
        if sent is None:
            assert message.tensor is None
        else:
            assert message.tensor.shape == sent.shape
            assert torch.equal(message.tensor, sent)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def _strides(rank: int, transport: Transport) -> None:
    image = numbers(2, 3, 4, 5)
    filling = [
        image.to(memory_format=torch.channels_last),
        image.transpose(0, 3),
        numbers(64, 1, 64).transpose(0, 2),
        image[1:, 1:],
    ]
    with_holes = [image[:, :, ::2], image[:1].expand(7, -1, -1, -1), image[..., :2]]
    messages = exchange(rank, transport, [*filling, *with_holes])
    for sent, message in zip(filling + with_holes, messages, strict=False):
        assert torch.equal(message.tensor, sent)
    for sent, message in zip(filling, messages, strict=False):
        assert message.tensor.stride() == sent.stride()
    for message in messages[len(filling) :]:
        assert message.tensor.is_contiguous()


def _gradients(rank: int, transport: Transport) -> None:
    leaf = torch.ones(3, requires_grad=True)
    tensors = [leaf * 2, torch.ones(3), leaf * torch.ones(5000, 3)]
    messages = exchange(rank, transport, tensors)
    if rank == 1:
        assert [message.requires_grad for message in messages] == [True, False, True]
        assert not any(message.tensor.requires_grad for message in messages)
        assert messages[0].tensor.tolist() == [2, 2, 2]


def _copies(rank: int, transport: Transport) -> None:
    if rank == 0:
        small = torch.ones(4)
        transport.send(1, key(0), small)
        small.zero_()  # small payloads are copied at once
        for index in range(1, 4):  # larger ones are kept alive
            transport.send(1, key(index), torch.full((50_000,), float(index)))
            gc.collect()
        transport.drain()
        return
    time.sleep(0.2)
    transport.expect(0, [key(index) for index in range(4)])
    for index in range(4):
        values = transport.take(key(index)).tensor
        assert values is not None
        assert values.unique().tolist() == [max(index, 1)]


def test_tensors_of_all_kinds_of_dtype(run: Callable[..., Any]) -> None:
    run(_dtypes)


def test_empty_small_and_large_tensors_and_none(run: Callable[..., Any]) -> None:
    run(_sizes)


def test_tensors_that_fill_their_memory_keep_their_strides(run: Callable[..., Any]) -> None:
    run(_strides)


def test_requires_grad_travels_as_a_flag(run: Callable[..., Any]) -> None:
    run(_gradients)


def test_sent_tensors_stay_alive_until_they_have_left(run: Callable[..., Any]) -> None:
    run(_copies)


def test_more_than_eight_dimensions_are_refused_at_the_sender() -> None:
    transport = LoopbackNetwork(2).transport(0)
    with pytest.raises(ValueError, match=r"at most 8 dimensions, not one of shape \(1, 1, "):
        transport.send(1, key(), torch.ones((1,) * 9))


def test_a_fingerprint_beyond_64_bits_is_refused_at_the_sender() -> None:
    with pytest.raises(ValueError, match="does not fit 64-bit"):
        LoopbackNetwork(2).transport(0).send(1, key(), None, fingerprint=2**63)


# ------------------------------------------------------------------------------ order and addresses


def _all_to_all(rank: int, transport: Transport) -> None:
    peers, count = [peer for peer in range(3) if peer != rank], 100
    for peer in peers:
        transport.expect(peer, [key(peer, index) for index in range(count)])
    for index in range(count):
        for peer in peers:
            shape = 10 if index % 10 else 5000
            transport.send(peer, key(rank, index), torch.full((shape,), float(rank * 1000 + index)))
    for index in reversed(range(count)):  # taken in any order
        for peer in peers:
            message = transport.take(key(peer, index))
            assert message.tensor is not None
            assert message.tensor[0].item() == peer * 1000 + index
    transport.drain()


def _to_itself(rank: int, transport: Transport) -> None:
    leaf = torch.ones(2, requires_grad=True)
    transport.expect(rank, [key(1)])
    for batch in range(2):
        transport.send(rank, key(batch), leaf, fingerprint=7)
    for batch in range(2):
        message = transport.take(key(batch))
        assert message.requires_grad
        assert message.fingerprint == 7
        assert message.tensor is not None
        assert message.tensor.tolist() == [1, 1]
        assert message.tensor.data_ptr() != leaf.data_ptr()
    transport.drain()


def _other_schedule(rank: int, transport: Transport) -> None:
    if rank == 0:
        transport.send(1, key(0, 5), torch.ones(1))
        transport.drain()
        return
    transport.expect(0, [key(0, 4)])
    with pytest.raises(PipelineError, match=r"rank 1 expected .*=4\) from rank 0.*=5\)") as caught:
        transport.take(key(0, 4))
    assert "different schedules" in str(caught.value)


def _misuse(rank: int, transport: Transport) -> None:
    with pytest.raises(PipelineError, match="which was never expected"):
        transport.take(key(3))
    transport.expect(1 - rank, [key(4)])
    with pytest.raises(PipelineError, match="already expects it"):
        transport.expect(1 - rank, [key(4)])
    transport.send(1 - rank, key(4), None)
    transport.take(key(4))
    transport.expect(1 - rank, [key(4)])  # a key is free again once it was taken
    transport.send(1 - rank, key(4), None)
    transport.take(key(4))


def _nothing_comes(rank: int, transport: Transport) -> None:
    if rank == 1:
        transport.expect(0, [key()])
        start = time.monotonic()
        with pytest.raises(PipelineError, match=r"waited 0.5 s for .* from rank 0"):
            transport.take(key())
        assert time.monotonic() - start < 2
    else:
        time.sleep(1)
        transport.send(1, key(), None)
        transport.drain()


def test_messages_between_all_ranks_find_their_keys(run: Callable[..., Any]) -> None:
    run(_all_to_all, world_size=3)


def test_a_rank_can_send_to_itself(run: Callable[..., Any]) -> None:
    run(_to_itself)


def test_a_message_out_of_order_is_an_error_that_names_both_keys(run: Callable[..., Any]) -> None:
    run(_other_schedule)


def test_unannounced_and_doubly_announced_messages_are_errors(run: Callable[..., Any]) -> None:
    run(_misuse)


def test_waiting_ends_after_the_timeout(run: Callable[..., Any]) -> None:
    run(_nothing_comes, timeout=0.5)


# ------------------------------------------------------------------------------------------- waking


class _Watch:
    """A failure watch that is told of a failure by the test."""

    def __init__(self) -> None:
        self.failure: PeerFailure | None = None
        self.suspected: list[tuple[int, str]] = []
        self._wakers: list[Callable[[], None]] = []

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def suspect(self, rank: int, reason: str) -> None:
        self.suspected.append((rank, reason))

    def on_failure(self, wake: Callable[[], None]) -> Callable[[], None]:
        self._wakers.append(wake)
        return lambda: self._wakers.remove(wake)

    def fail(self) -> None:
        self.failure = PeerFailure("rank 7 failed")
        for wake in self._wakers:
            wake()


def test_a_failure_elsewhere_wakes_a_rank_that_waits() -> None:
    watch = _Watch()
    transport = LoopbackNetwork(2, failures=watch).transport(0)
    transport.expect(1, [key()])
    threading.Timer(0.2, watch.fail).start()
    start = time.monotonic()
    with pytest.raises(PeerFailure, match="rank 7 failed"):
        transport.take(key())
    assert time.monotonic() - start < 1


def test_a_message_that_has_arrived_is_handed_out_even_after_a_failure() -> None:
    watch = _Watch()
    network = LoopbackNetwork(2, failures=watch)
    receiver = network.transport(0)
    receiver.expect(1, [key()])
    network.transport(1).send(0, key(), None)
    watch.fail()
    assert receiver.take(key()).tensor is None


def _peer_leaves(rank: int) -> None:
    watch = _Watch()
    transport = GlooTransport(dist.new_group(backend="gloo"), failures=watch)
    if rank == 1:
        time.sleep(0.3)
        return  # its process ends while rank 0 waits
    transport.expect(1, [key()])
    threading.Timer(1.0, lambda: watch.suspected and watch.fail()).start()
    with pytest.raises(PeerFailure, match="rank 7 failed"):
        transport.take(key())
    assert [peer for peer, _ in watch.suspected] == [1]
    assert "rank 0 lost its connection to rank 1" in watch.suspected[0][1]


def test_a_lost_connection_is_a_suspicion_whose_cause_is_left_to_the_watch() -> None:
    run_ranks(_peer_leaves, 2, barrier=False)


def _peer_leaves_unwatched(rank: int) -> None:
    transport = GlooTransport(dist.new_group(backend="gloo"))
    if rank == 1:
        return
    transport.expect(1, [key()])
    with pytest.raises(PipelineError, match="rank 0 lost its connection to rank 1"):
        transport.take(key())


def test_without_a_watch_a_lost_connection_is_raised_at_once() -> None:
    run_ranks(_peer_leaves_unwatched, 2, barrier=False)


# ------------------------------------------------------------------------------------------ latency


def _hops(rank: int) -> float:
    """The median time of a message there and one back, over that of as many bytes through a socket."""
    transport = GlooTransport(dist.new_group(backend="gloo"))
    activation, rounds = torch.ones(4, 256), 200
    transport.expect(1 - rank, [key(index) for index in range(rounds)])

    def through(index: int) -> None:
        if rank == 0:
            transport.send(1, key(index), activation)
        transport.take(key(index))
        if rank == 1:
            transport.send(0, key(index), activation)

    def bare(_: int) -> None:
        if rank == 0:
            connection.send_bytes(content)
        connection.recv_bytes()
        if rank == 1:
            connection.send_bytes(content)

    def median(hop: Callable[[int], None]) -> float:
        times = []
        dist.barrier()
        for index in range(rounds):
            start = time.perf_counter()
            hop(index)
            times.append(time.perf_counter() - start)
        return sorted(times)[rounds // 2]

    content, port = activation.numpy().tobytes(), torch.zeros(1, dtype=torch.int64)
    listener = Listener(("127.0.0.1", 0)) if rank == 0 else None
    port += listener.address[1] if listener else 0
    dist.broadcast(port, 0)
    with listener.accept() if listener else Client(("127.0.0.1", int(port))) as connection:
        ratio = median(through) / median(bare)
    transport.drain()
    return ratio


def test_a_small_message_waits_for_nobody_who_polls() -> None:
    # 5 to 18 times as long as through a socket on two cores; with a pause of a millisecond it would be some 100 times.
    assert min(run_ranks(_hops, 2)[0] for _ in range(3)) < 40
