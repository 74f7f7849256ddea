"""Lightning's advice to synchronise what is logged stays away where all ranks log the same, and only there."""

from __future__ import annotations

import warnings

import pytest
from lightning.fabric.utilities.warnings import PossibleUserWarning

from lightning_asyncpipe.integration.advice import UnneededAdvice
from lightning_asyncpipe.integration.terminal import quieten
from tests.support.evaluated import Classifier, points, run

ADVICE = (
    "It is recommended to use `self.log('x', ..., sync_dist=True)` when logging on epoch level in distributed setting "
    "to accumulate the metric across devices."
)


@pytest.mark.parametrize(("replicas", "text", "shown"), [(1, ADVICE, 0), (2, ADVICE, 1), (1, "Something else.", 1)])
def test_the_advice_is_shown_where_it_helps(replicas, text, shown):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        advice = UnneededAdvice(replicas)
        warnings.warn(text, PossibleUserWarning, stacklevel=1)
        advice.close()
        assert len(caught) == shown
        warnings.warn(text, PossibleUserWarning, stacklevel=1)
    assert len(caught) == shown + 1


@pytest.mark.filterwarnings("ignore")
def test_a_run_leaves_the_filters_of_warnings_as_they_were():
    quieten()  # which is for good
    before = list(warnings.filters)
    run(Classifier, "emulated", ("validate", {"dataloaders": points(8), "verbose": False}))
    assert warnings.filters == before
