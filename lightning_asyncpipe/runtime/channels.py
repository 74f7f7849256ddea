"""Asynchronous messages between ranks over a gloo process group.

Three facts about gloo shape this file. ``Work.is_completed()`` stays False until ``wait()``, so
every wait happens in a helper thread and the main thread waits on a queue from which a failure or
Ctrl-C can wake it. A wait that times out closes the connection, so helper threads wait without
limit and time is kept by :meth:`Mailbox.take`. A message that is larger than the receive posted
for it aborts the process, so every message starts with a part of fixed size (``wire.py``).

For each peer, one thread receives in the order that was announced by ``expect``, with receives
posted ahead, and one thread waits for sends to leave. Sends are posted by the caller, except from
a CUDA device, where the copy to pinned memory must finish first.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.runtime import exits, wire
from lightning_asyncpipe.runtime.mailbox import FailureWatch, Mailbox
from lightning_asyncpipe.runtime.wire import Message, MessageKey

__all__ = ["FailureWatch", "GlooTransport", "Message", "MessageKey", "Transport"]

_FOREVER = timedelta(days=365)
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
            CPU memory.
        failures: told of lost connections, asked while waiting. None: a lost connection is raised
            as it is seen.
        timeout: seconds that ``take`` and ``drain`` wait at most.
        on_stall: called now and then while ``take`` waits for long; may raise what it finds.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
        failures: FailureWatch | None = None,
        timeout: float = 1800.0,
        on_stall: Callable[[], None] | None = None,
    ) -> None:
        self.rank = dist.get_rank()
        self._group = group
        self._device = torch.device(device)
        self._timeout = timeout
        self._mailbox = Mailbox(self.rank, failures, timeout)
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
        first = wire.pack(key, tensor, requires_grad, fingerprint)
        sender = self._senders.get(peer)
        if sender is None:
            sender = self._senders[peer] = _Sender(self._group, peer, self._mailbox)
        sender.send(first, tensor, staged=self._device.type == "cuda")

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
            pinned = self._device.type == "cuda"
            receiver = self._receivers[peer] = _Receiver(self._group, peer, self._mailbox, pinned)
        receiver.expect(keys)

    def take(self, key: MessageKey) -> Message:
        """Block until the message has arrived, and remove it; see :meth:`Mailbox.take`.

        Only one thread may call this. Ctrl-C and failures of other ranks interrupt it.
        """
        message = self._mailbox.take(key)
        if message.tensor is None or message.tensor.device == self._device:
            return message
        return message._replace(tensor=message.tensor.to(self._device, non_blocking=True))

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


class _Helper(ABC):
    """A daemon thread that waits for gloo's operations with one peer."""

    def __init__(self, name: str, group: dist.ProcessGroup, peer: int, mailbox: Mailbox) -> None:
        self._group = group
        self._peer = peer
        self._group_peer = dist.get_group_rank(group, peer)
        self._mailbox = mailbox
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
            work.wait(_FOREVER)
        except RuntimeError as error:
            raise _ConnectionLost(error) from error


class _ConnectionLost(Exception):
    """An operation of gloo failed."""


class _Sender(_Helper):
    """Sends to one peer: posts them in order, and keeps their buffers until they have left."""

    def __init__(self, group: dist.ProcessGroup, peer: int, mailbox: Mailbox) -> None:
        super().__init__("send-to", group, peer, mailbox)
        self._pending = 0
        self._changed = threading.Condition()
        self._small: list[_Posted | _Staged] = []
        self._queue: queue.SimpleQueue[list[_Posted | _Staged] | None] = queue.SimpleQueue()
        self._thread.start()

    def send(self, first: bytearray, tensor: Tensor | None, staged: bool) -> None:
        with self._changed:
            self._pending += 1
        if staged:  # through the thread, also what is ready, so that the order is kept
            self._queue.put([_Staged(first, tensor)])
            return
        try:
            posted = self._post_message(first, None if tensor is None else tensor.cpu())
        except _ConnectionLost as lost:
            self._mailbox.lose(self._peer, lost)
            return
        self._small.append(posted)
        if len(posted.buffers) > 1 or len(self._small) >= _SMALL_HELD:
            self._flush()

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

    def _run(self) -> None:
        while (items := self._queue.get()) is not None:
            self._busy = True
            count = len(items)
            for item in items:
                posted = item if isinstance(item, _Posted) else self._post_message(*item.ready())
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


class _Staged:
    """A message whose tensor is on its way from the device to pinned CPU memory."""

    def __init__(self, first: bytearray, tensor: Tensor | None) -> None:
        self._first = first
        self._host = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor is not None and tensor.is_cuda:
            self._host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def ready(self) -> tuple[bytearray, Tensor | None]:
        """Wait for the copy; returns what to post."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._first, self._host


class _Receiver(_Helper):
    """Receives from one peer, in the expected order, with receives posted ahead."""

    def __init__(self, group: dist.ProcessGroup, peer: int, mailbox: Mailbox, pinned: bool) -> None:
        super().__init__("receive-from", group, peer, mailbox)
        self._pinned = pinned
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
        """The tensor of a message; waits for the second part where there is one."""
        if header.dtype is None:
            return None
        tensor = header.empty(self._pinned)
        data = wire.memory(tensor)
        if data.numel() <= wire.INLINE_SIZE:
            data.numpy().data[:] = wire.inline(part)[: data.numel()]
        else:
            self._wait(self._post(self._group.recv, data, _SECOND_TAG))
        return tensor
