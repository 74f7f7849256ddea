"""Parameters that something other than the optimizer changes during training.

Each rank holds a part of the model, and other ranks hold copies of that part, so code that writes to parameters (a
teacher that follows the weights, a constraint on them) or that unfreezes them would see and change some of them only.
What can be seen of it cheaply is an error instead of a wrong model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.runtime.hollow import is_hollow

_SAMPLED = 64  # elements of a frozen parameter that are compared
_BATCHES = 3  # batches before which they are; what follows the weights does so from the first step on


class _Before(NamedTuple):
    name: str
    parameter: nn.Parameter
    trained: bool
    version: int
    address: int
    sample: Tensor | None  # of a frozen one


class ParameterWatch:
    """Compares the parameters of a module with what they were when training was set up.

    Writes of the optimizer do not count: they preserve autograd's version of the tensor. Of a frozen parameter the
    address and, before the first few batches, some of its elements are compared too, since writing through ``.data``
    leaves the version alone.

    Args:
        module: its parameters that this rank holds are watched, the others only for being unfrozen.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before = [
            _Before(name, parameter, parameter.requires_grad, parameter._version, parameter.data_ptr(), _sample(parameter))
            for name, parameter in module.named_parameters()
        ]
        self._checks = 0

    def check(self) -> None:
        """Look before a batch.

        Raises:
            PipelineError: names the parameter and says what to do.
        """
        sampling, self._checks = self._checks < _BATCHES, self._checks + 1
        for before in self._before:
            parameter = before.parameter
            if before.trained:
                if parameter._version != before.version:
                    raise _changed(before.name, "It is trained by the optimizer")
                continue
            if parameter.requires_grad:
                raise PipelineError(
                    f"`{before.name}` was frozen when training began and requires a gradient now. Which parameters are "
                    "trained is part of the pipelines' plan: unfreeze before `fit`, and to unfreeze more later end this "
                    "`fit` and start another one on the same module."
                )
            if (
                parameter._version != before.version
                or parameter.data_ptr() != before.address
                or (sampling and before.sample is not None and not _equal(_sample(parameter), before.sample))
            ):
                raise _changed(before.name, "It is frozen")


def _sample(parameter: Tensor) -> Tensor | None:
    if parameter.requires_grad or parameter.is_meta or is_hollow(parameter):
        return None
    return parameter.detach().reshape(-1)[:_SAMPLED].clone()


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one.nan_to_num(), other.nan_to_num())


def _changed(name: str, state: str) -> PipelineError:
    return PipelineError(
        f"`{name}` was written to outside the optimizer's step. {state}, and every rank holds a part of the parameters "
        "and copies of others' parts, so code that changes weights (a teacher that follows them, a constraint) would "
        "change some copies only. Load weights before `fit` or in `setup`; constrain them in a hook of the optimizer "
        "(`register_step_post_hook`), on the optimizer's own parameters. A teacher that follows the weights is not supported."
    )
