"""Every use of a private part of torch's autograd and optimizer utilities, in one place.

Each entry names the versions it was checked on; ``tests/test_internals.py`` fails first when one moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import grad_mode
from torch.distributed.distributed_c10d import PrefixStore


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
def patched_total_norm(total_norm: Callable[..., Tensor]) -> Iterator[None]:
    """Replace the function by which torch's clipping utilities compute a norm.

    ``torch.nn.utils.clip_grad._get_total_norm``, which ``clip_grad_norm_`` looks up at each call, so that it is found
    however the user imported the latter. Checked on torch 2.13.

    Args:
        total_norm: called as the original with the original as keyword `local`.
    """
    from torch.nn.utils import clip_grad

    original = clip_grad._get_total_norm

    def replacement(*args: Any, **kwargs: Any) -> Tensor:
        return total_norm(*args, **kwargs, local=original)

    clip_grad._get_total_norm = replacement
    try:
        yield
    finally:
        clip_grad._get_total_norm = original


def default_store() -> Any:
    """The store of the default process group.

    ``torch.distributed.distributed_c10d._get_default_store``, checked on torch 2.13.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


_stores = itertools.count()


def own_store(purpose: str) -> Any:
    """A part of the default store, over a connection of its own where there is one to be had.

    All ranks get the same part if they ask in the same order.
    """
    store = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if hasattr(store, "clone"):
        store = store.clone()
    return PrefixStore(f"asyncpipe/{purpose}/{next(_stores)}", store)
