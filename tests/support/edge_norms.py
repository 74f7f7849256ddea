"""Scenarios about norms of gradients and clipping in hooks: each must be that of the whole model, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from tests.support.edge_basics import Regression, sized
from tests.support.edges import Scenarios

NORMS = Scenarios()
SIZES = (8, 8, 5, 8)


class InHook(Regression):
    """Calls a function on itself in a hook and takes down the numbers that it returns."""

    def __init__(self, hook: str, function: Callable[[Any], dict[str, Any]]) -> None:
        super().__init__()
        self.function = function
        self.seen: list[dict[str, float]] = []
        setattr(self, hook, self.call)

    def call(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append({name: float(value) for name, value in self.function(self).items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def _gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def clipped(norm: float = 2.0, **options: Any) -> Callable[[Any], dict[str, Any]]:
    """Clips by the norm, and again, when nothing is left to clip."""

    def clip(module: Any) -> dict[str, Any]:
        first = clip_grad_norm_(module.parameters(), 0.1, norm, **options)
        return {"first": first, "second": clip_grad_norm_(module.parameters(), 0.1, norm, **options)}

    return clip


def clipped_in_two_steps(module: Any) -> dict[str, Any]:
    total = get_total_norm(_gradients(module), 3.0)
    clip_grads_with_norm_(module.parameters(), 0.1, total)
    return {"before": total, "after": torch.nn.utils.get_total_norm(_gradients(module), 3.0, foreach=False)}


def clipped_by_value(module: Any) -> dict[str, Any]:
    clip_grad_value_(module.parameters(), 0.01)
    return {"largest": get_total_norm(_gradients(module), float("inf"))}


def norms(module: Any) -> dict[str, Any]:
    """Of all parameters, of a part, in another order and with another separator."""
    found = {**grad_norm(module, 2), **grad_norm(module, "inf", ".")}
    return {**found, **{f"head {name}": norm for name, norm in grad_norm(module.net.head, 1.0).items()}}


def norms_of_weights(module: Any) -> dict[str, Any]:
    """Not of gradients; hosts that are not the owner must not count."""
    return {"weights": get_total_norm(module.parameters()), "head": get_total_norm(module.net.head.weight)}


def norm_logged(module: Any) -> dict[str, Any]:
    found = grad_norm(module, 2)
    module.log_dict(found)
    return found


CALLS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "clipping by the norm": clipped(),
    "clipping by the sum, one by one": clipped(1.0, foreach=False),
    "clipping by the largest, all at once": clipped(float("inf"), foreach=True, error_if_nonfinite=True),
    "clipping in two steps": clipped_in_two_steps,
    "clipping by value": clipped_by_value,
    "norms by parameter": norms,
    "norms that are logged": norm_logged,
    "norms of weights": norms_of_weights,
}
for name, function in CALLS.items():
    NORMS.add(
        f"{name} before the step",
        lambda function=function: InHook("on_before_optimizer_step", function),
        lambda: sized(*SIZES),
    )
for name in ("clipping by the norm", "norms by parameter"):
    NORMS.add(
        f"{name} after the backward",
        lambda name=name: InHook("on_after_backward", CALLS[name]),
        lambda: sized(*SIZES),
    )


class FromOutside(pl.Callback):
    """Clips in a callback, each half of the model apart."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        layers = list(module.net.layers)
        for part in (layers[:3], layers[3:]):
            clip_grad_norm_((p for layer in part for p in layer.parameters()), 0.02)


NORMS.add(
    "clipping from outside, with Lightning's own",
    Regression,
    lambda: sized(*SIZES),
    arguments=lambda: {"callbacks": [FromOutside()], "gradient_clip_val": 0.03, "max_epochs": 2},
)


class UsesNormsInItsStep(Regression):
    """A penalty on the norm of a gradient, in the step: a matter of the micro-batch alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x.clone().requires_grad_()
        loss = super().training_step((x, y), batch_idx)
        (gradient,) = torch.autograd.grad((self.net.head(x)).sum(), x, create_graph=True)
        return loss + float(get_total_norm([gradient.detach()])) * self.net.head.weight.square().mean()


NORMS.add("norms in the step", UsesNormsInItsStep, lambda: sized(*SIZES), reference="parts")
