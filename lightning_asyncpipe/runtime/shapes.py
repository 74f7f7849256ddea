"""What skipped calls return: zeros in the structure, shapes, strides and types of the real result.

The result of a call depends on the shapes of its arguments, so it is looked up by those. A signature that was not seen
before is answered by a run of the module in which operations compute shapes only
(:func:`lightning_asyncpipe._private.shapes_only`); where that is impossible, because code in it looks at values, it is
run for real, without gradients. Hooks do not fire then: they would take what they see for the module's real output.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_asyncpipe._private import shapes_only, to_fake, without_hooks
from lightning_asyncpipe.runtime.buffers import preserved_buffers
from lightning_asyncpipe.runtime.structure import leaves, map_leaves, preserved_attributes
from lightning_asyncpipe.runtime.trace import CallKey

CACHED_SIGNATURES = 4096
"""How many results are remembered; the least recently used are forgotten."""

_PLAIN = (int, float, bool, str, bytes, type(None), torch.dtype, torch.device)

Received = Callable[["TensorSpec"], Tensor]


class TensorSpec:
    """A tensor in a result: shape, strides, type and device. Not a container, so it can be a leaf itself."""

    __slots__ = ("_overlaps", "device", "dtype", "shape", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        self.device = tensor.device
        self._overlaps = overlaps(self.shape, self.stride)

    def zeros(self) -> Tensor:
        """A fresh tensor of zeros; one whose elements share memory if the real one's do."""
        if self._overlaps:
            extent = 1 + sum((s - 1) * d for s, d in zip(self.shape, self.stride, strict=True) if s)
            memory = torch.zeros(extent, dtype=self.dtype, device=self.device)
            return memory.as_strided(self.shape, self.stride)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()

    def arrange(self, tensor: Tensor) -> Tensor:
        """`tensor`, or a copy of it that has this specification's strides, where the shapes are equal."""
        if tensor.shape != self.shape or tensor.stride() == self.stride or self._overlaps:
            return tensor
        arranged = torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device)
        return arranged.copy_(tensor)


class _Argument:
    """A leaf of a result that is one of the arguments itself."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of a tensor share memory because it was expanded."""
    return any(d == 0 and s > 1 for s, d in zip(shape, stride, strict=True))


class SkippedCalls:
    """Makes the results of calls that are skipped.

    Attributes:
        inferred: how many results had to be worked out; the others were remembered.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Any] = OrderedDict()
        self.inferred = 0

    def result(
        self,
        key: CallKey,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        received: Received | None = None,
        positions: Sequence[int] = (),
    ) -> Any:
        """What the skipped call returns.

        Args:
            key: the call.
            module: the module that is called.
            call: calls it for real.
            args: its positional arguments.
            kwargs: its keyword arguments.
            received: makes the tensor for the leaves at `positions`, told what it should look like.
            positions: leaves of the result that are not zeros.
        """
        signature = (key, module.training, *_signature(args), *kwargs, *_signature(kwargs))
        template = self._known.get(signature)
        if template is None:
            template = self._known[signature] = self._infer(module, call, args, kwargs)
            if len(self._known) > CACHED_SIGNATURES:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(signature)
        if type(template) is TensorSpec:
            return template.zeros() if received is None else received(template)
        return _fill(template, (args, kwargs), received, positions)

    def _infer(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self.inferred += 1
        with preserved_attributes(module), preserved_buffers(module), without_hooks(module):
            try:
                with shapes_only() as mode:
                    given = map_leaves(
                        lambda leaf: to_fake(mode, leaf.detach()) if isinstance(leaf, Tensor) else _copied(leaf),
                        (args, kwargs),
                    )
                    with mode:
                        return _template(call(*given[0], **given[1]), given)
            except Exception:
                # Code that looks at values cannot do without them. If the call itself is wrong, it fails again.
                with torch.no_grad():
                    given = map_leaves(
                        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else _copied(leaf),
                        (args, kwargs),
                    )
                    return _template(call(*given[0], **given[1]), given)


def _signature(value: Any) -> Iterator[Hashable]:
    """What the shapes of a result can depend on; of objects that are no containers or plain values the type only."""
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            yield (leaf.shape, leaf.stride(), leaf.dtype)
        elif isinstance(leaf, _PLAIN):
            yield leaf
        else:
            yield cast(Hashable, type(leaf))


def _copied(leaf: Any) -> Any:
    """A copy of an argument that a trial run might change (a cache of keys and values), if it can be copied."""
    if isinstance(leaf, (*_PLAIN, nn.Module, type, FunctionType, ModuleType)):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:
        return leaf


def _template(result: Any, arguments: Any) -> Any:
    """`result` with specifications in place of its tensors."""
    given = {id(leaf): i for i, leaf in enumerate(leaves(arguments)) if not isinstance(leaf, _PLAIN)}

    def describe(leaf: Any) -> Any:
        if id(leaf) in given:
            return _Argument(given[id(leaf)])
        return TensorSpec(leaf) if isinstance(leaf, Tensor) else leaf

    return map_leaves(describe, result)


def _fill(template: Any, arguments: Any, received: Received | None, positions: Sequence[int]) -> Any:
    """A fresh result from its template."""
    index = -1
    given: list[Any] = []
    entry: Tensor | None = None

    def choose(leaf: Any) -> Any:
        nonlocal index, entry
        index += 1
        if received is not None and index in positions:
            if entry is None:
                entry = received(leaf)
            return entry
        if type(leaf) is TensorSpec:
            return leaf.zeros()
        if type(leaf) is _Argument:
            if not given:
                given.extend(leaves(arguments))
            return given[leaf.position]
        return leaf

    return map_leaves(choose, template)
