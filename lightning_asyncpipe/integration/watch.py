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
    """Compares the parameters of a module, before each batch, with what they were before the first one.

    Writes of the optimizer do not count: they preserve autograd's version of the tensor. Of a frozen parameter the
    address and, before the first few batches, some of its elements are compared too, since writing through ``.data``
    leaves the version alone. What is trained must stay what it is when the watch is made.

    Args:
        module: its parameters that this rank holds are watched, the others only for being unfrozen.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [(name, p, p.requires_grad) for name, p in module.named_parameters()]
        self._before: list[_Before] = []
        self._checks = 0

    def check(self) -> None:
        """Look before a batch.

        Raises:
            PipelineError: names the parameter and says what to do.
        """
        for name, parameter, trained in self._parameters:
            if parameter.requires_grad and not trained:
                raise PipelineError(
                    f"`{name}` was frozen when training began and requires a gradient now. Which parameters are "
                    "trained is part of the pipelines' plan: unfreeze before `fit`, and to unfreeze more later end "
                    "this `fit` and start another one on the same module."
                )
        if not self._checks:
            self._before = [
                _Before(name, p, trained, p._version, p.data_ptr(), None if trained else _sample(p))
                for name, p, trained in self._parameters
            ]
        self._checks += 1
        for before in self._before:
            if before.parameter._version != before.version or not (before.trained or self._is_as_before(before)):
                raise _changed(before)

    def _is_as_before(self, before: _Before) -> bool:
        parameter = before.parameter
        if parameter.data_ptr() != before.address:
            return False
        if before.sample is None or self._checks > _BATCHES:
            return True
        sample = _sample(parameter)
        return sample is not None and torch.equal(sample.nan_to_num(), before.sample.nan_to_num())


def _sample(parameter: Tensor) -> Tensor | None:
    if parameter.is_meta or is_hollow(parameter):
        return None
    return parameter.detach().reshape(-1)[:_SAMPLED].clone()


def _changed(before: _Before) -> PipelineError:
    state = "trained by the optimizer" if before.trained else "frozen"
    return PipelineError(
        f"`{before.name}`, which is {state}, was written to outside the optimizer's step. Every rank holds a part of "
        "the parameters and copies of others' parts, so code that changes weights (a teacher that follows them, a "
        "constraint) would change some copies only. Load weights before `fit` or in `setup`; constrain them in a hook "
        "of the optimizer (`register_step_post_hook`), on the optimizer's own parameters. A teacher that follows the "
        "weights is not supported."
    )
