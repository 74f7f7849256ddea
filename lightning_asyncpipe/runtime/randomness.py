"""Random numbers that depend on (seed, step, micro-batch, unit) and on nothing else.

A stage skips units that another one runs. If all code drew from one stream, noise drawn in the step after a unit would
differ between stages of one micro-batch. So the generators are seeded anew when a unit begins and when it has returned,
from the task's key and the unit's own number: what runs in between draws from a stream of its own. Whatever the global
states were, they are restored after each action.

The seed that the CPU generator was given last also tells where in the step one is. Activation checkpointing restores
that generator before it runs a part of the step again, and so says by which call's stream the part goes on.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import nn

from lightning_asyncpipe.runtime.own_random import own_generators

GENERATORS = ("torch", "numpy", "python")
_TWISTER_SIZE = 624  # numbers of 32 bits in a Mersenne twister; one more says how many are used


@lru_cache(maxsize=1024)  # the actions of a micro-batch ask for the same ones
def digest(*parts: int | str) -> int:
    """A 64-bit number for a sequence of numbers and strings; equal on all machines."""
    text = "\x1f".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _cuda_generator() -> torch.Generator | None:
    """The generator of the current GPU, if this process uses one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.default_generators[torch.cuda.current_device()]


class _Memory:
    """The memory of a Mersenne twister: reading and writing it takes 1 us, where its own interface takes up to 70."""

    def __init__(self, address: int) -> None:
        self._address = address
        self._size = 4 * (_TWISTER_SIZE + 1)

    def read(self) -> bytes:
        return ctypes.string_at(self._address, self._size)

    def write(self, content: bytes) -> None:
        ctypes.memmove(self._address, content, self._size)


class _Global(Protocol):
    """A global generator of another library."""

    def snapshot(self) -> object:
        """Something that differs if numbers were drawn since."""

    def save(self) -> object:
        """Take the state down, for :meth:`restore`; returns a snapshot."""

    def restore(self) -> None: ...
    def seed(self, seed: int) -> None: ...


class _Numpy:
    """numpy's global generator. It may hold back a normal number, which is outside the twister."""

    def __init__(self) -> None:
        self._state: Any = None
        self._content: object = None
        self._generator: object = None
        self._memory: _Memory | None = None

    @staticmethod
    def _random() -> Any:
        return sys.modules["numpy"].random

    def snapshot(self) -> object:
        generator: Any = getattr(self._random(), "get_bit_generator", lambda: None)()
        if type(generator).__name__ != "MT19937":
            self._memory = None
            return object()
        if generator is not self._generator or self._memory is None:
            self._generator, self._memory = generator, _Memory(int(generator.ctypes.state_address))
        return self._memory.read()

    def save(self) -> object:
        content = self.snapshot()
        # A number can only have been put back since the last time if others were drawn with it.
        if content != self._content or self._state["has_gauss"]:
            self._state = self._random().get_state(legacy=False)
            self._content = content
        return content

    def restore(self) -> None:
        if self._memory is None or self._state["has_gauss"]:
            self._random().set_state(self._state)
        else:
            self._random().seed(0)  # drops a number that is held back
            assert isinstance(self._content, bytes)
            self._memory.write(self._content)

    def seed(self, seed: int) -> None:
        self._random().seed(seed & 0xFFFFFFFF)


class _Python:
    """The generator of the module ``random``; it may hold back a normal number, in an attribute."""

    def __init__(self) -> None:
        self._memory = _memory_of_python()
        self._state: Any = None
        self._held: float | None = None

    def snapshot(self) -> object:
        return random.getstate() if self._memory is None else self._memory.read()

    def save(self) -> object:
        self._state = self.snapshot()
        self._held = random._inst.gauss_next  # type: ignore[attr-defined]
        return self._state

    def restore(self) -> None:
        if self._memory is None:
            random.setstate(self._state)
        else:
            self._memory.write(self._state)
            random._inst.gauss_next = self._held  # type: ignore[attr-defined]

    def seed(self, seed: int) -> None:
        random.seed(seed)


def _memory_of_python() -> _Memory | None:
    """Where CPython keeps the state of ``random``: an index, then the twister, at the end of the object."""
    generator = random._inst
    if sys.implementation.name != "cpython":
        return None
    base = next(kind for kind in type(generator).__mro__ if kind.__module__ == "_random")
    size = base.__basicsize__ // 8 * 8
    for padding in (0, 4):
        memory = _Memory(id(generator) + size - padding - 4 * (_TWISTER_SIZE + 1))
        index, *twister = struct.unpack(f"{_TWISTER_SIZE + 1}I", memory.read())
        if (*twister, index) == random.getstate()[1]:
            return memory
    return None


class RandomStreams:
    """Gives each unit of a task its own random stream.

    Args:
        per_call: the generators among :data:`GENERATORS` that are seeded for each unit; torch's always are. The others
            are only watched, and are added when something draws from them.
        model: its own generators are seeded too.
    """

    def __init__(self, per_call: Iterable[str] = GENERATORS, model: nn.Module | None = None) -> None:
        self._model = model
        self.refresh()
        self._others: dict[str, _Global] = {"numpy": _Numpy(), "python": _Python()}
        self._seeded = [self._others[name] for name in per_call if name in self._others]
        self._watched: list[tuple[_Global, object]] = []
        self._cpu: torch.Tensor | None = None
        self._cuda: tuple[torch.Generator, torch.Tensor] | None = None
        self._base = 0

    def refresh(self) -> None:
        """Look for the model's own generators anew: hooks may have made or replaced some."""
        own = {} if self._model is None else own_generators(self._model)
        self._own = [(digest("own", name), generator) for name, generator in own.items()]

    def begin(self, key: tuple[int, ...], start: int) -> None:
        """Save the global states and start the stream of the code around units.

        Args:
            key: of the task: seed, step, micro-batch.
            start: number of the stream.
        """
        self._cpu = torch.default_generator.get_state()
        cuda = _cuda_generator()
        self._cuda = None if cuda is None else (cuda, cuda.get_state())
        self._watched.clear()
        for name, other in self._others.items():
            if name == "numpy" and "numpy" not in sys.modules:
                continue
            saved = other.save()
            if other not in self._seeded:
                self._watched.append((other, saved))
        for _, own in self._own:
            own.save()
        self._base = digest(*key)
        self.enter(start)

    def end(self) -> None:
        """Restore the global states."""
        assert self._cpu is not None
        torch.default_generator.set_state(self._cpu)
        if self._cuda is not None:
            generator, state = self._cuda
            generator.set_state(state)
        for other in self._seeded:
            other.restore()
        for other, before in self._watched:
            if other.snapshot() != before:
                other.restore()
                self._seeded.append(other)
        for _, own in self._own:
            own.restore()

    def enter(self, stream: int) -> None:
        """Start another stream of the current task."""
        seed = self._base ^ stream
        torch.default_generator.manual_seed(seed)
        if self._cuda is not None:
            self._cuda[0].manual_seed(seed)
        for other in self._seeded:
            other.seed(seed)
        for salt, own in self._own:
            own.seed(seed ^ salt)

    @staticmethod
    def position() -> int:
        """The seed of the stream that is current; after a restored state, that of the restored stream."""
        return torch.default_generator.initial_seed()


class Watch:
    """Finds out from which generators some code draws."""

    def __init__(self) -> None:
        self._others: dict[str, _Global] = {"python": _Python()}
        if "numpy" in sys.modules:
            self._others["numpy"] = _Numpy()
        self._before = self._states()

    def _states(self) -> dict[str, Any]:
        states: dict[str, Any] = {n: other.snapshot() for n, other in self._others.items()}
        generators = [g for g in (torch.default_generator, _cuda_generator()) if g is not None]
        states["torch"] = [bytes(generator.get_state().tolist()) for generator in generators]
        return states

    def drawn(self) -> tuple[str, ...]:
        """The generators that moved since the watch began."""
        now = self._states()
        return tuple(name for name in GENERATORS if now.get(name) != self._before.get(name))


@contextmanager
def preserved_state(model: nn.Module | None = None) -> Iterator[None]:
    """The global random states, and those of a model's own generators, are afterwards what they were before."""
    streams = RandomStreams(model=model)
    streams.begin((0,), 0)
    try:
        yield
    finally:
        streams.end()
