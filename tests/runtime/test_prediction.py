"""Early forwards run on what is known of the coming update: momentum, and the gradient that the device has gathered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_asyncpipe._private import TorchDispatchMode
from lightning_asyncpipe.runtime import adam, packing
from lightning_asyncpipe.runtime.gradients import GradientAccumulator
from lightning_asyncpipe.runtime.prediction import Prediction, refresh_is_due
from lightning_asyncpipe.runtime.update_rules import UpdateRules, is_known

Make = Callable[[list[Parameter]], Optimizer]
MUON = getattr(torch.optim, "Muon", None)
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, betas=(0.8, 0.9), weight_decay=0.0),
    "adam with amsgrad": lambda parameters: Adam(parameters, lr=0.01, betas=(0.8, 0.9), amsgrad=True),
    "adamw that maximizes": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.0, maximize=True),
    "adamw with weight decay": lambda parameters: AdamW(parameters, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1),
    "adam with weight decay": lambda parameters: Adam(parameters, lr=0.01, betas=(0.8, 0.9), weight_decay=0.01),
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "sgd with dampening": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "plain sgd": lambda parameters: SGD(parameters, lr=0.1),
}
STEPS = 21  # what is sent every so many steps is one step old then


class Training:
    """One parameter that a real optimizer steps; predicted as by its owner, or from what an owner sends."""

    def __init__(
        self, make: Make, clipped: float = 1.0, owned: bool = True, dtype: torch.dtype = torch.float64
    ) -> None:
        torch.manual_seed(0)
        self.parameter = Parameter(torch.randn(4, 3, dtype=dtype))
        self.clipped = clipped
        self.optimizer = make([self.parameter])
        parameters = {"w": self.parameter}
        rules = UpdateRules(parameters, {"w": (self.optimizer, 0)})
        rate = self.optimizer.param_groups[0]
        self.early = Prediction(parameters, [["w"]], lambda _: float(rate["lr"]), rules, ["w"] if owned else [])
        self.gathered = GradientAccumulator(parameters)

    def gather(self, gradient: Tensor, share: float = 1.0) -> None:
        with self.gathered.collecting(["w"]):
            (self.parameter * gradient).sum().real.backward()
        self.gathered.cover(["w"], share)

    def step(self, gradient: Tensor) -> None:
        self.gather(gradient)
        self.early.rotate()
        self.early.step_follows()
        self.early.before_update(["w"])
        gradients = {"w": self.gathered.get("w")}
        self.early.collected(gradients)
        self.gathered.clear()
        self.parameter.grad = gradients["w"] * self.clipped
        self.optimizer.step()
        self.early.stepped()
        self.parameter.grad = None

    def train(self, steps: int = STEPS) -> Training:
        for step in range(steps):
            self.step(gradient_of(step))
        return self

    def predicted(self) -> Tensor:
        [leaf] = self.early.leaves(0, self.gathered).values()
        return leaf.detach().clone()


def kept(early: Prediction) -> int:
    """Elements of all tensors that are kept between steps, beside single numbers."""
    held = [value for value in vars(early).values() if isinstance(value, dict)]
    tensors = [each for value in held for each in value.values() if isinstance(each, Tensor)]
    return sum(tensor.numel() for tensor in tensors if tensor.dim() and not isinstance(tensor, Parameter))


def gradient_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64) + 0.5


def error(predicted: Tensor, before: Tensor, after: Tensor) -> float:
    """Of a predicted update, over the length of the true one."""
    return float((predicted - after).norm() / (after - before).norm())


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("clipped", [1.0, 0.1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_all_of_the_gradient_the_update_is_known(name: str, clipped: float, owned: bool) -> None:
    training = Training(OPTIMIZERS[name], clipped, owned).train()
    before = training.parameter.detach().clone()
    training.gather(gradient_of(99))
    predicted = training.predicted()
    training.gathered.clear()
    training.step(gradient_of(99))
    # Elsewhere AdamW's v grows by a tenth of the new square, in the part of the momentum as well.
    exact = owned or "adam" not in name
    assert error(predicted, before, training.parameter.detach()) < (1e-12 if exact else 0.3)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "adam" in name])
def test_an_owner_keeps_no_copy_of_what_adam_steps(name: str) -> None:
    owner, other = (Training(OPTIMIZERS[name], owned=owned).train(3).early for owned in (True, False))
    assert (kept(owner), kept(other)) == (0, 2 * 4 * 3)


def test_a_large_parameter_is_predicted_in_pieces_as_it_would_be_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = []
    for elements in (1, 6, 7, 100):
        monkeypatch.setitem(adam._PIECE, "cpu", elements)
        training = Training(OPTIMIZERS["adamw with weight decay"]).train(3)
        training.gather(gradient_of(99))
        predicted.append(training.predicted())
    assert all(torch.equal(each, predicted[0]) for each in predicted)


def test_weights_in_16_bits_are_predicted_from_gradients_in_32() -> None:
    training = Training(OPTIMIZERS["adamw"], dtype=torch.bfloat16)
    training.parameter.grad = gradient_of(0).bfloat16()
    training.optimizer.step()
    predicted = adam.next_weights(
        training.parameter.detach(),
        training.optimizer.param_groups[0],
        training.optimizer.state[training.parameter],
        gradient_of(1).float(),
        torch.tensor(1.0),
        decoupled=True,
    )
    training.parameter.grad = gradient_of(1).bfloat16()
    training.optimizer.step()
    torch.testing.assert_close(predicted, training.parameter.detach(), rtol=2**-7, atol=1e-3)


def test_a_part_of_the_gradient_stands_for_the_whole() -> None:
    whole, part = (Training(OPTIMIZERS["adamw"]).train() for _ in range(2))
    whole.gather(gradient_of(99))
    part.gather(gradient_of(99) / 4, share=0.25)
    torch.testing.assert_close(whole.predicted(), part.predicted())


def test_with_no_gradient_yet_the_last_update_is_repeated() -> None:
    training = Training(OPTIMIZERS["adamw"]).train(3)
    before = training.parameter.detach().clone()
    training.step(gradient_of(3))
    after = training.parameter.detach()
    torch.testing.assert_close(training.predicted(), after + (after - before))


def test_a_gradient_that_has_overflowed_is_left_out() -> None:
    training = Training(OPTIMIZERS["adamw"], owned=False).train(3)
    repeated = training.predicted()
    training.early.rotate()
    gradient = gradient_of(99)
    gradient[1, 1], gradient[2, 2] = float("inf"), float("nan")
    training.gather(gradient)
    predicted = training.predicted()
    assert bool(predicted.isfinite().all())
    assert (predicted == repeated).nonzero().tolist() == [[1, 1], [2, 2]]


def test_a_complex_gradient_that_has_overflowed_is_left_out() -> None:
    training = Training(OPTIMIZERS["sgd"], dtype=torch.complex128).train(3)
    repeated = training.predicted()
    training.early.rotate()
    gradient = gradient_of(99).to(torch.complex128)
    gradient[1, 1] = complex(float("nan"), 1.0)
    training.gather(gradient)
    assert (training.predicted() == repeated).nonzero().tolist() == [[1, 1]]


def test_where_a_gradient_has_overflowed_an_owner_takes_it_for_zero() -> None:
    predicted = []
    for overflowed in (True, False):
        training = Training(OPTIMIZERS["adamw with weight decay"]).train(3)
        gradient = gradient_of(99)
        gradient[1, 1], gradient[2, 2] = (float("inf"), float("nan")) if overflowed else (0.0, 0.0)
        training.gather(gradient)
        predicted.append(training.predicted())
    assert torch.equal(*predicted)


@pytest.mark.parametrize("owned", [True, False])
def test_an_element_that_has_had_no_gradient_moves_no_further_than_the_optimizer_would_move_it(owned: bool) -> None:
    training = Training(OPTIMIZERS["adamw"], owned=owned)
    gradient = torch.zeros(4, 3, dtype=torch.float64)
    gradient[0, 0] = 1.0
    for _ in range(STEPS):
        training.step(gradient)
    training.gather(torch.full_like(gradient, 0.1))
    moved = (training.predicted() - training.parameter.detach()).abs()
    assert float(moved.max()) < 0.01 * (0.8 + 0.2 / 0.1**0.5)


@pytest.mark.skipif(MUON is None, reason="this torch has no Muon")
def test_a_prediction_for_muon_is_closer_than_the_last_update() -> None:
    errors = []
    for informed in (True, False):
        training = Training(lambda parameters: MUON(parameters, lr=0.02, momentum=0.9)).train()
        before = training.parameter.detach().clone()
        if informed:
            training.gather(gradient_of(99))
        predicted = training.predicted()
        training.gathered.clear()
        training.step(gradient_of(99))
        errors.append(error(predicted, before, training.parameter.detach()))
    assert errors[0] < 0.9 * errors[1]


@pytest.mark.skipif(MUON is None, reason="this torch has no Muon")
def test_noise_of_a_half_of_the_gradient_takes_nothing_of_the_signal_in_a_prediction_for_muon() -> None:
    training = Training(lambda parameters: MUON(parameters, lr=0.01, momentum=0.9, weight_decay=0.0))
    signal = gradient_of(-1)
    predicted = made = 0.0
    for step in range(400):
        halves = [0.3 * signal + gradient_of(2 * step + half) - 0.5 for half in range(2)]
        training.gather(halves[0] / 2, share=0.5)
        before = training.parameter.detach().clone()
        told = training.predicted() - before
        training.step(halves[1] / 2)
        if step >= 20:
            predicted -= float((told * signal).sum())
            made -= float(((training.parameter.detach() - before) * signal).sum())
    assert predicted == pytest.approx(made, rel=0.03)


def test_after_a_flush_nothing_is_left_of_the_updates_before_it() -> None:
    training = Training(OPTIMIZERS["sgd"]).train(3)
    training.gather(gradient_of(99))
    training.early.flush()
    assert torch.equal(training.predicted(), training.parameter.detach())


def test_what_an_owner_sends_tells_another_device_the_preconditioner() -> None:
    owner, informed = Training(OPTIMIZERS["adamw"]), Training(OPTIMIZERS["adamw"], owned=False)
    parameter = Parameter(owner.parameter.detach().clone())
    rules = UpdateRules({"w": parameter}, {"w": (owner.optimizer, 0)})
    other = Prediction({"w": parameter}, [["w"]], lambda _: 0.01, rules)
    for step in range(6):
        owner.step(gradient_of(step))
        informed.step(gradient_of(step))
        other.rotate()
        other.step_follows()
        other.before_update(["w"])
        other.arrived(["w"], torch.cat([torch.zeros(0, dtype=torch.float64), *owner.early.companions(["w"])]))
        with torch.no_grad():
            parameter.copy_(owner.parameter)
        informed.gather(gradient_of(50 + step), 0.5)
        [leaf] = other.leaves(0, informed.gathered).values()
        assert torch.equal(leaf, informed.predicted())
        informed.gathered.clear()


def test_preconditioners_are_sent_often_at_first_and_rarely_later() -> None:
    assert [steps for steps in range(1, 62) if refresh_is_due(steps)] == [1, 2, 4, 8, 16, 20, 40, 60]


def test_only_optimizers_whose_step_is_theirs_are_known() -> None:
    class Own(AdamW):
        pass

    weights = [Parameter(torch.ones(2))]
    known = {type(o).__name__: is_known(o) for o in (AdamW(weights), SGD(weights, lr=1), Own(weights))}
    assert known == {"AdamW": True, "SGD": True, "Own": False}
    assert not is_known(torch.optim.Adagrad(weights))


class Many:
    """Parameters of all kinds, each group with settings of its own, predicted as by their owner or elsewhere."""

    def __init__(self, kind: type[Optimizer], owned: bool, copies: int = 1) -> None:
        torch.manual_seed(0)
        shapes = [(3,), (2, 3), (), (1,), (2, 3, 2, 2), (0,), (5,), (4,)] * copies
        dtypes = [torch.float64] * 6 + [torch.bfloat16, torch.float64]
        self.parameters = {f"{i}": Parameter(torch.randn(shape, dtype=dtypes[i % 8])) for i, shape in enumerate(shapes)}
        self.parameters["4"].data = self.parameters["4"].data.to(memory_format=torch.channels_last)
        if kind is SGD:
            self.parameters["complex"] = Parameter(torch.randn(3, dtype=torch.complex128))
        names = list(self.parameters)
        groups = [
            {"params": [self.parameters[name] for name in names[1::2]]},
            {"params": [self.parameters[name] for name in names[::2]], "lr": 0.02, "maximize": True},
        ]
        self.optimizer = kind(groups, lr=0.01, weight_decay=0.1, **({"momentum": 0.9} if kind is SGD else {}))
        places = {name: (self.optimizer, 1 - i % 2) for i, name in enumerate(names)}

        def rate(name: str) -> float:
            return float(self.optimizer.param_groups[places[name][1]]["lr"])

        rules = UpdateRules(self.parameters, places)
        self.early = Prediction(self.parameters, [names], rate, rules, names if owned else [])
        for step in range(3):
            self.step(late="7" if step == 0 else "")
        self.gathered = GradientAccumulator(self.parameters)
        for i, name in enumerate(names):
            if i != 1:
                with self.gathered.collecting([name]):
                    (self.parameters[name] * self.gradient(name)).sum().abs().backward()
        self.gathered.cover(names[:-1], 0.5)
        overflowed = self.gathered.get("0")
        assert overflowed is not None
        overflowed[0] = float("inf")

    def gradient(self, name: str) -> Tensor:
        return torch.randn_like(self.parameters[name])

    def step(self, late: str) -> None:
        """One step, each gradient clipped in another way; `late` gets its first gradient some other time."""
        self.early.step_follows()
        self.early.before_update(self.parameters)
        gradients = {name: self.gradient(name) for name in self.parameters if name != late}
        self.early.collected(gradients)
        for i, (name, gradient) in enumerate(gradients.items()):
            self.parameters[name].grad = gradient.to(self.parameters[name].dtype) / (i + 1)
        self.optimizer.step()
        self.early.stepped()
        self.optimizer.zero_grad()

    def predicted(self) -> list[Tensor]:
        self.early.rotate()
        return list(self.early.leaves(0, self.gathered).values())


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("kind", [AdamW, Adam, SGD])
def test_small_parameters_are_predicted_together_as_they_would_be_alone(
    kind: type[Optimizer], owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = Many(kind, owned)
    together = many.predicted()
    monkeypatch.setattr(packing, "SMALL", -1)
    alone = many.predicted()
    for one, other, parameter in zip(together, alone, many.parameters.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        assert one.stride() == other.stride() == parameter.stride()
        assert bool(one.isfinite().all())
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("kind", [AdamW, SGD])
def test_one_more_small_parameter_costs_few_operations(kind: type[Optimizer], owned: bool) -> None:
    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not any(alias.alias_info for alias in func._schema.returns):
                self.calls[str(func)] += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for copies in (2, 6):
        many = Many(kind, owned, copies)
        with Count() as count:
            many.predicted()
        counts.append(count.calls.total())
    assert (counts[1] - counts[0]) / 32 < 4


def test_complex_weights_are_predicted_from_their_momentum_where_adam_steps_them() -> None:
    for owned in (True, False):
        training = Training(OPTIMIZERS["adamw"], owned=owned, dtype=torch.complex128)
        for step in range(3):
            training.step(gradient_of(step).to(torch.complex128))
        training.gather(gradient_of(99).to(torch.complex128))
        moved = training.predicted() - training.parameter.detach()
        assert 0 < float(moved.abs().max()) < 0.02
