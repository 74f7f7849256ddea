"""Real processes do what one process does that emulates them, and what one device does."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tests.support import rank_runs
from tests.support.edge_basics import Points, Tower
from tests.support.edge_models import NormTower
from tests.support.edge_projects import PROJECTS
from tests.support.edges import STAGES, Observed, assert_close, assert_same, run
from tests.support.launch import run_ranks
from tests.support.rank_runs import REPLICA_BATCH, REPLICA_EPOCHS, SCENARIOS

SAME_TO_RANKS = {
    # What these do is done before or behind the ranks, and one process has shown that it works.
    "sizes that do not divide",
    "a last batch smaller than M",
    "one micro-batch for each batch",
    "batches that are named tuples",
    "batches that are dataclasses",
    "a step without batch_idx",
    "limit_train_batches",
    "a share of the batches",
    "max_steps in mid-epoch",
    "a data set without a length",
    "combined loaders to the longest",
    "shuffling and augmentation with 1 workers",
    "overfit_batches",
    "fast_dev_run",
    "detect_anomaly",
    "a profiler",
    "a callback that stops",
    "frozen layers here and there",
    "a frozen stage in the middle",
    "a frozen last stage",
    "activations in place",
    "dropout",
    "noise in the step",
    "batch normalisation without weights",
    "checkpointed blocks with dropout, outside",
    "constant buffers",
    "a step that calls the module",
    "Lightning's own first example",
    "GPT-2",
    "GPT-2 with dropout",
    "warm-up by hand before the step",
    "a callback that starts batches",
    "configured clipping by value",
    "a step that reads the learning rate",
    "a schedule by step",
    "a schedule by epoch",
    "clipping by the sum, one by one before the step",
    "clipping by the largest, all at once before the step",
    "clipping by value before the step",
    "clipping by the norm after the backward",
    "norms by parameter after the backward",
    *PROJECTS,  # some of which four ranks train
}
NAMES = [name for name in SCENARIOS if name not in SAME_TO_RANKS]
assert len(NAMES) + len(SAME_TO_RANKS) == len(SCENARIOS)


def _everything(directory: Path) -> dict[str, Any]:
    """What one rank does."""
    return {
        "scenarios": rank_runs.scenarios(NAMES),
        "saved, synchronous": rank_runs.train_and_save(directory / "synchronous", "ranks", max_staleness=0),
        "saved, asynchronous": rank_runs.train_and_save(directory / "asynchronous", "ranks"),
        "csv": rank_runs.logged_to_csv(directory / "csv", "ranks", max_staleness=0),
        "twice": rank_runs.fit_twice("ranks"),
        "on": rank_runs.fit_on("ranks"),
        "sampler": rank_runs.with_lightnings_sampler(Tower),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    """What each of the ranks has observed."""
    return run_ranks(_everything, STAGES, directory, timeout=280.0)


@pytest.mark.parametrize("name", NAMES)
def test_asynchronous_training_equals_the_emulated(name, ranks):
    expected = run(SCENARIOS[name], "emulated")
    for rank in ranks:
        found: Observed = rank["scenarios"][name]
        assert_same(found, expected)
        for key in ("stale_microbatches", "microbatches", "max_staleness", "steps"):
            assert found.statistics[key] == expected.statistics[key]


# Checkpoints


def loaded(path: Path) -> dict[str, Any]:
    """A checkpoint without the names of directories, and without what one device does not save."""
    checkpoint: dict[str, Any] = torch.load(path, weights_only=True)
    checkpoint.pop("async_multipipe", None)
    for state in checkpoint["callbacks"].values():
        for key in [key for key in state if "path" in key or "dir" in key or key == "best_k_models"]:
            del state[key]
    return checkpoint


def test_checkpoints_are_those_of_one_device(ranks, directory):
    expected = rank_runs.train_and_save(directory / "one device", "parts")
    names = sorted(path.name for path in (directory / "one device").iterdir())
    assert names == sorted(path.name for path in (directory / "synchronous").iterdir())
    assert len(names) == 8
    for name in names:
        assert_close(loaded(directory / "synchronous" / name), loaded(directory / "one device" / name), name)
    for rank in ranks:
        assert_same(rank["saved, synchronous"], expected, 1e-12)


def test_saving_is_a_place_where_training_can_go_on(ranks, directory):
    expected = rank_runs.train_and_save(directory / "emulated", "emulated")
    for rank in ranks:
        assert_same(rank["saved, asynchronous"], expected)
    for path in (directory / "emulated").iterdir():
        assert_close(loaded(directory / "asynchronous" / path.name), loaded(path), path.name)


def test_a_checkpoint_loads_on_one_device_bit_for_bit(ranks, directory):
    path = directory / "asynchronous" / "final.ckpt"
    trained = ranks[0]["saved, asynchronous"].tensors
    saved = loaded(path)["state_dict"]
    assert list(saved) == list(trained)
    assert all(torch.equal(saved[name], trained[name]) for name in trained)
    module = rank_runs.Saved.load_from_checkpoint(path)
    assert module.rate == 1e-2
    assert module.head.weight is module.net[3].head.weight
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, trained[name].to(tensor.dtype)), name


# Logging


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_logger_gets_each_value_once(ranks, directory):
    expected = rank_runs.logged_to_csv(directory / "one device csv", "whole")
    for rank in ranks:
        assert_same(rank["csv"], expected)
    found, wanted = rows(directory / "csv/metrics.csv"), rows(directory / "one device csv/metrics.csv")
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            assert (one[key] == other[key]) or float(one[key]) == pytest.approx(float(other[key]), abs=1e-9), key


# Several fits


@pytest.mark.parametrize(("key", "again"), [("twice", rank_runs.fit_twice), ("on", rank_runs.fit_on)])
def test_a_module_can_be_fitted_again(key, again, ranks):
    for expected, *found in zip(again("emulated"), *(rank[key] for rank in ranks), strict=True):
        for observed in found:
            assert_same(observed, expected)


# Data


def test_all_ranks_of_a_replica_see_each_epoch_in_one_order_of_its_own(ranks):
    orders = [[y for batch in epoch for y in batch] for epoch in ranks[0]["sampler"].seen]
    samples = sorted(Points(38).y.tolist())
    assert [sorted(order) for order in orders] == [samples] * REPLICA_EPOCHS
    assert orders[0] != orders[1]
    for rank in ranks:
        assert_same(rank["sampler"], ranks[0]["sampler"])


# Replicas

REPLICAS = {"num_stages": 2, "data_parallel_size": 2}
IN_FOUR_STAGES = (
    "GPT-2 with dropout",
    "BERT with its masked-language loss",
    "Llama",
    "BART",
    "a residual network",
    "adapters",
)


def _on_four_ranks() -> dict[str, Observed]:
    """What each of four ranks does."""
    return {
        **rank_runs.scenarios(IN_FOUR_STAGES, num_stages=4),
        "synchronous": rank_runs.with_lightnings_sampler(NormTower, **REPLICAS, max_staleness=0),
        "asynchronous": rank_runs.with_lightnings_sampler(NormTower, **REPLICAS, num_pipelines=1),
    }


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Observed]]:
    """What each of four ranks has observed."""
    return run_ranks(_on_four_ranks, 4, timeout=280.0)


@pytest.fixture
def replicas(four_ranks) -> list[dict[str, Observed]]:
    """What each rank of two replicas of two stages has observed."""
    return [{key: rank[key] for key in ("synchronous", "asynchronous")} for rank in four_ranks]


@pytest.mark.parametrize("name", IN_FOUR_STAGES)
def test_four_stages_equal_the_emulated(name, four_ranks):
    expected = run(SCENARIOS[name], "emulated", num_stages=4)
    for rank in four_ranks:
        assert_same(rank[name], expected)


def shares(replica: int) -> list[list[list[float]]]:
    """The targets that a replica sees by the samplers of DistributedDataParallel, by epoch and batch."""
    sampler = DistributedSampler(Points(38), num_replicas=2, rank=replica, shuffle=True, seed=0)
    loader = DataLoader(Points(38), REPLICA_BATCH, sampler=sampler)
    epochs = []
    for epoch in range(REPLICA_EPOCHS):
        sampler.set_epoch(epoch)
        epochs.append([y.tolist() for _, y in loader])
    return epochs


def test_replicas_see_their_shares(replicas):
    for rank, found in enumerate(replicas):
        for run_of_rank in found.values():
            assert run_of_rank.seen == shares(rank // 2)


def test_synchronous_replicas_equal_one_device_with_all_their_batches(replicas):
    torch.manual_seed(1)
    module = rank_runs.Remembers(NormTower()).double()
    optimizer = module.configure_optimizers()
    points = Points(38)
    row = {y: i for i, y in enumerate(points.y.tolist())}
    losses = []
    for epoch in range(REPLICA_EPOCHS):
        batches = list(zip(shares(0)[epoch], shares(1)[epoch], strict=True))
        for index, both in enumerate(batches):
            total = 0.0
            for replica, targets in enumerate(both):
                buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
                rows = [row[y] for y in targets]
                for part in (rows[: (len(rows) + 1) // 2], rows[(len(rows) + 1) // 2 :]) if len(rows) > 3 else (rows,):
                    loss = F.mse_loss(module.net(points.x[part]), points.y[part]) * len(part) / len(rows) / 2
                    (loss / 2).backward()
                    total += float(loss)
                if replica:  # the statistics of the first replica are those of the run, as with DDP
                    for name, buffer in module.named_buffers():
                        buffer.copy_(buffers[name])
            losses.append(total)
            if index % 2 or index == len(batches) - 1:
                optimizer.step()
                optimizer.zero_grad()
    for rank in replicas:
        found = rank["synchronous"]
        assert_close(found.tensors, dict(module.state_dict()), "tensors")
        assert_close(found.losses, losses, "losses")


def test_asynchronous_replicas_stay_equal(replicas):
    first = replicas[0]["asynchronous"]
    assert 0 < first.statistics["stale_share"] < 1
    assert first.statistics["max_staleness"] == 1
    for rank in replicas:
        found = rank["asynchronous"]
        assert_close(found.tensors, first.tensors, "tensors", 0.0)
        assert found.losses == first.losses
        assert found.metrics == first.metrics
