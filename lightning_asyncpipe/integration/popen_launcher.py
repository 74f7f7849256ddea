"""Lightning's launcher of scripts, such that a failure anywhere ends everything in seconds, in one voice.

It holds a ``board``, which the strategy attaches once the ranks are connected. An exception that leaves the run on any
rank is reported there; where another rank failed first, that rank's failure takes the place of the local exception,
which is only its consequence.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd, _hydra_subprocess_cmd
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _HYDRA_AVAILABLE, _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import _TunerExitException

from lightning_asyncpipe.integration.children import Children, QuietExit, enter_child
from lightning_asyncpipe.integration.raised import first_failure
from lightning_asyncpipe.runtime.failure import FailureBoard


class PopenLauncher(_SubprocessScriptLauncher):
    """Starts the running command line once more for each further rank of this node.

    Args:
        cluster_environment: as in Lightning.
        num_processes: ranks on this node.
        num_nodes: nodes; each needs its own launching process.
    """

    #: What to start children with in place of the interpreter and the script's name (``python
    #: script.py`` or ``python -m module``); the script's arguments follow. For programs that run
    #: a script inside themselves.
    command_prefix: ClassVar[Sequence[str] | None] = None

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._board: FailureBoard | None = None
        self._children: Children | None = None
        self._quiet = enter_child()

    @property
    def board(self) -> FailureBoard | None:
        """Where failures are reported; attached by the strategy once the ranks are connected."""
        return self._board

    @board.setter
    def board(self, board: FailureBoard | None) -> None:
        self._board = board
        children = self._children or _launched
        if children is not None:
            children.board = board
            if board is not None:
                board.owns_terminal = True
        elif board is not None and board.rank != 0:
            self._quiet = self._quiet or QuietExit(board.rank, pipe=None)
            self._quiet.board = board

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start the other ranks of this node, unless somebody else does, and call ``function``.

        Raises:
            PeerFailure: another rank failed first.
        """
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except _TunerExitException:
            raise
        except BaseException as error:
            cause = first_failure(self._board, error)
            if self._children is not None:
                self._children.end_first_at_exit()
            if cause is error:
                raise
            raise cause from None

    def kill(self, signum: int | signal.Signals) -> None:
        """Send a signal to the ranks that this process started."""
        if self._children is not None:
            self._children.kill(signum)

    def _call_children_scripts(self) -> None:
        global _launched
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = f"{self.num_processes * self.num_nodes}"
        self._children = _launched = Children()
        for local_rank in range(1, self.num_processes):
            command, cwd = self._command(local_rank)
            variables = {**os.environ, "LOCAL_RANK": str(local_rank)}
            rank = environment.node_rank() * self.num_processes + local_rank
            self.procs.append(self._children.start(rank, command, variables, cwd))
        self._children.look_after()

    def _command(self, local_rank: int) -> tuple[Sequence[str], str | None]:
        """The command line and working directory of a child."""
        command, cwd = self._script_command(local_rank)
        if self.command_prefix is None:
            return command, cwd
        import __main__  # at call time: a program that runs a script replaces it

        own = 2 if __main__.__spec__ is None else 3  # "python script.py" or "python -m module"
        return [*self.command_prefix, *command[own:]], cwd

    @staticmethod
    def _script_command(local_rank: int) -> tuple[Sequence[str], str | None]:
        if _HYDRA_AVAILABLE:
            from hydra.core.hydra_config import HydraConfig

            if HydraConfig.initialized():
                return _hydra_subprocess_cmd(local_rank)
        return _basic_subprocess_cmd(), None


_launched: Children | None = None  # a later Trainer of the same script uses the same children
