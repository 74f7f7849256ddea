"""The collectives that Lightning's loops, callbacks and loggers use, over all ranks.

Objects travel through the safe codec: nothing that arrives is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpipe.runtime import codec, exits


class World:
    """The process groups of a run; of one process alone where torch.distributed is not initialised.

    Attributes:
        messages: carries activations, gradients and weights between stages; its own, since helper threads use it.
        control: carries the step's records and objects, on the CPU.
        payloads: carries large tensors of messages from device to device, where that was asked for.
    """

    def __init__(self) -> None:
        self.active = dist.is_available() and dist.is_initialized()
        self.messages: dist.ProcessGroup | None = None
        self.control: dist.ProcessGroup | None = None
        self.payloads: dist.ProcessGroup | None = None
        if self.active:
            self.messages = dist.new_group(backend="gloo")
            self.control = dist.new_group(backend="gloo")

    def close(self) -> None:
        """Give the groups back; every rank has to call it."""
        for group in (self.messages, self.control, self.payloads):
            if group is not None:
                dist.destroy_process_group(group)
        self.active, self.messages, self.control, self.payloads = False, None, None, None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size() if self.active else 1

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank() if self.active else 0

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """`obj` of rank `src`, on every rank."""
        return codec.broadcast_object(obj, src, self.control) if self.size > 1 else obj

    def all_gather(self, obj: Any) -> list[Any]:
        """Every rank's `obj`, in the order of ranks."""
        return codec.all_gather_object(obj, self.control) if self.size > 1 else [obj]

    def gather(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Every rank's `obj` on rank `dst`, None elsewhere."""
        return codec.gather_object(obj, dst, self.control) if self.size > 1 else [obj]

    def begin_all_gather(self, tensor: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to collect every rank's CPU tensor of one shape and data type.

        Nobody may write to `tensor`, and no other collective may begin, before what this returns has been called; it
        waits for the tensors of all ranks, in their order.
        """
        if self.size == 1:
            return lambda: [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        work = dist.all_gather(parts, tensor, group=self.control, async_op=True)
        exits.watch(work, lambda: True)

        def finish() -> list[Tensor]:
            try:
                work.wait()
            finally:
                exits.forget(work)
            return parts

        return finish

    def send_tensor(self, tensor: Tensor, dst: int = 0) -> None:
        """Send a dense tensor to another rank, which calls :meth:`receive_tensor`."""
        if tensor.numel():
            dist.send(_as_bytes(tensor.detach().cpu().contiguous()), dst, group=self.control)

    def receive_tensor(self, shape: Sequence[int], dtype: torch.dtype, src: int) -> Tensor:
        """The tensor that rank `src` sends, in CPU memory."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        if tensor.numel():
            dist.recv(_as_bytes(tensor), src, group=self.control)
        return tensor

    def broadcast_tensor(self, tensor: Tensor, src: int) -> None:
        """Overwrite `tensor` with that of rank `src`; through CPU memory where it is elsewhere."""
        if self.size == 1:
            return
        host = tensor.detach().cpu().contiguous()
        dist.broadcast(host, src, group=self.control)
        if self.rank != src:
            tensor.copy_(host)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, so that all data types can be sent."""
    return tensor.view(-1).view(torch.uint8)
