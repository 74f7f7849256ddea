"""Gradients of a window, gathered outside ``parameter.grad``.

Backwards run inside Lightning's ``training_step``, and Lightning zeroes the gradients after it: until the window ends,
gradients therefore live here, in float32 at least. While a backward runs, an accumulator of the parameter's own data
type is lent to it as ``.grad``, so that autograd adds in place and hooks on gradients see what they would see on one
device that accumulates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_asyncpipe.runtime.ownership import Bucket


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The data type in which gradients of parameters of type `dtype` are added up: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class GradientAccumulator:
    """Sums of the gradients of this rank's parameters since the last :meth:`clear`.

    Args:
        parameters: the trainable parameters that this rank hosts, by name.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._parameters = dict(parameters)
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._sums: dict[str, Tensor] = {}
        self._covered: dict[str, float] = {}

    @contextmanager
    def collecting(self, names: Iterable[str], leaves: Mapping[Parameter, Tensor] | None = None) -> Iterator[None]:
        """Gather the gradients that the enclosed backward gives to the parameters `names`.

        Args:
            names: parameters that the backward may reach.
            leaves: the tensors that stood in for the parameters in the forward, where some did.
        """
        leaves = leaves or {}
        targets: list[tuple[str, Tensor]] = []
        for name in names:
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter.grad = None  # of the last step, which nobody needs any more
                targets.append((name, leaves.get(parameter, parameter)))
        for name, target in targets:
            total = self._sums.get(name)
            target.grad = total if total is not None and total.dtype == target.dtype else None
        try:
            yield
        finally:
            for name, target in targets:
                gradient, target.grad = target.grad, None
                if gradient is not None:
                    self._add(name, gradient)

    def _add(self, name: str, gradient: Tensor) -> None:
        total = self._sums.get(name)
        if gradient is total:
            return
        gradient = gradient.detach()
        if total is None or total.dtype == gradient.dtype:
            # What autograd returns for a lent accumulator already holds the sum.
            self._sums[name] = gradient.to(accumulation_dtype(gradient.dtype))
        else:
            total.add_(gradient)

    def get(self, name: str) -> Tensor | None:
        """The sum for one parameter, None if no backward reached it."""
        return self._sums.get(name)

    def replace(self, name: str, total: Tensor) -> None:
        """Keep the same sum in other memory; until :meth:`clear` nothing may be added to it."""
        self._sums[name] = total

    def cover(self, names: Iterable[str], share: float) -> None:
        """Backwards of `share` of the window have been through the uses of these parameters in one stage."""
        for name in names:
            self._covered[name] = self._covered.get(name, 0.0) + share

    def covered(self, name: str) -> float:
        """The share of the window whose backwards have reached a parameter, summed over the stages that use it."""
        return self._covered.get(name, 0.0)

    def clear(self) -> None:
        """Forget all sums: a new window begins."""
        self._sums.clear()
        self._covered.clear()


@contextmanager
def preserved_gradients(parameters: Iterable[Parameter]) -> Iterator[None]:
    """The parameters have no gradients in here, and afterwards those that they had before."""
    saved = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in saved:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in saved:
            parameter.grad = gradient


def take_gradients(parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    """The gradients of the parameters that have one, by name; afterwards they have none."""
    found = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    return found


def pack_gradients(
    accumulator: GradientAccumulator,
    names: Sequence[str],
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """One flat tensor: the sums of `names`, then one flag each that says whether there was any gradient."""
    parts: list[Tensor] = []
    flags = torch.zeros(len(names), dtype=dtype, device=device)
    for i, name in enumerate(names):
        total = accumulator.get(name)
        if total is None:
            parts.append(torch.zeros(shapes[name].numel(), dtype=dtype, device=device))
        else:
            flags[i] = 1
            parts.append((total.to_dense() if total.is_sparse else total).reshape(-1))
    return torch.cat([*parts, flags])


def unpack_gradients(packed: Tensor, names: Sequence[str], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Views of what :func:`pack_gradients` made, by name; parameters without any gradient are left out."""
    flags = packed[len(packed) - len(names) :].tolist()
    found: dict[str, Tensor] = {}
    start = 0
    for name, flag in zip(names, flags, strict=True):
        size = shapes[name].numel()
        if flag:
            found[name] = packed[start : start + size].view(shapes[name])
        start += size
    return found


def add_sums(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add `more` to `sums` in place; what `sums` does not have becomes part of it as it is."""
    for name, gradient in more.items():
        sums[name] = sums[name].add_(gradient) if name in sums else gradient


def pack_weights(
    parameters: Mapping[str, Parameter], names: Sequence[str], companions: Sequence[Tensor] = ()
) -> Tensor:
    """The weights of `names` in one flat tensor of their data type, and `companions` of that type after them."""
    with torch.no_grad():
        return torch.cat([*(parameters[name].detach().reshape(-1) for name in names), *companions])


def shard_of(bucket: Bucket, rank: int) -> tuple[str, ...]:
    """The names of `bucket` that `rank` owns, none if it owns none."""
    return next((names for owner, names in bucket.shards if owner == rank), ())
