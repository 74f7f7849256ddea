"""Parameters without memory, for those that a rank does not host.

Modules keep the same ``Parameter`` object, of the same shape, type and device; all its elements share one in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def absent(parameter: Tensor) -> Tensor:
    """One element that stands for all those of a parameter which is not held: NaN, where its type has it.

    So what is computed from it, in a hook say, cannot be taken for a value of the model.
    """
    value = float("nan") if parameter.is_floating_point() or parameter.is_complex() else 0
    return torch.full((), value, dtype=parameter.dtype, device=parameter.device)


def hollow(parameter: Tensor, element: Tensor | None = None) -> None:
    """Replace the data of a parameter by some that take the memory of one element (three for a scalar).

    Args:
        parameter: gets data of the same shape.
        element: all of them, as a 0-dimensional tensor; :func:`absent` if None.
    """
    one = absent(parameter) if element is None else element
    parameter.data = one.repeat(3)[1] if parameter.dim() == 0 else one.expand(parameter.shape)


def is_hollow(tensor: Tensor) -> bool:
    """Whether :func:`hollow` made the data of a tensor."""
    if tensor.device.type == "meta":
        return False
    if tensor.dim() == 0:
        return tensor.storage_offset() == 1 and tensor.untyped_storage().nbytes() == 3 * tensor.element_size()
    return not any(tensor.stride())
