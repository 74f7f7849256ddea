"""Gradient norms over all ranks.

Every rank steps only what it owns, so a norm over its own gradients is a part of the whole. While the hooks around an
optimizer step run, torch's norm of gradients is therefore global: Lightning's ``gradient_clip_val``,
``self.clip_gradients`` and a user's own ``torch.nn.utils.clip_grad_norm_`` all come through it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpipe._private import patched_total_norm


@contextmanager
def global_norms(
    all_reduce: Callable[[Tensor, str], Tensor], device: torch.device, dtype: torch.dtype
) -> Iterator[None]:
    """Make the norms of gradients that torch computes in here global.

    Args:
        all_reduce: reduces a tensor over all ranks, by "sum" or "max".
        device: where the norm of a rank without gradients is created.
        dtype: of the gradients, the same on every rank; norms come in this type, in float32 at least.
    """
    dtype = torch.promote_types(dtype, torch.float32)

    def total_norm(
        tensors: Iterable[Tensor] | Tensor,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        local: Callable[..., Tensor],
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm_type = float(norm_type)
        part = torch.zeros((), dtype=torch.float64, device=device)
        if gradients:
            part = local(gradients, norm_type, False, foreach).to(part)
        if math.isinf(norm_type):
            total = all_reduce(part, "max")
        else:
            total = all_reduce(part**norm_type, "sum") ** (1.0 / norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients of all ranks is {total.item()}, so it cannot "
                "be clipped. Pass error_if_nonfinite=False to clip all the same."
            )
        return total.to(dtype)

    with patched_total_norm(total_norm):
        yield


def reduce_with(
    group: Any, counting: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Callable[[Tensor, str], Tensor]:
    """An all-reduce for :func:`global_norms` over a process group; the identity where there is none.

    Args:
        counting: entered around each wait for the other ranks.
    """

    def all_reduce(tensor: Tensor, operation: str) -> Tensor:
        if group is not None:
            op = torch.distributed.ReduceOp.MAX if operation == "max" else torch.distributed.ReduceOp.SUM
            with counting():
                torch.distributed.all_reduce(tensor, op=op, group=group)
        return tensor

    return all_reduce
