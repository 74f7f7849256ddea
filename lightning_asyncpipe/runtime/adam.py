"""The step that Adam is about to make, as far as the gradient is known, without making it.

Where a rank owns a parameter the optimizer's state is at hand, so the coming weights can be worked out by Adam's own
formula (Kingma and Ba 2015; AdamW after Loshchilov and Hutter 2019) and nothing has to be kept for it. It is done piece
by piece: the temporaries of a piece stay in a CPU's cache, and are never as large as a large parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_asyncpipe.runtime.gradients import accumulation_dtype

_PIECE = {"cpu": 1 << 16}
"""Elements of a piece by kind of device."""
_PIECE_ELSEWHERE = 1 << 24


def next_weights(
    weights: Tensor,
    group: Mapping[str, Any],
    state: Mapping[str, Any],
    gradient: Tensor | None,
    scale: Tensor,
    decoupled: bool,
) -> Tensor:
    """What Adam's next step would turn `weights` into.

    Args:
        weights: of a parameter; not complex.
        group: its parameter group.
        state: what the optimizer keeps of it, after one step at least.
        gradient: of its shape; elements that are not finite count as 0. None: as the momentum says, so that the next
            step is like the last one.
        scale: what `gradient` has to be multiplied with; a number, or one for each element.
        decoupled: whether weights decay apart from the gradient, as in AdamW.
    """
    first, second = map(float, group["betas"])
    rate, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
    steps = float(state["step"]) + (gradient is not None)
    # Adam's m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), with the second correction taken out of the root.
    root = (1 - second**steps) ** 0.5
    length, eps = -rate * root / (1 - first**steps), eps * root
    largest = state.get("max_exp_avg_sq") if group["amsgrad"] else None
    result, dtype = torch.empty_like(weights), accumulation_dtype(weights.dtype)
    scratch: list[Tensor] = []
    for piece in _pieces(weights):
        old, momentum, squares = (piece(t).to(dtype) for t in (weights, state["exp_avg"], state["exp_avg_sq"]))
        scratch = scratch or [torch.empty_like(old) for _ in range(3)]
        moment, root_mean, new = (_Piece(0, piece.length)(t) for t in scratch)
        if gradient is not None:
            torch.mul(piece(gradient).to(dtype), piece(scale), out=moment)
            moment.nan_to_num_(0.0, 0.0, 0.0)
            if group["maximize"]:
                moment.neg_()
            if decay and not decoupled:
                moment.add_(old, alpha=decay)
            torch.mul(moment, moment, out=root_mean)
            squares = torch.lerp(squares, root_mean, 1 - second, out=root_mean)
            momentum = torch.lerp(momentum, moment, 1 - first, out=moment)
        if largest is not None:
            squares = torch.maximum(squares, piece(largest).to(dtype), out=root_mean)
        torch.sqrt(squares, out=root_mean).add_(eps)
        torch.mul(old, 1 - rate * decay if decoupled else 1.0, out=new)
        piece(result).copy_(new.addcdiv_(momentum, root_mean, value=length))
    return result


def _pieces(like: Tensor) -> Iterator[_Piece]:
    """Pieces of tensors of one shape, along their first dimension."""
    rows = like.shape[0] if like.dim() else 1
    size = _PIECE.get(like.device.type, _PIECE_ELSEWHERE)
    step = max(1, size * rows // max(1, like.numel()))
    return (_Piece(start, min(step, rows - start)) for start in range(0, rows, step))


class _Piece:
    def __init__(self, start: int, length: int) -> None:
        self.start, self.length = start, length

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(0, self.start, self.length) if tensor.dim() else tensor
