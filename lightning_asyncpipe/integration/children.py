"""The processes that a launching process starts as further ranks, from start to end.

Nobody else would end them: a child whose peers are gone waits in a receive, and Lightning ends
children only on Ctrl-C. Here a thread looks after them. A child that died without a word is
reported as the run's failure; once there is a failure, and when this process ends, children that
do not end by themselves are ended. The other direction, a launching process that is killed, is
the kernel's matter (``runtime.lifeline``).

A child does not print the exception that ends it: it leaves it to the launching process, which
knows whether it is the first failure, a consequence, or what every rank says at the same time.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType

from lightning_asyncpipe.runtime.failure import FailureBoard
from lightning_asyncpipe.runtime.lifeline import kernel_lifeline, tie_to_parent

# Tells a child "PID:FD:RANK": the launching process, the end of a pipe to which the child writes
# the exception that ends it, and its global rank.
PARENT_VARIABLE = "LIGHTNING_ASYNCPIPE_PARENT"
_PIPE_SIZE = 65536  # bytes that a pipe holds without a reader

_POLL = 0.1  # seconds
_OWN_END = 4.5  # seconds that children have to end by themselves once the run has failed
_AFTER_TERM = 2.0  # seconds between SIGTERM and SIGKILL
_WITHOUT_A_WORD = 0.3  # seconds after which a child that has ended well in mid-run counts as lost
_BEFORE_BOARD = 3.0  # seconds that the launching rank has to fail with the same error by itself
_EXIT_WAIT = 300.0  # seconds that an orderly exit waits for children that are still at work


class Children:
    """The child processes of this launching process, by global rank."""

    def __init__(self) -> None:
        self.board: FailureBoard | None = None
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pipes: dict[int, int] = {}
        self._stopped = False  # ended on purpose: their exit codes mean nothing
        self._late: str | None = None
        self._ended_well: dict[int, float] = {}
        self._owner = os.getpid()

    def start(
        self, rank: int, command: Sequence[str], environment: Mapping[str, str], cwd: str | None
    ) -> subprocess.Popen[bytes]:
        """Start the process of ``rank``, tied to the life of this one."""
        # The kernel's signal follows the starting thread, so only the main thread's can be used.
        in_main = threading.current_thread() is threading.main_thread()
        self._pipes[rank], write_end = os.pipe()
        process = subprocess.Popen(
            command,
            env={**environment, PARENT_VARIABLE: f"{os.getpid()}:{write_end}:{rank}"},
            cwd=cwd,
            preexec_fn=kernel_lifeline() if in_main else None,
            pass_fds=(write_end,),
        )
        os.close(write_end)
        self.processes[rank] = process
        return process

    def look_after(self) -> None:
        """Watch the children from now on, until they or this process end."""
        atexit.register(self._at_exit)
        threading.Thread(target=self._watch, daemon=True, name="children-watch").start()

    def end_first_at_exit(self) -> None:
        """Have the exit of this process begin with the end of the children; the run has failed.

        Other exit handlers may wait for connections to children to close.
        """
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def kill(self, signum: int) -> None:
        """Send ``signum`` to all that are alive; what becomes of them is no failure any more."""
        if signum == signal.SIGKILL:
            self._stopped = True
        for process in self.processes.values():
            process.send_signal(signum)

    def end(self, patience: float) -> None:
        """End all within ``patience`` seconds, plus two after SIGTERM."""
        self._stopped = True
        if self._wait(patience):
            return
        for process in self.processes.values():
            process.terminate()
        if not self._wait(_AFTER_TERM):
            for process in self.processes.values():
                process.kill()
            self._wait(_AFTER_TERM)

    def _last_words(self, rank: int) -> str:
        """What a child that has ended wrote to its pipe."""
        # Not to its end: a process that the child left behind may still hold the pipe open.
        os.set_blocking(self._pipes[rank], False)
        try:
            return os.read(self._pipes[rank], _PIPE_SIZE).decode(errors="replace")
        except BlockingIOError:
            return ""

    def _wait(self, timeout: float) -> bool:
        """Whether all have ended, after at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process in self.processes.values()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _watch(self) -> None:
        while not self._stopped and any(p.poll() is None for p in self.processes.values()):
            time.sleep(_POLL)
            if self.board is not None and self.board.failure is not None:
                self.end(_OWN_END)
                return
            self._look()
        self._look()

    def _look(self) -> None:
        for rank, process in self.processes.items():
            code = process.poll()
            if code is None or self._stopped or self._late is not None:
                continue
            if code or self._left_the_run(rank):
                self._on_death(rank, process)

    def _left_the_run(self, rank: int) -> bool:
        """Whether a child that has ended well did so in mid-run, as after ``os._exit(0)`` in the user's code."""
        if self.board is None or not self.board.active or self.board.ending:
            return False
        return time.monotonic() > self._ended_well.setdefault(rank, time.monotonic()) + _WITHOUT_A_WORD

    def _on_death(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        text = self._last_words(rank) or how_it_ended(rank, process.pid, process.returncode)
        if self.board is None:
            # Most errors before the ranks are connected happen on all of them, this one included.
            time.sleep(_BEFORE_BOARD)
            if self.board is None and not self._stopped:
                self.end(0.0)
                print(text, file=sys.stderr, flush=True)
                os._exit(1)
        if self.board is not None and self.board.active:
            self.board.report_lost(rank, text)
        elif self.board is not None and self.board.failure is None:
            self._late = text

    def _at_exit(self) -> None:
        if os.getpid() != self._owner:
            return  # a fork that ended like a main program
        failed = (
            hasattr(sys, "last_value")  # an exception that ended this process was just printed
            or self._late is not None
            or (self.board is not None and self.board.failure is not None)
        )
        if not failed:
            self._wait(_EXIT_WAIT)
            self._look()
        self.end(1.5 if failed else 0.0)
        if self._late is not None:
            print(self._late, file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)


def how_it_ended(rank: int, pid: int, code: int) -> str:
    """One sentence on a process that ended without having said why."""
    if code >= 0:
        return f"rank {rank} (pid {pid}) ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"rank {rank} (pid {pid}) was killed by {name}"


class QuietExit:
    """An ``excepthook`` for ranks that do not speak for the run.

    Args:
        rank: global rank.
        pipe: descriptor by which the launching process learns of the exception; None: there is no
            such process, and the rank speaks for itself if rank 0 does not.
    """

    def __init__(self, rank: int, pipe: int | None) -> None:
        self.board: FailureBoard | None = None
        self._rank = rank
        self._pipe = pipe
        self._previous = sys.excepthook
        sys.excepthook = self

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        board = self.board
        failure = board.failure if board is not None else None
        if board is not None and failure is not None:
            if failure.rank != board.rank:
                return
            if self._pipe is None and not board.seen_by_rank_0(2.0):
                self._previous(kind, error, trace)
        elif self._pipe is not None:
            if issubclass(kind, KeyboardInterrupt):
                return  # Ctrl-C reaches all processes; that this one has ended by it, its exit code says
            lines = "".join(traceback.format_exception(kind, error, trace))
            head = f"rank {self._rank} failed:\n\n".encode()
            body = lines.encode(errors="backslashreplace")
            os.write(self._pipe, head + body[len(head) - _PIPE_SIZE :])
        else:
            self._previous(kind, error, trace)


_as_child: QuietExit | None = None


def enter_child() -> QuietExit | None:
    """Set up this process if a launching process started it; None if none did.

    To be called as early as possible; further calls return what the first one did. From then on
    the process ends with the launching one, and leaves the printing of its errors to it.
    """
    global _as_child
    # Taken out of the environment: it is not meant for this process's own children.
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is not None:
        pid, pipe, rank = (int(part) for part in parent.split(":"))
        tie_to_parent(pid)
        os.set_inheritable(pipe, False)
        _as_child = QuietExit(rank, pipe)
    return _as_child
