"""Gradients gather outside ``.grad``, in float32 at least."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from lightning_asyncpipe.runtime.gradients import (
    GradientAccumulator,
    add_sums,
    pack_gradients,
    unpack_gradients,
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_several_backwards_are_those_of_one_device(dtype):
    weight = Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
    accumulator = GradientAccumulator({"w": weight})
    for factor in (1.0, 0.5, 0.25):
        with accumulator.collecting(["w"]):
            (weight * factor).sum().backward()
        assert weight.grad is None
    total = accumulator.get("w")
    assert total.dtype is torch.promote_types(dtype, torch.float32)
    assert torch.equal(total, torch.full((2,), 1.75, dtype=total.dtype))


def test_low_precision_gradients_do_not_swallow_small_ones():
    weight = Parameter(torch.ones(1, dtype=torch.bfloat16))
    accumulator = GradientAccumulator({"w": weight})
    for factor in [256.0] + [0.5] * 8:
        with accumulator.collecting(["w"]):
            (weight * factor).sum().backward()
    assert accumulator.get("w").item() == 260.0


def test_gradients_of_stand_ins_count_for_the_parameter():
    weight = Parameter(torch.ones(2))
    stand_in = torch.full((2,), 3.0, requires_grad=True)
    accumulator = GradientAccumulator({"w": weight})
    with accumulator.collecting(["w"]):
        (weight * 2).sum().backward()
    with accumulator.collecting(["w"], {weight: stand_in}):
        (stand_in**2).sum().backward()
    assert accumulator.get("w").tolist() == [8.0, 8.0]
    assert weight.grad is None
    assert stand_in.grad is None


@pytest.mark.parametrize("stands_in", [False, True])
def test_the_gradient_of_the_last_step_is_gone_when_a_backward_makes_another(stands_in):
    weight = Parameter(torch.ones(2))
    used = torch.ones(2, requires_grad=True) if stands_in else weight
    weight.grad = torch.zeros(2)
    seen = []
    used.register_hook(lambda gradient: seen.append(weight.grad))
    with GradientAccumulator({"w": weight}).collecting(["w"], {weight: used}):
        (used * 2).sum().backward()
    assert seen == [None]


def test_a_parameter_that_no_backward_reached_has_no_sum():
    weight = Parameter(torch.ones(2))
    accumulator = GradientAccumulator({"w": weight})
    with accumulator.collecting(["w"]):
        pass
    assert accumulator.get("w") is None


def test_gradients_are_gathered_even_if_the_backward_raises():
    weight = Parameter(torch.ones(2))
    accumulator = GradientAccumulator({"w": weight})

    def backward_that_raises():
        with accumulator.collecting(["w"]):
            weight.sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        backward_that_raises()
    assert weight.grad is None
    assert accumulator.get("w").tolist() == [1.0, 1.0]


def test_packed_gradients_tell_missing_from_zero():
    weights = {
        "a": Parameter(torch.ones(2, 2)),
        "b": Parameter(torch.ones(3)),
        "c": Parameter(torch.ones(1)),
    }
    shapes = {name: weight.shape for name, weight in weights.items()}
    accumulator = GradientAccumulator(weights)
    with accumulator.collecting(["a", "b"]):
        (weights["a"].sum() + 0 * weights["b"].sum()).backward()
    sums: dict[str, torch.Tensor] = {}
    for _ in range(2):
        packed = pack_gradients(accumulator, ["a", "b", "c"], shapes, torch.float32, torch.device("cpu"))
        add_sums(sums, unpack_gradients(packed, ["a", "b", "c"], shapes))
    assert set(sums) == {"a", "b"}
    assert torch.equal(sums["a"], torch.full((2, 2), 2.0))
    assert torch.equal(sums["b"], torch.zeros(3))
