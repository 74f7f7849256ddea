"""Models that are built without memory, and given only what a rank needs of it.

While a model is built its tensors have no memory, and the operations that make and fill them are recorded. Later these
are run again on the CPU, in their order, from the recorded state of the random number generator: every value is the one
that building the model on one device would have given. A tensor has memory only from the first operation on it to the
last one, unless it is wanted; what others need is left out, but for random numbers, which are drawn and dropped.

The tensors are fake ones, not ones on the meta device: many initialisations, those of ``torch.nn.init`` and of
``transformers`` among them, do nothing on that device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_asyncpipe._private import (
    FakeTensorMode,
    TorchDispatchMode,
    fake_mode,
    forget_origins,
    is_fake,
    makes_views,
    storage_key,
    without_modes,
    written_arguments,
)
from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.runtime.structure import map_leaves, tensors


@dataclass(frozen=True)
class _Piece:
    """A tensor without memory in recorded arguments: where it lies in a storage."""

    storage: int
    layout: tuple[int, torch.Size, tuple[int, ...]]
    dtype: torch.dtype

    @property
    def extent(self) -> int:
        """Elements of the storage up to its end."""
        offset, shape, stride = self.layout
        if 0 in shape:
            return offset
        return offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


class _Leaf:
    """Hides a dataclass from functions that walk through nested values."""

    __slots__ = ("piece",)

    def __init__(self, piece: _Piece) -> None:
        self.piece = piece


@dataclass
class _Operation:
    """One recorded call.

    Attributes:
        function: the operation.
        arguments: ``(args, kwargs)``, tensors without memory described.
        reads, writes: numbers of storages that it reads, and that it writes to or makes.
        made: what it returns, if not views of its arguments.
        random: whether it draws from the CPU's generator.
        state: that generator's state before it, where something else has changed it.
    """

    function: Any
    arguments: Any
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    made: tuple[_Piece, ...]
    random: bool
    state: Tensor | None


@dataclass(frozen=True)
class _RandomState:
    content: Tensor


class Recording:
    """How the tensors of a model are made; see :meth:`building` and :meth:`values`."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # storages: their identities must not be reused
        self._state: _RandomState | None = None

    @contextmanager
    def building(self) -> Iterator[None]:
        """Tensors that are made in here have no memory, and how they are made is recorded.

        Tensors that were there before, or are loaded, stay real. A value that code in here asks for is worked out.
        """
        self._state = None
        mode = fake_mode()
        with mode, _Recorder(self, mode):
            yield

    # Recording

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and take it down if it concerns tensors without memory."""
        given = [*tensors(args), *tensors(kwargs)]
        fakes = [tensor for tensor in given if is_fake(tensor)]
        from_data = function is torch.ops.aten.lift_fresh.default
        if given and not fakes and not from_data:
            with without_modes():
                return function(*args, **kwargs)
        if _asks_for_values(function):
            known = {id(tensor): value for tensor, value in self.values(fakes)}
            args, kwargs = map_leaves(lambda leaf: known.get(id(leaf), leaf), (args, dict(kwargs)))
            with without_modes():
                return function(*args, **kwargs)
        written = self._written(function, args, kwargs)
        if not all(is_fake(tensor) for tensor in written):
            raise PipelineError(
                f"while the model is built, {function} writes values that are not known yet to a tensor that was there "
                "before: build all that belongs together in `configure_model`, or all of it in `__init__`"
            )
        # What an operation changes of a tensor's shape must not be seen in its own arguments.
        described = map_leaves(self._described, (args, dict(kwargs)))
        state = self._random_state() if _draws(function) else None
        result = function(*args, **kwargs)
        if function.namespace != "prim" and (from_data or not makes_views(function)):
            self._add(function, described, fakes, written, result, state)
        return result

    def _described(self, leaf: Any) -> Any:
        return _Leaf(self._piece(leaf)) if isinstance(leaf, Tensor) and is_fake(leaf) else leaf

    @staticmethod
    def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
        found: list[Tensor] = []
        for position, name in written_arguments(function):
            found += tensors(args[position] if position < len(args) else kwargs.get(name))
        return found

    def _add(
        self,
        function: Any,
        described: Any,
        fakes: Sequence[Tensor],
        written: Sequence[Tensor],
        result: Any,
        state: _RandomState | None,
    ) -> None:
        reads = tuple(self._number(tensor) for tensor in fakes)
        made = tuple(self._piece(tensor) for tensor in tensors(result) if is_fake(tensor))
        fresh = tuple(piece for piece in made if piece.storage not in reads)
        if not written and not fresh:
            return  # views, and questions about tensors
        writes = (*(self._number(tensor) for tensor in written), *(piece.storage for piece in fresh))
        changed = None if state is None or state is self._state else state.content
        self._state = state or self._state
        self._operations.append(_Operation(function, described, reads, writes, fresh, state is not None, changed))

    def _random_state(self) -> _RandomState:
        """The state of the CPU's generator; the same object as long as nothing changes it."""
        with without_modes():
            content = torch.get_rng_state()
            if self._state is not None and torch.equal(content, self._state.content):
                return self._state
            return _RandomState(content)

    def _number(self, tensor: Tensor) -> int:
        key = storage_key(tensor)
        assert key is not None
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._kept)
            self._kept.append(tensor.untyped_storage())
        return number

    def _piece(self, tensor: Tensor) -> _Piece:
        layout = (int(tensor.storage_offset()), tensor.shape, tuple(tensor.stride()))
        return _Piece(self._number(tensor), layout, tensor.dtype)

    # What other ranks need to know

    def states(self) -> list[list[Any]]:
        """The recorded states of the random number generator: number of the operation and state."""
        return [[i, operation.state] for i, operation in enumerate(self._operations) if operation.state is not None]

    def set_states(self, states: Sequence[Sequence[Any]]) -> None:
        """Draw the random numbers that another rank would, whose :meth:`states` these are."""
        for operation in self._operations:
            operation.state = None
        for index, state in states:
            self._operations[index].state = state

    # Running

    def values(self, wanted: Collection[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The values of tensors of this recording, on the CPU; the global random state stays what it is.

        Returns:
            Pairs of a wanted tensor and its value.

        Raises:
            PipelineError: nothing that was recorded made a tensor.
        """
        pieces = [(tensor, self._piece(tensor)) for tensor in wanted]
        keep = {piece.storage for _, piece in pieces}
        made = {number for operation in self._operations for number in operation.writes}
        missing = [tensor for tensor, piece in pieces if piece.storage not in made and tensor.numel()]
        if missing:
            raise PipelineError(
                f"{len(missing)} tensors of the model, the first of shape {list(missing[0].shape)}, have no values, "
                "and it is not known how they are made: they were not built in `configure_model` of this run"
            )
        memory = _Memory(keep)
        with without_modes():
            before = torch.get_rng_state()
            try:
                for operation, last in self._needed(keep):
                    memory.run(operation)
                    memory.free(last)
            finally:
                torch.set_rng_state(before)
            return [(tensor, memory.tensor(piece)) for tensor, piece in pieces]

    def _needed(self, keep: set[int]) -> list[tuple[_Operation, tuple[int, ...]]]:
        """The operations to run, each with the storages that none after it needs.

        An operation is needed if it writes to what is needed; one that draws random numbers also if another one that is
        needed does so later.
        """
        needed, drawn = set(keep), False
        chosen: list[tuple[_Operation, tuple[int, ...]]] = []
        for operation in reversed(self._operations):
            useful = bool(needed.intersection(operation.writes))
            if not useful and not (operation.random and drawn):
                continue
            drawn = drawn or operation.random
            touched = {*operation.writes, *(operation.reads if useful else ())}
            chosen.append((operation, tuple(touched - needed)))
            if useful:
                needed.update(operation.reads)
                needed.difference_update(piece.storage for piece in operation.made)
        return chosen[::-1]


class _Memory:
    """Storages that have values at the moment."""

    def __init__(self, keep: set[int]) -> None:
        self._keep = keep
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, piece: _Piece) -> Tensor:
        """The tensor at a piece of a storage, which gets memory if it has none."""
        storage = self._storages.get(piece.storage)
        if storage is None:
            storage = torch.empty(piece.extent, dtype=piece.dtype).untyped_storage()
            self._storages[piece.storage] = storage
        offset, shape, stride = piece.layout
        return torch.empty(0, dtype=piece.dtype).set_(storage, offset, shape, stride)

    def run(self, operation: _Operation) -> None:
        if operation.state is not None:
            torch.set_rng_state(operation.state)
        args, kwargs = map_leaves(
            lambda leaf: self.tensor(leaf.piece) if isinstance(leaf, _Leaf) else leaf, operation.arguments
        )
        with torch.no_grad():
            results = tensors(operation.function(*args, **kwargs))
        results = results[-len(operation.made) :] if operation.made else []
        for piece, result in zip(operation.made, results, strict=True):
            self._bind(piece, result, tensors((args, kwargs)))

    def _bind(self, piece: _Piece, result: Tensor, given: Sequence[Tensor]) -> None:
        same = (int(result.storage_offset()), tuple(result.stride())) == (piece.layout[0], piece.layout[2])
        own = result.untyped_storage().nbytes() == result.nbytes
        if same and own and all(storage_key(result) != storage_key(tensor) for tensor in given):
            self._storages[piece.storage] = result.untyped_storage()
        else:
            self.tensor(piece).copy_(result)

    def free(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number not in self._keep:
                self._storages.pop(number, None)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives a recording all operations."""

    def __init__(self, recording: Recording, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._mode = mode

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._recording.call(func, args, kwargs or {})
        finally:
            forget_origins(self._mode)  # so that modules can be converted: their tensors are swapped then


def _draws(function: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())


def _asks_for_values(function: Any) -> bool:
    """Whether Python gets to know values, or shapes that depend on them, from an operation."""
    tags = getattr(function, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def unfilled(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module that have no memory, by their first name."""
    every = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor for name, tensor in every if is_fake(tensor)}
