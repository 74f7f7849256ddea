"""What a step keeps in Python between its calls: counters, dicts of them, iterators.

A step runs once for each stage of each micro-batch, so such state moves on more often than on one device, and in other
numbers on other ranks. Where it decides what the step computes, two runs on one micro-batch differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str, type(None))
_ENTRIES = 1000  # of a dict that are compared
_DEPTH = 2
SET_IN_STEPS = frozenset({"_hparams", "_metric_attributes", "log"})
"""Attributes of a module that Lightning, or this package, sets while a step runs."""

# What torch, Lightning or this package keeps in a module.
_NOT_THE_USERS = SET_IN_STEPS | {
    *vars(nn.Module()),
    "_compiled_call_impl",
    "_current_fx_name",
    "_fabric",
    "_jit_is_scripting",
    "_trainer",
}


def plain_entries(value: Any) -> dict[Any, Any]:
    """The numbers, strings and the like in a dict, by key; none of a dict that is too large to be compared often."""
    if len(value) > _ENTRIES:
        return {}
    return {key: entry for key, entry in value.items() if type(entry) in _PLAIN}


def step_state(model: nn.Module) -> dict[str, object]:
    """Numbers, strings and the like that a model keeps, by the name of the attribute, dict or object that they are in.

    Metrics keep theirs in other ways, and are left out.
    """
    found: dict[str, object] = {}
    for name, module in model.named_modules():
        if any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__):
            continue
        for attribute, value in vars(module).items():
            if attribute not in _NOT_THE_USERS:
                _add(f"{name}.{attribute}" if name else attribute, value, _DEPTH, found)
    return found


def iterators(model: nn.Module) -> list[str]:
    """Names of the attributes that are iterators: how far they are is not to be seen."""
    return [
        f"{name}.{attribute}" if name else attribute
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if attribute not in _NOT_THE_USERS and isinstance(value, Iterator)
    ]


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """The names under which something else is found than before."""
    return [name for name, value in after.items() if name not in before or not _same(before[name], value)]


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _add(name: str, value: Any, depth: int, found: dict[str, object]) -> None:
    if type(value) in _PLAIN:
        found[name] = value
    elif isinstance(value, dict):
        if type(value).__module__ in ("builtins", "collections"):
            found[name] = plain_entries(value)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value):
        kind = type(value).__module__.partition(".")[0]
        if kind not in ("torch", "lightning", "lightning_asyncpipe", "torchmetrics", "numpy"):
            for attribute, entry in list(vars(value).items()):
                _add(f"{name}.{attribute}", entry, depth - 1, found)
