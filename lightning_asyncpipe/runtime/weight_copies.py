"""One low-precision copy of the weights for all micro-batches that are in flight.

Under autocast without its cache, as Lightning runs it, every call of a layer makes a copy of its weight in 16 bits and
keeps it for the backward: one copy for each micro-batch in flight. Here the copies are made once for a version of the
weights, and all forwards of that version share them. Their backwards then use the version of their forward, as they
would with a copy of their own, so the results are the same to the last bit.

A parameter is replaced only as an argument of a function that autocast runs in low precision whatever its arguments
are. All else that is done with it sees the parameter itself: an embedding that is tied to a head, a norm in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_asyncpipe._private import in_function_transform

SMALLEST = 1 << 14
"""Elements of a parameter that is worth sharing: a smaller one is copied in less time than it takes to look it up."""

MATRIX_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(torch.conv1d, torch.conv2d, torch.conv3d),
        *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
        *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.addbmm, torch.baddbmm),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm),
        *(Tensor.addmm, Tensor.addbmm, Tensor.baddbmm),
    }
)
"""Functions that cast all their arguments under autocast, on every device; "Autocast Op Reference" of torch.amp."""

_ATTENTION_POSITIONS = frozenset({5, 11})
_ATTENTION_KEYWORDS = frozenset(
    {"in_proj_weight", "out_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"}
)


class _Alias(torch.autograd.Function):
    """The shared copy as the result of a cast of the parameter: each use has its own way back to it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


class _Shared:
    """The copies of one tensor, and what it was when they were made."""

    __slots__ = ("copies", "source", "state")

    def __init__(self, source: Tensor) -> None:
        self.source = source
        self.copies: dict[torch.dtype, Tensor] = {}
        self.state = _state(source)


class WeightCopies:
    """Makes and forgets the copies; :meth:`shared` lets a forward use them.

    Which parameters are cast, and to which type, is learnt from the first forward of a stage.

    Args:
        stages: for each stage its parameters; those that this process does not hold are never looked at.
        device_type: of the autocast, such as "cuda".
    """

    def __init__(self, stages: Sequence[Sequence[Parameter]], device_type: str) -> None:
        self._stages = [
            [p for p in parameters if p.dtype == torch.float32 and p.numel() >= SMALLEST] for parameters in stages
        ]
        self._device_type = device_type
        self._wanted: dict[Parameter, set[torch.dtype]] = {}
        self._shared: dict[int, _Shared] = {}
        self._current: dict[int, tuple[Parameter, _Shared | None]] = {}
        self._mode = _CastOnce(self)

    @contextmanager
    def shared(self, stage: int, weights: Mapping[Parameter, Tensor] | None = None) -> Iterator[None]:
        """Around the step of one forward of `stage`.

        Args:
            stage: the stage.
            weights: the tensors that stand in for parameters in this forward.
        """
        parameters = self._stages[stage]
        if not parameters:
            yield
            return
        for parameter in parameters:
            source = parameter if weights is None else weights.get(parameter, parameter)
            self._current[id(source)] = (parameter, self._of(source, parameter))
        try:
            with self._mode:
                yield
        finally:
            self._current.clear()

    def _of(self, source: Tensor, parameter: Parameter) -> _Shared | None:
        """The copies of a tensor, new ones if it has changed."""
        wanted = self._wanted.get(parameter)
        if wanted is None:
            return None
        shared = self._shared.get(id(source))
        if shared is None or shared.state != _state(source):
            shared = self._shared[id(source)] = _Shared(source)
        for dtype in wanted - shared.copies.keys():
            shared.copies[dtype] = source.detach().to(dtype)
        return shared

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is shared in here."""
        current, self._current = self._current, {}
        try:
            yield
        finally:
            self._current = current

    def forget(self, stage: int) -> None:
        """The weights of a stage have changed; forwards that are in flight keep the copies that they have."""
        for parameter in self._stages[stage]:
            self._shared.pop(id(parameter), None)

    def of(self, source: Tensor) -> list[Tensor]:
        """The copies that there are of a parameter, or of what stands in for it."""
        shared = self._shared.get(id(source))
        return [] if shared is None else list(shared.copies.values())

    def clear(self) -> None:
        """Forget all copies. Between segments anything may write to weights in ways that leave no trace."""
        self._shared.clear()

    def replace(self, tensor: Any) -> Any:
        """The copy of a parameter that autocast would make now; anything else as it is."""
        known = self._current.get(id(tensor))
        if known is None or not torch.is_autocast_enabled(self._device_type) or in_function_transform():
            return tensor  # not in a transform: some of them take functions apart before autocast sees them
        parameter, shared = known
        dtype = torch.get_autocast_dtype(self._device_type)
        copy = None if shared is None else shared.copies.get(dtype)
        if copy is None:
            self._wanted.setdefault(parameter, set()).add(dtype)
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            return _Alias.apply(tensor, copy)  # type: ignore[no-untyped-call]
        return copy


class _CastOnce(TorchFunctionMode):
    """Replaces parameters in the arguments of functions that would cast them."""

    def __init__(self, copies: WeightCopies) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in MATRIX_FUNCTIONS:
            replace = self._copies.replace
            args = tuple(map(replace, args))
            kwargs = {name: replace(value) for name, value in kwargs.items()}
        elif func is F.multi_head_attention_forward:
            # A function of several calls, which are not seen from here; its projections are calls of `linear`.
            replace = self._copies.replace
            args = tuple(replace(a) if i in _ATTENTION_POSITIONS else a for i, a in enumerate(args))
            kwargs = {name: replace(a) if name in _ATTENTION_KEYWORDS else a for name, a in kwargs.items()}
        return func(*args, **kwargs)


def _state(tensor: Tensor) -> tuple[int, int]:
    """What changes when a tensor is written to, or given other memory; not by writes that preserve its version."""
    return tensor._version, tensor.data_ptr()
