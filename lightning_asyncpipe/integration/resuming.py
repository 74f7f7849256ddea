"""What a checkpoint of this strategy holds beside what every checkpoint of Lightning holds: its randomness, its plan.

A resumed training must draw the numbers that it would have drawn had it not been interrupted. The randomness of steps
is a function of the seed, so the seed is saved. Loaders and hooks draw from the global generators, so their states are
saved; where a batch was already fetched that has not been trained, also those from before it was, since it is fetched
again. Shuffling loaders may have generators of their own.

All of it lies under one key, as tensors and plain values, which one device ignores and ``weights_only`` loading allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from lightning_asyncpipe.errors import CheckpointError
from lightning_asyncpipe.integration import internals

KEY = "async_multipipe"


@dataclass(frozen=True)
class Randomness:
    """Random states at the time of a save.

    Attributes:
        seed: of the randomness of steps.
        states: of the global generators.
        before_next: those from before the batch was fetched that waits to be trained; None if none waits.
        generators: states of the loaders' own generators, in the order of :func:`own_generators`.
    """

    seed: int
    states: dict[str, Any] = field(repr=False)
    before_next: dict[str, Any] | None = field(repr=False)
    generators: list[Tensor] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        return {
            "seed": self.seed,
            "random_states": _plain(self.states),
            "before_next_batch": None if self.before_next is None else _plain(self.before_next),
            "generators": self.generators,
        }

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any], path: object = "") -> Randomness | None:
        """What a checkpoint holds; None if it is one of another strategy.

        Args:
            checkpoint: that was read.
            path: where from, for messages.

        Raises:
            CheckpointError: it is not what :meth:`to_dict` gives.
        """
        saved = checkpoint.get(KEY)
        if saved is None:
            return None
        if not isinstance(saved, Mapping):
            raise _damaged(path, "", f"it is {type(saved).__name__}, not a dict")
        key = "seed"
        try:
            seed = int(saved[key])
            key = "random_states"
            states = _with_arrays(saved[key])
            key = "before_next_batch"
            before = None if saved[key] is None else _with_arrays(saved[key])
            key = "generators"
            generators = list(saved[key])
            if not all(isinstance(state, Tensor) for state in generators):
                raise TypeError("not all are tensors")
        except KeyError as error:
            raise _damaged(path, key, f"{error} is missing") from None
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise _damaged(path, key, str(error)) from None
        return cls(seed, states, before, generators)


def _damaged(path: object, key: str, what: str) -> CheckpointError:
    entry = f"{KEY!r}, {key!r}" if key else repr(KEY)
    return CheckpointError(
        f"the checkpoint {path} is damaged: the entry {entry} is not what this version of lightning-asyncpipe writes "
        f"({what}). Delete the entry {KEY!r} to go on with fresh random states and a new plan, or resume with the "
        "version that wrote it."
    )


def names_of_states(checkpoint: Mapping[str, Any], path: object = "") -> list[list[str]]:
    """For each optimizer the names of its parameters, in the order of its states; empty where nothing tells.

    Raises:
        CheckpointError: it is not what this strategy writes.
    """
    saved = checkpoint.get(KEY) or {}
    if not isinstance(saved, Mapping):
        raise _damaged(path, "", f"it is {type(saved).__name__}, not a dict")
    orders = saved.get("parameters", [])
    try:
        return [[str(name) for group in order for name in group] for order in orders]
    except TypeError as error:
        raise _damaged(path, "parameters", str(error)) from None


def plan_of(checkpoint: Mapping[str, Any]) -> Any:
    """The plan that a checkpoint holds, not checked; None if it holds none. See :mod:`.saved_plans`."""
    saved = checkpoint.get(KEY)
    return saved.get("plan") if isinstance(saved, Mapping) else None


def own_generators(loaders: Iterable[object]) -> list[Generator]:
    """The generators that loaders and their samplers draw from, each once."""
    found: dict[int, Generator] = {}
    for loader in loaders:
        for owner in _with_samplers(loader):
            generator = getattr(owner, "generator", None)
            if isinstance(generator, Generator):
                found.setdefault(id(generator), generator)
    return list(found.values())


def generator_states(loaders: Iterable[object]) -> list[Tensor]:
    """States of :func:`own_generators`."""
    return [generator.get_state() for generator in own_generators(loaders)]


def set_generator_states(loaders: Iterable[object], states: list[Tensor]) -> None:
    """Set what :func:`generator_states` gave, unless the loaders are others by now."""
    generators = own_generators(loaders)
    if len(generators) == len(states):
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _with_samplers(loader: object) -> Iterator[object]:
    yield loader
    for name in ("sampler", "batch_sampler"):
        sampler = getattr(loader, name, None)
        yield sampler
        yield getattr(sampler, "sampler", None)


def _plain(states: Mapping[str, Any]) -> dict[str, Any]:
    """Random states without numpy's arrays, which `weights_only` loading refuses."""
    plain = dict(states)
    if "numpy" in plain:
        kind, twister, *rest = plain["numpy"]
        plain["numpy"] = [kind, torch.from_numpy(twister.astype("int64")), *rest]
    return plain


def _with_arrays(states: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`_plain`."""
    known = internals.collect_random_states()
    full = {name: state for name, state in states.items() if name in known}
    if "numpy" in full:
        kind, twister, *rest = full["numpy"]
        full["numpy"] = (kind, twister.numpy().astype("uint32"), *rest)
    present = internals.collect_random_states()
    _ = full["torch"], full["python"]
    try:  # they need not be what they say they are
        internals.set_random_states(full)
    finally:
        internals.set_random_states(present)
    return full
