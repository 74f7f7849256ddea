"""What data, loops and models do in ordinary projects trains as on one device."""

from __future__ import annotations

import pytest

import tests.support.edge_data
import tests.support.edge_models  # noqa: F401
from tests.support.edges import SCENARIOS, assert_same, run

DETERMINISTIC = [name for name, scenario in SCENARIOS.items() if scenario.reference != "none"]
RANDOM = [name for name, scenario in SCENARIOS.items() if scenario.reference == "none"]


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_synchronous_equals_one_device(name):
    scenario = SCENARIOS[name]
    expected = run(scenario, scenario.reference)
    assert expected.losses
    assert_same(run(scenario, "emulated", max_staleness=0), expected)


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_do_not_depend_on_stages_and_pipelines(name):
    scenario = SCENARIOS[name]
    expected = run(scenario, "emulated", num_stages=1, max_staleness=0)
    for stages, pipelines in ((2, 1), (3, 3), (4, 2)):
        found = run(scenario, "emulated", num_stages=stages, num_pipelines=pipelines, max_staleness=0)
        assert_same(found, expected)


def test_checkpointing_changes_nothing():
    expected = run(SCENARIOS["the same blocks without checkpointing"], "emulated")
    for where in ("inside", "outside"):
        found = run(SCENARIOS[f"checkpointed blocks with dropout, {where}"], "emulated")
        assert_same(found, expected)


STOPS_BY_LOSS = "early stopping on a training metric"


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != STOPS_BY_LOSS])
def test_asynchronous_training_sees_every_batch_once(name):
    scenario = SCENARIOS[name]
    found = run(scenario, "emulated")
    if scenario.reference == "none":
        expected = run(scenario, "emulated", num_stages=1)
    else:
        expected = run(scenario, scenario.reference)
    assert found.progress == expected.progress
    assert len(found.losses) == len(expected.losses)
    assert found.losses[0] == pytest.approx(expected.losses[0], abs=1e-9)
    assert found.statistics["max_staleness"] <= 1
