"""Collectives after a run has ended, when other ranks may have left for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_asyncpipe.errors import PipelineError


@contextmanager
def together(call: str, over: bool) -> Iterator[None]:
    """Around a collective, with which nobody helps once the run is over: what it raises then says who is missing.

    Args:
        call: what the user called.
        over: whether the run has ended on this rank.

    Raises:
        PipelineError: another rank did not take part.
    """
    try:
        yield
    except RuntimeError as error:
        if not over or isinstance(error, PipelineError):
            raise
        raise PipelineError(
            f"`{call}` after the end of the run was not called on every rank: another one has ended, or did something "
            "else until the time was up. Every rank has to call it, since each holds a part of what is saved: not only "
            "`if trainer.is_global_zero`."
        ) from None
