"""Models that were written without this package in mind train unmodified."""

from __future__ import annotations

import re
from statistics import fmean

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from tests.support.edge_projects import CARRIES, PROJECTS
from tests.support.edges import check_asynchronous, check_synchronous, run


@pytest.mark.parametrize("name", PROJECTS)
def test_synchronous_training_equals_one_device(name):
    check_synchronous(PROJECTS[name])


@pytest.mark.parametrize("name", PROJECTS)
def test_asynchronous_training_learns(name):
    scenario = PROJECTS[name]
    found = check_asynchronous(scenario)
    if scenario.strategy["num_stages"] > 2:  # two devices wait for nobody
        assert found.statistics["stale_microbatches"]
    batches = len(found.losses) // found.progress["current_epoch"]
    assert fmean(found.losses[-batches:]) < fmean(found.losses[:batches])


def test_only_the_adapters_of_a_frozen_model_change():
    scenario = PROJECTS["adapters"]
    torch.manual_seed(1)  # as `run` does
    before, after = scenario.module().double().state_dict(), run(scenario, "emulated").tensors
    changed = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    assert changed == {name for name in after if ".c_attn.down." in name or ".c_attn.up." in name}


def test_a_demonstration_of_one_layer_has_no_third_stage():
    with pytest.raises(MisconfigurationException, match=r"3 stages were asked for.*can be cut into 2 at most"):
        run(PROJECTS["BoringModel"], "emulated", num_stages=3)


def test_a_state_that_is_carried_from_batch_to_batch_is_named():
    with (
        pytest.warns(UserWarning, match=re.escape("`training_step` changes `self.hidden`")),
        pytest.raises(MisconfigurationException, match=r"something else each time .* state that it keeps"),
    ):
        run(CARRIES, "emulated")
