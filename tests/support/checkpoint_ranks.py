"""What each of two ranks does with checkpoints, in one launch of real processes."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_asyncpipe import AsyncMultiPipeStrategy
from tests.support.edge_basics import Regression, sized
from tests.support.fit import fit
from tests.support.resuming import LOADERS, Drawing, Saves, draw

RANKS = 2
KINDS: dict[str, dict[str, Any]] = {"file": {}, "parts": {"save_distributed_checkpoint": True}}
SAVED = 2, 8
SAME_PLAN: dict[str, Any] = {"devices": RANKS, "deterministic": True}
PLACES = "step-8", "epoch-0"


class Grouped(Regression):
    """Tied weights, a frozen layer, parameter groups in another order than the model's, and a schedule by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net.layers[3].weight = self.net.layers[0].weight
        self.net.layers[1].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [{"params": parameters[1::2]}, {"params": parameters[::2], "weight_decay": 0.1}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def grouped(strategy: Any, directory: Path, devices: int = 1, **arguments: Any) -> dict[str, Tensor]:
    """Train a :class:`Grouped` for three epochs, saved after each; returns what it ends with."""
    torch.manual_seed(1)
    module = Grouped().double()
    arguments = {"max_epochs": 3, "callbacks": [Saves(directory)], **arguments}
    fit(module, sized(8, 8, 8, 5), strategy, devices, **arguments)
    return tensors_of(module)


def tensors_of(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def everything(directory: Path) -> dict[str, Any]:
    """What one rank does, and has seen."""
    found: dict[str, Any] = {}
    for kind, options in KINDS.items():
        found[kind] = _interrupted_and_not(directory / kind, options)
        found[kind, "here"] = grouped(_synchronous(**options), directory / kind / "grouped", RANKS)
        path = directory / "elsewhere" / kind / "epoch-0.ckpt"
        found[kind, "from elsewhere"] = grouped(_synchronous(), directory / "unused", RANKS, ckpt_path=path)
    path = directory / "file" / "grouped" / "epoch-0.ckpt"
    found["ddp"] = grouped("ddp", directory / "unused", RANKS, ckpt_path=path)
    found["kept"] = kept(directory / "kept", "ranks")
    found["after a failure"] = _after_a_failure(directory / "failed")
    found["full disk"] = _message(lambda: _with_a_full_disk(directory / "file"))  # the last: it ends the run
    return found


def _strategy(**options: Any) -> AsyncMultiPipeStrategy:
    return AsyncMultiPipeStrategy(num_microbatches=4, **options)


def _synchronous(**options: Any) -> AsyncMultiPipeStrategy:
    """A plan in which no rank has the whole model."""
    return _strategy(num_pipelines=1, max_staleness=0, **options)


def _interrupted_and_not(directory: Path, options: dict[str, Any]) -> dict[str, Any]:
    _, module = draw(_strategy(**options), "resumable", Saves(directory, SAVED), **SAME_PLAN)
    found = {"whole": (tensors_of(module), module.seen)}
    for place in PLACES:
        again = Saves(directory / "again", SAVED)
        path = directory / f"{place}.ckpt"
        _, module = draw(_strategy(**options), "resumable", again, path, **SAME_PLAN)
        found[place] = tensors_of(module), module.seen
    return found


def kept(directory: Path, how: str, strategy: Any = None) -> list[tuple[str, list[str], float]]:
    """Names of the checkpoints that callbacks keep, for each callback, and the best value."""
    callbacks = [
        ModelCheckpoint(directory / "best", monitor="loss", save_top_k=2, every_n_train_steps=1, filename="{step}"),
        ModelCheckpoint(directory / "often", every_n_train_steps=3, save_top_k=-1, save_last=True),
        ModelCheckpoint(directory / "linked", save_last="link", filename="{epoch}"),
        ModelCheckpoint(directory / "weights", save_weights_only=True, every_n_epochs=2),
    ]
    ranks = how == "ranks"
    chosen = _synchronous() if ranks else strategy
    arguments = {"callbacks": callbacks, "enable_checkpointing": True, "max_epochs": 4}
    torch.manual_seed(1)
    fit(Grouped().double(), sized(8, 8, 8, 5), chosen, RANKS if ranks else 1, **arguments)
    return [
        (
            os.path.basename(str(callback.dirpath)),
            sorted(path.name for path in Path(str(callback.dirpath)).iterdir()),
            float(callback.best_model_score or 0.0),
        )
        for callback in callbacks
    ]


# What goes wrong


class Fails(Drawing):
    """Fails on all ranks after its third step, once."""

    fails = True

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.fails and self.trainer.global_step == 3:
            self.fails = False
            raise ValueError("the third step")


def _message(run: Any) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def _after_a_failure(directory: Path) -> dict[str, Any]:
    """A fit that fails, and others of the same module."""
    torch.manual_seed(1)
    module = Fails().double()

    def again(**arguments: Any) -> None:
        fit(module, LOADERS["resumable"](), _strategy(), RANKS, callbacks=[Saves(directory, (2,))], **arguments)

    return {
        "first": _message(again),
        "again": _message(again),
        "from the checkpoint": _message(lambda: again(ckpt_path=directory / "step-2.ckpt")),
        "seen": module.seen,
    }


def _with_a_full_disk(directory: Path) -> None:
    """Save where something is saved already, with no room on rank 0."""
    if os.environ["LOCAL_RANK"] == "0":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    draw(_strategy(), "resumable", Saves(directory, SAVED), devices=RANKS)
