"""However a run ends, all its processes end within seconds, and say what happened once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

from lightning_asyncpipe.errors import PeerFailure
from lightning_asyncpipe.integration.popen_launcher import PopenLauncher
from lightning_asyncpipe.integration.process_launcher import ProcessLauncher
from lightning_asyncpipe.integration.raised import first_failure
from lightning_asyncpipe.runtime.channels import GlooTransport, MessageKey
from lightning_asyncpipe.runtime.failure import FailureBoard
from tests.support.scripts import PYTHON_PATH

SCRIPT = Path(__file__).with_name("popen_script.py")
WORLD = 3
KEY = MessageKey(0, 0, 0, 0, 0)
# Seconds from the failure to the end of the last process; more where others use the machine too.
LIMIT = 10.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.mark.parametrize("told_by", [0, 1])
def test_a_connection_that_breaks_does_not_cover_what_a_thread_has_found_out(told_by: int) -> None:
    store = dist.HashStore()
    boards = [FailureBoard(store, rank, 2, poll=0.01, grace=60, name="told") for rank in range(2)]
    boards[told_by].report_lost(told_by, "step 12: rank 0 saves, but rank 1 trains")
    for board in boards:
        raised = first_failure(board, RuntimeError("Connection closed by peer"))
        assert isinstance(raised, PeerFailure)
        assert str(raised) == "step 12: rank 0 saves, but rank 1 trains"
    for board in reversed(boards):
        board.close()


class Run:
    """One run of ``popen_script.py``, in a session of its own."""

    def __init__(self, directory: Path, scenario: str, world_size: int) -> None:
        self.directory = directory
        command = [sys.executable, str(SCRIPT), scenario, str(directory), str(world_size)]
        environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "MASTER_PORT")}
        self.process = subprocess.Popen(
            command,
            env={**environment, "PYTHONPATH": PYTHON_PATH},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self) -> str:
        """Wait for the launching process; returns its (and its children's) stderr."""
        _, self.errors = self.process.communicate(timeout=90)
        return self.errors

    def wait_for(self, name: str) -> None:
        """Wait until the run has left the file ``name``."""
        deadline = time.monotonic() + 60
        while not (self.directory / name).exists() or not (self.directory / name).read_text():
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.05)

    @property
    def failed_at(self) -> float:
        return float((self.directory / "failing").read_text())

    def survivors(self) -> list[int]:
        """The pids of ranks that are still there, after the time limit at most."""
        pids = [int(file.read_text()) for file in self.directory.glob("pid-*")]
        while any(_alive(pid) for pid in pids) and time.time() < self.failed_at + LIMIT:
            time.sleep(0.1)
        return [pid for pid in pids if _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(scenario: str, world_size: int = 2) -> Run:
        runs.append(Run(tmp_path, scenario, world_size))
        return runs[-1]

    yield begin
    for run in runs:
        for file in tmp_path.glob("pid-*"):
            if _alive(pid := int(file.read_text())):
                os.kill(pid, signal.SIGKILL)
        run.process.kill()
        run.process.wait()


# ---------------------------------------------------------------------------------- popen launcher


@pytest.mark.parametrize(
    ("scenario", "last"),
    [
        ("one_raises", "Boom: first"),
        ("the_first_raises", "Boom: first"),
        ("one_is_killed", "was killed by SIGKILL"),
        ("one_exits", "ended with exit code 7"),
        ("one_raises_before_the_start", "Boom: early"),
        ("all_raise_before_the_start", "Boom: everywhere"),
    ],
)
def test_a_failure_of_one_rank_ends_all_with_its_words_last(
    start: Callable[..., Run], scenario: str, last: str
) -> None:
    run = start(scenario, world_size=3 if scenario == "one_raises" else 2)
    errors = run.wait()
    assert run.process.returncode == 1
    assert last_line(errors).endswith(last), errors
    assert errors.count(last) == 1, errors
    assert errors.count("Traceback") <= 2, errors
    assert run.survivors() == []
    assert time.time() < run.failed_at + LIMIT


def test_children_do_not_outlive_a_killed_parent(start: Callable[..., Run]) -> None:
    run = start("waits")
    run.wait_for("failing")
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.survivors() == []
    assert run.wait().strip() == ""


def test_ctrl_c_ends_all_ranks_with_one_message(start: Callable[..., Run]) -> None:
    run = start("waits")
    run.wait_for("failing")
    os.killpg(run.process.pid, signal.SIGINT)
    errors = run.wait()
    assert last_line(errors).endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1, errors
    assert run.survivors() == []


def test_a_child_may_work_on_after_the_run(start: Callable[..., Run]) -> None:
    run = start("one_works_on_after_the_run")
    assert run.wait() == ""
    assert run.process.returncode == 0
    assert (run.directory / "worked-on").exists()


def test_a_child_that_raises_after_the_run_is_heard(start: Callable[..., Run]) -> None:
    run = start("one_raises_after_the_run")
    assert last_line(run.wait()) == "Boom: late"
    assert run.process.returncode == 1


def test_children_are_started_by_the_command_that_a_program_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import __main__

    monkeypatch.setattr(__main__, "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    launcher = PopenLauncher(LightningEnvironment(), 2, 1)
    assert launcher._command(1)[0] == [sys.executable, os.path.abspath("train.py"), "--lr", "1"]
    prefix = [sys.executable, "-m", "lightning_asyncpipe", "run", "train.py"]
    monkeypatch.setattr(PopenLauncher, "command_prefix", prefix)
    assert launcher._command(1)[0] == [*prefix, "--lr", "1"]
    monkeypatch.setattr(__main__, "__spec__", SimpleNamespace(name="package.train"))
    assert launcher._command(1)[0] == [*prefix, "--lr", "1"]


# -------------------------------------------------------------------------------- process launcher


def _launch(start_method: str, body: Callable[..., Any], *args: Any, world_size: int = WORLD) -> Any:
    environment = LightningEnvironment()
    strategy = SimpleNamespace(
        cluster_environment=environment, num_processes=world_size, accelerator=None, local_rank=None
    )
    launcher = ProcessLauncher(strategy, start_method)  # type: ignore[arg-type]
    return launcher.launch(_rank, launcher, world_size, body, *args)


def _rank(launcher: ProcessLauncher, world_size: int, body: Callable[..., Any], *args: Any) -> Any:
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    launcher.board = board = FailureBoard.over_default_store()
    transport = GlooTransport(dist.new_group(backend="gloo"), failures=board)
    dist.barrier()  # a process that is still connecting when another dies has c10d write about it
    result = body(rank, board, transport, *args)
    transport.close()
    board.close()
    return result


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MASTER_PORT", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is undone
        monkeypatch.delenv(name)


def _wait(rank: int, transport: GlooTransport) -> None:
    if rank == 1:
        dist.barrier()  # cannot be woken
    transport.expect((rank + 1) % WORLD, [KEY])
    transport.take(KEY)


def _returns(rank: int, board: FailureBoard, transport: GlooTransport) -> str:
    return f"of rank {rank}"


def _raises(rank: int, board: FailureBoard, transport: GlooTransport, culprit: int) -> None:
    if rank == culprit:
        raise ValueError("first")
    _wait(rank, transport)


def _dies(rank: int, board: FailureBoard, transport: GlooTransport, culprit: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    _wait(rank, transport)


def _interrupts(rank: int, board: FailureBoard, transport: GlooTransport, main: int) -> None:
    if rank == 2:
        os.kill(main, signal.SIGINT)
    _wait(rank, transport)


def _children() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE
        # These live as long as pytest.
        and not any(name in " ".join(child.cmdline()) for name in ("resource_tracker", "forkserver"))
    ]


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_the_result_of_rank_0_is_returned(start_method: str) -> None:
    assert _launch(start_method, _returns, world_size=2) == "of rank 0"


def _assert_that_no_process_wrote(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing but what c10d logs itself where the store dies with rank 0, frame by frame."""
    written = re.sub(r"(?m)^\[rank\d+\]:\[W.*TCPStore(.*\n)+?\n", "", capfd.readouterr().err)
    assert written == ""


@pytest.mark.parametrize("culprit", [0, 2])
def test_the_main_process_raises_the_failed_ranks_traceback(culprit: int, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    with pytest.raises(PeerFailure) as caught:
        _launch("fork", _raises, culprit)
    text = str(caught.value)
    assert text.startswith(f"rank {culprit} failed:")
    assert last_line(text) == "ValueError: first"
    assert time.monotonic() - start < LIMIT
    assert _children() == []
    _assert_that_no_process_wrote(capfd)


@pytest.mark.parametrize("culprit", [0, 2])
def test_the_main_process_says_which_rank_was_killed(culprit: int, capfd: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    with pytest.raises(PeerFailure, match=rf"^rank {culprit} \(pid \d+\) was killed by SIGKILL$"):
        _launch("fork", _dies, culprit)
    assert time.monotonic() - start < LIMIT
    assert _children() == []
    _assert_that_no_process_wrote(capfd)


def test_ctrl_c_in_the_main_process_ends_all() -> None:
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _launch("fork", _interrupts, os.getpid())
    assert time.monotonic() - start < LIMIT
    assert _children() == []


class _Strategy(DDPStrategy):
    """Takes the place of a strategy whose ranks hold parts of the model only."""

    final_state: dict[str, Any] | None = None

    def _configure_launcher(self) -> None:
        self._launcher = ProcessLauncher(self, "fork")

    def teardown(self) -> None:
        module = self.lightning_module
        assert module is not None
        self.final_state = {k: torch.full_like(v, 7.0) for k, v in module.state_dict().items()}
        if os.environ.get("DROP"):
            self.final_state.pop("layer.bias")
        super().teardown()


def _fit(tmp_path: Path) -> BoringModel:
    model = BoringModel()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=_Strategy(start_method="fork"),
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model)
    assert trainer.global_step == 0  # the main process trained nothing itself
    return model


def test_the_main_process_gets_the_strategys_final_state(tmp_path: Path) -> None:
    model = _fit(tmp_path)
    assert model.layer.weight.unique().tolist() == [7.0]


def test_an_incomplete_final_state_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROP", "1")
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "layer.bias"'):
        _fit(tmp_path)
