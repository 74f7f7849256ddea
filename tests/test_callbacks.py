"""Lightning's callbacks, loggers and profilers work as on one device, or say why not."""

from __future__ import annotations

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from tests.support.callback_cases import USES, observe
from tests.support.evaluated import Classifier, assert_same, points, run
from tests.support.evaluation_cases import divided
from tests.support.launch import run_ranks


@pytest.mark.parametrize("name", USES)
def test_emulated_devices_do_what_one_device_does(name, tmp_path):
    assert_same(observe(name, "emulated", tmp_path), observe(name, "one", tmp_path))


def observed_by_a_rank(directory):
    """What one of two ranks sees, as two stages and as two replicas."""
    replicas = divided("ranks", replicas=2, num_stages=1, num_microbatches=2)
    return {name: observe(name, "ranks", directory, num_stages=2) for name in USES} | {"replicas": replicas}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two ranks has seen."""
    return run_ranks(observed_by_a_rank, 2, tmp_path_factory.mktemp("ranks"), timeout=400.0)


@pytest.mark.parametrize("name", USES)
def test_ranks_do_what_one_device_does(name, ranks, tmp_path):
    expected = observe(name, "one", tmp_path)
    assert_same(ranks[0][name], expected)
    assert_same(ranks[1][name][0] if isinstance(ranks[1][name][0], tuple) else ranks[1][name], expected[0])


def test_replicas_log_and_measure_what_one_device_does(ranks):
    expected = divided("one")
    for rank in ranks:
        assert_same(rank["replicas"], expected)


@pytest.mark.parametrize(
    ("callback", "reason"),
    [(LearningRateFinder(), "Find the learning rate on one device"), (BatchSizeFinder(), "distributed strategies")],
)
def test_searches_that_need_the_whole_model_say_so(callback, reason):
    with pytest.raises(MisconfigurationException, match=reason):
        run(Classifier, "emulated", ("fit", {"train_dataloaders": points(8)}), callbacks=[callback])
