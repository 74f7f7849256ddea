"""The first failure reaches every rank, which ends in time and in silence but for rank 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import torch.distributed as dist

from lightning_asyncpipe.errors import DataMismatchError, PeerFailure
from lightning_asyncpipe.runtime.failure import FailureBoard

POLL = 0.02
# Seconds from the failure to the end of the last process; more where others use the machine too.
LIMIT = 10.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
Boards = Callable[[int], list[FailureBoard]]


def wait_until(condition: Callable[[], object], timeout: float = 3.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.fixture
def boards() -> Iterator[Boards]:
    made: list[FailureBoard] = []

    def make(count: int) -> list[FailureBoard]:
        store = dist.HashStore()
        made.extend(FailureBoard(store, rank, count, poll=POLL, grace=60, name="test") for rank in range(count))
        return made

    yield make
    # The rank with the store leaves last, for it waits for the others.
    for board in reversed(made):
        board.close()


# --------------------------------------------------------------------------------------- agreement


def test_every_rank_learns_the_first_failure_with_its_traceback(boards: Boards) -> None:
    ranks = boards(3)
    ranks[2].report(raised(ValueError("boom")))
    for board in ranks:
        wait_until(lambda board=board: board.failure)
        with pytest.raises(PeerFailure) as caught:
            board.check()
        text = str(caught.value)
        assert text.startswith("rank 2 failed:\n\nTraceback (most recent call last):\n")
        assert text.endswith("ValueError: boom\n")


def test_what_concerns_all_ranks_is_told_without_the_traceback_of_one(boards: Boards) -> None:
    ranks = boards(3)
    ranks[1].report(raised(DataMismatchError("step 3: rank 0 has a batch 3, but rank 1 has none")))
    for board in ranks:
        wait_until(lambda board=board: board.failure)
        with pytest.raises(PeerFailure, match=r"^step 3: rank 0 has a batch 3, but rank 1 has none$"):
            board.check()


def test_the_first_of_several_failures_wins(boards: Boards) -> None:
    ranks = boards(3)
    failures = [board.report(raised(ValueError(f"{board.rank}"))) for board in reversed(ranks)]
    assert [failure.rank for failure in failures] == [2, 2, 2]


def test_what_looks_like_a_consequence_waits_for_its_cause(boards: Boards) -> None:
    first, second = boards(2)
    threading.Timer(0.3, first.report, [raised(ValueError("cause"))]).start()
    failure = second.report(raised(RuntimeError("[pair.cc:553] Connection closed by peer")))
    assert (failure.rank, failure.kind) == (0, "ValueError")


def test_a_lost_connection_without_a_cause_is_itself_the_failure(boards: Boards) -> None:
    (board,) = boards(1)
    start = time.monotonic()
    failure = board.report(raised(RuntimeError("Connection closed by peer")))
    assert failure.kind == "RuntimeError"
    assert 0.9 < time.monotonic() - start < 2.5


def test_a_suspicion_becomes_the_failure_after_a_second(boards: Boards) -> None:
    first, second = boards(2)
    second.suspect(0, "rank 1 lost its connection to rank 0")
    second.check()
    time.sleep(0.5)
    first.check()
    wait_until(lambda: first.failure)
    with pytest.raises(PeerFailure, match=r"^rank 1 lost its connection to rank 0$"):
        first.check()


def test_a_suspicion_gives_way_to_the_cause(boards: Boards) -> None:
    first, second = boards(2)
    second.suspect(0, "lost")
    first.report(raised(ValueError("cause")))
    wait_until(lambda: second.failure)
    assert second.failure is not None
    assert second.failure.kind == "ValueError"


def test_a_rank_that_could_not_report_is_reported_by_another(boards: Boards) -> None:
    first, second = boards(2)
    first.report_lost(1, "rank 1 (pid 123) was killed by SIGKILL")
    wait_until(lambda: second.failure)
    with pytest.raises(PeerFailure, match=r"^rank 1 \(pid 123\) was killed by SIGKILL$"):
        second.check()


def test_waiters_are_woken_once_and_late_ones_at_once(boards: Boards) -> None:
    first, second = boards(2)
    woken: list[str] = []
    second.on_failure(lambda: woken.append("early"))
    forget = second.on_failure(lambda: woken.append("forgotten"))
    forget()
    first.report(raised(ValueError()))
    wait_until(lambda: woken)
    second.on_failure(lambda: woken.append("late"))
    time.sleep(5 * POLL)
    assert woken == ["early", "late"]


def test_the_failed_rank_knows_whether_rank_0_will_speak(boards: Boards) -> None:
    first, second = boards(2)
    assert not second.seen_by_rank_0(0.0)
    second.report(raised(ValueError()))
    assert second.seen_by_rank_0(3.0)
    assert first.failure is not None


def test_tracebacks_survive_in_any_language(boards: Boards) -> None:
    first, second = boards(2)
    second.report(raised(ValueError("größer als 日本 \ud800")))
    wait_until(lambda: first.failure)
    assert first.failure is not None
    assert "größer als 日本 \ud800" in first.failure.text


def test_errors_after_the_end_of_the_run_stay_where_they_are(boards: Boards) -> None:
    first, second = boards(2)
    second.close()
    first.close()
    assert not first.active
    assert first.report(raised(ValueError())).rank == 0
    first.check()
    assert second.failure is None


def test_a_rank_ends_its_watch_when_rank_0_leaves_first(boards: Boards) -> None:
    first, second, _ = boards(3)
    start = time.monotonic()
    first.close()
    assert time.monotonic() - start < 1
    wait_until(lambda: not second.active)
    second.check()


# --------------------------------------------------------------------------------- whole processes


class Outcome(NamedTuple):
    """How a run of ``scenarios.py`` ended."""

    code: int  # of rank 0
    errors: str  # of all ranks
    seconds: float  # from the failure to the end of all ranks
    survivors: list[int]

    @property
    def last_line(self) -> str:
        return self.errors.strip().splitlines()[-1].removeprefix("[rank0]: ")


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.scenarios"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def run(server: subprocess.Popen[str], tmp_path: Path) -> Callable[[str], Outcome]:
    """Runs a scenario to the end of its last process, or to the time limit."""

    def run_scenario(name: str) -> Outcome:
        output, errors = tmp_path / "output", tmp_path / "errors"
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{name} {output} {errors}\n")
        session, code = (int(word) for word in server.stdout.readline().split())
        deadline = time.monotonic() + LIMIT
        while (alive := _members(session)) and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = time.time()
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        words = output.read_text().split()
        seconds = ended - float(words[1]) if words else 0.0
        return Outcome(code, errors.read_text(), seconds, alive)

    return run_scenario


def _members(session: int) -> list[int]:
    return [pid for pid in psutil.pids() if _in_session(pid, session)]


def _in_session(pid: int, session: int) -> bool:
    try:
        return os.getsid(pid) == session and psutil.Process(pid).status() != "zombie"
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


@pytest.mark.parametrize(
    ("scenario", "last"),
    [
        ("raises_while_others_take", "Boom: first"),
        ("raises_while_others_are_in_a_barrier", "Boom: first"),
        ("rank_0_raises", "Boom: first"),
        ("hangs_in_cleanup", "Boom: first"),
        ("is_interrupted", "KeyboardInterrupt"),
        ("is_interrupted_in_a_deadlock", "KeyboardInterrupt"),
    ],
)
def test_all_ranks_end_and_the_first_failure_is_the_last_line(
    run: Callable[[str], Outcome], scenario: str, last: str
) -> None:
    outcome = run(scenario)
    assert outcome.last_line == last, outcome.errors
    ends = [line for line in outcome.errors.splitlines() if line.endswith(f" {last}") or line == last]
    assert len(ends) == 1, outcome.errors
    assert outcome.code != 0
    assert outcome.seconds < LIMIT
    assert outcome.survivors == []


@pytest.mark.parametrize("scenario", ["is_killed_while_others_take", "is_killed_while_others_are_in_a_barrier"])
def test_a_killed_rank_ends_the_others_by_their_lost_connections(run: Callable[[str], Outcome], scenario: str) -> None:
    outcome = run(scenario)
    assert "Connection closed by peer" in outcome.last_line, outcome.errors
    assert outcome.code == 1
    assert outcome.seconds < LIMIT
    assert outcome.survivors == []


def test_the_others_end_in_silence_where_rank_0_is_killed(run: Callable[[str], Outcome]) -> None:
    outcome = run("rank_0_is_killed")
    assert outcome.errors == ""
    assert outcome.seconds < LIMIT
    assert outcome.survivors == []


def test_one_of_several_simultaneous_failures_is_shown(run: Callable[[str], Outcome]) -> None:
    outcome = run("all_raise")
    assert outcome.last_line.startswith("Boom: of rank")
    assert outcome.errors.count("Boom: of rank") == 1
    assert outcome.survivors == []


@pytest.mark.parametrize("scenario", ["ends_well", "rank_0_ends_first", "rank_0_ends_last"])
def test_ranks_that_end_well_at_different_times_are_no_failure(run: Callable[[str], Outcome], scenario: str) -> None:
    outcome = run(scenario)
    assert outcome.errors == ""
    assert outcome.code == 0
    assert outcome.survivors == []
