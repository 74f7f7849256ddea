"""What an optimizer will do with a gradient, as far as that can be told where its state is not.

With momentum b an update of Adam or SGD is ``b`` times the one before and ``- lr (1 - b)`` times the new gradient,
preconditioned (for SGD, ``- lr``). The preconditioner of AdamW is ``1 / (sqrt(v) + eps)``, and v grows with the new
gradient itself; SGD has none.

Muon makes the momentum orthogonal. What its update tells of the momentum is all but the symmetric factor H of the polar
decomposition; so H is sent, and with it the momentum, the new gradient added and made orthogonal, is the update.

An estimate of the gradient from part of the window is right on average but noisier than the gradient. Where an update
is linear in the gradient it is right on average, too. What Muon makes orthogonal has a fixed size, however: the more of
it is noise the less is signal. So its predicted update is made longer by what that noise has added.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_asyncpipe.runtime.adam import next_weights
from lightning_asyncpipe.runtime.gradients import accumulation_dtype
from lightning_asyncpipe.runtime.packing import end_to_end

_MUON: type[Optimizer] | None = getattr(torch.optim, "Muon", None)  # from torch 2.9 on
_ADAMS = (Adam, AdamW)
_KNOWN: tuple[type[Optimizer], ...] = (*_ADAMS, SGD, *(() if _MUON is None else (_MUON,)))


def is_known(optimizer: Optimizer) -> bool:
    """Whether updates of an optimizer can be told in advance; subclasses may do anything, so it is not for them."""
    return type(optimizer) in _KNOWN


def tells_weights(optimizer: Optimizer | None) -> bool:
    """Whether the weights after a step can be told from an optimizer's state and the gradient alone."""
    return type(optimizer) in _ADAMS


class UpdateRules:
    """How parameters are updated, by name.

    Args:
        parameters: the parameters to tell of.
        places: the optimizer of each, a known one, and the number of its group; none for a parameter without.
    """

    def __init__(self, parameters: Mapping[str, Parameter], places: Mapping[str, tuple[Optimizer, int]]) -> None:
        self._parameters = parameters
        self._places = places

    def _group(self, name: str) -> tuple[Optimizer, dict[str, Any]]:
        optimizer, number = self._places[name]
        return optimizer, optimizer.param_groups[number]

    def shape(self, name: str) -> torch.Size:
        """Of the preconditioner: the parameter's, that of a factor of the matrix, or ``(0,)`` where there is none."""
        optimizer, _ = self._places.get(name, (None, 0))
        shape = self._parameters[name].shape
        if type(optimizer) in _ADAMS and not self._parameters[name].is_complex():
            return shape
        return torch.Size([min(shape)] * 2 if type(optimizer) is _MUON else [0])

    def gain_bytes(self, name: str) -> int:
        """Bytes of the preconditioner as it is sent and kept, in the parameter's type."""
        return self.shape(name).numel() * self._parameters[name].dtype.itemsize

    def tells_weights(self, name: str) -> bool:
        """Whether :meth:`next_weights` can be asked for a parameter, by the rank that steps it."""
        optimizer, _ = self._places.get(name, (None, 0))
        return tells_weights(optimizer) and not self._parameters[name].is_complex()

    def kind(self, name: str) -> Hashable:
        """Equal for parameters that may be told of end to end, as :mod:`packing` lays them."""
        optimizer, number = self._places[name]
        if type(optimizer) is _MUON:
            return name
        step = optimizer.state.get(self._parameters[name], {}).get("step")
        return id(optimizer), number, None if step is None else float(step)

    def next_weights(self, names: Sequence[str], gradient: Tensor | None, scale: Tensor) -> Tensor:
        """Parameters after the step that the optimizer would make now, end to end in memory of their own.

        Args:
            names: of parameters of one :meth:`kind` that this rank has stepped before, and of which
                :meth:`tells_weights`.
            gradient: of the window, or an estimate of it, end to end; None: let the last step repeat itself.
            scale: what the gradient has to be multiplied with.
        """
        parameters = [self._parameters[name] for name in names]
        optimizer, group = self._group(names[0])
        states = [optimizer.state[parameter] for parameter in parameters]
        kept = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
        state = {"step": states[0]["step"], **{key: end_to_end([state[key] for state in states]) for key in kept}}
        decoupled = bool(group.get("decoupled_weight_decay", type(optimizer) is AdamW))
        weights = end_to_end([parameter.detach() for parameter in parameters])
        return next_weights(weights, group, state, gradient, scale, decoupled)

    def preconditioner(self, name: str) -> Tensor | None:
        """What must be known of the optimizer's state to tell an update from a gradient.

        Args:
            name: of a parameter that this rank has just stepped, and whose ``.grad`` is still there.

        Returns:
            A tensor of :meth:`shape`; None where there is none, or the optimizer has no state of the parameter.
        """
        if not self.shape(name).numel():
            return None
        parameter = self._parameters[name]
        optimizer, group = self._group(name)
        state = optimizer.state.get(parameter, {})
        if type(optimizer) in _ADAMS:
            squares: Tensor | None = state.get("max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq")
            if squares is None:
                return None
            correction = 1 - float(group["betas"][1]) ** float(state["step"])
            scale: Tensor = (squares / correction).sqrt_().add_(group["eps"]).reciprocal_()
            return scale
        momentum: Tensor | None = state.get("momentum_buffer")
        if momentum is None or parameter.grad is None:
            return None
        if group["nesterov"]:
            momentum = parameter.grad.lerp(momentum, group["momentum"])
        matrix = momentum if momentum.shape[0] >= momentum.shape[1] else momentum.T
        matrix = matrix.to(accumulation_dtype(matrix.dtype))
        values, vectors = torch.linalg.eigh(matrix.T @ matrix)
        factor: Tensor = (vectors * values.clamp_min_(0).sqrt_()) @ vectors.T
        return factor

    def update(
        self,
        name: str,
        move: Tensor,
        rates: tuple[float, float],
        gradient: Tensor,
        covered: float,
        preconditioner: Tensor | None,
    ) -> Tensor:
        """The coming update of a parameter, or of some of one :meth:`kind`, all tensors of which lie end to end.

        Args:
            name: of the parameter, or any of them.
            move: its last update.
            rates: the learning rates of that update and of the coming one, not 0 the first.
            gradient: of the window as the optimizer gets it, estimated from a part of it.
            covered: how large a part of the window that is, more than 0 and at most 1.
            preconditioner: as it was some steps before; None, or zeros, where the parameter had no gradient then.
        """
        optimizer, group = self._group(name)
        last, rate = rates
        if type(optimizer) is _MUON:
            if preconditioner is None or not preconditioner.any():
                return move * (rate / last)
            return self._muon(name, group, move, rates, gradient, covered, preconditioner)
        repeated = move * (float(group["betas"][0] if "betas" in group else group["momentum"]) * rate / last)
        if group["maximize"]:
            gradient = -gradient
        if type(optimizer) is SGD:
            return repeated - gradient * (rate * (1 - float(group["dampening"])))
        if preconditioner is None:
            return repeated
        gradient = gradient * preconditioner
        first, second = map(float, group["betas"])
        # A gradient much larger than those before it makes the preconditioner smaller at once.
        grown = gradient.square().mul_(1 - second).add_(second).sqrt_()
        return gradient.mul_(-rate * (1 - first)).div_(grown).add_(repeated)

    def _muon(
        self,
        name: str,
        group: dict[str, Any],
        move: Tensor,
        rates: tuple[float, float],
        gradient: Tensor,
        covered: float,
        factor: Tensor,
    ) -> Tensor:
        last, rate = rates
        weight = self._parameters[name].detach()
        decay: float = group["weight_decay"]
        direction = (move + last * decay * (weight - move)).neg_()
        direction *= min(move.shape) ** 0.5 / direction.norm().clamp_min(torch.finfo(move.dtype).tiny)
        momentum = direction @ factor if move.shape[0] >= move.shape[1] else factor @ direction
        kept: float = group["momentum"] ** (2 if group["nesterov"] else 1)
        scratch = Parameter(torch.zeros_like(weight))
        momentum = momentum.to(gradient.dtype)
        estimate = gradient.lerp(momentum, kept)
        scratch.grad = estimate.to(weight.dtype)
        assert _MUON is not None
        settings = {key: group[key] for key in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        _MUON([scratch], lr=rate, weight_decay=0.0, momentum=0.0, nesterov=False, **settings).step()  # type: ignore[call-arg]
        longer = self._longer(gradient, momentum, estimate, covered, group)
        return scratch.detach().mul_(longer).sub_(weight, alpha=rate * decay)

    @staticmethod
    def _longer(
        gradient: Tensor, momentum: Tensor, estimate: Tensor, covered: float, group: Mapping[str, Any]
    ) -> Tensor:
        """How much longer what Muon makes orthogonal has become by noise that the real one will not have; a scalar."""
        b: float = group["momentum"]
        kept = b**2 if group["nesterov"] else b
        known = momentum.square().sum()
        # Of the whole gradient's square: all of the signal, of which the momentum is the best guess, and of the noise
        # of a part of it as large a share as that part.
        noisy = gradient.square().sum()
        whole = torch.lerp(known, torch.maximum(known, noisy), covered)
        added = (1 - kept) ** 2 * (noisy - whole).clamp_min(0)
        if group["nesterov"]:
            # What is known is the momentum with the last gradient once more.
            added += b**2 * ((1 - b) ** 2 * (1 + 2 * b) * whole - (1 - b**2) * known).clamp_min(0)
        square = estimate.square().sum().clamp_min(torch.finfo(estimate.dtype).tiny)
        return (1 - added / square).clamp_min(0.25).rsqrt()
