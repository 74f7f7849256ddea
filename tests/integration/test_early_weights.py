"""What devices keep for early forwards is as much as the planner takes it to be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader

from lightning_asyncpipe.integration.early_weights import choose_early_weights, make_stash, update_rules
from lightning_asyncpipe.plan.memory import EarlyWeights, Holdings, predict
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.plan.profile import Boundary, ModelProfile, Unit, Weights
from lightning_asyncpipe.runtime.ownership import Ownership, ParameterInfo, assign
from lightning_asyncpipe.runtime.stash import WeightStash
from tests.support.fit import reference_fit

SHAPE, PER_STAGE = (6, 4), 4  # of a parameter; as many of each stage that each host owns the same
NBYTES, SQUARE = 6 * 4 * 4, 4 * 4 * 4  # of a parameter, and of a square of its shorter side
MUON = getattr(torch.optim, "Muon", None)
needs_muon = pytest.mark.skipif(MUON is None, reason="this version of torch has no Muon")


@dataclass(frozen=True)
class Case:
    """What is kept, in bytes: of a parameter that the device owns, and of one that another one owns."""

    make: Callable[[list[Parameter]], Optimizer]
    owned: int
    other: int
    stash: bool = False
    correction: str = "predict"


def _muon(parameters: list[Parameter]) -> Optimizer:
    assert MUON is not None
    optimizer: Optimizer = MUON(parameters, lr=0.01)
    return optimizer


CASES = {
    "live": Case(AdamW, 0, 0, correction="none"),
    "stash": Case(AdamW, 0, 0, stash=True, correction="auto"),
    "extrapolate": Case(AdamW, NBYTES, NBYTES, correction="extrapolate"),
    "another optimizer": Case(RMSprop, NBYTES, NBYTES),
    "adam": Case(Adam, 0, 2 * NBYTES),
    "adamw with amsgrad": Case(lambda parameters: AdamW(parameters, amsgrad=True), 0, 2 * NBYTES),
    "sgd": Case(lambda parameters: SGD(parameters, lr=0.1), NBYTES, NBYTES),
    "sgd with momentum": Case(lambda parameters: SGD(parameters, lr=0.1, momentum=0.9), NBYTES, NBYTES),
    "muon": Case(_muon, NBYTES + SQUARE, NBYTES + SQUARE),
}


@dataclass
class Device:
    """One device's parameters, with the optimizer of those that it owns."""

    parameters: dict[str, Parameter]
    owned: frozenset[str]
    optimizer: Optimizer
    stash: WeightStash | None

    def step(self) -> None:
        """Step what it owns, as a rank does."""
        gradients = {name: torch.ones_like(self.parameters[name]) for name in self.owned}
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
        if self.stash is not None:
            self.stash.step_follows()
            self.stash.before_update(self.parameters)
            self.stash.collected(gradients)
        self.optimizer.step()
        if self.stash is not None:
            self.stash.stepped()

    def take(self, owner: Device) -> None:
        """Receive what goes with the new weights of an owner."""
        names = sorted(owner.owned & self.parameters.keys())
        if names and self.stash is not None and owner.stash is not None:
            self.stash.arrived(names, torch.cat([torch.empty(0), *owner.stash.companions(names)]))

    @property
    def kept(self) -> int:
        """Bytes of all tensors that are kept between steps, beside single numbers."""
        attributes = () if self.stash is None else vars(self.stash).values()
        held = [value for value in attributes if isinstance(value, dict)]
        tensors = [each for value in held for each in value.values() if isinstance(each, Tensor)]
        return sum(each.nbytes for each in tensors if each.dim() and not isinstance(each, Parameter))


@dataclass
class Devices:
    """The devices of a placement, with a model of equal parameters."""

    case: Case
    placement: Placement
    made: list[Device] = field(default_factory=list)
    kind: EarlyWeights = "live"

    def __post_init__(self) -> None:
        stages = [[f"{s}.{k}" for k in range(PER_STAGE)] for s in range(self.placement.num_stages)]
        self.names = [name for names in stages for name in names]
        numel, dtype = torch.Size(SHAPE).numel(), torch.float32
        infos = [ParameterInfo(name, numel, dtype, True, (int(name[0]),)) for name in self.names]
        self.ownership: Ownership = assign(infos, self.placement)
        for rank in range(self.placement.num_stages):
            parameters = {n: Parameter(torch.randn(SHAPE)) for n in self.names if n in self.ownership.hosted(rank)}
            optimizer = self.case.make(list(parameters.values()))
            self.kind = choose_early_weights(self.case.stash, self.case.correction, [optimizer])
            owned = self.ownership.owned(rank)
            stash = make_stash(self.kind, [optimizer], stages, parameters, owned)
            self.made.append(Device(parameters, owned, optimizer, stash))

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            for device in self.made:
                device.step()
            for device in self.made:
                for other in self.made:
                    if other is not device:
                        device.take(other)

    def predicted(self) -> list[int]:
        """What the planner takes each device to keep, with no early forwards on their way."""
        parameters = {name: Parameter(torch.empty(SHAPE)) for name in self.names}
        rules = update_rules([self.case.make(list(parameters.values()))], parameters)
        weights = tuple(
            Weights(name, p.numel(), p.nbytes, p.nbytes, gains=rules.gain_bytes(name)) for name, p in parameters.items()
        )
        stages = range(self.placement.num_stages)
        used = [tuple(range(s * PER_STAGE, (s + 1) * PER_STAGE)) for s in stages]
        units = tuple(Unit(f"{s}", 1.0, 1.0, 1.0, parameters=used[s]) for s in stages)
        profile = ModelProfile(units, (Boundary(0),) * (len(units) - 1), weights)
        nothing = Holdings(((),) * len(stages), ((),) * len(stages))
        with_copies, without = (
            predict(profile, tuple(stages)[:-1], self.placement, nothing, early_weights=kind)
            for kind in (self.kind, "live")
        )
        return [a.weights - b.weights for a, b in zip(with_copies, without, strict=True)]


@pytest.mark.parametrize(("stages", "pipelines"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_muon) if n == "muon" else n for n in CASES])
def test_devices_keep_for_early_forwards_what_is_planned(name: str, stages: int, pipelines: int) -> None:
    case = CASES[name]
    devices = Devices(case, Placement(stages, pipelines))
    devices.train()
    owned = PER_STAGE
    others = PER_STAGE * (pipelines - 1)
    assert [device.kept for device in devices.made] == [case.owned * owned + case.other * others] * stages
    assert devices.predicted() == [device.kept for device in devices.made]


class Layers(pl.LightningModule):
    """Equal matrices under one of the optimizers."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return self.case.make(list(self.parameters()))


@pytest.mark.parametrize(
    ("name", "copies"),
    [("adam", 0), ("sgd", 1), pytest.param("muon", 2, marks=needs_muon)],  # Muon's factor is as large here
)
def test_plans_of_a_training_count_what_its_optimizer_needs(name: str, copies: int) -> None:
    planned = []
    for options in ({"weight_stash": True}, {}):
        asked = {"num_pipelines": 1, "num_microbatches": 4, "memory_limit": 1 << 30, **options}
        module = Layers(CASES[name])
        trainer, _ = reference_fit(module, DataLoader(torch.randn(16, 8), 8), 2, asked, precision="32-true")
        planned.append([device["memory"]["weights"] for device in trainer.strategy.describe()["devices"]])
    of_a_device = 2 * 8 * 8 * 4
    assert [b - a for a, b in zip(*planned, strict=True)] == [copies * of_a_device] * 2
