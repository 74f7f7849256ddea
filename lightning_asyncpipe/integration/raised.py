"""What a rank raises when a run fails: its own exception, or the failure elsewhere of which that is a consequence."""

from __future__ import annotations

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_asyncpipe.errors import PeerFailure
from lightning_asyncpipe.runtime.failure import Failure, FailureBoard

# Not errors but ways to stop: a rank that learns of one stops the same way, without a traceback.
_STOPS: dict[str, type[BaseException]] = {"KeyboardInterrupt": KeyboardInterrupt, "SIGTERMException": SIGTERMException}


def first_failure(board: FailureBoard | None, error: BaseException) -> BaseException:
    """Report ``error``; returns what this rank should raise: it, or what came before elsewhere."""
    if board is None:
        return error
    failure = board.report(error)
    if (failure.rank == board.rank and not failure.is_lost) or isinstance(error, (KeyboardInterrupt, SystemExit)):
        return error
    if failure.kind == type(error).__name__ and failure.text.rstrip().endswith(str(error)):
        return error  # what all ranks raise at the same time, each says in its own words
    return as_exception(failure, speaks=board.rank == 0)


def as_exception(failure: Failure, speaks: bool = True) -> BaseException:
    """The exception by which another process's failure is raised here.

    Args:
        speaks: whether this process tells the user why the run has ended, where that needs no traceback.
    """
    if failure.kind == "SystemExit":  # with a text, the interpreter prints it; the exit code is 1 both ways
        last = failure.text.strip().splitlines()[-1]
        return SystemExit(f"rank {failure.rank} ended the run: {last}" if speaks else 1)
    stop = _STOPS.get(failure.kind)
    return PeerFailure(failure.message) if stop is None else stop()
