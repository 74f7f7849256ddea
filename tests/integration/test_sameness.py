"""Settings that are not the same on every rank are named at the start."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn

from lightning_asyncpipe import AsyncMultiPipeStrategy
from lightning_asyncpipe.integration.sameness import (
    ONE_INSTALLATION,
    Settings,
    compare_modules,
    fingerprint,
    require_alike,
    settings_of_optimizers,
    settings_of_the_module,
    settings_of_the_strategy,
    settings_of_the_trainer,
    versions,
)
from tests.support.edge_basics import Regression


def of_the_trainer(**arguments: Any) -> Settings:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return settings_of_the_trainer(pl.Trainer(accelerator="cpu", devices=1, **quiet, **arguments))


def of_the_strategy(**arguments: Any) -> Settings:
    return settings_of_the_strategy(AsyncMultiPipeStrategy(**arguments))


def of_optimizers(build: Callable[[Any], Any], schedule: Callable[[Any], Any] | None = None, **config: Any) -> Settings:
    module = Regression()
    optimizer = build(module)
    schedulers = [LRSchedulerConfig(schedule(optimizer), **config)] if schedule else []
    return settings_of_optimizers([optimizer], schedulers, module)


def sgd(module: Any, **options: Any) -> Any:
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, **options})


def adam(module: Any, **options: Any) -> Any:
    return torch.optim.Adam(module.parameters(), **{"lr": 0.1, **options})


def steps(every: int) -> Callable[[Any], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, every)


def constant(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer)


DIFFERING: dict[str, tuple[Settings, Settings, str]] = {
    "accumulation": (
        of_the_trainer(),
        of_the_trainer(accumulate_grad_batches=2),
        r"Trainer\(accumulate_grad_batches=\.\.\.\) .*: 1 on ranks 0, 2, 2 on rank 1\.",
    ),
    "clipping": (
        of_the_trainer(gradient_clip_val=1.0),
        of_the_trainer(gradient_clip_val=0.5),
        r"gradient_clip_val.*: 1\.0 on ranks 0, 2, 0\.5 on rank 1",
    ),
    "clipping's algorithm": (
        of_the_trainer(gradient_clip_val=1.0),
        of_the_trainer(gradient_clip_val=1.0, gradient_clip_algorithm="value"),
        "gradient_clip_algorithm",
    ),
    "steps": (of_the_trainer(max_steps=5), of_the_trainer(max_steps=6), "max_steps.*: 5 on .*6 on"),
    "epochs": (of_the_trainer(max_epochs=5), of_the_trainer(max_epochs=6), "max_epochs.*: 5 on .*6 on"),
    "precision": (of_the_trainer(), of_the_trainer(precision="bf16-mixed"), "precision.*'32-true' on .*'bf16-mixed'"),
    "micro-batches": (
        of_the_strategy(),
        of_the_strategy(num_microbatches=4),
        r"AsyncMultiPipeStrategy\(num_microbatches=\.\.\.\).*'auto' on ranks 0, 2, 4 on rank 1",
    ),
    "staleness": (of_the_strategy(), of_the_strategy(max_staleness=0), "max_staleness.*: 1 on .*0 on"),
    "cuts": (of_the_strategy(cuts=["a"]), of_the_strategy(cuts=["b"]), r"cuts.*\['a'\] on .*\['b'\] on"),
    "the optimizer": (of_optimizers(sgd), of_optimizers(adam), "the optimizer is not .*SGD on ranks 0, 2, Adam on"),
    "the learning rate": (
        of_optimizers(sgd),
        of_optimizers(lambda m: sgd(m, lr=0.2)),
        r"`lr` of the optimizer's parameter group 0 .*: 0\.1 on ranks 0, 2, 0\.2 on rank 1\. .*`seed_everything`",
    ),
    "a learning rate in a tensor": (
        of_optimizers(lambda m: adam(m, lr=torch.tensor(0.25))),
        of_optimizers(lambda m: adam(m, lr=torch.tensor(0.5))),
        r"`lr` .*0\.25 on .*0\.5 on",
    ),
    "betas": (of_optimizers(adam), of_optimizers(lambda m: adam(m, betas=(0.9, 0.9))), "`betas`"),
    "what is trained": (
        of_optimizers(sgd),
        of_optimizers(lambda m: torch.optim.SGD(m.net.head.parameters(), lr=0.1)),
        "the parameters of the optimizer's parameter group 0.*net.layers.0.weight.* on ranks 0, 2, net.head.weight",
    ),
    "the scheduler": (
        of_optimizers(sgd, steps(3)),
        of_optimizers(sgd, constant),
        "the learning rate scheduler is not .*StepLR on .*ConstantLR on",
    ),
    "no scheduler": (of_optimizers(sgd, steps(3)), of_optimizers(sgd), "learning rate scheduler .*not there on rank 1"),
    "the scheduler's numbers": (
        of_optimizers(sgd, steps(3)),
        of_optimizers(sgd, steps(4)),
        "`step_size` of the learning rate scheduler .*: 3 on ranks 0, 2, 4 on rank 1",
    ),
    "the scheduler's interval": (
        of_optimizers(sgd, steps(3)),
        of_optimizers(sgd, steps(3), interval="step"),
        "`interval` of the learning rate scheduler .*'epoch' on ranks 0, 2, 'step' on rank 1",
    ),
    "the scheduler's frequency": (
        of_optimizers(sgd, steps(3)),
        of_optimizers(sgd, steps(3), frequency=2),
        "`frequency` of the learning rate scheduler",
    ),
}


@pytest.mark.parametrize("name", DIFFERING)
def test_what_differs_is_named_with_values_and_ranks(name: str) -> None:
    usual, other, expected = DIFFERING[name]
    require_alike([usual, dict(usual), usual])
    with pytest.raises(MisconfigurationException) as caught:
        require_alike([usual, other, usual])
    assert re.search(f"is not the same on every rank.*{expected}|{expected}", str(caught.value)), caught.value


def test_installations_that_differ_are_named() -> None:
    """Each rank makes its schedule itself: another version may make another one."""
    installed = versions()
    assert torch.__version__ in installed.values()
    for name in installed:
        with pytest.raises(MisconfigurationException, match=f"{name} is not .* Install the same versions"):
            require_alike([installed, {**installed, name: "0.0.1"}], ONE_INSTALLATION)


def test_copies_of_this_package_are_told_apart_by_their_sources(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.py").write_text("one = 1")
    first = fingerprint(tmp_path)
    (tmp_path / "part" / "a.pyc").write_text("is made on each machine")
    assert fingerprint(tmp_path) == first
    (tmp_path / "part" / "a.py").write_text("one = 2")
    second = fingerprint(tmp_path)
    (tmp_path / "part" / "a.py").rename(tmp_path / "a.py")
    assert len({first, second, fingerprint(tmp_path)}) == 3


class WithNumbers(Regression):
    def __init__(self, p: float = 0.1, **attributes: Any) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p)
        vars(self).update(attributes)


def compared(*modules: nn.Module) -> None:
    names = frozenset(name for name, _ in modules[0].named_modules() if name)
    compare_modules([settings_of_the_module(module) for module in modules], names)


def test_layers_that_differ_are_named() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"`self\.dropout\.p` is not .*: 0\.1 on rank 0, 0\.2 on rank 1"
    ):
        compared(WithNumbers(), WithNumbers(0.2))


def test_numbers_of_the_module_that_differ_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"`self\.scale` is not the same .*: 0\.5 on rank 0, 0\.7 on rank 1"):
        compared(WithNumbers(scale=0.5), WithNumbers(scale=0.7))


def test_the_state_of_metrics_and_private_attributes_are_no_settings() -> None:
    module = Regression()
    module.metrics = torchmetrics.MetricCollection({"error": torchmetrics.MeanSquaredError()})
    before = settings_of_the_module(module)
    module.metrics.update(torch.ones(2), torch.zeros(2))
    module.metrics.compute()
    next(layer for name, layer in module.named_modules() if name)._calls = 1
    assert settings_of_the_module(module) == before


def test_a_module_may_know_its_rank() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compared(*(WithNumbers(rank=rank, first=rank == 0) for rank in range(3)))
