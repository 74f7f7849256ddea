"""Bad input gets a clear error.

What one process can find out is asked of one process. All else is asked of programs that are started as a user starts
them: whatever goes wrong, and on whichever rank, the run ends within seconds, no process is left, the last thing on the
terminal says what was wrong, once, and the last checkpoint is whole.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset

from lightning_asyncpipe import AsyncMultiPipeStrategy, ReferenceStrategy
from lightning_asyncpipe.errors import CollectiveInStepError, PipelineError
from lightning_asyncpipe.integration import guards
from tests.support import faulty
from tests.support.edge_basics import WIDTH, Points, Regression, sized
from tests.support.faulty import FAULTS, Boom
from tests.support.fit import fit
from tests.support.scripts import PYTHON_PATH

pytestmark = pytest.mark.filterwarnings("ignore")

# Configurations


def arguments_of_the_strategy(devices: int = 3, **arguments: Any) -> Callable[[], Any]:
    """What is found out before any process is started."""

    def build() -> None:
        pl.Trainer(accelerator="cpu", devices=devices, strategy=AsyncMultiPipeStrategy(**arguments), logger=False)

    return build


def training(
    stages: int = 3,
    loader: Any = None,
    module: type[pl.LightningModule] = Regression,
    strategy: Any = None,
    **parts: Any,
) -> Callable[[], Any]:
    """A fit of a regression in which some parts are others."""

    def run() -> None:
        kind = type("Case", (module,), parts) if parts else module
        emulated = ReferenceStrategy(stages, num_microbatches=4, **(strategy or {}))
        fit(kind().double(), sized(8, 8, 8, 8) if loader is None else loader, emulated)

    return run


def calling(method: str, *args: Any, **options: Any) -> Callable[[], Any]:
    """A call of the Trainer."""

    def run() -> None:
        arguments: dict[str, Any] = {"precision": "64-true", "max_epochs": 1, "use_distributed_sampler": False}
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy=ReferenceStrategy(3),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{**arguments, **options.get("trainer", {})},
        )
        step = Regression.training_step
        steps = {"validation_step": step, "test_step": step, "predict_step": step}
        module = type("Case", (Regression,), steps)().double()
        getattr(trainer, method)(module, *args, **{k: v for k, v in options.items() if k != "trainer"})

    return run


class Skips(Regression):
    """A U-net: tensors of its first half are used in its second half."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleDict(
            {
                "down": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
                "up": nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3)),
            }
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, kept = batch[0], []
        for layer in self.net["down"]:
            x = layer(x)
            kept.append(x)
        for layer in self.net["up"]:
            x = layer(torch.cat([x, kept.pop()], -1))
        return x.square().mean()


class Recurrent(Regression):
    """Two tensors pass from call to call, and nothing is before or after the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTMCell(1, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        state = None
        for column in batch[0].unbind(1):
            state = self.net(column[:, None], state)
        return (state[0] + state[1]).square().mean()


class Manual(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Corrupt(Points):
    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise Boom("sample 17 is corrupt")
        return super().__getitem__(index)


def step(module: Any, batch: Any, batch_idx: int) -> Any:
    return Regression.training_step(module, batch, batch_idx)


def squares(module: Any, batch: Any, batch_idx: int) -> Any:
    return (module.net(batch[0]) - batch[1]) ** 2


def later(other: Callable[..., Any]) -> Callable[..., Any]:
    """A step that is another one in batch 2."""
    return lambda module, batch, i: (other if i == 2 else step)(module, batch, i)


def none_for_one_micro_batch(module: Any, batch: Any, batch_idx: int) -> Any:
    loss = step(module, batch, batch_idx)
    return None if bool((batch[0] == Points(32).x[18]).all(1).any()) else loss


def clocked(module: Any, batch: Any, batch_idx: int) -> Any:
    order = torch.randperm(len(batch[0]), generator=torch.Generator().manual_seed(time.time_ns() % 2**31))
    return step(module, (batch[0][order] + 1e-9 * time.time_ns() % 2.0, batch[1][order]), batch_idx)


def gathered(call: Callable[[Any], Any]) -> Callable[..., Any]:
    """A step that calls a collective."""
    return later(lambda module, batch, i: (call(module), step(module, batch, i))[1])


def optimizers(build: Callable[[Any], Any]) -> dict[str, Any]:
    return {"configure_optimizers": build}


def collated(batch: Callable[[list[Any]], Any]) -> DataLoader[Any]:
    return DataLoader(Points(32), 8, collate_fn=batch)


CONFIGURED: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "more pipelines than devices": (
        arguments_of_the_strategy(num_pipelines=4),
        MisconfigurationException,
        ["num_pipelines=4", "the 3 devices", "choose 1 to 3"],
    ),
    "replicas that do not divide the processes": (
        arguments_of_the_strategy(data_parallel_size=2),
        MisconfigurationException,
        ["3 processes", "data_parallel_size=2", "that divides 3"],
    ),
    "stages that do not fit the devices": (
        arguments_of_the_strategy(num_stages=2),
        MisconfigurationException,
        ["num_stages=2", "need 2 processes", "has 3", "use devices=2"],
    ),
    "no replicas": (
        arguments_of_the_strategy(data_parallel_size=0),
        MisconfigurationException,
        ["data_parallel_size must be an integer of at least 1, got 0"],
    ),
    "no micro-batches": (
        arguments_of_the_strategy(num_microbatches=0),
        MisconfigurationException,
        ["num_microbatches must be 'auto' or an integer of at least 1, got 0"],
    ),
    "micro-batches that are no number": (
        arguments_of_the_strategy(num_microbatches="many"),
        MisconfigurationException,
        ["num_microbatches must be .* got 'many'"],
    ),
    "nothing in flight": (
        arguments_of_the_strategy(max_in_flight=0),
        MisconfigurationException,
        ["max_in_flight must be .* got 0"],
    ),
    "too much staleness": (
        arguments_of_the_strategy(max_staleness=2),
        MisconfigurationException,
        ["max_staleness must be 0 .* or 1, got 2"],
    ),
    "micro-batches that are half a number": (
        lambda: AsyncMultiPipeStrategy(num_microbatches=8.0),  # type: ignore[arg-type]
        MisconfigurationException,
        [r"num_microbatches must be 'auto' or an integer of at least 1, got 8\.0"],
    ),
    "pipelines that are a word": (
        lambda: AsyncMultiPipeStrategy(num_pipelines="two"),  # type: ignore[arg-type]
        MisconfigurationException,
        ["num_pipelines must be 'auto' or an integer of at least 1, got 'two'"],
    ),
    "replicas left to chance": (
        lambda: AsyncMultiPipeStrategy(data_parallel_size="auto"),  # type: ignore[arg-type]
        MisconfigurationException,
        ["data_parallel_size must be an integer of at least 1, got 'auto'"],
    ),
    "a start method that there is not": (
        arguments_of_the_strategy(start_method="thread"),
        MisconfigurationException,
        ["start_method must be 'popen'", "got 'thread'"],
    ),
    "a timeout that is a number": (
        arguments_of_the_strategy(timeout=30),
        MisconfigurationException,
        [r"timeout must be a datetime.timedelta, such as timedelta\(minutes=30\), got 30"],
    ),
    "cuts that are one name": (
        arguments_of_the_strategy(cuts="net.layers.3"),
        MisconfigurationException,
        ["cuts must be 'auto' or a list of the names", "got 'net.layers.3'"],
    ),
    "cuts that are a number": (
        arguments_of_the_strategy(cuts=2),
        MisconfigurationException,
        ["cuts must be 'auto' or a list of the names", "got 2"],
    ),
    "more stages than cuts": (
        training(stages=20),
        MisconfigurationException,
        ["20 stages were asked for", r"can be cut into \d+ at most", "Use fewer stages"],
    ),
    "a U-net": (
        training(6, module=Skips),
        MisconfigurationException,
        ["6 stages were asked for", r"Before 'net.up.1', for example: .*made by 'net.down.0'.*used after it by"],
    ),
    "a recurrent loop": (
        training(2, module=Recurrent),
        MisconfigurationException,
        [
            "2 stages were asked for",
            "cannot be cut at all",
            "one tensor may cross, but 2 do",
            r"\[2, 5\] made by 'net'",
        ],
    ),
    "a cut that is no module": (
        training(strategy={"cuts": ["net.layers.2", "net.layer.4"]}),
        MisconfigurationException,
        ["calls no module 'net.layer.4'", "Near names: net.layers.4"],
    ),
    "too few names of cuts": (
        training(strategy={"cuts": ["net.layers.2"]}),
        MisconfigurationException,
        [r"3 stages need 2 cuts, but cuts=\['net.layers.2'\] names 1"],
    ),
    "cuts in another order": (
        training(strategy={"cuts": ["net.layers.4", "net.layers.2"]}),
        MisconfigurationException,
        ["'net.layers.2' does not begin after 'net.layers.4'", "in the order in which the step calls them"],
    ),
    "a cut that leaves the first stage empty": (
        training(strategy={"cuts": ["net", "net.layers.4"]}),
        MisconfigurationException,
        ["no stage can begin at 'net'", "the stage before it would be empty"],
    ),
    "a cut that leaves a stage between empty": (
        training(strategy={"cuts": ["net.layers.4", "net.layers.4"], "partition": "profile"}),
        MisconfigurationException,
        ["'net.layers.4' does not begin after 'net.layers.4' does, so nothing would lie between them", "each once"],
    ),
    "manual optimization": (
        training(module=Manual),
        MisconfigurationException,
        ["`Manual.automatic_optimization` is False", "Return the loss"],
    ),
    "a backward of the module's own": (
        training(backward=lambda self, loss: loss.backward()),
        MisconfigurationException,
        ["`Case.backward` is overridden", "Remove it"],
    ),
    "two optimizers": (
        training(
            **optimizers(
                lambda m: [
                    torch.optim.SGD(m.net.layers.parameters()),
                    torch.optim.Adam(m.net.head.parameters()),
                ]
            )
        ),
        MisconfigurationException,
        ["several optimizers", "parameter groups of one optimizer"],
    ),
    "LBFGS": (
        training(**optimizers(lambda m: torch.optim.LBFGS(m.parameters()))),
        MisconfigurationException,
        ["LBFGS is not supported", "such as AdamW"],
    ),
    "an optimizer with a tensor of its own": (
        training(**optimizers(lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.zeros(7))]))),
        MisconfigurationException,
        [r"gave SGD a tensor of shape \(7,\) that is no parameter", "register it"],
    ),
    "a step that returns None": (
        training(training_step=lambda *_: None),
        PipelineError,
        ["returned None for micro-batch 0 of batch 0", "Return a loss"],
    ),
    "a step that returns None for a batch": (
        training(training_step=later(lambda *_: None)),
        PipelineError,
        ["returned None, and so ended inside stage 0: it did not call 'net", "to skip", "return a loss times zero"],
    ),
    "a step that returns None for a micro-batch": (
        training(training_step=none_for_one_micro_batch),
        PipelineError,
        ["returned None for micro-batch 1 of batch 2", "Return a loss"],
    ),
    "a step that the clock decides": (
        training(training_step=clocked),
        MisconfigurationException,
        ["computes something else each time", "global generators", "not from the clock", "`on_after_batch_transfer`"],
    ),
    "a loss for each sample": (
        training(training_step=squares),
        MisconfigurationException,
        [r"must be a scalar, found the shape \(2,\)", "Return its mean"],
    ),
    "a loss for each sample, later": (
        training(training_step=later(squares)),
        MisconfigurationException,
        [r"must be a scalar, found the shape \(2,\)", "Return its mean"],
    ),
    "a loss that is a number": (
        training(training_step=lambda *_: 1.0),
        MisconfigurationException,
        ["must return a Tensor", "Found: float"],
    ),
    "a dict without a loss": (
        training(training_step=lambda *a: {"error": step(*a)}),
        MisconfigurationException,
        ["the 'loss' key needs to be present"],
    ),
    "a detached loss": (
        training(training_step=lambda *a: step(*a).detach()),
        PipelineError,
        ["the loss of micro-batch 0 of batch 0 depends on no parameter that is trained", "detached"],
    ),
    "a detached loss, later": (
        training(training_step=later(lambda *a: step(*a).detach())),
        PipelineError,
        [r"the loss of micro-batch \d of batch 2 depends on no parameter"],
    ),
    "a model that is frozen": (
        training(configure_model=lambda self: self.requires_grad_(False) and None),
        PipelineError,
        ["depends on no parameter that is trained", "`requires_grad=False`"],
    ),
    "an output that cannot be sent": (
        training(training_step=lambda *a: {"loss": step(*a), "model": object()}),
        PipelineError,
        [r"`\['model'\]` of what `training_step` returns is of type builtins.object", "Use tensors"],
    ),
    "all_gather in the step": (
        training(training_step=gathered(lambda m: m.all_gather(torch.ones(1)))),
        CollectiveInStepError,
        ["`self.all_gather` was called inside `training_step`", "Call it in a hook"],
    ),
    "a barrier in the step": (
        training(training_step=gathered(lambda m: m.trainer.strategy.barrier())),
        CollectiveInStepError,
        ["`strategy.barrier` was called inside `training_step`"],
    ),
    "all_reduce in the step": (
        training(training_step=gathered(lambda m: torch.distributed.all_reduce(torch.ones(1)))),
        CollectiveInStepError,
        ["`torch.distributed.all_reduce` was called inside `training_step`"],
    ),
    "a batch that cannot be split": (
        training(loader=collated(lambda _: {"x": {"words": pack_sequence([torch.zeros(3)])}, "y": torch.zeros(2)})),
        TypeError,
        [r"cannot split `batch\['x'\]\['words'\]`", "PackedSequence", "Return a tensor"],
    ),
    "a batch of no samples": (
        training(loader=collated(lambda _: (torch.zeros(0, WIDTH).double(), torch.zeros(0).double()))),
        PipelineError,
        ["batch 0 has no samples"],
    ),
    "a loader of no batches": (
        training(loader=DataLoader(Points(0), 8)),
        MisconfigurationException,
        ["plans from the first training batch, and there is none", "check the training dataloader"],
    ),
    "a stream of no batches": (
        training(loader=DataLoader(Nothing(), 8)),
        MisconfigurationException,
        ["plans from the first training batch, and there is none"],
    ),
    "a loader that raises": (training(loader=DataLoader(Corrupt(32), 8)), Boom, ["sample 17 is corrupt"]),
    "sync_batchnorm": (
        calling("fit", sized(8), trainer={"sync_batchnorm": True}),
        MisconfigurationException,
        ["`sync_batchnorm=True` is not supported", "Use BatchNorm"],
    ),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_a_mistake_is_named_with_what_to_do(name: str) -> None:
    run, kind, expected = CONFIGURED[name]
    with pytest.raises(kind) as caught:
        run()
    error = caught.value
    assert type(error) is kind
    for pattern in expected:
        assert re.search(pattern, str(error)), error
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__, "two tracebacks"


@pytest.mark.parametrize("start_method", ["popen", "spawn", "forkserver"])
def test_in_an_interactive_session_the_start_method_that_works_is_named(
    start_method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(MisconfigurationException, match=r"AsyncMultiPipeStrategy\(start_method='fork'\)") as caught:
        arguments_of_the_strategy(start_method=start_method)()
    assert "ddp" not in str(caught.value)
    arguments_of_the_strategy(start_method="fork")()


def test_saving_after_an_exception_is_turned_off_with_a_warning() -> None:
    callback = OnExceptionCheckpoint("nowhere")
    trainer = pl.Trainer(callbacks=[callback], accelerator="cpu", logger=False)
    with pytest.warns(UserWarning, match="`OnExceptionCheckpoint` has no effect: .* Save during training"):
        guards.leave_exceptions_unsaved(trainer)
    callback.on_exception(trainer, None, Boom())


# Programs

SCRIPT = Path(faulty.__file__)
RUN_LIMIT = 200.0  # seconds for a run from start to end, where others use the machine too
NOISE = (
    "During handling of",
    "The above exception was",
    "Exception ignored",
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "recvValue failed",
    "resource_tracker",
    "leaked",
    "terminate called",
    "Aborted",
    r"^\[[WE]\d* ",
)
DATA = "All ranks of a replica must see the same batches"
NUMBER = "All ranks must get the same number of batches"

SAID: dict[str, tuple[str, int]] = {
    # What the last line on the terminal is, and the last step that was saved.
    "noise of each rank's own": (rf"step 2: ranks 0 and \d belong to one replica but .*different data.*{DATA}", 0),
    "a smaller batch": (rf"step 2: ranks 0 and 1 belong to one replica but .*different data.*{DATA}", 0),
    "a shorter loader": (rf"step 3: rank 0 has a batch 3, but rank 1 has no batch 3\. {NUMBER}", 2),
    "a shorter loader, synchronous": (rf"step 3: rank 0 trains batch 3, but rank 1 (saves|asks whether) .*{NUMBER}", 2),
    "a shorter stream of a replica": (rf"step 3: rank 0 trains batch 3, but rank 1 (saves|asks whether) .*{NUMBER}", 2),
    "a corrupt sample": (r"Boom: sample 27 is corrupt$", 2),
    "rank 1 raises in the first step": (r"Boom: of rank 1 in batch 0$", 0),
    "rank 0 raises, rank 1 is busy": (r"Boom: of rank 0 in batch 5$", 4),
    "rank 2 raises, the others are busy": (r"Boom: of rank 2 in batch 5$", 4),
    "rank 1 raises in a hook while others save": (r"Boom: while saving$", 6),
    "rank 0 saves alone": (
        rf"step 5: rank 0 saves a checkpoint, but rank 1 .*training goes on\. {NUMBER}.*call "
        "`trainer.save_checkpoint` on every rank, not on one",
        4,
    ),
    "rank 0 saves alone after the end": (
        r"PipelineError: `trainer.save_checkpoint` after the end of the run was not called on every rank: .*not only",
        12,
    ),
    "no main guard, spawned": (
        r"MisconfigurationException: start_method='spawn' runs the script from its top .*under `if __name__ == ",
        0,
    ),
    "rank 1 waits alone": (rf"step 12: rank 0 .*, but rank 1 calls `strategy.barrier`\. {NUMBER}", 12),
    "collectives in the step": (r"CollectiveInStepError: `self.all_gather` was called inside", 2),
    "manual optimization": (r"MisconfigurationException: `Manual.automatic_optimization` is False", 0),
    "different modules": (r"PipelineError: rank 1 built another model than rank 0: net.layers.4.bias", 0),
    "a learning rate of each rank's own": (
        r"`lr` of the optimizer's parameter group 0 is not the same on every rank: 0\.1 on rank 0, 1\.1 on rank 1\. ",
        0,
    ),
    "rank 1 is killed": (r"rank 1 \(pid \d+\) was killed by SIGKILL$", 4),
    "rank 0 clips alone": (
        rf"step \d: rank 0 calls `torch.nn.utils.get_total_norm`, but rank 1 (trains batch|asks whether) .*{NUMBER}",
        4,
    ),
    "rank 1 leaves without a word": (r"rank 1 \(pid \d+\) ended with exit code 0$", 4),
    "rank 1 calls sys.exit": (r"rank 1 ended the run: SystemExit: 3$", 4),
    "ctrl-c": (r"Detected KeyboardInterrupt", 4),
    "sigterm": (r"Received SIGTERM: training ends after this batch on all ranks", 4),
    "rank 1 raises, spawned": (r"Boom: of rank 1 in batch 5$", 4),
    "sigterm, spawned": (r"Received SIGTERM: training ends after this batch on all ranks", 4),
    "a foreign plan": (
        r"foreign_plan.json' is for something else: .*its num_stages is 4.*device is cuda.*precision is bf16-mixed"
        r".*model is other.Model.*parameters differ: ",
        0,
    ),
    "a memory limit that nothing fits": (r"memory_limit=100 bytes .*the smallest limit .* is \d+ bytes", 0),
    "a cut that leaves a stage empty": (r"no stage can begin at 'net': .*the stage before it would be empty$", 0),
    "the step raises while it is measured": (r"Boom: while measuring$", 0),
    "ctrl-c while ranks start": (r"rank 1 \(pid \d+\) was killed by SIGINT$", 0),
    "rank 1 is killed while ranks start": (r"rank 1 \(pid \d+\) was killed by SIGKILL$", 0),
    "ctrl-c while measuring": (r"Detected KeyboardInterrupt", 0),
    "rank 1 is killed while measuring": (r"rank 1 \(pid \d+\) was killed by SIGKILL$", 0),
    "rank 0 is killed, spawned": (r"rank 0 \(pid \d+\) was killed by SIGKILL$", 4),
}
# What every rank raises is said by rank 0 alone, as its own.
BY_ALL = (
    "a learning rate of each rank's own",
    "manual optimization",
    "different modules",
    "a smaller batch",
    "a shorter loader",
    "a foreign plan",
    "a memory limit that nothing fits",
    "a cut that leaves a stage empty",
)
# Where nobody is left to say it, or it is no failure.
CODES = {
    "rank 0 is killed": -signal.SIGKILL,
    "sigterm": 0,
    "sigterm, spawned": 0,
    "nothing": 0,
    "sigterm while ranks start": -signal.SIGTERM,
    "sigterm while measuring": -signal.SIGTERM,
}
# The last step that is saved by runs that end without a word.
SILENT = {"nothing": 12, "rank 0 is killed": 4}


@dataclass
class Ended:
    """A run that has ended.

    Attributes:
        directory: with what it has saved.
        text: all that it has written to the terminal.
        code: of the process that was started.
        seconds: from the fault to when nobody could write to the terminal any more.
        limit: how many there may be: ten, more where others use the machine too.
        survivors: pids of processes that are still there.
    """

    directory: Path
    text: str
    code: int
    seconds: float
    limit: float
    survivors: list[int]

    @property
    def last_line(self) -> str:
        return self.text.strip().splitlines()[-1]


def run(name: str, directory: Path) -> Ended:
    """Start the program, let its fault happen, and wait for its end."""
    directory.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "MASTER_PORT")}
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), name, str(directory)],
        env={**environment, "PYTHONPATH": PYTHON_PATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        send = FAULTS[name].send
        if send is not None:
            _send(process, directory, *send)
        text, _ = process.communicate(timeout=RUN_LIMIT)  # the pipe ends with the last process that holds it
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    fault = directory / "fault"
    seconds = time.time() - float(fault.read_text()) if fault.exists() else 0.0
    limit = 10.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    pids = [int(file.read_text()) for file in directory.glob("pid-*")]
    deadline = time.monotonic() + 2.0
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return Ended(directory, text, process.returncode, seconds, limit, [pid for pid in pids if _alive(pid)])


def _send(process: subprocess.Popen[str], directory: Path, signum: signal.Signals, to: str) -> None:
    deadline = time.monotonic() + RUN_LIMIT
    while not (directory / "training").exists():
        assert process.poll() is None, "ended before the signal"
        assert time.monotonic() < deadline, "does not train"
        time.sleep(0.05)
    (directory / "fault").write_text(str(time.time()))
    (os.killpg if to == "all" else os.kill)(process.pid, signum)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Ended]]]:
    """The runs that the selected tests look at, two at a time."""
    here = (item for item in request.session.items if item.path == request.path)
    specifications = (getattr(item, "callspec", None) for item in here)
    names = dict.fromkeys(spec.params["fault"] for spec in specifications if spec and "fault" in spec.params)
    directory = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name, directory / str(i)) for i, name in enumerate(names)}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_ends_whole_and_says_once_what_was_wrong(
    fault: str, runs: dict[str, Future[Ended]], record_property: Callable[[str, object], None]
) -> None:
    ended = runs[fault].result()
    text = ended.text
    record_property("seconds", ended.seconds)
    assert ended.code == CODES.get(fault, 1), text
    assert ended.survivors == []
    assert ended.seconds < ended.limit
    for noise in NOISE:
        if fault == "rank 0 saves alone after the end" and noise == "terminate called":
            continue  # torch may abort a process that has ended well, if another one begins to talk to it just then
        assert not re.search(noise, text, re.MULTILINE), text
    if fault not in SAID:
        assert "Traceback" not in text
        assert saved_step(ended, fault) == SILENT.get(fault, 0)
        return
    said, last_step = SAID[fault]
    assert re.search(said, ended.last_line), text
    assert len(re.findall(said, text, re.MULTILINE)) == 1, text
    assert text.count("Traceback (") <= 2 + (fault == "a corrupt sample"), text  # another one in the worker of a loader
    if fault in BY_ALL:
        assert " failed:" not in text, text
    if fault == "collectives in the step":
        for call in ("strategy.barrier", "torch.distributed.all_reduce"):
            assert f"caught: `{call}` was called inside `training_step`" in text
    if FAULTS[fault].send is not None:
        assert "Traceback" not in text
        assert saved_step(ended, fault) >= last_step
    else:
        assert saved_step(ended, fault) == last_step


def saved_step(ended: Ended, fault: str) -> int:
    """The step of the last checkpoint, 0 if there is none; all checkpoints are whole."""
    expected = FAULTS[fault].module().state_dict() if any(ended.directory.glob("*.ckpt")) else {}
    steps = [0]
    for path in ended.directory.glob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=False)
        state = checkpoint["state_dict"]
        assert {name: tensor.shape for name, tensor in state.items()} == {n: t.shape for n, t in expected.items()}
        assert all(bool(tensor.isfinite().all()) for tensor in state.values())
        assert len(checkpoint["optimizer_states"][0]["state"]) == len(expected)
        steps.append(checkpoint["global_step"])
    return max(steps)
