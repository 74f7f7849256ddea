"""Trainings in every precision: of the GPT example, and of a model in which one parameter overflows at a known step."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.support.edge_basics import WIDTH, Points
from tests.support.edges import PartsOnOneDevice
from tests.support.fit import fit, parameters_of

PRECISIONS = ("32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")
STEPS = 20


def in_precision(precision: str, init_scale: float | None = None) -> dict[str, Any]:
    """Arguments of a Trainer on a CPU, where it takes '16-mixed' as a plugin only."""
    if precision != "16-mixed":
        return {"precision": precision}
    scaler = None if init_scale is None else torch.amp.GradScaler("cpu", init_scale=init_scale)
    return {"precision": None, "plugins": MixedPrecision("16-mixed", "cpu", scaler)}


@cache
def example() -> ModuleType:
    """The GPT example."""
    path = Path(__file__).parents[2] / "examples" / "train_gpt.py"
    spec = importlib.util.spec_from_file_location("train_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


class Norms(pl.Callback):
    """The norm of the gradients before each step, after it was unscaled."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self.values.append(float(torch.nn.utils.get_total_norm(gradients)))


def train_example(precision: str, strategy: Any, devices: int = 1, *callbacks: pl.Callback) -> dict[str, Any]:
    """20 steps of the GPT example, narrower than it is; AdamW's eps is one that is not zero in float16."""
    gpt = example()
    torch.manual_seed(0)
    text = torch.randint(97, 123, (4000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    loader = DataLoader(gpt.RandomCrops(text, 16, 4 * STEPS, 0), 4)
    module = gpt.LitGPT(width=32, depth=4, heads=2, length=16, steps=STEPS)
    if precision == "16-true":
        configure = module.configure_optimizers

        def with_larger_eps() -> Any:
            configured = configure()
            configured["optimizer"].param_groups[0]["eps"] = 1e-3
            return configured

        module.configure_optimizers = with_larger_eps
    norms = Norms()
    arguments = {"gradient_clip_val": 1.0, "callbacks": [norms, *callbacks], **in_precision(precision)}
    trainer, losses = fit(module, loader, strategy, devices, **arguments)
    found = {"losses": losses, "norms": norms.values, "parameters": parameters_of(module)}
    if hasattr(trainer.strategy, "statistics"):
        found["statistics"] = trainer.strategy.statistics()
    return found


def on_one_device(precision: str, microbatches: int) -> dict[str, Any]:
    """The same on one device that accumulates the micro-batches."""
    return train_example(precision, PartsOnOneDevice(microbatches))


# Overflow


class Overflows(pl.LightningModule):
    """Two layers; the gradient of the first one overflows at some steps.

    Takes down the loss scale after each step, the norm of the gradients that it saw before it, and the parameters.
    """

    def __init__(self, at: tuple[int, ...], value: float = float("inf")) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, 1, bias=False)
        self.at = at
        self.value = value
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = self.first(x.float())
        weight = self.first.weight
        if weight.requires_grad and batch_idx in self.at:
            hidden = hidden + _broken(weight, self.value)
        return F.mse_loss(self.second(torch.tanh(hidden)).squeeze(-1).float(), y.float())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen.append(float(torch.nn.utils.get_total_norm(gradients)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        plugin: Any = self.trainer.precision_plugin
        owned = [p for group in self.trainer.optimizers[0].param_groups for p in group["params"]]
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        self.seen.append(plugin.scaler.get_scale())
        self.seen.append({names[id(parameter)]: parameter.detach().clone() for parameter in owned})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, value: float) -> Tensor:
        ctx.value = value
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.new_full((WIDTH, WIDTH), ctx.value), None


def _broken(weight: Tensor, value: float) -> Tensor:
    """Zero, with a gradient for `weight` alone that is `value`."""
    result: Tensor = _Broken.apply(weight, value)
    return result


def train_overflowing(
    strategy: Any, devices: int = 1, checkpoint: Path | None = None, at: tuple[int, ...] = (2, 3), **arguments: Any
) -> dict[str, Any]:
    """Six steps of :class:`Overflows`."""
    torch.manual_seed(0)
    module = Overflows(at)
    loader = DataLoader(Points(48), 8)
    arguments = {**in_precision("16-mixed", 1024.0), **arguments}
    trainer, losses = fit(module, loader, strategy, devices, **arguments)
    if checkpoint is not None:
        trainer.save_checkpoint(checkpoint)
    found = {
        "losses": losses,
        "norms": module.seen[0::3],
        "scales": module.seen[1::3],
        "owned": module.seen[2::3],
        "parameters": parameters_of(module),
    }
    if hasattr(trainer.strategy, "statistics"):
        found["statistics"] = trainer.strategy.statistics()
    return found
