"""What models do in ordinary projects trains as on one device: frozen, shared, written in place, normalised."""

from __future__ import annotations

import pytest

from tests.support.edge_models import MODELS
from tests.support.edge_transformers import TRANSFORMERS
from tests.support.edges import assert_same, check_asynchronous, check_synchronous, expected_of, run

STAGES = {
    "GPT-2": (2,),
    "GPT-2 with padding": (2, 3, 4),
    "BERT with its masked-language loss": (4,),
    "BERT with a classifier": (3,),
}
assert STAGES.keys() == {name for name, scenario in TRANSFORMERS.items() if scenario.reference != "none"}


@pytest.mark.parametrize("name", MODELS)
def test_synchronous_training_equals_one_device(name):
    check_synchronous(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_asynchronous_training_sees_every_batch_once(name):
    check_asynchronous(MODELS[name])


@pytest.mark.parametrize("name", STAGES)
def test_transformers_train_as_on_one_device_in_any_number_of_stages(name):
    scenario = TRANSFORMERS[name]
    expected = expected_of(scenario)
    for stages in STAGES[name]:
        assert_same(run(scenario, "emulated", num_stages=stages, max_staleness=0), expected)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_train_asynchronously(name):
    check_asynchronous(TRANSFORMERS[name])
