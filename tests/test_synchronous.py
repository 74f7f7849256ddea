"""With ``max_staleness=0`` the pipelines compute what one device computes that accumulates the same micro-batches."""

from __future__ import annotations

import pytest
import torch

from tests.support.fit import clone, parameters_of, reference_fit
from tests.support.models import GPT, LanguageModel, loader
from tests.support.reference import largest_difference, train_one_device

STEPS = 20
GRID = [(d, n, m) for d in (1, 2, 3, 4) for n in sorted({1, min(2, d), d}) for m in sorted({1, d, 2 * d + 1})]


def module_and_loader(batches: int = STEPS, batch_size: int = 10):
    torch.manual_seed(1)
    return LanguageModel(GPT()), loader(batches * batch_size, batch_size)


@pytest.mark.parametrize(("d", "n", "m"), GRID)
def test_equals_one_device(d, n, m):
    module, batches = module_and_loader()
    accumulate, clip = (3, 0.5) if (d + n + m) % 2 else (1, None)
    expected = clone(module)
    losses = train_one_device(expected, batches, m, accumulate, clip)
    actual = clone(module)
    _, found = reference_fit(
        actual,
        batches,
        d,
        {"num_pipelines": n, "num_microbatches": m, "max_staleness": 0, "split_backward": (d + m) % 3 > 0},
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
    )
    assert largest_difference(parameters_of(actual), parameters_of(expected)) < 1e-9
    assert found == pytest.approx(losses, abs=1e-9)
