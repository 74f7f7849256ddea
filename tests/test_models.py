"""What models do in ordinary projects trains as on one device: freezing, sharing, randomness, writing in place."""

from __future__ import annotations

import pytest

from tests.support.edge_data import sized
from tests.support.edge_models import MODELS, TRANSFORMERS, RemembersMasks
from tests.support.edges import Scenario, assert_same, check_asynchronous, check_synchronous, run

DETERMINISTIC = [name for name, scenario in MODELS.items() if scenario.reference != "none"]
RANDOM = [name for name, scenario in MODELS.items() if scenario.reference == "none"]


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_synchronous_training_equals_one_device(name):
    check_synchronous(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_asynchronous_training_sees_every_batch_once(name):
    check_asynchronous(MODELS[name])


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_train_in_other_numbers_of_stages(name, stages):
    scenario = MODELS[name]
    expected = run(scenario, scenario.reference)
    assert_same(run(scenario, "emulated", num_stages=stages, max_staleness=0), expected)


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_do_not_depend_on_stages_and_pipelines(name):
    scenario = MODELS[name]
    expected = run(scenario, "emulated", num_stages=1, max_staleness=0)
    for stages, pipelines in ((2, 1), (3, 3), (4, 2)):
        found = run(scenario, "emulated", num_stages=stages, num_pipelines=pipelines, max_staleness=0)
        assert_same(found, expected)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("staleness", [0, 1])
def test_what_is_run_again_draws_what_it_drew(inside, staleness):
    scenario = Scenario(lambda: RemembersMasks(inside), lambda: sized(8, 8, 5, 8))
    found = run(scenario, "emulated", max_staleness=staleness)
    assert found.seen == [2] * (4 * 16)  # four blocks, sixteen micro-batches; forward and backward
