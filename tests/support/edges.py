"""Small trainings, each with something that ordinary projects have and pipelines tend to get wrong.

A scenario says how to build the module and its loader, and with what the Trainer is called. The same scenario is run
by plain Lightning on one device, by one process that emulates the devices, and by real ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_asyncpipe import AsyncMultiPipeStrategy, ReferenceStrategy
from lightning_asyncpipe.runtime.microbatch import split
from tests.support.fit import fit

STAGES = 3

Reference = Literal["whole", "parts", "none"]
How = Literal["whole", "parts", "none", "emulated", "ranks"]


@dataclass(frozen=True, eq=False)
class Scenario:
    """One training.

    Attributes:
        module: builds the LightningModule.
        batches: builds the loader.
        arguments: of the Trainer; a callable makes them anew for each fit, for callbacks and loggers.
        strategy: arguments of the strategy.
        reference: what synchronous training must equal: plain Lightning on whole batches, one device that accumulates
            the micro-batches, or neither, where random numbers are drawn.
    """

    module: Callable[[], pl.LightningModule]
    batches: Callable[[], Iterable[Any]]
    arguments: dict[str, Any] | Callable[[], dict[str, Any]] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=lambda: {"num_microbatches": 4})
    reference: Reference = "whole"

    def trainer_arguments(self) -> dict[str, Any]:
        return self.arguments() if callable(self.arguments) else dict(self.arguments)


class Scenarios(dict[str, Scenario]):
    """Scenarios by name."""

    def add(
        self, name: str, module: Callable[[], pl.LightningModule], batches: Callable[[], Iterable[Any]], **kwargs: Any
    ) -> None:
        """Add a scenario; the arguments are those of :class:`Scenario`."""
        assert name not in self, name
        self[name] = Scenario(module, batches, **kwargs)


@dataclass
class Observed:
    """What a training left behind; plain data, so that ranks can send it.

    Attributes:
        tensors: parameters and buffers.
        losses: of every batch.
        metrics: `callback_metrics`, `logged_metrics` and `progress_bar_metrics`.
        progress: steps and epochs done, batches seen, learning rates.
        seen: what the module itself took down, in its attribute `seen`.
        statistics: of the strategy.
        whole: whether what was logged are values of batches, not of micro-batches.
    """

    tensors: dict[str, Tensor]
    losses: list[float]
    metrics: dict[str, dict[str, float]]
    progress: dict[str, Any]
    seen: Any = None
    statistics: dict[str, Any] = field(default_factory=dict)
    whole: bool = True


class PartsOnOneDevice(SingleDeviceStrategy):
    """One device that accumulates the micro-batches of a batch."""

    def __init__(self, microbatches: int) -> None:
        super().__init__("cpu")
        self._microbatches = microbatches

    def training_step(self, batch: Any, *args: Any) -> Any:
        module = self.lightning_module
        least = 2 if any(isinstance(m, _BatchNorm) and m.training for m in module.modules()) else 1
        parts = split(batch, self._microbatches, min_samples=least)
        total = sum(part.size for part in parts)
        loss: Any = 0.0
        for part in parts:
            output = module.training_step(part.data, *args)
            value = output["loss"] if isinstance(output, dict) else output
            loss = loss + value.double() * (part.size / total)
        return loss


def train(
    scenario: Scenario, how: How, seed: int = 1, **strategy: Any
) -> tuple[pl.Trainer, pl.LightningModule, list[float]]:
    """Train a scenario in float64.

    Args:
        scenario: what to train.
        how: plain Lightning; one device that accumulates micro-batches; emulated devices; or as one of several ranks.
        seed: of this process before it builds the module.
        strategy: arguments of the strategy beside those of the scenario; `num_stages` is :data:`STAGES` by default.

    Returns:
        The trainer, the module and the loss of every batch.
    """
    torch.manual_seed(seed)
    module = scenario.module().to(torch.float64)
    loader = scenario.batches()
    options = {"num_stages": STAGES, **scenario.strategy, **strategy}
    chosen: Any
    devices = 1
    if how in ("whole", "none"):
        chosen = "auto"
    elif how == "parts":
        chosen = PartsOnOneDevice(options["num_microbatches"])
    elif how == "emulated":
        chosen = ReferenceStrategy(**options)
    else:
        chosen = AsyncMultiPipeStrategy(**options)
        devices = options["num_stages"] * options.get("data_parallel_size", 1)
    trainer, losses = fit(module, loader, chosen, devices, **scenario.trainer_arguments())
    return trainer, module, losses


def run(scenario: Scenario, how: How, seed: int = 1, **strategy: Any) -> Observed:
    """:func:`train`, and what it left behind."""
    observed = observe(*train(scenario, how, seed, **strategy))
    observed.whole = how != "parts"
    return observed


def observe(trainer: pl.Trainer, module: pl.LightningModule, losses: list[float]) -> Observed:
    """What the training that `trainer` has done left behind."""
    metrics = {
        name: {key: float(value) for key, value in getattr(trainer, name).items()}
        for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    }
    progress = {
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "batches": trainer.fit_loop.epoch_loop.total_batch_idx + 1,
        "lr": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
    }
    statistics = trainer.strategy.statistics() if isinstance(trainer.strategy, AsyncMultiPipeStrategy) else {}
    tensors = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    return Observed(tensors, losses, metrics, progress, getattr(module, "seen", None), statistics)


@functools.cache
def expected_of(scenario: Scenario) -> Observed:
    """What one device leaves behind, or one stage where random numbers are drawn."""
    if scenario.reference == "none":
        return run(scenario, "emulated", num_stages=1)
    return run(scenario, scenario.reference)


def check_synchronous(scenario: Scenario) -> None:
    """Without staleness, emulated devices do what one device does."""
    expected = expected_of(scenario)
    assert expected.losses
    assert_same(run(scenario, "emulated", max_staleness=0), expected)


def check_asynchronous(scenario: Scenario, same_length: bool = True) -> Observed:
    """With staleness, every batch is trained once, the first one on the same weights.

    Args:
        scenario: what to train.
        same_length: whether training ends when it does on one device.
    """
    found = run(scenario, "emulated")
    expected = expected_of(scenario)
    if same_length:
        assert found.progress == expected.progress
        assert len(found.losses) == len(expected.losses)
    assert abs(found.losses[0] - expected.losses[0]) <= 1e-9
    assert found.statistics["max_staleness"] <= 1
    return found


def assert_same(one: Observed, other: Observed, tolerance: float = 1e-9) -> None:
    """Two trainings have done the same."""
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        difference = (tensor.double() - other.tensors[name].double()).abs().max() if tensor.numel() else 0.0
        assert difference <= tolerance, f"{name} differs by {float(difference):.3g}"
    assert_close(one.losses, other.losses, "losses", tolerance)
    assert one.progress == other.progress
    for name, values in one.metrics.items():
        if one.whole and other.whole:
            assert_close(values, other.metrics[name], name, tolerance)
    assert_close(one.seen, other.seen, "seen", tolerance)


def assert_close(one: Any, other: Any, path: str = "", tolerance: float = 1e-9) -> None:
    """Nested values are equal, numbers and tensors to a tolerance."""
    if isinstance(one, dict):
        assert isinstance(other, dict), path
        assert one.keys() == other.keys(), f"{path}: {one.keys()} and {other.keys()}"
        for key, value in one.items():
            assert_close(value, other[key], f"{path}[{key!r}]", tolerance)
    elif isinstance(one, (list, tuple)):
        assert isinstance(other, (list, tuple)), path
        assert len(one) == len(other), f"{path}: {one} and {other}"
        for i, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_close(left, right, f"{path}[{i}]", tolerance)
    elif isinstance(one, Tensor):
        assert isinstance(other, Tensor), path
        assert one.shape == other.shape, f"{path}: {one.shape} and {other.shape}"
        assert torch.allclose(one.double(), other.double(), rtol=0.0, atol=tolerance), f"{path}: {one} and {other}"
    elif isinstance(one, float):
        assert abs(one - other) <= tolerance or one == other, f"{path}: {one} and {other}"
    else:
        assert one == other, f"{path}: {one} and {other}"
