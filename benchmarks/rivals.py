"""What others propose against stale gradients, as far as it can be tried here: experiments for ``convergence.py``.

All of them run in the paper's mode, early forwards on old weights, and change the optimizer or the gradients:

* error feedback: the difference between this update and the one before, which a delay of one step has left out, is
  added to the update. After Zmushko et al. 2026 (arXiv 2606.30634), as we understand it.
* nesterov: Adam with Nesterov's look-ahead and a momentum of .99. After Ajanthan et al. 2025 (arXiv 2505.01099).
* rotation: Adam in the eigenbasis of the averages of ``G G'`` and ``G' G``. After Jung et al. 2026 (arXiv 2602.03515).
* scaled: gradients that come from old weights count half.

An optimizer that is changed is another one where nothing is stale, too: so each has a synchronous run beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, NAdam, Optimizer

from lightning_asyncpipe import ReferenceStrategy
from lightning_asyncpipe.runtime.gradients import GradientAccumulator
from lightning_asyncpipe.runtime.stages import StageRunner
from lightning_asyncpipe.runtime.stash import WeightStash

BETAS = (0.9, 0.95)


class FeedbackAdamW(AdamW):
    """AdamW whose updates u become 2 u - u', where u' is the one before."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() for p in parameters]
        super().step()
        for parameter, old in zip(parameters, before, strict=True):
            update = parameter - old
            last = self.state[parameter].get("last")
            if last is not None:
                parameter.add_(update - last)
            self.state[parameter]["last"] = update
        return loss


class RotatedAdamW(AdamW):
    """AdamW that sees the gradients of matrices in a basis of their own, renewed every ten steps."""

    _EVERY, _DECAY = 10, 0.95

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        turned: list[tuple[Parameter, Tensor, Tensor]] = []
        for parameter in (p for group in self.param_groups for p in group["params"]):
            if parameter.grad is None or parameter.ndim != 2 or max(parameter.shape) > 256:
                continue
            left, right = self._bases(parameter, parameter.grad)
            turned.append((parameter, left, right))
            parameter.grad = left.T @ parameter.grad @ right
            parameter.copy_(left.T @ parameter @ right)
        super().step()
        for parameter, left, right in turned:
            parameter.copy_(left @ parameter @ right.T)
        return loss

    def _bases(self, parameter: Parameter, gradient: Tensor) -> tuple[Tensor, Tensor]:
        state = self.state[parameter]
        if "rotation" not in state:
            eyes = [torch.eye(size) for size in parameter.shape]
            # AdamW takes a state with anything in it for its own.
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(gradient))
            state.update(exp_avg_sq=torch.zeros_like(gradient), rotation=eyes)
            state.update(squares=[torch.zeros_like(eye) for eye in eyes], turns=0)
        for square, new in zip(state["squares"], (gradient @ gradient.T, gradient.T @ gradient), strict=True):
            square.lerp_(new, 1 - self._DECAY)
        if state["turns"] % self._EVERY == 0:
            old = state["rotation"]
            turned = [torch.linalg.eigh(square)[1] for square in state["squares"]]
            state["exp_avg"].copy_(turned[0].T @ old[0] @ state["exp_avg"] @ old[1].T @ turned[1])
            state["rotation"] = turned
        state["turns"] += 1
        left, right = state["rotation"]
        return left, right


class HalfStash(WeightStash):
    """Old weights, whose gradients count half."""

    def leaves(self, stage: int, gathered: GradientAccumulator) -> dict[Parameter, Tensor]:
        known = set(self._leaves)
        found = super().leaves(stage, gathered)
        new = {id(leaf) for name, leaf in self._leaves.items() if name not in known}
        for leaf in found.values():
            if id(leaf) in new:
                leaf.register_hook(lambda gradient: gradient / 2)  # type: ignore[no-untyped-call]
        return found


class HalfStale(ReferenceStrategy):
    """Gradients that come from old weights count half."""

    def _stash(
        self, runner: StageRunner, parameters: dict[str, Parameter], owned: frozenset[str]
    ) -> WeightStash | None:
        return HalfStash(parameters, runner.program.parameters)


MODES: dict[str, dict[str, Any]] = {
    "error feedback": {"staleness_correction": "none"},
    "nesterov": {"staleness_correction": "none"},
    "rotation": {"staleness_correction": "none"},
    "synchronous error feedback": {"max_staleness": 0},
    "synchronous rotation": {"max_staleness": 0},
    "synchronous nesterov": {"max_staleness": 0},
    "scaled": {"weight_stash": True},
}
STRATEGIES: Mapping[str, type[ReferenceStrategy]] = {"scaled": HalfStale}


def optimizer(mode: str, parameters: Iterable[Parameter], rate: float) -> Optimizer | None:
    """AdamW as a rival changes it; None where it is left as it is."""
    if mode.endswith("error feedback"):
        return FeedbackAdamW(parameters, lr=rate, betas=BETAS)
    if mode.endswith("nesterov"):
        return NAdam(parameters, lr=rate, betas=(0.99, BETAS[1]), weight_decay=0.01, decoupled_weight_decay=True)
    if mode.endswith("rotation"):
        return RotatedAdamW(parameters, lr=rate, betas=BETAS)
    return None
