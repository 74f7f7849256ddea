"""Nested arguments and results of calls: their leaves, and copies with other leaves.

Containers are tuples (named ones too), lists, dictionaries (subclasses like the outputs of ``transformers`` too) and
instances of dataclasses. Everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_ATOMS = (Tensor, int, float, bool, str, bytes, type(None))


def is_dataclass_instance(value: Any) -> bool:
    """Whether `value` is an instance of a dataclass (not the class)."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of a nested value, in a stable order."""
    if isinstance(value, _ATOMS):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif is_dataclass_instance(value):
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                yield from leaves(getattr(value, field.name))
    else:
        yield value


def tensors(value: Any) -> list[Tensor]:
    """The tensors among the leaves of a nested value."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """A copy of a nested value whose leaves are `function` of the original ones, called in the order of `leaves`."""
    if isinstance(value, _ATOMS):
        return function(value)
    if isinstance(value, (tuple, list)):
        items = [map_leaves(function, item) for item in value]
        if type(value) is list:
            return items
        if type(value) is tuple:
            return tuple(items)
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, dict):
        if type(value) is dict:
            return {key: map_leaves(function, item) for key, item in value.items()}
        replaced = copy.copy(value)
        for key, item in value.items():
            replaced[key] = map_leaves(function, item)
        return replaced
    if is_dataclass_instance(value):
        replaced = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                item = map_leaves(function, getattr(value, field.name))
                object.__setattr__(replaced, field.name, item)
        return replaced
    return function(value)


def replace_leaf(value: Any, position: int, leaf: Any) -> Any:
    """A copy of a nested value with the leaf at `position` (in the order of `leaves`) replaced."""
    index = -1

    def choose(original: Any) -> Any:
        nonlocal index
        index += 1
        return leaf if index == position else original

    return map_leaves(choose, value)


def leaf_at(value: Any, position: int) -> Any:
    """The leaf at `position`; IndexError if there are fewer."""
    for index, leaf in enumerate(leaves(value)):
        if index == position:
            return leaf
    raise IndexError(f"the value has no leaf {position}")


@contextmanager
def preserved_attributes(module: nn.Module) -> Iterator[None]:
    """The attributes of a module and its submodules, lists and dictionaries too, are afterwards what they were before.

    Modules keep things: tables for the longest sequence yet, the last attention weights. After a run without values,
    none of it may be a tensor without memory.
    """
    saved = [
        (container, container.copy())
        for submodule in module.modules()
        for container in (submodule.__dict__, *submodule.__dict__.values())
        if type(container) in (dict, list)
    ]
    try:
        yield
    finally:
        for container, content in saved:
            if _same_items(container, content):
                continue
            container.clear()
            if isinstance(container, dict):
                container.update(content)
            else:
                container.extend(content)


def _same_items(a: Any, b: Any) -> bool:
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(key in a and a[key] is value for key, value in b.items())
    return all(x is y for x, y in zip(a, b, strict=True))
