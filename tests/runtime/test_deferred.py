"""Models that are built without memory get the values that they would have had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.runtime import deferred
from lightning_asyncpipe.runtime.deferred import Recording, unfilled


class Mixed(nn.Module):
    """Fills its tensors in the ways in which people do."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.embedding = nn.Embedding(5, 6, padding_idx=2)
        self.attention = nn.MultiheadAttention(6, 2)
        self.recurrent = nn.LSTM(6, 6)
        self.tied = nn.Linear(6, 5)
        self.tied.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor([0.5, 2.0]))
        self.free = nn.Parameter(torch.randn(3, 4) * 0.1 + 1)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4, dtype=torch.bool)))
        self.register_buffer("frequencies", 1.0 / 10_000 ** (torch.arange(0, 6, 2).float() / 6))
        self.register_buffer("table", torch.tensor([[1, 2], [3, 4]]), persistent=False)
        nn.init.orthogonal_(self.lower.weight)
        nn.init.trunc_normal_(self.attention.in_proj_weight, std=0.02)
        torch.manual_seed(5)
        with torch.no_grad():
            self.tied.bias[1:3].uniform_()
            self.free[0].copy_(torch.arange(4.0))
            self.lower.bias.copy_(torch.ones(6, device="cpu"))
        self.apply(self._halve)
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.half = nn.Linear(3, 3).bfloat16()

    def _halve(self, module: nn.Module) -> None:
        if isinstance(module, nn.LSTM):
            for parameter in module.parameters():
                parameter.data.mul_(0.5)


def build(make: Any) -> tuple[nn.Module, nn.Module, Recording]:
    """The same model with values, and recorded."""
    torch.manual_seed(3)
    real = make()
    torch.manual_seed(3)
    recording = Recording()
    with recording.building():
        recorded = make()
    return real, recorded, recording


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


MODELS = {
    "mixed": Mixed,
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.PReLU()),
    "GPT-2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2)),
    "BERT": lambda: BertModel(
        BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_building_it_on_one_device(name: str) -> None:
    real, recorded, recording = build(MODELS[name])
    expected, found = all_tensors(real), all_tensors(recorded)
    assert expected.keys() == found.keys()
    state = torch.get_rng_state()
    values = {id(tensor): value for tensor, value in recording.values(list(unfilled(recorded).values()))}
    assert torch.equal(torch.get_rng_state(), state)
    for key, tensor in expected.items():
        value = values.get(id(found[key]), found[key])
        assert value.dtype == tensor.dtype, key
        assert torch.equal(value, tensor), key


@pytest.mark.parametrize("name", ["mixed", "GPT-2"])
def test_a_part_of_the_tensors_gets_the_same_values(name: str) -> None:
    real, recorded, recording = build(MODELS[name])
    expected, found = all_tensors(real), unfilled(recorded)
    for key, tensor in found.items():
        ((_, value),) = recording.values([tensor])
        assert torch.equal(value, expected[key]), key


def test_what_is_not_wanted_has_memory_only_while_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers are filled with random numbers in turn."""
    recording = Recording()
    with recording.building():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    most = 0
    run = deferred._Memory.run

    def watched(memory: Any, operation: Any) -> None:
        nonlocal most
        run(memory, operation)
        most = max(most, sum(storage.nbytes() for storage in memory._storages.values()))

    monkeypatch.setattr(deferred._Memory, "run", watched)
    assert len(recording.values([model[0].weight, model[19].weight])) == 2
    assert 2 * model[0].weight.nbytes <= most < 4 * model[0].weight.nbytes


def test_other_ranks_draw_the_same_numbers() -> None:
    _, one, first = build(Mixed)
    torch.manual_seed(99)
    second = Recording()
    with second.building():
        other = Mixed()
    second.set_states(first.states())
    for a, b in zip(unfilled(one).values(), unfilled(other).values(), strict=True):
        ((_, left),), ((_, right),) = first.values([a]), second.values([b])
        assert torch.equal(left, right)


def test_a_value_that_is_asked_for_is_worked_out() -> None:
    def make() -> nn.Module:
        rates = [float(rate) for rate in torch.linspace(0, 0.5, 3)]
        first = nn.Linear(2, 2)
        size = 3 if first.weight.sum() > 0 else 4
        return nn.Sequential(first, *map(nn.Dropout, rates), nn.Linear(2, size))

    real, recorded, recording = build(make)
    assert str(real) == str(recorded)
    for tensor, value in recording.values(list(unfilled(recorded).values())):
        assert torch.equal(value, all_tensors(real)[next(n for n, t in all_tensors(recorded).items() if t is tensor)])


def test_tensors_that_were_there_before_stay_real() -> None:
    before = nn.Linear(3, 3)
    recording = Recording()
    with recording.building(), torch.no_grad():
        before.weight.fill_(2.0)
        after = nn.Linear(3, 3)
        after.weight.copy_(before.weight)
        with pytest.raises(PipelineError, match="writes values that are not known yet"):
            before.bias.copy_(after.bias)
    assert torch.equal(before.weight, torch.full((3, 3), 2.0))
    assert set(unfilled(after)) == {"weight", "bias"}
    ((_, value),) = recording.values([after.weight])
    assert torch.equal(value, before.weight)


def test_tensors_that_were_made_elsewhere_cannot_be_filled() -> None:
    with Recording().building():
        layer = nn.Linear(2, 3)
    with pytest.raises(PipelineError, match=r"2 tensors of the model, the first of shape \[3, 2\], have no values"):
        Recording().values([layer.weight, layer.bias])


def test_errors_of_the_model_itself_come_out() -> None:
    with pytest.raises(RuntimeError, match="mine"), Recording().building():
        raise RuntimeError("mine")
