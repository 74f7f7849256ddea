"""Asynchronous messages between ranks over a gloo process group.

Three facts about gloo shape this file. ``Work.is_completed()`` stays False until ``wait()``, so
every wait happens in a helper thread and the main thread waits on a queue from which a failure or
Ctrl-C can wake it. A wait that times out closes the connection, so helper threads wait without
limit and time is kept by :meth:`Mailbox.take`. A message that is larger than the receive posted
for it aborts the process, so every message starts with a part of fixed size (``wire.py``).

For each peer, one thread receives in the order that was announced by ``expect``, with receives
posted ahead, and one thread waits for sends to leave. Sends are posted by the caller, except from
a CUDA device, where the tensor must have been computed, and copied to pinned memory, first. Between
devices that can, large tensors go directly (``payloads.py``), and only headers over gloo.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.runtime import exits, wire
from lightning_asyncpipe.runtime.devices import FOREVER, Device, device_of
from lightning_asyncpipe.runtime.mailbox import FailureWatch, Mailbox
from lightning_asyncpipe.runtime.payloads import DevicePayloads
from lightning_asyncpipe.runtime.wire import Message, MessageKey

__all__ = ["FailureWatch", "GlooTransport", "Message", "MessageKey", "Transport"]

_SLICE = 0.1  # seconds
_POSTED_AHEAD = 16  # receives in flight per peer; each costs wire.FIRST_SIZE bytes
_SMALL_HELD = 32  # small sends per peer whose buffers may be held although they have left
_FIRST_TAG, _SECOND_TAG = 1, 2


class Transport(Protocol):
    """Messages between the ranks of a run. ``peer`` is a global rank throughout."""

    rank: int

    def send(self, peer: int, key: MessageKey, tensor: Tensor | None, fingerprint: int = 0) -> None:
        """Send asynchronously; the caller must not write to ``tensor``'s memory afterwards."""

    def expect(self, peer: int, keys: Sequence[MessageKey]) -> None:
        """Post receives ahead of need, in the order in which ``peer`` sends."""

    def take(self, key: MessageKey) -> Message:
        """Block until the message has arrived, and remove it."""

    def drain(self) -> None:
        """Block until all that was sent has left."""

    def close(self) -> None:
        """Stop; messages that have not been taken are dropped."""


class GlooTransport:
    """The :class:`Transport` over point-to-point operations of a gloo process group.

    Args:
        group: a gloo group that nothing else uses; all ranks of the run.
        device: where received tensors are put. From and to a CUDA device they pass through pinned
            CPU memory, but for those that ``data`` carries.
        failures: told of lost connections, asked while waiting. None: a lost connection is raised
            as it is seen.
        timeout: seconds that ``take`` and ``drain`` wait at most.
        on_stall: called now and then while ``take`` waits for long; may raise what it finds.
        data: a group of the same ranks that carries large tensors between the memories of their
            devices, such as one of NCCL; every rank has one, or none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
        failures: FailureWatch | None = None,
        timeout: float = 1800.0,
        on_stall: Callable[[], None] | None = None,
        data: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = dist.get_rank()
        self._device = device_of(device)
        self._payloads = None if data is None else DevicePayloads(group, data, self._device)
        self._timeout = timeout
        self._mailbox = Mailbox(self.rank, failures, timeout)
        self._shared = _Shared(group, self._mailbox, self._device, self._payloads)
        self._mailbox.on_stall = on_stall
        self._receivers: dict[int, _Receiver] = {}
        self._senders: dict[int, _Sender] = {}

    def send(self, peer: int, key: MessageKey, tensor: Tensor | None, fingerprint: int = 0) -> None:
        """Send ``tensor`` (or None) to ``peer``, asynchronously.

        Up to 8 KiB are copied at once. A larger CPU tensor is sent from its own memory, which
        nobody may write to before ``drain`` returns.

        Raises:
            ValueError, TypeError: the tensor cannot be carried (see ``wire.pack``).
        """
        requires_grad = tensor is not None and tensor.requires_grad
        if tensor is not None:
            tensor = wire.dense(tensor)
        if peer == self.rank:
            copy = None if tensor is None else tensor.clone()
            self._mailbox.deliver(key, Message(copy, fingerprint, requires_grad))
            return
        direct = (
            self._payloads is not None
            and tensor is not None
            and tensor.nbytes > wire.INLINE_SIZE
            and self._device.holds(tensor)
        )
        first = wire.pack(key, tensor, requires_grad, fingerprint, direct)
        sender = self._senders.get(peer)
        if sender is None:
            sender = self._senders[peer] = _Sender(peer, self._shared)
        sender.send(first, tensor, direct)

    def expect(self, peer: int, keys: Sequence[MessageKey]) -> None:
        """Post receives for ``keys``, in the order in which ``peer`` sends them.

        Raises:
            PipelineError: a key is already expected.
        """
        self._mailbox.expect(peer, keys)
        if peer == self.rank:
            return
        receiver = self._receivers.get(peer)
        if receiver is None:
            receiver = self._receivers[peer] = _Receiver(peer, self._shared)
        receiver.expect(keys)

    def take(self, key: MessageKey) -> Message:
        """Block until the message has arrived, and remove it; see :meth:`Mailbox.take`.

        Only one thread may call this. Ctrl-C and failures of other ranks interrupt it.
        """
        message = self._mailbox.take(key)
        if message.tensor is None:
            return message
        return message._replace(tensor=self._device.adopt(message.tensor))

    def drain(self) -> None:
        """Block until everything sent has left; then buffers may be written to again.

        Raises:
            PeerFailure: another rank failed.
            PipelineError: a connection is lost, or the timeout has passed.
        """
        deadline = time.monotonic() + self._timeout
        for peer, sender in self._senders.items():
            while not sender.wait_idle(_SLICE):
                self._mailbox.check()
                if time.monotonic() > deadline:
                    raise PipelineError(
                        f"rank {self.rank} waited {self._timeout:g} s for rank {peer} to receive what was sent to it"
                    )

    def close(self) -> None:
        """Stop the helper threads; one that waits for a message that never came is left behind."""
        self._mailbox.close()
        for helper in (*self._senders.values(), *self._receivers.values()):
            helper.stop()
        if self._payloads is not None:
            self._payloads.close()


class _Shared(NamedTuple):
    """What all helpers of a transport use."""

    group: dist.ProcessGroup
    mailbox: Mailbox
    device: Device
    payloads: DevicePayloads | None


class _Helper(ABC):
    """A daemon thread that waits for operations with one peer."""

    def __init__(self, name: str, peer: int, shared: _Shared) -> None:
        self._group, self._mailbox, self._device, self._payloads = shared
        self._peer = peer
        self._group_peer = dist.get_group_rank(self._group, peer)
        self._busy = False
        self._stopping = False
        self._thread = threading.Thread(target=self._main, daemon=True, name=f"{name}-{peer}")

    def stop(self) -> None:
        """Have the thread end once it has nothing to wait for."""
        self._stopping = True
        self._request_stop()
        self._thread.join(_SLICE)

    @abstractmethod
    def _run(self) -> None: ...

    @abstractmethod
    def _request_stop(self) -> None: ...

    def _main(self) -> None:
        exits.watch(self, lambda: self._busy)
        try:
            with self._device.working():
                self._run()
        except _ConnectionLost as lost:
            if not self._stopping:
                self._mailbox.lose(self._peer, lost)
        except Exception as error:  # the main thread waits for what this thread cannot deliver
            self._mailbox.fail(error)
        finally:
            self._busy = False
            exits.forget(self)

    def _post(self, operation: Callable[..., dist.Work], buffer: Tensor, tag: int) -> dist.Work:
        """Post a send or receive of ``buffer``."""
        try:
            return operation([buffer], self._group_peer, tag)
        except RuntimeError as error:
            raise _ConnectionLost(error) from error

    @staticmethod
    def _wait(work: dist.Work) -> None:
        try:
            work.wait(FOREVER)
        except RuntimeError as error:
            raise _ConnectionLost(error) from error

    def _transfer(self, transfer: Callable[[int, Tensor], None], tensor: Tensor) -> None:
        """Send or receive ``tensor`` from device to device; waits for it."""
        try:
            transfer(self._group_peer, tensor)
        except RuntimeError as error:
            raise _ConnectionLost(error) from error
        if self._stopping:  # it may have been broken off
            raise _ConnectionLost("the transport was closed")


class _ConnectionLost(Exception):
    """An operation of gloo failed."""


class _Sender(_Helper):
    """Sends to one peer: posts them in order, and keeps their buffers until they have left."""

    def __init__(self, peer: int, shared: _Shared) -> None:
        super().__init__("send-to", peer, shared)
        self._pending = 0
        self._changed = threading.Condition()
        self._small: list[_Posted | _Staged] = []
        self._queue: queue.SimpleQueue[list[_Posted | _Staged] | None] = queue.SimpleQueue()
        self._thread.start()

    def send(self, first: bytearray, tensor: Tensor | None, direct: bool) -> None:
        with self._changed:
            self._pending += 1
        if self._payloads is not None or not self._device.immediate:
            # Through the thread, also what is ready, so that the order is kept.
            self._queue.put([_Staged(first, self._begin(tensor, direct), direct)])
            return
        try:
            posted = self._post_message(first, None if tensor is None else tensor.cpu())
        except _ConnectionLost as lost:
            self._mailbox.lose(self._peer, lost)
            return
        self._small.append(posted)
        if len(posted.buffers) > 1 or len(self._small) >= _SMALL_HELD:
            self._flush()

    def _begin(self, tensor: Tensor | None, direct: bool) -> Callable[[], Tensor] | None:
        if tensor is None:
            return None
        if direct:
            return self._device.computed(tensor)
        if tensor.device.type == "cpu" and tensor.nbytes <= wire.INLINE_SIZE:
            tensor = tensor.clone()  # the thread packs it later than it may be written to
        return self._device.to_host(tensor)

    def wait_idle(self, timeout: float) -> bool:
        """Whether everything has left, after at most ``timeout`` seconds."""
        self._flush()
        with self._changed:
            return self._changed.wait_for(lambda: self._pending == 0, timeout)

    def _request_stop(self) -> None:
        self._queue.put(None)

    def _flush(self) -> None:
        """Have the thread wait for what was posted; not at each small send, it costs a wake-up."""
        if self._small:
            self._queue.put(self._small)
            self._small = []

    def _post_message(self, first: bytearray, tensor: Tensor | None) -> _Posted:
        buffers = [torch.frombuffer(first, dtype=torch.uint8)]
        if tensor is not None:
            data = wire.memory(tensor)
            if data.numel() <= wire.INLINE_SIZE:
                wire.inline(first)[: data.numel()] = data.numpy().data
            else:
                buffers.append(data)
        tags = (_FIRST_TAG, _SECOND_TAG)
        works = [self._post(self._group.send, buffer, tag) for buffer, tag in zip(buffers, tags, strict=False)]
        return _Posted(works, buffers)

    def _post_staged(self, staged: _Staged) -> _Posted:
        tensor = None if staged.ready is None else staged.ready()
        if not staged.direct:
            return self._post_message(staged.first, tensor)
        posted = self._post_message(staged.first, None)
        assert self._payloads is not None
        assert tensor is not None
        self._transfer(self._payloads.send, tensor)
        return posted

    def _run(self) -> None:
        while (items := self._queue.get()) is not None:
            self._busy = True
            count = len(items)
            for item in items:
                posted = item if isinstance(item, _Posted) else self._post_staged(item)
                for work in posted.works:
                    self._wait(work)
            del items, item, posted  # free the buffers now, not when the next send comes
            with self._changed:
                self._pending -= count
                self._changed.notify_all()
            self._busy = False


class _Posted(NamedTuple):
    """Sends under way; the buffers are held until they have left."""

    works: list[dist.Work]
    buffers: list[Tensor]


class _Staged(NamedTuple):
    """A message whose tensor may not have been computed, or copied to CPU memory, yet."""

    first: bytearray
    ready: Callable[[], Tensor] | None  # waits for the tensor
    direct: bool  # from device to device


class _Receiver(_Helper):
    """Receives from one peer, in the expected order, with receives posted ahead."""

    def __init__(self, peer: int, shared: _Shared) -> None:
        super().__init__("receive-from", peer, shared)
        self._rank = dist.get_rank()
        self._keys: queue.SimpleQueue[MessageKey | None] = queue.SimpleQueue()
        self._posted: deque[tuple[MessageKey, bytearray, dist.Work]] = deque()
        self._thread.start()

    def expect(self, keys: Sequence[MessageKey]) -> None:
        for key in keys:
            self._keys.put(key)

    def _request_stop(self) -> None:
        self._keys.put(None)

    def _run(self) -> None:
        while self._post_ahead():
            expected, part, work = self._posted.popleft()
            self._wait(work)
            header = wire.unpack(part)
            if header.key != expected:
                text = wire.mismatch(self._rank, expected, self._peer, header.key)
                raise PipelineError(text)
            tensor = self._payload(header, part)
            self._mailbox.deliver(expected, Message(tensor, header.fingerprint, header.requires_grad))
            del tensor  # the mailbox alone keeps it alive

    def _post_ahead(self) -> bool:
        """Post receives for known keys; blocks while there are none. False: time to stop."""
        while len(self._posted) < _POSTED_AHEAD:
            if not self._posted and self._keys.empty():
                self._busy = False
            try:
                key = self._keys.get(block=not self._posted)
            except queue.Empty:
                break
            self._busy = True
            if key is None:
                return False
            part = bytearray(wire.FIRST_SIZE)
            buffer = torch.frombuffer(part, dtype=torch.uint8)
            work = self._post(self._group.recv, buffer, _FIRST_TAG)
            self._posted.append((key, part, work))
        return True

    def _payload(self, header: wire.Header, part: bytearray) -> Tensor | None:
        """The tensor of a message; waits for what does not come with the first part."""
        if header.dtype is None:
            return None
        if header.on_device:
            if self._payloads is None:
                raise PipelineError(
                    f"rank {self._peer} sends from device to device, and rank {self._rank} receives over gloo only: "
                    "`message_backend` must be the same on every rank"
                )
            direct = self._device.buffer(header)
            self._transfer(self._payloads.receive, direct)
            return direct
        tensor = self._device.host_buffer(header)
        data = wire.memory(tensor)
        if data.numel() <= wire.INLINE_SIZE:
            data.numpy().data[:] = wire.inline(part)[: data.numel()]
        else:
            self._wait(self._post(self._group.recv, data, _SECOND_TAG))
        return self._device.arrived(tensor)
