"""How a model is partitioned: measured, counted, or as a file says."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_asyncpipe import AsyncMultiPipeStrategy, ReferenceStrategy
from lightning_asyncpipe.integration import partitioning
from lightning_asyncpipe.integration.measurements import optimizer_costs
from lightning_asyncpipe.integration.partitioning import VARIABLE, way_of
from lightning_asyncpipe.runtime.hollow import is_hollow
from lightning_asyncpipe.runtime.profile import profile_model
from tests.support.edge_basics import WIDTH, Points, Regression, Tower, shuffled, sized
from tests.support.edges import Observed, PartsOnOneDevice, assert_close, observe
from tests.support.fit import fit
from tests.support.launch import run_ranks
from tests.support.resuming import Saves, draw

pytestmark = pytest.mark.filterwarnings("ignore")

Way = dict[str, Any]


class Sleeps(nn.Module):
    """A layer whose forward takes a while, which no counting of operations could know."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return torch.tanh(self.layer(x))


class Uneven(Regression):
    """Six layers, the last of which takes as long as all others together."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Tower()
        self.net.layers = nn.ModuleList(Sleeps(seconds) for seconds in (2e-3, 2e-3, 2e-3, 2e-3, 2e-3, 10e-3))


class Busy(Regression):
    """Draws random numbers, keeps running statistics and a count, and logs; `runs` counts its own steps."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)) for _ in range(4))
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 1), nn.Flatten(0))
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = self.inputs(batch)
        loss = F.mse_loss(self.net(x + 0.1 * torch.randn_like(x)), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.drawn.append(float(torch.rand(())))


def train(module: type[pl.LightningModule] = Regression, stages: int = 3, **options: Any) -> Observed:
    torch.manual_seed(1)
    built = module().double()
    strategy = ReferenceStrategy(stages, **{"num_microbatches": 4, **options})
    trainer, losses = fit(built, shuffled(24, 8), strategy)
    observed = observe(trainer, built, losses)
    observed.seen = getattr(built, "drawn", None)
    observed.statistics = {**observed.statistics, "plan": strategy.describe()}
    observed.statistics.pop("utilisation")
    return observed


def refused(path: Path | str, **options: Any) -> str:
    with pytest.raises(MisconfigurationException) as error:
        train(plan=str(path), **options)
    return str(error.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, counted."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    strategy = ReferenceStrategy(3, num_microbatches=4)
    fit(Regression().double(), sized(8, 8), strategy)
    strategy.save_plan(path)
    return path


# Measured


def test_a_measured_plan_sees_what_counting_cannot_and_can_be_repeated(tmp_path: Path) -> None:
    counted = train(Uneven).statistics["plan"]
    torch.manual_seed(1)
    module = Uneven().double()
    strategy = ReferenceStrategy(3, num_microbatches=4, num_pipelines=1, partition="profile")
    trainer, losses = fit(module, shuffled(24, 8), strategy)
    plan = strategy.describe()
    assert [stage["begins"] for stage in plan["stages"]] != [stage["begins"] for stage in counted["stages"]]
    # The slow layer is the last one: its stage has no other.
    assert plan["stages"][2]["begins"] in ("net.layers.5", "net.layers.5.layer")
    assert plan["stages"][2]["forward_ms"] >= 10
    assert sum(stage["parameters"] for stage in plan["stages"]) == sum(p.numel() for p in module.parameters())
    for device in plan["devices"]:
        assert 0.0 < device["utilisation"] <= 1.0
        assert device["memory"]["total"] >= device["memory"]["weights"] > 0
    assert plan["step_ms"] >= 4 * 10  # micro-batches, times the slow stage
    # From its file it is the same plan again, to the last bit.
    strategy.save_plan(tmp_path / "plan.json")
    again = train(Uneven, plan=tmp_path / "plan.json", num_microbatches="auto")
    assert again.statistics["plan"] == {**plan, "planned_by": f"the file {tmp_path / 'plan.json'}"}
    assert again.losses == losses
    assert_close(again.tensors, observe(trainer, module, losses).tensors, "weights")


def test_measuring_leaves_no_trace_in_the_training(tmp_path: Path) -> None:
    """Random numbers, running statistics and logs are those of a run that does not measure."""
    torch.manual_seed(1)
    module = Busy().double()
    strategy = ReferenceStrategy(3, num_microbatches=4, partition="profile")
    trainer, losses = fit(module, shuffled(24, 8), strategy)
    strategy.save_plan(tmp_path / "plan.json")
    again = train(Busy, plan=tmp_path / "plan.json")
    assert again.losses == losses
    assert again.seen == module.drawn
    measured = observe(trainer, module, losses)
    assert_close(again.tensors, measured.tensors, "weights")
    assert again.metrics == measured.metrics


def test_an_error_while_measuring_is_the_users_own() -> None:
    class Third(Regression):
        runs = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            Third.runs += 1
            if Third.runs > 5:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    with pytest.raises(KeyError, match="mine"):
        train(Third, partition="profile")


def test_what_an_optimizer_keeps_is_tried_out() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    cpu = torch.device("cpu")
    expected = {
        torch.optim.AdamW([parameter], lr=0.1): 8,
        torch.optim.SGD([parameter], lr=0.1): 0,
        torch.optim.SGD([parameter], lr=0.1, momentum=0.9): 4,
        torch.optim.AdamW([{"params": [parameter], "amsgrad": True}]): 12,
    }
    for optimizer, nbytes in expected.items():
        assert optimizer_costs([optimizer], cpu)[0] == nbytes
        assert not optimizer.state
    assert torch.equal(parameter, torch.zeros(3))

    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("not now")

    assert optimizer_costs([Odd([parameter], lr=0.1)], cpu)[0] == 8


def test_trying_an_optimizer_out_neither_steps_it_nor_fires_its_hooks() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    fired: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: fired.append(1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    called = getattr(optimizer, "_opt_called", None)
    parameter.grad = torch.ones(3)
    optimizer_costs([optimizer], torch.device("cpu"))
    assert torch.equal(parameter, torch.ones(3))
    assert not fired
    assert not optimizer.state
    assert scheduler.get_last_lr() == [0.1]
    assert getattr(optimizer, "_opt_called", None) == called


# The way


def test_nothing_is_measured_where_two_runs_should_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(AsyncMultiPipeStrategy):
        """As one of two ranks."""

        class world:
            size = 2

        _placed_processes = 2

    monkeypatch.delenv(VARIABLE)
    torch.use_deterministic_algorithms(False)  # a Trainer of another test may have turned it on
    assert way_of(Two()) == "profile"
    assert way_of(Two(partition="operations")) == "operations"
    assert way_of(ReferenceStrategy(4)) == "operations"
    torch.use_deterministic_algorithms(True)
    try:
        assert way_of(Two()) == "operations"
        assert way_of(Two(partition="profile")) == "profile"
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv(VARIABLE, "operations")
    assert way_of(Two()) == "operations"
    monkeypatch.setenv(VARIABLE, "guess")
    with pytest.raises(MisconfigurationException, match=f"{VARIABLE}='guess'"):
        way_of(Two())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"partition": "best"}, "partition='best': choose one of 'auto', 'profile', 'operations'"),
        ({"memory_limit": 0}, "memory_limit=0: give the bytes"),
        ({"memory_limit": "16GB"}, "memory_limit='16GB': give the bytes"),
        ({"plan": 3}, "plan=3: give the path"),
        ({"plan": "p.json", "memory_limit": 5}, "leave `memory_limit` out"),
        ({"plan": "p.json", "cuts": ["net"], "partition": "profile"}, "leave `partition` and `cuts` out, or the plan"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException) as error:
        AsyncMultiPipeStrategy(**arguments)
    assert message in str(error.value)


def test_there_is_no_plan_before_a_fit() -> None:
    with pytest.raises(MisconfigurationException, match="has no plan yet"):
        ReferenceStrategy(3).describe()


# Memory


def test_a_limit_that_nothing_fits_names_the_smallest_that_would() -> None:
    with pytest.raises(MisconfigurationException, match="memory_limit=100 bytes") as error:
        train(memory_limit=100)
    smallest = int(str(error.value).split("plan was found for is ")[1].split()[0])
    plan = train(memory_limit=smallest).statistics["plan"]
    assert max(device["memory"]["total"] for device in plan["devices"]) <= smallest
    assert plan["planned_by"] == "operations"


# Files


def test_a_file_is_readable(saved: Path) -> None:
    content = json.loads(saved.read_text())
    assert content["model"].endswith("Regression")
    assert content["precision"] == "64-true"
    assert content["geometry"]["num_stages"] == 3
    assert len(content["cuts"]) == 2
    assert content["parameters"]["net.head.weight"] == "float64 [1, 5]"


def test_a_plan_for_something_else_is_refused_and_what_differs_is_named(saved: Path, tmp_path: Path) -> None:
    class Wider(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net = Tower(6, WIDTH)
            self.net.head = nn.Linear(WIDTH, 1, bias=False)

    message = refused(saved, module=Wider)
    assert "its model is" in message
    assert "net.head.bias (float64 [1] in the plan, not there in the model)" in message
    assert "num_stages is 3, the strategy has num_stages=2" in refused(saved, stages=2)
    assert "num_microbatches is 4, the strategy has num_microbatches=8" in refused(saved, num_microbatches=8)
    data = torch.utils.data.TensorDataset(Points(16).x.float(), Points(16).y.float())
    loader = torch.utils.data.DataLoader(data, 8)
    with pytest.raises(MisconfigurationException, match="its precision is 64-true, this run's is 32-true"):
        fit(Regression(), loader, ReferenceStrategy(3, plan=str(saved)), precision="32-true")
    content = json.loads(saved.read_text())
    content["cuts"][0][2] = ["net.elsewhere", 0]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content))
    assert "cannot be cut there" in refused(other)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON that holds a plan"),
        ("[1]", 'no entry "format"'),
        ('{"format": "lightning-asyncpipe plan", "version": 9}', "has version 9"),
        (
            f'{{"format": "lightning-asyncpipe plan", "version": "{"9" * 10_000}"}}',
            "999..., this release reads",
        ),
        ('{"format": "lightning-asyncpipe plan", "version": 1}', 'is damaged: "geometry"'),
    ],
)
def test_a_file_that_is_no_plan_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    assert message in refused(path)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("cuts", [], '"cuts" must list 2 cuts'),
        ("costs", None, '"costs" must have numbers for forward, backward'),
        ("costs", {"forward": [1]}, '"costs", "forward" must list a number for each of 3 stages, found [1]'),
        ("parameters", 1, '"parameters" must map'),
        ("device", None, '"model", "device" and "precision" must be texts'),
    ],
)
def test_a_damaged_file_is_refused(entry: str, value: Any, message: str, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(saved.read_text()), entry: value}))
    assert message in refused(path)


@pytest.mark.parametrize(
    ("entry", "name", "value", "message"),
    [
        ("geometry", "num_microbatches", 10**9, "must be a whole number of 1 to 65536, found 1000000000"),
        ("geometry", "num_microbatches", "8", "must be a whole number of 1 to 65536, found '8'"),
        ("geometry", "max_in_flight", 0, "must be a whole number of 1 to 65536, found 0"),
        ("geometry", "max_in_flight", None, "must be a whole number of 1 to 65536, found nothing"),
        ("geometry", "num_pipelines", 9, "must be 1 to 3 for 3 stages, found 9"),
        ("costs", "forward", [1.0, float("nan"), 1.0], "finite, not negative and at most 1,000,000, found nan"),
        ("costs", "backward", [1.0, "x", 1.0], "finite, not negative and at most 1,000,000, found 'x'"),
        ("costs", "message", -5.0, "finite, not negative and at most 1,000,000, found -5.0"),
        ("costs", "reduce", 1e300, "finite, not negative and at most 1,000,000, found 1e+300"),
        ("costs", "update", float("inf"), "finite, not negative and at most 1,000,000, found inf"),
    ],
)
def test_a_number_in_a_file_that_cannot_be_is_named(
    entry: str, name: str, value: Any, message: str, saved: Path, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    content = json.loads(saved.read_text())
    content[entry][name] = value
    path.write_text(json.dumps(content))
    said = refused(path)
    assert said.startswith(f"the plan {str(path)!r} is damaged: " + f'"{entry}", "{name}" must be')
    assert message in said


def test_costs_in_a_file_that_do_not_fit_each_other_are_named(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    content = json.loads(saved.read_text())
    content["costs"]["backward"][1] += 1.0
    path.write_text(json.dumps(content))
    assert '"costs": stage 1: backward is' in refused(path)


@pytest.mark.parametrize("description", [None, 3, {"devices": []}, {"stages": [1], "num_stages": "many"}])
def test_what_a_file_says_to_people_need_not_make_sense(description: Any, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(saved.read_text()), "description": description}))
    plan = train(plan=path).statistics["plan"]
    assert plan["num_stages"] == len(plan["stages"]) == len(plan["devices"]) == 3


# Checkpoints


def resumed(strategy: Any, path: Path | None, saves: Saves, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    """What a training, begun or resumed, ends with, and its plan."""
    trainer, module = draw(strategy, "resumable", saves, path, **arguments)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}, trainer.strategy.describe()


def measuring(**options: Any) -> ReferenceStrategy:
    return ReferenceStrategy(**{"num_stages": 3, "num_microbatches": 4, "partition": "profile", **options})


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, Any]]:
    """A checkpoint of the midst of a measured training, and what the training ended with."""
    directory = tmp_path_factory.mktemp("interrupted")
    weights, plan = resumed(measuring(), None, Saves(directory, (8,)))
    return directory / "step-8.ckpt", weights, plan


def never_measured(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("measured")


def test_a_measured_training_goes_on_with_its_plan_to_the_same_bits(
    interrupted: tuple[Path, Any, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, weights, plan = interrupted
    monkeypatch.setattr(partitioning, "profile_model", never_measured)
    found, again = resumed(measuring(), path, Saves(tmp_path, (8,)))
    assert again == plan
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    # It is plain data, and what one device loads.
    entry = torch.load(path, weights_only=True)["async_multipipe"]["plan"]
    assert entry == json.loads(json.dumps(entry))
    assert entry["geometry"]["num_stages"] == 3
    draw(PartsOnOneDevice(4), "resumable", Saves(tmp_path, epochs=False), path, max_epochs=2)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(entry))  # the form of a plan file
    assert resumed(measuring(partition="auto", plan=file), path, Saves(tmp_path))[1]["stages"] == plan["stages"]


@pytest.mark.parametrize(
    ("options", "change", "said"),
    [
        ({"num_stages": 2}, None, "made with num_stages=3, this run has num_stages=2"),
        ({"num_pipelines": 1}, None, "made with num_pipelines='auto', this run has num_pipelines=1"),
        ({"cuts": ["net.3.layers.1", "net.3.layers.2"]}, None, "made with cuts='auto', this run has cuts=\\['net.3"),
        ({}, {"precision": "32-true"}, "its precision is 32-true, this run's is 64-true"),
        ({}, {"version": 9}, "The plan in the checkpoint has version 9"),
        ({}, {"costs": {"forward": [1.0]}}, 'The plan in the checkpoint is damaged: "costs"'),
        ({}, {"cuts": [["net.9", "call", ["net.9", 0], [0]]] * 2}, "the step of this one cannot be cut there"),
        ({}, {"cuts": [[torch.zeros(2)]] * 2}, "The plan in the checkpoint is damaged: Object of type Tensor"),
    ],
)
def test_what_is_another_run_by_now_is_planned_anew(
    options: dict[str, Any],
    change: dict[str, Any] | None,
    said: str,
    interrupted: tuple[Path, Any, dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = interrupted[0]
    monkeypatch.setattr(partitioning, "profile_model", partial(profile_model, seconds=0.0))
    if change is not None:
        checkpoint = torch.load(path, weights_only=False)
        checkpoint["async_multipipe"]["plan"] |= change
        path = tmp_path / "changed.ckpt"
        torch.save(checkpoint, path)
    with caplog.at_level("INFO"):
        resumed(measuring(**options), path, Saves(tmp_path, epochs=False), max_epochs=2)
    notes = [record.getMessage() for record in caplog.records if "The model is planned anew" in record.getMessage()]
    assert len(notes) == 1
    assert re.search(said, notes[0])


# Several processes


def _measured_by_ranks(path: Path) -> Any:
    torch.manual_seed(1)
    module = Uneven().double()
    strategy = AsyncMultiPipeStrategy(num_microbatches=4, partition="profile")
    trainer, losses = fit(module, shuffled(24, 8), strategy, 3)
    strategy.save_plan(path)
    plans = [strategy.describe()]
    ends = []
    for start in (None, path.parent / "step-8.ckpt"):
        strategy = AsyncMultiPipeStrategy(num_microbatches=4, partition="profile")
        weights, plan = resumed(strategy, start, Saves(path.parent, (8,), epochs=False), devices=3)
        ends.append(weights)
        plans.append(plan)
    return observe(trainer, module, losses), *plans, *ends


def test_ranks_agree_on_what_one_of_them_measured_and_on_what_they_resume(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    ranks = run_ranks(_measured_by_ranks, 3, path)
    for _, _, first, again, one, other in ranks:
        assert first == again == ranks[0][2]
        assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    plans = [plan for _, plan, *_ in ranks]
    assert plans[0]["planned_by"] == "profile"
    assert plans[0]["message_ms"] > 0
    assert plans[1] == plans[2] == plans[0]
    expected = train(Uneven, plan=path)
    for observed, *_ in ranks:
        assert_close(observed.tensors, expected.tensors, "weights")
        assert observed.losses == expected.losses


# Models that are built without memory


class Built(Regression):
    """Builds its layers in `configure_model`, with an initialisation of its own and a table that the step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        self.net = Tower().double()
        for layer in self.net.layers:
            nn.init.orthogonal_(layer.weight)
        self.register_buffer("table", torch.tensor([1.0, 0.5, 2.0, 1.0, 1.5], dtype=torch.float64))

    def inputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return x * self.table, y


def built(how: str, **options: Any) -> tuple[Observed, dict[str, Any]]:
    """Train; also which parameters this process holds in the middle of the training."""
    held: dict[str, Any] = {}

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            held.update({name: not is_hollow(p) for name, p in module.named_parameters()})

    torch.manual_seed(1)
    module = Built()
    strategy: Any = "auto"
    if how == "emulated":
        strategy = ReferenceStrategy(3, num_microbatches=4, num_pipelines=1, **options)
    elif how == "ranks":
        strategy = AsyncMultiPipeStrategy(num_microbatches=4, num_pipelines=1, **options)
    _, losses = fit(module, shuffled(24, 8), strategy, 3 if how == "ranks" else 1, callbacks=[Watch()])
    parameters = {n: p.detach() for n, p in module.named_parameters() if p.device.type != "meta"}
    return Observed(parameters, losses, {}, {}), held


@pytest.mark.parametrize("options", [{"max_staleness": 0}, {"max_staleness": 0, "partition": "profile"}])
def test_a_model_built_without_memory_starts_and_trains_like_one_on_one_device(options: dict[str, Any]) -> None:
    expected, _ = built("whole")
    found, held = built("emulated", **options)
    assert_close(found.losses, expected.losses, "losses", 1e-9)
    assert_close(found.tensors, expected.tensors, "weights", 1e-9)
    assert all(held.values())


class Evaluated(Built):
    """Also has steps of evaluation; that of prediction needs the whole model."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = self.inputs(batch)
        self.log("loss", F.mse_loss(self.net(x), y))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = self.inputs(batch)
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.net(x).sum(), x)
        return gradient


EVALUATIONS = (("validate", False), ("test", True), ("predict", False), ("predict", True))
"""Methods of the Trainer, and whether weights come from a checkpoint."""


def evaluated(strategy: Callable[[], Any], devices: int, path: Path) -> list[tuple[Any, int]]:
    """What evaluating models that were never trained gives, and how many parameters are held afterwards."""
    found: list[tuple[Any, int]] = []
    for method, loads in EVALUATIONS:
        torch.manual_seed(1)
        module = Evaluated()
        trainer = pl.Trainer(
            strategy=strategy(),
            accelerator="cpu",
            devices=devices,
            precision="64-true",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            inference_mode=False,
        )
        loader = torch.utils.data.DataLoader(Points(12), 4)
        result = getattr(trainer, method)(module, loader, ckpt_path=path if loads else None)
        result = torch.cat(result) if method == "predict" else {k: float(v) for k, v in result[0].items()}
        found.append((result, sum(p.device.type != "meta" for p in module.parameters())))
    return found


def three_devices(**options: Any) -> ReferenceStrategy:
    return ReferenceStrategy(3, num_microbatches=4, num_pipelines=1, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a trained model."""
    path = tmp_path_factory.mktemp("trained") / "last.ckpt"
    torch.manual_seed(5)
    trainer, _ = fit(Evaluated(), shuffled(24, 8), "auto")
    trainer.save_checkpoint(path)
    return path


def assert_evaluated_alike(found: list[tuple[Any, int]], expected: list[tuple[Any, int]]) -> None:
    for (method, loads), (ours, _), (theirs, _) in zip(EVALUATIONS, found, expected, strict=True):
        assert_close(ours, theirs, f"{method}, {loads}", 1e-9)


def test_a_model_built_without_memory_is_evaluated_without_being_trained(trained: Path) -> None:
    expected = evaluated(lambda: "auto", 1, trained)
    assert not torch.equal(expected[2][0], expected[3][0])
    assert_evaluated_alike(evaluated(three_devices, 1, trained), expected)


def _built_by_ranks(path: Path) -> Any:
    evaluation = evaluated(lambda: AsyncMultiPipeStrategy(num_microbatches=4, num_pipelines=1), 3, path)
    return *built("ranks", max_staleness=0), evaluation


def test_each_rank_holds_only_what_it_hosts_from_the_beginning_to_the_end(trained: Path) -> None:
    expected, _ = built("whole")
    ranks = run_ranks(_built_by_ranks, 3, trained)
    on_one = evaluated(lambda: "auto", 1, trained)
    together: dict[str, Tensor] = {}
    for observed, held, evaluation in ranks:
        assert_evaluated_alike(evaluation, on_one)
        assert all(count < len(held) for _, count in evaluation[:2])
        assert all(count == len(held) for _, count in evaluation[2:])  # its step needs all of them
        assert_close(observed.losses, expected.losses, "losses", 1e-9)
        assert set(observed.tensors) == {name for name, here in held.items() if here}
        assert len(observed.tensors) < len(expected.tensors)
        together |= observed.tensors
    assert_close(together, expected.tensors, "weights", 1e-9)
