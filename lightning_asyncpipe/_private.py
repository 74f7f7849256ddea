"""Every use of a private part of torch, in one place.

Each entry was checked on torch 2.13; ``tests/runtime/test_private.py`` fails first when one moves.

* ``_unsafe_preserve_version_counter``, for :func:`preserve_versions`: updates between a forward and its backward.
* ``clip_grad._get_total_norm``, for :func:`total_norm_rerouted`: norms of gradients over all ranks.
* ``GradScaler._per_optimizer_states`` and ``_check_inf_per_device``, for :func:`overflow_checks`: one verdict for all.
* ``distributed_c10d._get_default_store``, for :func:`default_store`: a store for failures and standpoints.
* ``Module._compiled_call_impl``, for :func:`intercept`: a call of a module, hooks included.
* ``Module._forward_hooks`` and its like, for :func:`without_hooks`: trial runs of a module.
* Frames of ``torch/utils/checkpoint.py``, for :func:`checkpoint_frames`: what a backward runs
  again.
* ``FakeTensorMode``, for :func:`fake_mode`: shapes of results without computing; ``FakeTensor``, for :func:`is_fake`,
  and ``tensor_memo`` and ``describer.lookup_tensor`` of the mode's ``meta_converter``, for :func:`forget_origins`; the
  logger of its module, for :func:`shapes_only`.
* ``_disable_current_modes``, for :func:`without_modes`: real operations while a model is built without memory.
* ``TorchDispatchMode``, for ``runtime/trace.py``: every operation of a step.
* ``UntypedStorage._cdata``, for :func:`storage_key`: the identity of a storage.
* ``OpOverload._schema``, for :func:`written_arguments` and :func:`makes_views`: what an operation does to storages.
* ``_StorageInfo`` and ``_MEM_FORMAT_ENCODING`` of torch.distributed.checkpoint, for ``runtime/shards.py``: what an
  index says of a tensor.
* ``torch._C._functorch.maybe_current_level``, for :func:`in_function_transform`: whether ``vmap`` and its like run.
* ``RNNBase._flat_weights``, for :func:`parameter_slots`: where modules hold parameters.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import grad_mode
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

_fake_log = logging.getLogger(FakeTensorMode.__module__)

CallImpl = Callable[..., Any]
StorageInfo = _StorageInfo
MemoryFormat = _MEM_FORMAT_ENCODING

_ATTRIBUTE = "_compiled_call_impl"
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_BEFORE = "_asyncpipe_before"
_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


class Interception:
    """What :func:`intercept` put in front of a module's call; :meth:`remove` takes it away again."""

    def __init__(self, module: nn.Module, around: Callable[[CallImpl], CallImpl]) -> None:
        self._module = module
        self._before: CallImpl | None = module.__dict__.get(_ATTRIBUTE)
        self._original = original_call(module)
        self._removed = False
        wrapped = around(self._original)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._removed:
                return self._original(*args, **kwargs)
            return wrapped(*args, **kwargs)

        self._call = call
        self._call.__dict__[_BEFORE] = self._before
        module.__dict__[_ATTRIBUTE] = call

    def remove(self) -> None:
        """Restore the module's call. One that was put on top of this one stays, and this one passes through."""
        self._removed = True
        if self._module.__dict__.get(_ATTRIBUTE) is not self._call:
            return
        if self._before is None:
            del self._module.__dict__[_ATTRIBUTE]
        else:
            self._module.__dict__[_ATTRIBUTE] = self._before


def intercept(module: nn.Module, around: Callable[[CallImpl], CallImpl]) -> Interception:
    """Put a function in front of every call of `module`.

    ``nn.Module._wrapped_call_impl`` calls the attribute ``_compiled_call_impl`` instead of ``_call_impl`` where it is
    set, so the function is outside the module's own hooks: those of a module that is not called do not fire, and what a
    hook makes of the output is seen. The attribute is dropped when a module is pickled or copied.

    Args:
        module: the module instance; its class and other instances are not touched.
        around: given what the call was before (a compiled call is kept), returns what it is now.
    """
    return Interception(module, around)


def original_call(module: nn.Module) -> CallImpl:
    """What a call of `module` executes at the moment: a compiled implementation or torch's own."""
    existing: CallImpl | None = module.__dict__.get(_ATTRIBUTE)
    if existing is not None:
        return existing
    plain: CallImpl = module._call_impl
    return plain


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, or ``torch.compile(module)`` made it."""
    call = module.__dict__.get(_ATTRIBUTE)
    while call is not None and _BEFORE in getattr(call, "__dict__", {}):
        call = call.__dict__[_BEFORE]
    return call is not None or type(module).__name__ == "OptimizedModule"


def interception_works() -> bool:
    """Whether a call of a module goes through ``_compiled_call_impl`` in this version of torch."""
    seen: list[object] = []

    def around(call: CallImpl) -> CallImpl:
        def observed(*args: Any, **kwargs: Any) -> Any:
            seen.append(args)
            return call(*args, **kwargs)

        return observed

    module = nn.Identity()
    interception = intercept(module, around)
    result = module(1)
    interception.remove()
    return result == 1 and seen == [(1,)] and module(2) == 2 and len(seen) == 1


def checkpoint_frames() -> list[tuple[FrameType, bool]]:
    """The calls of ``torch.utils.checkpoint.checkpoint`` that the caller is in, outermost first.

    Returns:
        The frame of each (its identity tells regions apart) and whether it is reentrant: then its forward runs in
        the static method ``forward`` of an autograd function of the same file.
    """
    found: list[tuple[FrameType, bool]] = []
    reentrant = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _CHECKPOINT_FILE:
            if code.co_name == "forward":
                reentrant = True
            elif code.co_name == "checkpoint":
                found.append((frame, reentrant))
                reentrant = False
        frame = frame.f_back
    found.reverse()
    return found


def on_stack(wanted: FrameType) -> bool:
    """Whether `wanted` is a frame of the current call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """No hook of `module` or of a submodule fires in here."""
    saved = [
        (submodule.__dict__, name, submodule.__dict__[name])
        for submodule in module.modules()
        for name in _HOOKS
        if submodule.__dict__.get(name)
    ]
    for attributes, name, _ in saved:
        attributes[name] = OrderedDict()
    try:
        yield
    finally:
        for attributes, name, hooks in saved:
            attributes[name] = hooks


def fake_mode() -> FakeTensorMode:
    """A mode in which operations compute shapes, strides and types only; real tensors may take part."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def to_fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A tensor without memory that has the shape, strides and type of `tensor`."""
    return mode.from_tensor(tensor)


def forget_origins(mode: FakeTensorMode) -> None:
    """Drop a mode's weak references to its tensors, with which ``torch.utils.swap_tensors`` refuses them."""
    converter = mode.fake_tensor_converter.meta_converter
    converter.tensor_memo.clear()
    converter.describer.lookup_tensor.clear()


@contextmanager
def shapes_only() -> Iterator[FakeTensorMode]:
    """A :func:`fake_mode`, not yet entered, of which nothing is left on the tensors that were made fake in here.

    The mode logs a traceback for every operation that fails in it. Callers handle that, so nobody is told.
    """
    mode = fake_mode()
    disabled, _fake_log.disabled = _fake_log.disabled, True
    try:
        yield mode
    finally:
        _fake_log.disabled = disabled
        forget_origins(mode)


def swap(one: Tensor, other: Tensor) -> None:
    """Two tensors exchange all but their identity; public, but without types."""
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no memory because it was made in :func:`fake_mode`."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def without_modes() -> Iterator[None]:
    """Operations in here are what they are outside of all dispatch modes."""
    with _disable_current_modes():
        yield


def storage_key(tensor: Tensor) -> int | None:
    """The identity of a tensor's storage while it is alive; None for a tensor without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


@cache
def written_arguments(operation: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operation writes to, by its schema."""
    schema = getattr(operation, "_schema", None)
    if schema is None:
        return ()
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def makes_views(operation: Any) -> bool:
    """Whether an operation only makes views of its arguments, by its schema."""
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.returns:
        return False
    aliases = [result.alias_info for result in schema.returns]
    return all(alias is not None and not alias.is_write for alias in aliases)


def parameter_slots(module: nn.Module) -> list[tuple[Any, Any, Tensor]]:
    """Where a module itself holds its parameters: (container, key, parameter).

    Recurrent modules keep a list of them beside the registered ones.
    """
    slots: list[tuple[Any, Any, Tensor]] = [
        (module._parameters, name, parameter) for name, parameter in module._parameters.items() if parameter is not None
    ]
    if isinstance(module, nn.RNNBase):
        flat = module._flat_weights
        slots.extend((flat, i, weight) for i, weight in enumerate(flat) if weight is not None)
    return slots


@contextmanager
def preserve_versions(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let in-place writes in here pass autograd's version check: an update between a forward and its backward.

    ``torch.autograd._unsafe_preserve_version_counter``, checked on torch 2.13.
    """
    if not tensors:
        yield
        return
    with grad_mode._unsafe_preserve_version_counter(tuple(tensors)):
        yield


@contextmanager
def rerouted(function: Callable[..., Any], target: Callable[..., Any]) -> Iterator[None]:
    """Let calls of a function go to another one, by whatever name it was imported.

    The function object stays and gets other code, since users import functions by name.

    Args:
        function: a plain function without free variables, or a wrapper around one (``functools.wraps``).
        target: called as the original, with the original as keyword `local`.
    """
    plain: Any = inspect.unwrap(function)
    code, defaults, keyword_defaults = plain.__code__, plain.__defaults__, plain.__kwdefaults__
    original = FunctionType(code, plain.__globals__, plain.__name__, defaults)
    original.__kwdefaults__ = keyword_defaults

    def route(*args: Any, _target: Callable[..., Any], **kwargs: Any) -> Any:
        return _target(*args, **kwargs)

    plain.__code__, plain.__defaults__ = route.__code__, None
    plain.__kwdefaults__ = {"_target": partial(target, local=original)}
    try:
        yield
    finally:
        plain.__code__, plain.__defaults__, plain.__kwdefaults__ = code, defaults, keyword_defaults


def total_norm_rerouted(total_norm: Callable[..., Tensor]) -> AbstractContextManager[None]:
    """Replace the function by which torch's clipping utilities compute a norm.

    ``torch.nn.utils.clip_grad._get_total_norm``, which ``clip_grad_norm_`` calls and ``torch.nn.utils.get_total_norm``
    is. Checked on torch 2.13.

    Args:
        total_norm: called as the original with the original as keyword `local`.
    """
    from torch.nn.utils import clip_grad

    return rerouted(clip_grad._get_total_norm, total_norm)


@contextmanager
def overflow_checks(scaler: torch.amp.GradScaler, agree: Callable[[Tensor | None], Tensor]) -> Iterator[None]:
    """Let a scaler act on what all ranks have found when they looked for overflow, instead of what this one has.

    A scaler keeps what it found by device in ``_per_optimizer_states``; ``unscale_`` looks, or, for an optimizer that
    unscales by itself, ``_check_inf_per_device``. Checked on torch 2.13.

    Args:
        scaler: its checks are replaced while the context lasts.
        agree: given what this rank has found, above zero for an overflow, None if it has no gradients; returns what all
            have.
    """

    def checked(check: Callable[..., Any]) -> Callable[..., Any]:
        def check_all(optimizer: torch.optim.Optimizer) -> Any:
            result = check(optimizer)
            found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            every = agree(torch.stack([f.max() for f in found.values()]).max() if found else None)
            found.clear()
            found[every.device] = every
            return result

        return check_all

    names = ("unscale_", "_check_inf_per_device")
    for name in names:
        scaler.__dict__[name] = checked(getattr(scaler, name))
    try:
        yield
    finally:
        for name in names:
            del scaler.__dict__[name]


def in_function_transform() -> bool:
    """Whether the caller is inside a transform of ``torch.func``, such as ``vmap``."""
    return maybe_current_level() is not None


def default_store() -> Store:
    """The store of the default process group.

    ``torch.distributed.distributed_c10d._get_default_store``, checked on torch 2.13.
    """
    from torch.distributed import distributed_c10d

    store: Store = distributed_c10d._get_default_store()
    return store


def own_connection(store: Store) -> Store:
    """The store under all prefixes, over a connection of its own where there is one to be had.

    A blocking call of another thread would hold a shared connection up.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return store
    if hasattr(store, "clone"):
        connection: Store = store.clone()
    else:
        connection = TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    return connection


_stores = itertools.count()


def own_store(purpose: str) -> Store:
    """A part of the default store; see :func:`own_connection`. All ranks get the same if they ask in the same order."""
    return PrefixStore(f"asyncpipe/{purpose}/{next(_stores)}", own_connection(default_store()))
