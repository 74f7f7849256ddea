"""One recorded run of the user's step: which operations made and used which values, inside which calls of modules.

The step runs for real on one micro-batch. A dispatch mode sees every operation; an interception of every submodule's
call gives the tree of calls. A *value* is the content of a storage between two writes: an operation that writes in
place ends one value of a storage and begins the next. Whoever analyses the trace decides which values depend on the
model (:mod:`lightning_asyncpipe.runtime.liveness`).

Times are positions in one sequence of events: operations, and begins and ends of calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lightning_asyncpipe._private import (
    CallImpl,
    TorchDispatchMode,
    checkpoint_frames,
    intercept,
    is_compiled,
    makes_views,
    on_stack,
    shapes_only,
    storage_key,
    to_fake,
    written_arguments,
)
from lightning_asyncpipe.runtime.buffers import RunningStatistics, preserved_buffers
from lightning_asyncpipe.runtime.randomness import Watch, preserved_state
from lightning_asyncpipe.runtime.structure import leaves, map_leaves, preserved_attributes, tensors

ELEMENT_COST = 16.0
"""Floating-point operations that moving one element to or from memory is worth, in the cost of an operation."""

END = sys.maxsize
"""The time of a use by whoever called the step."""


class CallKey(NamedTuple):
    """The `nth` call (from 0) of the module that `model.get_submodule(name)` is."""

    name: str
    nth: int


@dataclass(frozen=True)
class Leaf:
    """A tensor among the arguments or results of a call, as it was then.

    Attributes:
        position: its place among all leaves of the arguments `(args, kwargs)`, or of the result.
        value: the value of its storage; -1 for a tensor without storage.
        layout: offset, shape and strides in the storage.
    """

    position: int
    value: int
    layout: tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass
class Region:
    """One call of ``torch.utils.checkpoint.checkpoint``; what happens in it happens again in the backward."""

    reentrant: bool
    begin: int
    end: int = END


@dataclass
class Call:
    """One call of a submodule.

    Attributes:
        parent: index of the call around it; -1 where the step itself calls.
        begin, end: times.
        regions: indices of the checkpointed regions that it is called in, outermost first.
        arguments, results: their tensors.
    """

    key: CallKey
    parent: int
    begin: int
    end: int = END
    regions: tuple[int, ...] = ()
    arguments: tuple[Leaf, ...] = ()
    results: tuple[Leaf, ...] = ()


@dataclass
class Value:
    """The content of a storage from `birth` on, until something writes to the storage.

    Attributes:
        birth: time of the operation that made it; 0 for one that was there before the step.
        call: index of the innermost call then; -1 for the step itself.
        storage: number of its storage.
        parameters: names of the parameters whose storage it is in.
    """

    birth: int
    call: int
    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameters: frozenset[str] = frozenset()


@dataclass
class Operation:
    """One operation: the values it read and made (a view makes none), and what it costs.

    Attributes:
        cost: floating-point operations of matrix products, and :data:`ELEMENT_COST` for each element read or made;
            nothing for views.
        reads: it made no tensor: its result went to Python.
    """

    time: int
    call: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost: float
    reads: bool


@dataclass(eq=False)
class Trace:
    """What :func:`trace_step` recorded.

    Attributes:
        calls: in the order in which they began.
        operations: in the order of time.
        values: all of them.
        regions: checkpointed regions.
        results: values of the tensors that the step returned.
        end: a time after everything.
        random: which random number generators the step drew from: "torch", "numpy", "python".
        parameters: names of all parameters of the model.
        compiled: names of the modules whose inner calls are not seen, because they are compiled.
    """

    calls: list[Call] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    results: tuple[int, ...] = ()
    end: int = 0
    random: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()

    def call_name(self, index: int) -> str:
        """The module of a call, for messages."""
        if index < 0:
            return "the step"
        return self.calls[index].key.name or "forward"


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Builds a :class:`Trace` while it is active."""

    def __init__(self, parameters: Mapping[str, Tensor], ignored: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace(parameters=tuple(parameters))
        self._clock = 0
        self._stack: list[int] = []
        self._counts: dict[str, int] = {}
        self._current: dict[int, int] = {}  # storage -> its present value
        self._kept: list[Any] = []  # storages: their identities must not be reused
        self._storages = 0
        self._numbers: dict[int, int] = {}
        self._regions: dict[FrameType, int] = {}
        self._open: list[FrameType] = []
        self._ignored = {storage_key(tensor) for tensor in ignored} - {None}
        self._parameters: dict[int, frozenset[str]] = {}
        for name, parameter in parameters.items():
            key = storage_key(parameter)
            if key is not None:
                # Several parameters may be views of one storage (flattened weights of recurrent modules).
                self._parameters[key] = self._parameters.get(key, frozenset()) | {name}

    def tick(self) -> int:
        self._clock += 1
        return self._clock

    # Operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [*tensors(args), *tensors(kwargs)] if kwargs else tensors(args)
        written: set[int] = set()
        for position, name in written_arguments(func):
            argument = args[position] if position < len(args) else kwargs.get(name)
            for tensor in tensors(argument):
                key = storage_key(tensor)
                if key is not None:
                    written.add(key)
        inputs = {key: self._value(tensor) for tensor in given if (key := self._key(tensor)) is not None}
        result = func(*args, **kwargs)
        made = tensors(result)
        time = self.tick()
        self._close_regions(time)
        outputs: dict[int, int] = {}
        for tensor in [*made, *given]:
            key = self._key(tensor)
            if key is None or key in outputs:
                continue
            if key not in inputs or key in written:
                outputs[key] = self._birth(key, tensor, time)
        if func.namespace == "prim":  # questions about a tensor's type or device
            return result
        self.trace.operations.append(
            Operation(
                time,
                self._stack[-1] if self._stack else -1,
                str(func),
                tuple(inputs.values()),
                tuple(outputs.values()),
                0.0 if makes_views(func) else _cost(func, args, kwargs, result, given, made),
                not made and not written,
            )
        )
        return result

    def _key(self, tensor: Tensor) -> int | None:
        key = storage_key(tensor)
        return None if key in self._ignored else key

    def _value(self, tensor: Tensor) -> int:
        key = self._key(tensor)
        if key is None:
            return -1
        if key not in self._current:
            self._birth(key, tensor, 0)
        return self._current[key]

    def _birth(self, key: int, tensor: Tensor, time: int) -> int:
        if key not in self._numbers:
            self._numbers[key] = self._storages
            self._storages += 1
            self._kept.append(tensor.untyped_storage())
        values = self.trace.values
        self._current[key] = len(values)
        values.append(
            Value(
                time,
                self._stack[-1] if self._stack and time else -1,
                self._numbers[key],
                tuple(tensor.shape),
                tensor.dtype,
                self._parameters.get(key, frozenset()),
            )
        )
        return len(values) - 1

    # Calls

    def around(self, name: str) -> Callable[[CallImpl], CallImpl]:
        """For :func:`intercept`: record the calls of the module `name`."""

        def wrap(call: CallImpl) -> CallImpl:
            def recorded(*args: Any, **kwargs: Any) -> Any:
                index = self._begin(name, args, kwargs)
                try:
                    result = call(*args, **kwargs)
                except BaseException:
                    self._stack.pop()
                    self.trace.calls[index].end = self.tick()
                    raise
                self._finish(index, result)
                return result

            return recorded

        return wrap

    def _begin(self, name: str, args: Any, kwargs: Any) -> int:
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        self._close_regions(self.tick())
        begin = self.tick()
        regions = []
        for frame, reentrant in checkpoint_frames():
            if frame not in self._regions:
                self._regions[frame] = len(self.trace.regions)
                self.trace.regions.append(Region(reentrant, begin))
                self._open.append(frame)
            regions.append(self._regions[frame])
        index = len(self.trace.calls)
        parent = self._stack[-1] if self._stack else -1
        call = Call(CallKey(name, count), parent, begin, regions=tuple(regions))
        call.arguments = self._leaves((args, kwargs))
        self.trace.calls.append(call)
        self._stack.append(index)
        return index

    def _finish(self, index: int, result: Any) -> None:
        self._stack.pop()
        call = self.trace.calls[index]
        call.results = self._leaves(result)
        call.end = self.tick()

    def _leaves(self, structure: Any) -> tuple[Leaf, ...]:
        return tuple(
            Leaf(
                position,
                self._value(leaf),
                (int(leaf.storage_offset()), tuple(leaf.shape), tuple(leaf.stride())),
            )
            for position, leaf in enumerate(leaves(structure))
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided
        )

    def _close_regions(self, time: int) -> None:
        while self._open and not on_stack(self._open[-1]):
            self.trace.regions[self._regions[self._open.pop()]].end = time

    def finish(self, result: Any) -> Trace:
        """The step returned `result`: complete the trace."""
        self._close_regions(self.tick())
        self.trace.results = tuple(self._value(tensor) for tensor in tensors(result))
        self.trace.end = self.tick()
        self._kept.clear()
        self._regions.clear()
        return self.trace


def _cost(func: Any, args: Any, kwargs: Any, result: Any, given: list[Tensor], made: list[Tensor]) -> float:
    cost = ELEMENT_COST * (sum(t.numel() for t in given) + sum(t.numel() for t in made))
    packet = getattr(func, "_overloadpacket", None)
    if packet in flop_registry:
        cost += float(flop_registry[packet](*args, **kwargs, out_val=result))
    elif "scaled_dot_product" in str(func) and len(given) >= 3:
        query, key, value = given[:3]
        scores = query.numel() // max(query.shape[-1], 1) * key.shape[-2]
        cost += 2.0 * scores * (query.shape[-1] + value.shape[-1])
    return cost


def trace_step(
    model: nn.Module,
    step: Callable[..., Any],
    arguments: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ignored: Iterable[Tensor] = (),
    compute: bool = True,
    grad: bool = True,
) -> Trace:
    """Run `step` once on one micro-batch and record it.

    Buffers and random states are left as they were. What the step does otherwise (metrics, logging, other attributes)
    it does as in any run; the caller sees to that. All intermediate tensors are kept until the step has ended.

    Args:
        model: the module whose submodules' calls are recorded, and whose parameters are followed.
        step: usually ``model.training_step``.
        arguments: positional arguments of the step.
        kwargs: keyword arguments of the step.
        context: entered around the step, for example autocast; its cache of casted weights is switched off, since a
            weight that is cast in one stage and used in another would look like a value that crosses.
        ignored: tensors whose content does not matter to the step's results.
        compute: False: follow shapes only, without memory and without computing. For a step that looks at values of
            tensors, that fails; attributes are then what they were before.
        grad: whether the step runs with gradients enabled.
    """
    recorder = _Recorder(dict(model.named_parameters()), ignored)
    opaque: list[str] = []
    cached = torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        # Running statistics are staged in all runs by stages, so their layers do not depend on earlier calls.
        statistics = RunningStatistics(model)
        stack.callback(statistics.close)
        stack.enter_context(preserved_buffers(model))
        for name, module in model.named_modules():
            inside = any(name.startswith(prefix) for prefix in opaque)
            if is_compiled(module) and not inside:
                # Compiled code calls no submodules that could be intercepted: it is one unit.
                opaque.append(f"{name}." if name else "")
                recorder.trace.compiled += (name,)
            if not inside:
                stack.callback(intercept(module, recorder.around(name)).remove)
        stack.enter_context(preserved_state(model))
        watch = Watch()
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(context())
        torch.set_autocast_cache_enabled(False)
        stack.callback(torch.set_autocast_cache_enabled, cached)
        statistics.begin(watch=False)
        stack.callback(statistics.end)
        given = (arguments, dict(kwargs or {}))
        if not compute:
            mode = stack.enter_context(shapes_only())
            given = map_leaves(lambda leaf: to_fake(mode, leaf) if isinstance(leaf, Tensor) else leaf, given)
            stack.enter_context(preserved_attributes(model))
            stack.enter_context(mode)
        with recorder:
            result = step(*given[0], **given[1])
        recorder.trace.random = watch.drawn()
        return recorder.finish(result)
