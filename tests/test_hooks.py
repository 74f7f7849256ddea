"""What modules do around the step works as on one device: outputs, hooks, clipping, schedules, logging."""

from __future__ import annotations

import pytest

from tests.support.edge_hooks import HOOKS
from tests.support.edges import check_asynchronous, check_synchronous


@pytest.mark.parametrize("name", HOOKS)
def test_synchronous_training_equals_one_device(name):
    check_synchronous(HOOKS[name])


@pytest.mark.parametrize("name", HOOKS)
def test_asynchronous_training_sees_every_batch_once(name):
    check_asynchronous(HOOKS[name])
