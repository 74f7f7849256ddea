"""Random generators of the user's own: attributes of modules, and variables of the files that define them.

A step that draws from them would draw other numbers in each stage of a micro-batch. So they are treated as the global
ones are (:mod:`lightning_asyncpipe.runtime.randomness`): seeded anew for each part of a micro-batch, and afterwards
what they were. Found are ``torch.Generator``, numpy's ``Generator`` and ``RandomState`` and ``random.Random``, in
attributes, in lists and dicts in them, and in attributes of plain objects in them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

_DEPTH = 3
_ENTRIES = 100  # of a list or dict that are looked at
_OTHERS = ("torch.", "torchmetrics.", "lightning.", "lightning_asyncpipe.", "numpy.", "builtins.")
_PLAIN = (str, bytes, int, float, bool, type(None), type, Tensor)


class _Own(Protocol):
    """One generator."""

    def save(self) -> None: ...
    def restore(self) -> None: ...
    def seed(self, seed: int) -> None: ...


class _Torch:
    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._state: Tensor | None = None
        self._given: int | None = None

    def save(self) -> None:
        self._state, self._given = self._generator.get_state(), None

    def restore(self) -> None:
        assert self._state is not None
        self._generator.set_state(self._state)

    def seed(self, seed: int) -> None:
        if self._given is None or self._generator.initial_seed() == self._given:
            self._given = seed
            self._generator.manual_seed(seed)
        # Else the step has seeded it itself, and goes on with that.


class _Numpy:
    """numpy's ``Generator``, or a ``RandomState``."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._legacy = not hasattr(generator, "bit_generator")
        self._state: Any = None

    def save(self) -> None:
        self._state = self._generator.get_state(legacy=False) if self._legacy else self._generator.bit_generator.state

    def restore(self) -> None:
        if self._legacy:
            self._generator.set_state(self._state)
        else:
            self._generator.bit_generator.state = self._state

    def seed(self, seed: int) -> None:
        if self._legacy:
            self._generator.seed(seed & 0xFFFFFFFF)
        else:
            bits = self._generator.bit_generator
            bits.state = type(bits)(seed).state


class _Python:
    def __init__(self, generator: random.Random) -> None:
        self._generator = generator
        self._state: Any = None

    def save(self) -> None:
        self._state = self._generator.getstate()

    def restore(self) -> None:
        self._generator.setstate(self._state)

    def seed(self, seed: int) -> None:
        self._generator.seed(seed)


def own_generators(model: nn.Module) -> dict[str, _Own]:
    """The generators that a model's code may draw from, each under the first name it is found by.

    The global generators of torch, numpy and ``random`` are not among them.
    """
    found: dict[str, _Own] = {}
    seen = _global_generators()
    files: dict[str, None] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _INTERNAL:
                _look(f"{name}.{attribute}" if name else attribute, value, _DEPTH, seen, found)
        files.update({kind.__module__: None for kind in type(module).__mro__ if not _others(kind)})
    for file in files:
        for variable, value in list(vars(sys.modules[file]).items()) if file in sys.modules else ():
            own = _wrapped(value)
            if own is not None and id(value) not in seen:
                seen.add(id(value))
                found.setdefault(f"global {variable}", own)
    return found


_INTERNAL = frozenset(("_modules", "_parameters", "_buffers", "_trainer", "_fabric", "_metric_attributes"))


def _others(kind: type) -> bool:
    return f"{kind.__module__}.".startswith(_OTHERS)


def _global_generators() -> set[int]:
    ids = {id(torch.default_generator), id(random._inst)}
    ids |= {id(generator) for generator in torch.cuda.default_generators}
    if "numpy" in sys.modules:
        ids.add(id(getattr(sys.modules["numpy"].random.mtrand, "_rand", None)))
    return ids


def _wrapped(value: Any) -> _Own | None:
    if isinstance(value, torch.Generator):
        return _Torch(value)
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else _Python(value)
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        if isinstance(value, numpy.random.Generator):
            return _Numpy(value)
        if isinstance(value, numpy.random.RandomState):
            twister = value.get_state(legacy=False)["bit_generator"] == "MT19937"
            return _Numpy(value) if twister else None
    return None


def _look(name: str, value: Any, depth: int, seen: set[int], found: dict[str, _Own]) -> None:
    if isinstance(value, _PLAIN) or id(value) in seen:
        return
    own = _wrapped(value)
    if own is not None:
        seen.add(id(value))
        found[name] = own
        return
    if depth and not isinstance(value, nn.Module):
        seen.add(id(value))
        for key, entry in _entries(value):
            _look(f"{name}{key}", entry, depth - 1, seen, found)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        if type(value).__module__ in ("builtins", "collections") and len(value) <= _ENTRIES:
            yield from ((f"[{key!r}]", entry) for key, entry in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{i}]", entry) for i, entry in enumerate(value[:_ENTRIES]))
    elif not _others(type(value)):
        yield from ((f".{key}", entry) for key, entry in list(getattr(value, "__dict__", {}).items())[:_ENTRIES])
