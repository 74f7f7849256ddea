"""Parameters without memory, for those that a rank does not host.

Modules keep the same ``Parameter`` object, of the same shape, type and device; all its elements share one in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hollow(parameter: Tensor) -> None:
    """Replace the data of a parameter by zeros that take the memory of one element (three for a scalar)."""
    if parameter.dim() == 0:
        parameter.data = torch.zeros(3, dtype=parameter.dtype, device=parameter.device)[1]
    else:
        zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        parameter.data = zero.expand(parameter.shape)


def is_hollow(tensor: Tensor) -> bool:
    """Whether :func:`hollow` made the data of a tensor."""
    if tensor.device.type == "meta":
        return False
    if tensor.dim() == 0:
        return tensor.storage_offset() == 1 and tensor.untyped_storage().nbytes() == 3 * tensor.element_size()
    return not any(tensor.stride())
