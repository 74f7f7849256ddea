"""Gradients and weights move between hosts of a stage, and only between them; nothing is copied that need not be."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.runtime.exchange import REDUCE, WeightExchange
from lightning_asyncpipe.runtime.loopback import LoopbackNetwork
from lightning_asyncpipe.runtime.ownership import ParameterInfo, assign
from lightning_asyncpipe.runtime.wire import Message, MessageKey

SHAPES = {"a": torch.Size([2, 3]), "b": torch.Size([4]), "unused": torch.Size([2])}


class Sent:
    """A transport that takes down what is sent, and has a message for whoever asks."""

    def __init__(self, rank: int, other: Tensor | None = None) -> None:
        self.rank = rank
        self.sent: list[tuple[int, MessageKey, Tensor]] = []
        self.other = other

    def send(self, peer: int, key: MessageKey, tensor: Tensor, fingerprint: int = 0) -> None:
        self.sent.append((peer, key, tensor))

    def take(self, key: MessageKey) -> Message:
        return Message(self.other, 0, False)


def exchange(rank: int, pipelines: int, transport: Sent) -> tuple[WeightExchange, dict[str, Parameter]]:
    """A rank of two that hosts stage 0, with or without the other one."""
    placement = Placement(2, pipelines)
    infos = [ParameterInfo(name, shape.numel(), torch.float32, True, (0,)) for name, shape in SHAPES.items()]
    parameters = {name: Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    return WeightExchange(rank, placement, 1, assign(infos, placement), parameters, transport), parameters


def gather(weights: WeightExchange, parameters: dict[str, Parameter], value: float) -> None:
    with weights.accumulator.collecting(["a", "b"]):
        (value * (parameters["a"].sum() + parameters["b"].sum())).backward()


def test_the_only_host_of_a_stage_sends_nothing_and_copies_no_gradient() -> None:
    transport = Sent(1)
    weights, parameters = exchange(1, 1, transport)
    gather(weights, parameters, 2.0)
    totals = {name: weights.accumulator.get(name) for name in ("a", "b")}
    weights.reduce(0, 0)
    sums = weights.collect()
    assert {name: sums[name] is totals[name] for name in sums} == {"a": True, "b": True}
    weights.stepped()
    weights.publish(1)
    weights.update()
    assert transport.sent == []
    assert weights.accumulator.get("a") is None


def test_sums_are_made_in_place_and_what_was_sent_stays_as_it_was() -> None:
    first = Sent(0)
    weights, parameters = exchange(0, 2, first)
    gather(weights, parameters, 2.0)
    mine = weights.accumulator.get("a")
    weights.reduce(0, 0)
    [(peer, key, message)] = first.sent
    assert (peer, key.kind, mine is not None) == (1, REDUCE, True)
    # The first rank owns "a", and "b" went to the second; both can still be looked at until the window ends.
    assert weights.accumulator.get("a") is mine
    sent = weights.accumulator.get("b")
    assert sent is not None
    assert sent.untyped_storage().data_ptr() == message.untyped_storage().data_ptr()
    assert sent.tolist() == [2.0] * 4

    second = Sent(1, message.clone())
    others, copies = exchange(1, 2, second)
    gather(others, copies, 3.0)
    others.reduce(0, 0)
    [(_, _, to_first)] = [entry for entry in second.sent if entry[0] == 0]
    kept = to_first.clone()
    first.other = to_first.clone()
    sums = weights.collect()
    assert sums["a"] is mine
    assert sums["a"].tolist() == [[5.0] * 3] * 2
    assert "unused" not in sums
    assert others.collect()["b"].tolist() == [5.0] * 4
    assert torch.equal(to_first, kept)


def test_hosts_get_equal_weights_over_a_real_network() -> None:
    network = LoopbackNetwork(2)
    ranks = [exchange(rank, 2, network.transport(rank)) for rank in range(2)]  # type: ignore[arg-type]
    for me, (weights, _) in enumerate(ranks):
        keys = [key._replace(batch=7) for key in weights.published_by(1 - me)]
        network.transport(me).expect(1 - me, keys)
    for me, (weights, parameters) in enumerate(ranks):
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.fill_(10.0 + me)
        weights.stepped()
        weights.publish(7)
    for weights, _ in ranks:
        weights.update()
    for name in SHAPES:
        assert torch.equal(ranks[0][1][name], ranks[1][1][name])
