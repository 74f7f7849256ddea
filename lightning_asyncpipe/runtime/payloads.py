"""Large tensors from one GPU's memory to another's, beside headers that travel over gloo.

An operation of NCCL occupies the device until its counterpart on the other device runs, and calls of CUDA that wait for
the device (freeing memory, pinning some) wait for it too. Two devices that each begin a send and then wait so, or
operations that fill a device while their counterparts wait for room on another, never go on. NCCL's own manual asks
for one communicator at a time, by a lock, in an order that is the same everywhere. This is that lock. A transfer

* begins only once the tensor has been computed and the receiver, which has the header, has memory for it;
* holds both ranks from then on: no rank takes part in two transfers at once;
* so waits for nothing but the other end, which has nothing else to do.

Ranks are held in ascending order: the lower one first, which then tells the higher one. A rank that is held thus only
waits for a higher one, or for a transfer that both ends have begun, so that no circle of waiting ranks can close,
whichever transfers meet. Until the receiver is ready nobody is held: it may not even expect the message yet. Since both
directions of all pairs share the lock, one communicator serves all ranks, and what a pair needs of it is made when the
two first meet.

Waiting for each other before each transfer costs two or three small messages. They pass in helper threads, while the
device computes.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpipe.runtime import wire
from lightning_asyncpipe.runtime.devices import FOREVER, Device

_READY, _GO = 3, 4  # tags; each is used by one thread at each end of an ordered pair
_PATIENCE = 2.0  # seconds that a transfer may take to end before its group is aborted


class DevicePayloads:
    """This rank's transfers of tensors in device memory.

    Each method is called by one helper thread for each peer, which waits for nothing else meanwhile. What they raise
    if the connection is lost is a RuntimeError, as torch's.

    Args:
        tokens: the gloo group of the headers; its tags 3 and 4 are used.
        data: a group of the same ranks in the same order that transfers the memory of `device`, and nothing else.
        device: waits for the transfers.
    """

    def __init__(self, tokens: dist.ProcessGroup, data: dist.ProcessGroup, device: Device) -> None:
        self._tokens = tokens
        self._data = data
        self._device = device
        self._rank = tokens.rank()
        self._held = threading.Lock()

    def send(self, peer: int, tensor: Tensor) -> None:
        """Send to rank `peer` of the group, which has been sent the header; returns once it has left.

        Args:
            tensor: dense, on the device, and computed.
        """
        self._hear(peer, _READY)
        with self._held:
            told = self._tell(peer, _GO) if self._rank < peer else None
            self._device.finish(self._data.send([wire.memory(tensor)], peer, 0))
        if told is not None:
            told.wait(FOREVER)

    def receive(self, peer: int, tensor: Tensor) -> None:
        """Fill `tensor` with what rank `peer` of the group sends, whose header has arrived."""
        if self._rank < peer:
            with self._held:
                told = self._tell(peer, _READY)
                self._device.finish(self._data.recv([wire.memory(tensor)], peer, 0))
        else:
            told = self._tell(peer, _READY)
            self._hear(peer, _GO)
            with self._held:
                self._device.finish(self._data.recv([wire.memory(tensor)], peer, 0))
        told.wait(FOREVER)

    def close(self) -> None:
        """No further transfers; one whose other end does not come is broken off, so that the device is free again."""
        if self._held.acquire(timeout=_PATIENCE):
            self._held.release()
        else:
            self._data.abort()

    def _tell(self, peer: int, tag: int) -> _Told:
        return _Told(self._tokens, peer, tag)

    def _hear(self, peer: int, tag: int) -> None:
        self._tokens.recv([torch.empty(1, dtype=torch.uint8)], peer, tag).wait(FOREVER)


class _Told:
    """A token under way, with its memory."""

    def __init__(self, tokens: dist.ProcessGroup, peer: int, tag: int) -> None:
        self._token = torch.zeros(1, dtype=torch.uint8)
        self._work = tokens.send([self._token], peer, tag)
        self.wait = self._work.wait
