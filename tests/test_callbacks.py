"""Lightning's callbacks, loggers and profilers work as on one device, or say why not."""

from __future__ import annotations

import functools
import os
import warnings
from datetime import timedelta

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.loggers import TensorBoardLogger

from tests.support.callback_cases import USES, averaged_and_resumed, observe
from tests.support.evaluated import Classifier, Takes, assert_same, points, run
from tests.support.evaluation_cases import Logs, divided
from tests.support.launch import run_ranks

IN_PARTS = [{"num_pipelines": 1}, {"num_pipelines": 1, "num_microbatches": 2, "max_staleness": 1}]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """What is seen of a use on one device."""
    directory = tmp_path_factory.mktemp("one")
    return functools.cache(lambda name: observe(name, "one", directory))


@pytest.mark.parametrize("name", USES)
def test_emulated_devices_do_what_one_device_does(name, one_device, tmp_path):
    assert_same(observe(name, "emulated", tmp_path), one_device(name))


def observed_by_a_rank(directory):
    """What one of two ranks sees, as two stages and as two replicas."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {name: observe(name, "ranks", directory, num_stages=2) for name in USES}
    found["warnings"] = [str(warning.message) for warning in caught]
    found["by the clock"] = validations_by_the_clock()
    found["averaged"] = [averaged_and_resumed("ranks", directory / str(i), **plan) for i, plan in enumerate(IN_PARTS)]
    found["nodes"] = on_a_node_of_its_own()
    found["replicas"] = divided("ranks", replicas=2, num_stages=1, num_microbatches=2)
    return found


def validations_by_the_clock():
    """How often a rank validates for which it is always time, or never."""
    interval = timedelta(0) if os.environ["LOCAL_RANK"] == "0" else timedelta(days=1)
    loaders = {"train_dataloaders": points(20), "val_dataloaders": points(8)}
    takes = Takes()
    run(
        Classifier,
        "ranks",
        ("fit", loaders),
        strategy={"num_stages": 2},
        callbacks=[takes],
        val_check_interval=interval,
    )
    return [entry[1] for entry in takes.seen if entry[0] == "validation" and not entry[2]]


def on_a_node_of_its_own():
    """What a rank sees that is the only one of its machine."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("NODE_RANK", os.environ["LOCAL_RANK"])
        environment.setenv("LOCAL_RANK", "0")
        takes = Takes()
        loaders = {"train_dataloaders": points(20), "val_dataloaders": points(8)}
        run(
            Classifier, "ranks", ("fit", loaders), callbacks=[takes], strategy={"num_stages": 2}, devices=1, num_nodes=2
        )
        return takes.seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks has seen."""
    return run_ranks(observed_by_a_rank, 2, tmp_path_factory.mktemp("ranks"), timeout=400.0)


@pytest.mark.parametrize("name", USES)
def test_ranks_do_what_one_device_does(name, ranks, one_device):
    expected = one_device(name)
    assert_same(ranks[0][name], expected)
    assert_same(ranks[1][name][0] if isinstance(ranks[1][name][0], tuple) else ranks[1][name], expected[0])


def test_replicas_log_and_measure_what_one_device_does(ranks):
    expected = divided("one")
    for rank in ranks:
        assert_same(rank["replicas"], expected)


def test_each_rank_averages_what_it_owns_also_after_a_resume(ranks, tmp_path):
    synchronous = averaged_and_resumed("one", tmp_path / "one")
    asynchronous = averaged_and_resumed("emulated", tmp_path / "emulated", **IN_PARTS[1])
    for plan, (whole, resumed, names) in enumerate((synchronous, asynchronous)):
        assert_same(resumed, whole)
        for rank in ranks:
            assert_same(rank["averaged"][plan][:2], [whole, whole])
        held = [rank["averaged"][plan][2] for rank in ranks]
        assert all(held)
        assert sorted([*held[0], *held[1]]) == sorted(names)


def test_ranks_of_several_machines_do_what_one_device_does(ranks):
    takes = Takes()
    loaders = {"train_dataloaders": points(20), "val_dataloaders": points(8)}
    run(Classifier, "one", ("fit", loaders), callbacks=[takes])
    for rank in ranks:
        assert_same(rank["nodes"], takes.seen)


def test_ranks_validate_when_it_is_time_on_the_first(ranks):
    assert [rank["by the clock"] for rank in ranks] == [[1, 2, 3, 4, 5]] * 2


def test_nobody_is_advised_to_synchronise_what_all_ranks_share(ranks):
    assert [message for rank in ranks for message in rank["warnings"] if "sync_dist" in message] == []


def written(directory):
    """What a TensorBoardLogger has written: for each name the steps and the values."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    events = accumulator(str(directory)).Reload()
    return {name: [(e.step, round(e.value, 5)) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_gets_each_value_once(tmp_path):
    pytest.importorskip("tensorboard")
    assert written(log_to_tensorboard("emulated", tmp_path)) == written(log_to_tensorboard("one", tmp_path))
    run_ranks(log_to_tensorboard, 2, "ranks", tmp_path)
    assert written(tmp_path / "ranks") == written(tmp_path / "one")


def log_to_tensorboard(how, directory):
    loaders = {"train_dataloaders": points(20), "val_dataloaders": points(14, 4, seed=1)}
    logger = TensorBoardLogger(directory, how, "", sub_dir="")
    run(Logs, how, ("fit", loaders), strategy={"num_stages": 2}, logger=logger, log_every_n_steps=2, max_epochs=2)
    return directory / how


@pytest.mark.parametrize(
    ("callback", "reason"),
    [(LearningRateFinder(), "Find the learning rate on one device"), (BatchSizeFinder(), "distributed strategies")],
)
def test_searches_that_need_the_whole_model_say_so(callback, reason):
    with pytest.raises(MisconfigurationException, match=reason):
        run(Classifier, "emulated", ("fit", {"train_dataloaders": points(8)}), callbacks=[callback])
