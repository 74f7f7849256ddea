"""Random numbers depend on the seed, the step and the micro-batch alone, not on how the pipelines are laid out."""

from __future__ import annotations

import pytest

from tests.support.edge_basics import sized
from tests.support.edge_random import RANDOM, RemembersMasks
from tests.support.edge_transformers import TRANSFORMERS
from tests.support.edges import Scenario, assert_same, check_asynchronous, run

SCENARIOS = {**RANDOM, **{name: s for name, s in TRANSFORMERS.items() if s.reference == "none"}}


@pytest.mark.parametrize("name", SCENARIOS)
def test_training_does_not_depend_on_stages_and_pipelines(name):
    scenario = SCENARIOS[name]
    expected = run(scenario, "emulated", num_stages=1, max_staleness=0)
    for stages, pipelines in ((2, 1), (3, 3), (4, 2)):
        found = run(scenario, "emulated", num_stages=stages, num_pipelines=pipelines, max_staleness=0)
        assert_same(found, expected)


@pytest.mark.parametrize("name", RANDOM)
def test_asynchronous_training_sees_every_batch_once(name):
    check_asynchronous(RANDOM[name])


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("staleness", [0, 1])
def test_what_is_run_again_draws_what_it_drew(inside, staleness):
    scenario = Scenario(lambda: RemembersMasks(inside), lambda: sized(8, 8, 5, 8))
    found = run(scenario, "emulated", max_staleness=staleness)
    assert found.seen == [2] * (4 * 16)  # four blocks, sixteen micro-batches; forward and backward
