"""Collectives inside a step: refused, since the ranks run different parts of it at different times."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torchmetrics import Metric

from lightning_asyncpipe.errors import CollectiveInStepError

# Point-to-point calls are not among them: the transport makes them.
_COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "new_group",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


class _Steps(threading.local):
    """How many steps are running on a thread, one inside the other, and the name of the innermost."""

    depth = 0
    name = "training_step"


_steps = _Steps()


@contextmanager
def in_step(name: str = "training_step") -> Iterator[None]:
    """Mark the calling thread as running a micro-batch's forward or backward.

    Args:
        name: of the step, for messages.

    Collectives that this thread calls in here raise ``CollectiveInStepError``; other threads, such
    as those of the transport, are not concerned.
    """
    _patches.acquire()
    _steps.depth += 1
    before, _steps.name = _steps.name, name
    try:
        yield
    finally:
        _steps.depth -= 1
        _steps.name = before
        _patches.release()


def inside_step() -> bool:
    """Whether the calling thread is inside :func:`in_step`."""
    return _steps.depth > 0


@contextmanager
def outside_step() -> Iterator[None]:
    """Let this package's own collectives, which all ranks call, begin between the actions of a step."""
    depth, _steps.depth = _steps.depth, 0
    try:
        yield
    finally:
        _steps.depth = depth


def forbid_in_step(call: str) -> None:
    """Raise if the calling thread is inside ``in_step``.

    Args:
        call: what was called, as the user would write it.

    Raises:
        CollectiveInStepError: names the call and what to do instead.

    """
    if _steps.depth:
        raise CollectiveInStepError(
            f"`{call}` was called inside `{_steps.name}`. The ranks run different parts of it for "
            "different micro-batches, so they would wait for each other forever. Call it in a hook "
            "such as `on_train_batch_end`. To log the mean over ranks call `self.log` alone: it "
            "logs the value of the whole batch on every rank. A loss over samples of several "
            "micro-batches or ranks is not supported."
        )


class _Patches:
    """Checks in front of the collectives, in place only while a step runs somewhere."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._originals: list[tuple[Any, str, Any]] = []

    def acquire(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                for owner, name, replacement in _replacements():
                    self._originals.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, replacement)

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                while self._originals:
                    setattr(*self._originals.pop())


_patches = _Patches()


@functools.cache
def _replacements() -> list[tuple[Any, str, Any]]:
    replacements: list[tuple[Any, str, Any]] = [(Metric, "_sync_dist", _metric_sync())]
    if not dist.is_available():
        return replacements
    c10d: Any = dist.distributed_c10d
    for owner in (dist, c10d):
        for name in _COLLECTIVES:
            if hasattr(owner, name):
                call = f"torch.distributed.{name}"
                replacements.append((owner, name, _checked(getattr(owner, name), call)))
    # Collectives that the user imported by name are not reached through these modules. All of them
    # call this function (torch 2.13), as do `get_rank` and others that are harmless.
    inner = getattr(c10d, "_rank_not_in_group", None)
    if inner is not None:
        replacements.append((c10d, "_rank_not_in_group", _checked_by_caller(inner)))
    return replacements


def _checked(original: Callable[..., Any], call: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        forbid_in_step(call)
        return original(*args, **kwargs)

    return checked


def _checked_by_caller(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_name
        if caller in _COLLECTIVES:
            forbid_in_step(f"torch.distributed.{caller}")
        return original(*args, **kwargs)

    return checked


def _metric_sync() -> Callable[..., Any]:
    original = Metric._sync_dist

    @functools.wraps(original)
    def checked(self: Metric, *args: Any, **kwargs: Any) -> Any:
        forbid_in_step(f"{type(self).__name__}.compute")
        return original(self, *args, **kwargs)

    return checked
