"""What data and loops do in ordinary projects trains as on one device."""

from __future__ import annotations

import pytest

import tests.support.edge_data  # noqa: F401
from tests.support.edges import SCENARIOS, assert_same, run


@pytest.mark.parametrize("name", [name for name, s in SCENARIOS.items() if s.reference != "none"])
def test_synchronous_equals_one_device(name):
    scenario = SCENARIOS[name]
    expected = run(scenario, scenario.reference)
    assert expected.losses
    assert_same(run(scenario, "emulated", max_staleness=0), expected)


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_asynchronous_trains_every_batch_once(name):
    scenario = SCENARIOS[name]
    found = run(scenario, "emulated")
    expected = run(scenario, "whole")
    assert found.progress == expected.progress
    assert len(found.losses) == len(expected.losses)
    assert found.losses[0] == pytest.approx(expected.losses[0], abs=1e-9)
    assert found.statistics["max_staleness"] <= 1
