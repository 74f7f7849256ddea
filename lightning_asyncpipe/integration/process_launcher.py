"""Lightning's launcher of processes, such that a failure anywhere ends everything in seconds, in one voice.

The main process is no rank and not on the ``board`` of failures, so each process leaves the first failure that it
learns of in a file; the main process raises the one that began it.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

import lightning.pytorch as pl
import torch
import torch.multiprocessing as mp
from lightning.fabric.strategies.launchers.multiprocessing import _check_bad_cuda_fork, _check_missing_main_guard
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _GlobalStateSnapshot,
    _MultiProcessingLauncher,
    _WorkerOutput,
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.multiprocessing.spawn import start_processes

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration.children import how_it_ended
from lightning_asyncpipe.integration.parts import explain
from lightning_asyncpipe.integration.raised import as_exception
from lightning_asyncpipe.runtime.failure import Failure, FailureBoard, failure_of
from lightning_asyncpipe.runtime.lifeline import tie_to_multiprocessing_parent

_OUTCOME = "outcome.pt"
_NO_GUARD = 78  # exit code of a process in which the script starts processes where it should define things alone
_OWN_END = 4.5  # seconds that processes have to end by themselves once one has failed


def _lacks_main_guard() -> bool:
    """Whether this process is only just being started, by running the script up to here."""
    try:
        _check_missing_main_guard()
    except RuntimeError:
        return True
    return False


class ProcessLauncher(_MultiProcessingLauncher):
    """Starts all ranks of this node by ``multiprocessing``; the main process is none of them.

    The weights that the main process's module has afterwards are the strategy's ``final_state``:
    a dictionary as of ``state_dict()``, of the whole model, which the strategy must have set on
    global rank 0 before its ``teardown`` has ended. What else the main process's strategy should
    know of the run is ``outcome()``, tensors and plain values, given to its ``take_outcome``.
    """

    def __init__(
        self,
        strategy: pl.strategies.ParallelStrategy,
        start_method: Literal["spawn", "fork", "forkserver"] = "spawn",
    ) -> None:
        super().__init__(strategy, start_method)
        self._board: FailureBoard | None = None
        self._directory = ""
        self._process = 0

    @property
    def board(self) -> FailureBoard | None:
        """Where failures are reported; attached by the strategy once the ranks are connected."""
        return self._board

    @board.setter
    def board(self, board: FailureBoard | None) -> None:
        self._board = board
        if board is not None:
            board.owns_terminal = False  # the main process does
            board.on_failure(self._record)

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run ``function`` on all ranks of this node; returns what local rank 0 returned.

        Raises:
            PeerFailure: a rank failed; with its own traceback.
        """
        if self._start_method in ("fork", "forkserver"):
            _check_bad_cuda_fork()
        if self._start_method != "fork" and _lacks_main_guard():
            sys.stdout.flush()
            os._exit(_NO_GUARD)  # the main process says what is wrong, once; a server of forks keeps no other code
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if self._already_fit and fitting:
            raise NotImplementedError(
                "Calling `trainer.fit()` twice on one Trainer is not supported where the processes "
                f"are started by {self._start_method!r}; make a new Trainer, and use "
                "`fit(ckpt_path=...)` to go on"
            )
        environment = self._strategy.cluster_environment
        assert environment is not None
        os.environ["MASTER_PORT"] = str(environment.main_port)  # the same for all of them
        with tempfile.TemporaryDirectory(prefix="lightning-asyncpipe-") as self._directory:
            output = self._run_processes(trainer, function, args, kwargs)
            if trainer is None:
                return output
            self._already_fit |= fitting
            self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    @property
    def _num_processes(self) -> int:
        count: int = self._strategy.num_processes  # type: ignore[attr-defined]
        return count

    # ------------------------------------------------------------------------- in the main process

    def _run_processes(
        self,
        trainer: pl.Trainer | None,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        queue = mp.get_context(self._start_method).SimpleQueue()
        arguments: list[Any] = [trainer, function, args, kwargs, queue]
        if self._start_method == "spawn":
            arguments.append(_GlobalStateSnapshot.capture())
        context = start_processes(  # type: ignore[no-untyped-call]
            self._wrapping_function,
            args=arguments,
            nprocs=self._num_processes,
            start_method=self._start_method,
            join=False,
        )
        self.procs = context.processes
        try:
            with self._passing_on_sigterm():
                dead = self._wait_for_all_or_one_failed()
        finally:  # also on Ctrl-C, which the terminal sends to all processes
            self._end_processes()
        if dead is not None and self.procs[dead].exitcode == _NO_GUARD:
            raise MisconfigurationException(
                f"start_method={self._start_method!r} runs the script from its top in each process, where it comes to "
                'this call again: put all that the script does under `if __name__ == "__main__":`, or leave '
                "start_method at 'popen', which needs no guard"
            )
        if dead is not None:
            raise as_exception(self._failure(dead))
        return queue.get()

    @contextmanager
    def _passing_on_sigterm(self) -> Iterator[None]:
        """Let SIGTERM end the training on all ranks after the same batch; by default it kills.

        Does nothing where the program handles SIGTERM itself.
        """
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGTERM, lambda signum, frame: self.kill(signum))
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _wait_for_all_or_one_failed(self) -> int | None:
        """The index of the first process that ended badly, once one has; None: all ended well."""
        alive = {process.sentinel: index for index, process in enumerate(self.procs)}
        while alive:
            for sentinel in multiprocessing.connection.wait(list(alive)):
                index = alive.pop(sentinel)  # type: ignore[arg-type]
                self.procs[index].join()
                if self.procs[index].exitcode:
                    return index
        return None

    def _end_processes(self) -> None:
        """Let processes end by themselves for a while, then kill them.

        Not by SIGTERM: Lightning's handler for it waits in a collective for ranks that are gone.
        """
        try:
            deadline = time.monotonic() + _OWN_END
            for process in self.procs:
                process.join(max(0.0, deadline - time.monotonic()))
        finally:
            for process in self.procs:
                process.kill()
                process.join()

    def _failure(self, dead: int) -> Failure:
        """The first failure, from what the processes recorded and how the first of them ended."""
        process = self.procs[dead]
        environment = self._strategy.cluster_environment
        assert environment is not None
        assert process.pid is not None
        rank = environment.node_rank() * self._num_processes + dead
        ended = Failure.lost(rank, how_it_ended(rank, process.pid, process.exitcode or 0))
        records = [
            Failure(*json.loads(file.read_text())) for file in sorted(Path(self._directory).glob("failure-*.json"))
        ]
        own = [record for record in records if record.rank == rank and not record.is_lost]
        explained = [record for record in records if not record.is_lost]
        if process.exitcode is not None and process.exitcode < 0 and not own:
            return ended  # what the others have recorded is how they noticed
        return (own or explained or records or [ended])[0]

    def _recover_results_in_main_process(self, worker_output: _WorkerOutput, trainer: pl.Trainer) -> None:
        weights = worker_output.weights_path
        super()._recover_results_in_main_process(worker_output._replace(weights_path=None), trainer)
        if weights is None:
            return
        module = trainer.lightning_module
        outcome = Path(self._directory) / _OUTCOME
        if outcome.exists():
            self._strategy.take_outcome(torch.load(outcome, weights_only=True))  # type: ignore[attr-defined]
        if is_overridden("configure_model", module):
            module.configure_model()  # layers that so far exist in the workers only
        state = torch.load(weights, weights_only=False)  # written by our own process, just now
        module.load_state_dict(state, strict=module.strict_loading)

    # ----------------------------------------------------------------------------- in the processes

    def _wrapping_function(self, process_idx: int, *args: Any) -> None:
        tie_to_multiprocessing_parent()
        self._process = process_idx
        try:
            super()._wrapping_function(process_idx, *args)
        except BaseException as error:
            self._exit(error)

    def _exit(self, error: BaseException) -> NoReturn:
        """End this process after ``error``; the main process raises the first failure."""
        explain(error, getattr(self._strategy, "lightning_module", None))
        if self._board is not None:
            self._board.report(error)
            self._record()
        else:
            environment = self._strategy.cluster_environment
            node = 0 if environment is None else environment.node_rank()
            rank = node * self._num_processes + self._process
            self._write(failure_of(rank, error))
        sys.exit(1)

    def _record(self) -> None:
        """Leave the first failure for the main process, which is not on the board."""
        if self._board is not None and self._board.failure is not None:
            self._write(self._board.failure)

    def _write(self, failure: Failure) -> None:
        path = Path(self._directory) / f"failure-{self._process}.json"
        unfinished = path.with_suffix(f".{time.monotonic_ns()}")
        unfinished.write_text(json.dumps(failure))
        unfinished.replace(path)

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> _WorkerOutput | None:
        if self._strategy.local_rank != 0:
            return None
        checkpoint = trainer.checkpoint_callback
        weights: str | None = None
        if trainer.state.fn == TrainerFn.FITTING and self._strategy.global_rank == 0:
            state = getattr(self._strategy, "final_state", None)
            if state is None:
                raise PipelineError("the strategy has no final_state to give to the main process")
            weights = os.path.join(self._directory, "weights.pt")
            torch.save(state, weights)
            if hasattr(self._strategy, "outcome"):
                torch.save(self._strategy.outcome(), os.path.join(self._directory, _OUTCOME))
        return _WorkerOutput(
            getattr(checkpoint, "best_model_path", None),
            weights,
            trainer.state,
            results,
            self.get_extra_results(trainer),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_board": None}
