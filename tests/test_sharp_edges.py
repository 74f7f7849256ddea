"""What data sets and loops do in ordinary projects trains as on one device."""

from __future__ import annotations

import pytest

from tests.support.edge_data import DATA
from tests.support.edges import check_asynchronous, check_synchronous


@pytest.mark.parametrize("name", DATA)
def test_synchronous_training_equals_one_device(name):
    check_synchronous(DATA[name])


@pytest.mark.parametrize("name", DATA)
def test_asynchronous_training_sees_every_batch_once(name):
    check_asynchronous(DATA[name], same_length=name != "early stopping on a training metric")
