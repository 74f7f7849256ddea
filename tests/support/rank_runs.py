"""What each rank does in the one launch of real processes that many tests look at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_asyncpipe import AsyncMultiPipeStrategy, ReferenceStrategy
from tests.support.edge_basics import WIDTH, Points, Regression, Tower, shuffled
from tests.support.edge_data import DATA
from tests.support.edge_hooks import HOOKS, Logs
from tests.support.edge_models import MODELS, NormTower
from tests.support.edge_norms import NORMS
from tests.support.edge_projects import PROJECTS
from tests.support.edge_random import RANDOM
from tests.support.edge_transformers import TRANSFORMERS
from tests.support.edges import STAGES, How, Observed, Scenario, observe, run, train
from tests.support.fit import fit

SCENARIOS = {**DATA, **MODELS, **RANDOM, **TRANSFORMERS, **HOOKS, **NORMS, **PROJECTS}
OTHER_SEED = 77


def seed_of_this_rank() -> int:
    """Ranks start from different seeds, as programs that set none do."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    return OTHER_SEED + rank if rank else 1


def scenarios(names: Iterable[str], **strategy: Any) -> dict[str, Observed]:
    """Train scenarios one after the other."""
    return {name: run(SCENARIOS[name], "ranks", seed_of_this_rank(), **strategy) for name in names}


# Checkpoints


class Saved(Regression):
    """Has tied weights, options that are saved, parameter groups, a frozen layer and running statistics."""

    def __init__(self, layers: int = 4, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(NormTower(), nn.Unflatten(0, (-1, 1)), nn.Linear(1, WIDTH), Tower(layers))
        self.head = self.net[3].head
        self.net[3].layers[1].requires_grad_(False)
        self.rate = rate

    def configure_optimizers(self) -> Any:
        parameters = list(self.named_parameters())
        groups = [{"params": parameters[1::2]}, {"params": parameters[::2], "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=self.rate, momentum=0.9, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def checkpointed(directory: Path) -> Scenario:
    """A training that saves in mid-epoch and at its end."""
    return Scenario(
        Saved,
        lambda: shuffled(80, 10),
        lambda: {
            "max_epochs": 2,
            "enable_checkpointing": True,
            "callbacks": [
                ModelCheckpoint(directory, every_n_train_steps=3, save_top_k=-1, save_last=True),
                ModelCheckpoint(directory, monitor="loss_epoch", filename="best"),
            ],
        },
        {"num_microbatches": 2},
        reference="parts",
    )


def train_and_save(directory: Path, how: How, **strategy: Any) -> Observed:
    """Train with checkpoints in `directory`, and save once more when the training has ended."""
    trainer, module, losses = train(checkpointed(directory), how, seed_of_this_rank(), **strategy)
    observed = observe(trainer, module, losses)
    trainer.save_checkpoint(directory / "final.ckpt")
    observed.whole = how != "parts"
    return observed


def logged_to_csv(directory: Path, how: How, **strategy: Any) -> Observed:
    """Train with a logger that writes a table."""
    scenario = Scenario(
        Logs,
        lambda: shuffled(19, 5),
        lambda: {"max_epochs": 2, "log_every_n_steps": 2, "logger": CSVLogger(directory, name="", version="")},
    )
    return run(scenario, how, seed_of_this_rank(), **strategy)


# Several fits of one module


def _strategy(how: How, **options: Any) -> tuple[Any, int]:
    if how == "emulated":
        return ReferenceStrategy(STAGES, num_microbatches=4, **options), 1
    return AsyncMultiPipeStrategy(num_microbatches=4, **options), STAGES


def fit_twice(how: How) -> list[Observed]:
    """Fit a module, and fit it again with another Trainer and another number of pipelines."""
    torch.manual_seed(seed_of_this_rank())
    module = Regression().double()
    results = []
    for pipelines in (1, 3):
        strategy, devices = _strategy(how, num_pipelines=pipelines)
        trainer, losses = fit(module, shuffled(19, 5), strategy, devices)
        results.append(observe(trainer, module, losses))
        with torch.no_grad():
            module.net(Points(3).x)
            module.net.head.weight.mul_(0.5)
    return results


def fit_on(how: How) -> list[Observed]:
    """Fit a module, and go on with the same Trainer."""
    torch.manual_seed(seed_of_this_rank())
    module = Regression().double()
    strategy, devices = _strategy(how)
    loader = shuffled(19, 5)
    trainer, losses = fit(module, loader, strategy, devices)
    results = [observe(trainer, module, list(losses))]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader)
    return [*results, observe(trainer, module, losses)]


# What a replica sees


class Remembers(Regression):
    """Takes down the targets of the samples, batch by batch."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        if net is not None:
            self.net = net
        self.seen: list[list[list[float]]] = []

    def on_train_epoch_start(self) -> None:
        self.seen.append([])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen[-1].append(batch[1].tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


REPLICA_BATCH = 4
REPLICA_EPOCHS = 2


def with_lightnings_sampler(net: Callable[[], nn.Module], how: How = "ranks", **strategy: Any) -> Observed:
    """Train on a loader that shuffles, with the sampler that Lightning puts into it."""
    scenario = Scenario(
        lambda: Remembers(net()),
        lambda: DataLoader(Points(38), REPLICA_BATCH, shuffle=True),
        {"max_epochs": REPLICA_EPOCHS, "use_distributed_sampler": True, "accumulate_grad_batches": 2},
        {"num_microbatches": 2},
    )
    return run(scenario, how, seed_of_this_rank(), **strategy)
