"""Weights that a rank does not hold cannot be taken for weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_asyncpipe.integration.parts import explain
from lightning_asyncpipe.runtime.hollow import hollow, is_hollow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_what_is_computed_from_them_is_no_number(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
    hollow(parameter)
    assert is_hollow(parameter)
    assert parameter.shape == shape
    assert parameter.detach().isnan().all()
    assert parameter.untyped_storage().nbytes() <= 3 * parameter.element_size()


def test_integers_are_zero() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    hollow(parameter)
    assert is_hollow(parameter)
    assert parameter.tolist() == [0, 0, 0]


def test_a_write_to_them_is_explained() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    hollow(module[1].weight)
    with pytest.raises(RuntimeError) as caught, torch.no_grad():
        module[1].weight.lerp_(module[0].weight, 0.5)
    explain(caught.value, module)
    assert "in the place of `1.weight` (1 in all)" in str(caught.value)
    assert "use the callback `EMAWeightAveraging`" in str(caught.value)


def test_other_errors_are_left_alone() -> None:
    module = nn.Linear(2, 2)
    for error in (RuntimeError("other"), ValueError("more than one element")):
        before = error.args
        explain(error, module)
        assert error.args == before
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(()).expand(3).add_(1.0)
    before = caught.value.args
    explain(caught.value, module)
    assert caught.value.args == before
