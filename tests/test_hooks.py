"""What modules do around the step works as on one device: outputs, hooks, clipping, schedules, logging."""

from __future__ import annotations

import logging

import pytest

from tests.support.edge_hooks import CHANGES, HOOKS
from tests.support.edges import check_asynchronous, check_synchronous, run


@pytest.mark.parametrize("name", HOOKS)
def test_synchronous_training_equals_one_device(name):
    check_synchronous(HOOKS[name])


@pytest.mark.parametrize("name", CHANGES)
def test_synchronous_steps_read_what_hooks_between_accumulated_batches_wrote(name):
    check_synchronous(CHANGES[name])


@pytest.mark.parametrize("name", HOOKS)
def test_asynchronous_training_sees_every_batch_once(name):
    check_asynchronous(HOOKS[name])


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("a start of batches that is overridden", "StartsBatches.on_train_batch_start"),
        ("a callback that starts batches", "StartsBatchesFromOutside.on_train_batch_start"),
    ],
)
def test_no_forward_runs_before_an_overridden_start_of_its_batch(name, hook, caplog):
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        found = run(HOOKS[name], "emulated")
    assert found.statistics["stale_microbatches"] == 0
    assert len([record for record in caplog.records if hook in record.getMessage()]) == 1
