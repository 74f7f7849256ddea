"""What changes behind the pipelines' back is an error or named: parameters and attributes of the module."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration.growth import GrowthWatch
from lightning_asyncpipe.integration.watch import ParameterWatch
from lightning_asyncpipe.runtime.hollow import hollow
from tests.support.edge_basics import Regression, Tower, sized
from tests.support.edges import Scenario, run

pytestmark = pytest.mark.filterwarnings("ignore")

# Parameters


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.elsewhere = nn.Linear(2, 2).requires_grad_(False)
        for parameter in self.elsewhere.parameters():
            hollow(parameter)


def test_the_optimizer_and_gradients_may_do_what_they_do() -> None:
    module = Parts()
    watch = ParameterWatch(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(5):
        watch.check()
        module.trained(torch.ones(1, 2)).sum().backward()
        with torch.autograd._unsafe_preserve_version_counter(tuple(module.trained.parameters())):
            optimizer.step()
        optimizer.zero_grad()
    module.trained.requires_grad_(False)
    watch.check()


def add_in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(1.0)


def add_to_data(parameter: nn.Parameter) -> None:
    parameter.data.add_(1.0)


def replace_data(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data + 1.0


@pytest.mark.parametrize("change", [add_in_place, add_to_data, replace_data])
def test_writing_to_a_frozen_parameter_is_an_error_that_names_it(change: Any) -> None:
    module = Parts()
    watch = ParameterWatch(module)
    watch.check()
    change(module.frozen.bias)
    with pytest.raises(PipelineError, match=r"`frozen\.bias`, which is frozen, was written.*register_step_post_hook"):
        watch.check()


def test_writing_to_a_trained_parameter_is_an_error_that_names_it() -> None:
    module = Parts()
    watch = ParameterWatch(module)
    watch.check()
    add_in_place(module.trained.weight)
    with pytest.raises(PipelineError, match=r"`trained\.weight`, which is trained by the optimizer"):
        watch.check()


@pytest.mark.parametrize("part", ["frozen", "elsewhere"])
def test_unfreezing_is_an_error_on_every_rank(part: str) -> None:
    module = Parts()
    watch = ParameterWatch(module)
    getattr(module, part).weight.requires_grad_(True)
    with pytest.raises(PipelineError, match=rf"`{part}\.weight` was frozen.*before `fit`"):
        watch.check()


def test_not_a_number_is_equal_to_itself() -> None:
    module = Parts()
    module.frozen.bias.fill_(float("nan"))
    watch = ParameterWatch(module)
    watch.check()
    watch.check()


def test_weights_may_be_loaded_before_the_first_batch() -> None:
    module = Parts()
    watch = ParameterWatch(module)
    module.frozen.load_state_dict(nn.Linear(2, 2).state_dict())
    module.trained.load_state_dict(nn.Linear(2, 2).state_dict())
    watch.check()
    watch.check()


class Unfreezes(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net.layers[:2].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net.layers.requires_grad_(self.current_epoch > 0)
        if self.current_epoch == 0:
            self.net.layers[2:].requires_grad_(True)


class Clamps(Regression):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)


class Teaches(Regression):
    """Has a teacher that follows the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Tower()
        self.teacher.load_state_dict(self.net.state_dict())
        self.teacher.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self.net(x), y + self.teacher(x))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter, follower in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            follower.data.mul_(0.9).add_(parameter.data, alpha=0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("module", "named"), [(Unfreezes, "net.layers.0.weight"), (Clamps, "net."), (Teaches, "teacher.")]
)
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_fit_ends_with_the_error(module: Any, named: str, staleness: int) -> None:
    scenario = Scenario(module, lambda: sized(8, 8, 8), {"max_epochs": 2})
    with pytest.raises(PipelineError, match=named):
        run(scenario, "emulated", max_staleness=staleness)


# Attributes


class Counts(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.same = 1.5
        self._last: Tensor | None = None
        self.history: dict[str, list[float]] = defaultdict(list)
        self.outs: list[int] = []

    def training_step(self, change: Any) -> None:
        self.same = float("1.5")
        self.outs.append(1)
        change(self)


def add_one(module: Counts) -> None:
    module.count += 1


def keep(module: Counts) -> None:
    module._last = torch.ones(1)


def append(module: Counts) -> None:
    module.history["loss"].append(0.5)


def make(module: Counts) -> None:
    module.made = 3


def leave(module: Counts) -> None:
    module.count += 1
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("change", "named"),
    [(add_one, "count"), (keep, "_last"), (append, "history"), (make, "made"), (leave, "count")],
)
def test_an_attribute_that_a_step_changes_is_named_once(change: Any, named: str) -> None:
    module = Counts()
    watch = GrowthWatch(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            try:
                with watch.watching():
                    module.training_step(change)
            except KeyboardInterrupt:
                pass
    assert [str(warning.message).partition(".")[2].partition("`")[0] for warning in caught] == [named]
    assert "differs between ranks" in str(caught[0].message)


def test_a_step_that_changes_nothing_is_silent() -> None:
    module = Counts()
    watch = GrowthWatch(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with watch.watching():
            module.training_step(lambda module: module.hparams)
