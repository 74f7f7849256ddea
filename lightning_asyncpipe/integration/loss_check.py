"""Notices a loss that is not the mean of its samples' losses, before anybody trains on another one without knowing.

A pipeline averages the losses of micro-batches. For a contrastive loss, a sum or statistics of the batch that is
another loss than that of the batch, and nothing else would show it. So the loss of two micro-batches together is
compared with the mean of theirs apart, in evaluation mode, where dropout and batch normalisation do not make them
differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_asyncpipe._private import is_fake
from lightning_asyncpipe.integration import collectives
from lightning_asyncpipe.runtime import microbatch
from lightning_asyncpipe.runtime.buffers import preserved_buffers

_NOTICED = 0.05  # relative difference; a mean over the tokens that count differs less, most of the time
_REPEATED = 1e-3  # relative difference of two runs, above which chance is what makes losses differ


def warn_unless_mean(
    module: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    count: int,
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Warn if the loss of two micro-batches together is far from the mean of their losses.

    Nothing is said where it cannot be known: of a batch in one micro-batch, of a model without memory yet, of a step
    that needs training mode or draws at random what the loss depends on.

    Args:
        module: whole; its modes and buffers are what they were afterwards.
        step: called with a part of a batch, returns what ``training_step`` returns.
        batch: the first one.
        count: into how many micro-batches it is split.
        context: of the Trainer's precision, around each run.
    """
    if count < 2 or any(is_fake(parameter) for parameter in module.parameters()):
        return

    def loss(part: Any) -> float:
        with torch.no_grad(), context():
            value = step(part)
        found = value.get("loss") if isinstance(value, Mapping) else value
        return float(found) if isinstance(found, Tensor) else math.nan

    try:
        together = microbatch.split(batch, max(1, count // 2))[0]
        halves = microbatch.split(together.data, 2)
        with _evaluating(module), preserved_buffers(module), collectives.in_step():
            whole = loss(together.data)
            apart = sum(loss(half.data) * half.size for half in halves) / together.size
            if not _differ(whole, apart, _NOTICED) or _differ(whole, loss(together.data), _REPEATED):
                return
    except Exception:
        return  # it runs in training, as it has done when its cuts were looked for
    rank_zero_warn(
        f"The loss of {together.size} samples together is {whole:.4g}, but {apart:.4g} on average over "
        f"{len(halves)} micro-batches of them: it is not a mean over samples, so training on {count} micro-batches is "
        "not training on the batch. Divide a sum by the number of samples in the step. Where samples are compared with "
        "each other, as in contrastive losses, take fewer and larger micro-batches (`num_microbatches`). See 'The loss "
        "of a batch' in docs/data-and-losses.md."
    )


def _differ(one: float, other: float, share: float) -> bool:
    """Whether two numbers, both finite, differ by more than a share of the larger one."""
    return abs(one - other) > share * max(abs(one), abs(other)) and math.isfinite(one + other)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode
