"""Gradients as hooks see them, and their norms over all ranks.

Every rank steps only what it owns, so a norm over its own gradients is a part of the whole. While the hooks around an
optimizer step run, torch's norm of gradients is therefore global: Lightning's ``gradient_clip_val``,
``self.clip_gradients``, a user's own ``torch.nn.utils.clip_grad_norm_`` or ``get_total_norm``, and Lightning's
``grad_norm``, which then names the parameters of all ranks.

A ``.grad`` has the data type of its parameter, but norms are those of the float32 gradients that it was made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch.utilities.grads import grad_norm as lightning_grad_norm
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lightning_asyncpipe._private import rerouted, total_norm_rerouted
from lightning_asyncpipe.integration.collectives import inside_step
from lightning_asyncpipe.runtime.gradients import accumulation_dtype


class InstalledGradients:
    """The gradients that have become ``.grad``, and for 16-bit ones the float32 gradients that they are a cast of."""

    def __init__(self) -> None:
        self._wide: dict[int, tuple[Tensor, int, Tensor]] = {}

    def install(self, parameter: Parameter, gradient: Tensor) -> None:
        """Make `gradient`, of float32 at least, the ``.grad`` of a parameter, in the data type of the parameter."""
        parameter.grad = narrow = gradient.to(parameter.dtype)
        if narrow.dtype != gradient.dtype:
            self._wide[id(narrow)] = (narrow, narrow._version, gradient)

    def wide(self, gradient: Tensor) -> Tensor:
        """What a gradient was a cast of, or itself in float32 at least if it was changed since."""
        narrow, version, wide = self._wide.get(id(gradient), (None, 0, gradient))
        if narrow is gradient and narrow._version == version:
            return wide
        return gradient.to(accumulation_dtype(gradient.dtype))

    def clear(self) -> None:
        """The step is over."""
        self._wide.clear()


class GlobalNorms:
    """Norms of gradients over all ranks.

    Args:
        parameters: all parameters of the model by name, the same names on every rank.
        owned: names of those that this rank owns.
        gradients: what has become ``.grad``.
        all_reduce: reduces a tensor over all ranks, by "sum" or "max".
        device: where the norm of a rank without gradients is created.
        meet: told which function is called that every rank has to call.
    """

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        owned: Collection[str],
        gradients: InstalledGradients,
        all_reduce: Callable[[Tensor, str], Tensor],
        device: torch.device,
        meet: Callable[[str], None],
    ) -> None:
        self._owned = {id(parameter): name in owned for name, parameter in parameters.items()}
        dtypes = [p.dtype for p in parameters.values() if p.requires_grad]
        self._dtype = accumulation_dtype(dtypes[0] if dtypes else torch.float32)
        self._gradients = gradients
        self._all_reduce = all_reduce
        self._device = device
        self._meet = meet

    @contextmanager
    def in_hooks(self) -> Iterator[None]:
        """Around an optimizer step, its closure and its hooks: torch's and Lightning's norms are global in here."""
        with (
            total_norm_rerouted(self._total_norm),
            rerouted(lightning_grad_norm, self._grad_norm),
            rerouted(clip_grad_norm_, self._clip_by_norm),
            rerouted(clip_grad_value_, _clip_by_value),
        ):
            yield

    def _clip_by_norm(
        self,
        parameters: Iterable[Tensor] | Tensor,
        *args: Any,
        local: Callable[..., Tensor],
        **kwargs: Any,
    ) -> Tensor:
        """In place of ``torch.nn.utils.clip_grad_norm_``: a rank that owns nothing has no parameters to give it."""
        if not isinstance(parameters, Tensor) and not any(self._owned.values()):
            parameters = list(parameters)  # of an empty generator torch warns that nothing would be clipped
        return local(parameters, *args, **kwargs)

    def _total_norm(
        self,
        tensors: Iterable[Tensor] | Tensor,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        local: Callable[..., Tensor],
    ) -> Tensor:
        """In place of ``torch.nn.utils.get_total_norm``: of gradients, or of parameters, each counted by its owner."""
        if inside_step():
            return local(tensors, norm_type, error_if_nonfinite, foreach)
        self._meet("torch.nn.utils.get_total_norm")
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        own = [self._gradients.wide(tensor) for tensor in given if self._owned.get(id(tensor), True)]
        norm_type = float(norm_type)
        part = torch.zeros((), dtype=torch.float64, device=self._device)
        if own:
            part = local(own, norm_type, False, foreach).to(part)
        if math.isinf(norm_type):
            # The largest of numbers of which one is NaN may be any other one; on one device it is NaN.
            known = torch.stack([part.nan_to_num(0.0, math.inf), part.isnan().to(part)])
            largest = self._all_reduce(known, "max")
            total = largest[0].masked_fill(largest[1] > 0, math.nan)
        else:
            total = self._all_reduce(part**norm_type, "sum") ** (1.0 / norm_type)
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients of all ranks is {total.item()}, so it cannot "
                "be clipped. Pass error_if_nonfinite=False to clip all the same."
            )
        return total.to(self._dtype)

    def _grad_norm(
        self,
        module: nn.Module,
        norm_type: float | str,
        group_separator: str = "/",
        *,
        local: Callable[..., dict[str, Any]],
    ) -> dict[str, Any]:
        """In place of ``lightning.pytorch.utilities.grad_norm``: each norm comes from the parameter's owner."""
        order = float(norm_type)
        if inside_step() or not order > 0:
            return local(module, norm_type, group_separator)
        self._meet("lightning.pytorch.utilities.grad_norm")
        names = [name for name, _ in module.named_parameters()]
        norms = torch.zeros(len(names), dtype=torch.float64, device=self._device)
        known = torch.zeros_like(norms)
        for i, (_, parameter) in enumerate(module.named_parameters()):
            if parameter.grad is not None and self._owned.get(id(parameter), True):
                gradient = self._gradients.wide(parameter.grad)
                values = gradient.coalesce().values() if gradient.is_sparse else gradient
                norms[i] = torch.linalg.vector_norm(values, order)
                known[i] = 1.0
        norms, known = self._all_reduce(torch.stack([norms, known]), "sum").to(self._dtype)
        found = {
            f"grad_{order}_norm{group_separator}{name}": norm
            for name, norm, any_gradient in zip(names, norms, known.tolist(), strict=True)
            if any_gradient
        }
        if found:
            found[f"grad_{order}_norm_total"] = torch.linalg.vector_norm(torch.stack(list(found.values())), order)
        return found


def _clip_by_value(
    parameters: Iterable[Tensor] | Tensor, *args: Any, local: Callable[..., None], **kwargs: Any
) -> None:
    """In place of ``torch.nn.utils.clip_grad_value_``, which fails where no parameter has a gradient."""
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(parameter.grad is not None for parameter in given):
        local(given, *args, **kwargs)


def reduce_with(
    group: Any, counting: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Callable[[Tensor, str], Tensor]:
    """An all-reduce for :class:`GlobalNorms` over a process group; the identity where there is none.

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
