"""Private names of torch, Lightning and torchmetrics that the package uses: where they are, and that all are known.

What a name means is tested where it is used. Here is what fails first when one of them moves in another version, and
what fails when code leans on one that is not taken down. Checked on torch 2.13, Lightning 2.6.6 and torchmetrics 1.9.
"""

from __future__ import annotations

import ast
import importlib
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torchmetrics import MeanMetric

import lightning_asyncpipe

ROOT = Path(lightning_asyncpipe.__file__).parent
GATHERED = {"_private.py", "internals.py"}
"""Modules that gather such names, each with a test of its own."""


def trainer() -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)


OWNERS: dict[str, tuple[Any, list[str]]] = {
    "a module": (lambda: nn.BatchNorm1d(2), ["_buffers", "_parameters", "_forward_hooks", "_forward_pre_hooks"]),
    "Python's random numbers": (lambda: random, ["_inst"]),
    "a tensor": (lambda: torch.ones(2), ["_is_view", "_version"]),
    "an optimizer": (optimizer, ["_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"]),
    "a metric": (
        MeanMetric,
        ["_defaults", "_reductions", "_filter_kwargs", "_forward_cache", "_update_count", "_computed", "_sync_dist"],
    ),
    "a LightningModule": (
        pl.LightningModule,
        ["_LightningModule__check_allowed", "_LightningModule__to_tensor", "_on_before_batch_transfer"],
    ),
    "calls of a trainer": (lambda: call, ["_call_strategy_hook"]),
    "a launcher": (lambda: _SubprocessScriptLauncher, ["_check_can_spawn_children"]),
    "loaders": (lambda: CombinedLoader([1]), ["_load_state_dicts", "_state_dicts"]),
    "a loop": (lambda: _Loop(trainer()), ["_restarting"]),
    "the fit loop": (lambda: trainer().fit_loop, ["_should_accumulate", "_combined_loader"]),
    "the loop of validation": (
        lambda: trainer().validate_loop,
        [
            "_is_sequential",
            "_build_kwargs",
            "_build_step_args_from_hook_kwargs",
            "_combined_loader",
            "_data_source",
            "_on_evaluation_model_eval",
            "_on_evaluation_model_train",
        ],
    ),
    "the loop of prediction": (
        lambda: trainer().predict_loop,
        [
            "_build_kwargs",
            "_build_step_args_from_hook_kwargs",
            "_combined_loader",
            "_on_predict_model_eval",
            "_on_predict_model_train",
        ],
    ),
}
PYTHONS_OWN = {"_fields", "_getframe"}


@pytest.mark.parametrize("owner", OWNERS)
def test_the_names_are_where_they_were(owner: str) -> None:
    made, names = OWNERS[owner]
    found = made()
    assert [name for name in names if name not in dir(found)] == []  # properties may not be ready to be asked


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in ROOT.rglob("*.py"):
        yield path.name, ast.parse(path.read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_private_imports_are_there() -> None:
    imported = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("__", "lightning_asyncpipe")):
                imported |= {(node.module, alias.name) for alias in node.names if is_private(alias.name)}
    missing = [f"{m}.{name}" for m, name in sorted(imported) if not hasattr(importlib.import_module(m), name)]
    assert imported
    assert missing == []


def test_no_other_names_are_used() -> None:
    """An attribute with an underscore that the package defines nowhere is somebody else's."""
    defined, used = set(PYTHONS_OWN), defaultdict(set)
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined.add(node.attr)
            elif isinstance(node, ast.Attribute) and is_private(node.attr) and file not in GATHERED:
                used[node.attr].add(file)
    known = {name for _, names in OWNERS.values() for name in names}
    unknown = {name: sorted(files) for name, files in used.items() if name not in known | defined}
    assert unknown == {}
    assert used["_build_kwargs"], "looks at nothing"
