"""Tensors of messages between a device's memory and the host's: who waits for what.

Computing on a GPU is asynchronous: a tensor that is to be sent may not have been computed yet, and a copy that was
asked for may not have been made. Three rules keep that apart from the order of messages.

* What leaves is copied on a stream of its own, behind what the sending thread had asked for until then, so that the
  copy does not hold up what is computed next. A helper thread waits for the copy's event, never for the device.
* What arrives is put into memory of a helper thread's own stream, and handed over once it is there. So whoever takes it
  need not wait, but must tell the allocator on which stream it is used (:meth:`Device.adopt`).
* Memory is held by a reference until the copy from it has been made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_asyncpipe.runtime.wire import Header

FOREVER = timedelta(days=365)


def device_of(device: torch.device | str) -> Device:
    """How tensors get from and to a device."""
    found = torch.device(device)
    return CudaDevice(found) if found.type == "cuda" else Device(found)


class Device:
    """A device on which all that was asked for is done at once, such as the CPU.

    Attributes:
        immediate: a tensor that is to be sent is there already.
    """

    immediate = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def working(self) -> AbstractContextManager[None]:
        """Around what a helper thread does."""
        return nullcontext()

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is in the memory of this device."""
        return tensor.device.type == self._device.type

    # By the thread that computes

    def computed(self, tensor: Tensor) -> Callable[[], Tensor]:
        """What is returned waits, in any thread, until `tensor` has been computed, and returns it."""
        return lambda: tensor

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to copy `tensor` to CPU memory; what is returned waits for the copy, in any thread, and returns it."""
        host = tensor.cpu()
        return lambda: host

    def adopt(self, tensor: Tensor) -> Tensor:
        """`tensor`, which a helper thread received, on this device; it is going to be used by the calling thread."""
        return tensor.to(self._device)

    # By helper threads, in `working`

    def host_buffer(self, header: Header) -> Tensor:
        """CPU memory for the tensor that a message announces."""
        return header.empty()

    def buffer(self, header: Header) -> Tensor:
        """Memory of the device for the tensor that a message announces."""
        return header.empty(self._device)

    def arrived(self, host: Tensor) -> Tensor:
        """What has arrived in :meth:`host_buffer`, on the device, or where :meth:`adopt` takes it from."""
        return host

    def finish(self, work: dist.Work) -> None:
        """Wait until a transfer of a tensor in the device's memory is over."""
        work.wait(FOREVER)


class CudaDevice(Device):
    """A GPU."""

    immediate = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._outgoing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def working(self) -> AbstractContextManager[None]:
        # Entered by each helper thread, since both the current device and the current stream are a thread's own.
        return torch.cuda.stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def computed(self, tensor: Tensor) -> Callable[[], Tensor]:
        event = self._event(torch.cuda.current_stream(self._device))

        def wait() -> Tensor:
            event.synchronize()
            return tensor

        return wait

    def to_host(self, tensor: Tensor) -> Callable[[], Tensor]:
        if not tensor.is_cuda:
            return super().to_host(tensor)
        host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
        self._outgoing.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outgoing):
            host.copy_(tensor, non_blocking=True)
        event, source = self._event(self._outgoing), [tensor]

        def copied() -> Tensor:
            event.synchronize()
            source.clear()  # the allocator may have its memory from here on, not earlier
            return host

        return copied

    def adopt(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return super().adopt(tensor)
        tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def host_buffer(self, header: Header) -> Tensor:
        return header.empty(pin_memory=True)

    def arrived(self, host: Tensor) -> Tensor:
        tensor = host.to(self._device, non_blocking=True)
        self._event(torch.cuda.current_stream(self._device)).synchronize()
        return tensor

    def finish(self, work: dist.Work) -> None:
        work.wait()  # of this thread's stream, for NCCL's
        self._event(torch.cuda.current_stream(self._device)).synchronize()

    @staticmethod
    def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event behind what `stream` has been asked for; waiting for it lets the processor do other work."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event
