"""Norms in hooks, and clipping by them, are those of the whole model, as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_asyncpipe.integration.clipping import GlobalNorms, InstalledGradients
from tests.support.edge_norms import NORMS
from tests.support.edges import check_asynchronous, check_synchronous


@pytest.mark.parametrize("name", NORMS)
def test_synchronous_training_equals_one_device(name: str) -> None:
    check_synchronous(NORMS[name])


@pytest.mark.parametrize("name", ["norms by parameter before the step", "clipping in two steps before the step"])
def test_asynchronous_training_sees_every_batch_once(name: str) -> None:
    check_asynchronous(NORMS[name])


# Gradients in 16 bits


def installed(values: list[float], dtype: torch.dtype) -> tuple[torch.nn.Parameter, InstalledGradients, GlobalNorms]:
    parameter = torch.nn.Parameter(torch.zeros(len(values), dtype=dtype))
    gradients = InstalledGradients()
    gradients.install(parameter, torch.tensor(values))
    norms = GlobalNorms(
        {"p": parameter}, {"p"}, gradients, lambda tensor, _: tensor, torch.device("cpu"), lambda call: None
    )
    return parameter, gradients, norms


def total(norms: GlobalNorms, *gradients: Any) -> Any:
    with norms.in_hooks():
        return torch.nn.utils.get_total_norm(gradients)


def test_a_norm_is_that_of_the_float32_gradient_before_its_cast() -> None:
    parameter, gradients, norms = installed([3e5, 4e5, 1e-9], torch.float16)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [torch.inf, torch.inf, 0.0]
    assert total(norms, parameter.grad) == 5e5
    gradients.clear()
    assert total(norms, parameter.grad) == torch.inf


def test_a_gradient_that_was_changed_counts_as_it_is_and_in_float32() -> None:
    parameter, _, norms = installed([256.0] * 256 + [1.0], torch.bfloat16)
    assert parameter.grad is not None
    assert total(norms, parameter.grad).item() == pytest.approx((256**3 + 1) ** 0.5, rel=1e-7)
    parameter.grad.mul_(0.5)
    assert total(norms, parameter.grad).item() == pytest.approx((256**3 + 1) ** 0.5 / 2, rel=1e-7)
    assert total(norms, parameter.grad).dtype == torch.float32


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_norm_that_is_no_number_is_none_on_all_ranks(order: float, value: float) -> None:
    """Also where the number is another rank's: the largest of a number and of none may be the number."""
    parameter, gradients, _ = installed([1.0, value], torch.float32)
    assert parameter.grad is not None

    def all_reduce(tensor: torch.Tensor, operation: str) -> torch.Tensor:
        if operation == "sum":
            return tensor + 7.0
        other = torch.tensor([7.0, 0.0])
        return torch.where(other > tensor, other, tensor)

    norms = GlobalNorms({"p": parameter}, {"p"}, gradients, all_reduce, torch.device("cpu"), lambda call: None)
    with norms.in_hooks():
        found = torch.nn.utils.get_total_norm([parameter.grad], order)
        with pytest.raises(RuntimeError, match=rf"of all ranks is {value}, so it cannot be clipped"):
            torch.nn.utils.clip_grad_norm_([parameter], 1.0, order, error_if_nonfinite=True)
    assert repr(found.item()) == repr(value)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("given", [[], [torch.nn.Parameter(torch.zeros(2))]], ids=["no parameters", "no gradients"])
def test_a_rank_without_gradients_clips_nothing_and_says_nothing(given: list[torch.nn.Parameter]) -> None:
    elsewhere = {str(i): parameter for i, parameter in enumerate(given)}
    norms = GlobalNorms(
        elsewhere, {}, InstalledGradients(), lambda tensor, _: tensor + 4.0, torch.device("cpu"), lambda call: None
    )
    with norms.in_hooks():
        torch.nn.utils.clip_grad_value_((p for p in given), 0.1)
        torch.nn.utils.clip_grad_value_(parameters=given, clip_value=0.1, foreach=False)
        assert torch.nn.utils.clip_grad_norm_((p for p in given), max_norm=1.0) == 2.0


def test_gradients_are_clipped_by_value_where_there_are_some() -> None:
    parameter, _, norms = installed([3.0, -0.05], torch.float32)
    with norms.in_hooks():
        torch.nn.utils.clip_grad_value_([torch.nn.Parameter(torch.zeros(2)), parameter], 0.1)
        assert parameter.grad is not None
        assert parameter.grad.tolist() == pytest.approx([0.1, -0.05])
        torch.nn.utils.clip_grad_value_(parameter, 0.01)
    assert parameter.grad.tolist() == pytest.approx([0.01, -0.01])
