"""Ranks as threads of one process: a transport that keeps messages in memory, for tests.

It has the semantics of ``channels.GlooTransport``: messages of a pair arrive in the order of their
sends, must have been expected in that order, and are copies.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.runtime import wire
from lightning_asyncpipe.runtime.mailbox import FailureWatch, Mailbox
from lightning_asyncpipe.runtime.wire import Message, MessageKey


class LoopbackNetwork:
    """The connections between ``world_size`` ranks of one process.

    Args:
        world_size: number of ranks.
        failures: asked by every rank while it waits; None: :meth:`fail` alone ends waits.
        timeout: seconds that ``take`` and ``drain`` wait at most.
    """

    def __init__(self, world_size: int, failures: FailureWatch | None = None, timeout: float = 60.0) -> None:
        self._mailboxes = [Mailbox(rank, failures, timeout) for rank in range(world_size)]
        self._pairs = {
            (source, target): _Pair(source, target, mailbox)
            for target, mailbox in enumerate(self._mailboxes)
            for source in range(world_size)
            if source != target
        }

    def transport(self, rank: int) -> LoopbackTransport:
        """The transport of one rank; to be used by one thread."""
        return LoopbackTransport(rank, self._mailboxes[rank], self._pairs)

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in every rank that waits, or comes to wait."""
        for mailbox in self._mailboxes:
            mailbox.fail(error)


class LoopbackTransport:
    """One rank's end of a :class:`LoopbackNetwork`; see ``channels.Transport``."""

    def __init__(self, rank: int, mailbox: Mailbox, pairs: dict[tuple[int, int], _Pair]) -> None:
        self.rank = rank
        self._mailbox = mailbox
        self._pairs = pairs

    def send(self, peer: int, key: MessageKey, tensor: Tensor | None, fingerprint: int = 0) -> None:
        """Send a copy of ``tensor``.

        Raises:
            ValueError, TypeError: the tensor cannot be carried (see ``wire.pack``).
        """
        requires_grad = tensor is not None and tensor.requires_grad
        copy = None if tensor is None else wire.dense(tensor).clone()
        wire.pack(key, copy, requires_grad, fingerprint)  # refuse what a real wire would refuse
        message = Message(copy, fingerprint, requires_grad)
        if peer == self.rank:
            self._mailbox.deliver(key, message)
        else:
            self._pairs[self.rank, peer].send(key, message)

    def expect(self, peer: int, keys: Sequence[MessageKey]) -> None:
        """Announce ``keys``, in the order in which ``peer`` sends them."""
        self._mailbox.expect(peer, keys)
        if peer != self.rank:
            self._pairs[peer, self.rank].expect(keys)

    def take(self, key: MessageKey) -> Message:
        """Block until the message has arrived, and remove it; see ``Mailbox.take``."""
        return self._mailbox.take(key)

    def drain(self) -> None:
        """Check for a failure; a copy has left as soon as it is made."""
        self._mailbox.check()

    def close(self) -> None:
        """Stop watching for failures."""
        self._mailbox.close()


class _Pair:
    """Messages from one rank to another: the n-th sent meets the n-th expected."""

    def __init__(self, source: int, target: int, mailbox: Mailbox) -> None:
        self._source = source
        self._target = target
        self._mailbox = mailbox
        self._lock = threading.Lock()
        self._sent: deque[tuple[MessageKey, Message]] = deque()
        self._expected: deque[MessageKey] = deque()

    def send(self, key: MessageKey, message: Message) -> None:
        with self._lock:
            self._sent.append((key, message))
            self._match()

    def expect(self, keys: Sequence[MessageKey]) -> None:
        with self._lock:
            self._expected.extend(keys)
            self._match()

    def _match(self) -> None:
        while self._sent and self._expected:
            (key, message), expected = self._sent.popleft(), self._expected.popleft()
            if key == expected:
                self._mailbox.deliver(key, message)
            else:
                self._mailbox.fail(PipelineError(wire.mismatch(self._target, expected, self._source, key)))
