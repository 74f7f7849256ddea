"""A traced step says which calls were made, and which values each operation read and made."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_asyncpipe.runtime.cuts import choose_cuts, find_cuts
from lightning_asyncpipe.runtime.hollow import hollow
from lightning_asyncpipe.runtime.liveness import analyse
from lightning_asyncpipe.runtime.program import build_program
from lightning_asyncpipe.runtime.randomness import Watch
from lightning_asyncpipe.runtime.trace import CallKey, Trace, trace_step
from tests.runtime.stage_models import WIDTH, Chain, Cnn, Gpt, images, text, vectors


def trace(model: Any, batch: Any, **options: Any) -> Trace:
    return trace_step(model, model.training_step, (batch, 0), **options)


def operations_in(recorded: Trace, name: str) -> list[str]:
    return [o.name for o in recorded.operations if recorded.call_name(o.call) == name]


def test_calls_form_a_tree_in_order() -> None:
    recorded = trace(Gpt(2), text())
    names = [call.key.name for call in recorded.calls]
    assert names[:7] == ["", "wte", "wpe", "drop", "blocks.0", "blocks.0.ln_1", "blocks.0.attn"]
    attention = recorded.calls[6]
    assert recorded.calls[attention.parent].key == CallKey("blocks.0", 0)
    for call in recorded.calls:
        assert call.begin < call.end <= recorded.end
        if call.parent >= 0:
            outer = recorded.calls[call.parent]
            assert outer.begin < call.begin
            assert call.end < outer.end


def test_a_shared_module_has_its_first_name_and_its_calls_are_counted() -> None:
    class Shared(Chain):
        def run(self, x: Tensor) -> Tensor:
            return self.again(self.layers[0](self.again(x)))

        def __init__(self) -> None:
            super().__init__(2)
            self.again = self.layers[1]

    keys = [call.key for call in trace(Shared(), vectors()).calls]
    assert keys[:3] == [("layers.1", 0), ("layers.0", 0), ("layers.1", 1)]


def test_an_operation_in_place_begins_a_new_value_and_a_view_does_not() -> None:
    class Model(Chain):
        def run(self, x: Tensor) -> Tensor:
            y = self.layers[0](x)
            y.view(-1)[0] = 1
            return y.mul_(2)

    recorded = trace(Model(1), vectors())
    by_name = {o.name: o for o in reversed(recorded.operations)}
    assert by_name["aten.view.default"].outputs == ()
    (first,) = by_name["aten.addmm.default"].outputs
    multiply = by_name["aten.mul_.Tensor"]
    (last,) = multiply.outputs
    values = recorded.values
    assert values[first].storage == values[last].storage
    assert first not in multiply.inputs  # the value that the assignment made lies between
    assert values[first].birth < values[multiply.inputs[0]].birth < values[last].birth


def test_uses_of_a_parameter_are_found_through_views_and_outside_its_module() -> None:
    recorded = trace(Gpt(1, tied="matmul"), text())
    opened = {i for i, call in enumerate(recorded.calls) if call.key.name == ""}
    uses = analyse(recorded, opened).uses["wte.weight"]
    assert len(uses) == 2
    embed = next(call for call in recorded.calls if call.key.name == "wte")
    norm = next(call for call in recorded.calls if call.key.name == "ln_f")
    assert embed.begin < uses[0] < embed.end
    assert uses[1] > norm.end


def test_values_that_every_stage_can_make_are_local() -> None:
    class Model(Chain):
        def __init__(self) -> None:
            super().__init__(2)
            self.shift = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("table", torch.ones(WIDTH))
            self.rotary = nn.Identity()

        def run(self, x: Tensor) -> Tensor:
            local = self.rotary(self.table * 2) + self.shift[:WIDTH]
            return self.layers[1](self.layers[0](x) + local)

    recorded = trace(Model(), vectors())
    found = analyse(recorded, ())
    names = {recorded.calls[i].key.name for i in found.local}
    assert names == {"rotary"}
    live = {recorded.values[i].birth for i, alive in enumerate(found.live) if alive}
    assert min(live) > next(c.end for c in recorded.calls if c.key.name == "rotary")
    added = next(o for o in recorded.operations if o.name == "aten.add.Tensor" and o.time > min(live))
    assert found.uses["shift"] == [added.time]


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_regions_are_recorded_with_their_extent(reentrant: bool) -> None:
    class Model(Chain):
        def run(self, x: Tensor) -> Tensor:
            def two(x: Tensor) -> Tensor:
                return self.layers[1](self.layers[0](x)) * 2

            x = checkpoint(two, x, use_reentrant=reentrant)
            return self.layers[2](x) + 1

    recorded = trace(Model(), vectors().requires_grad_())
    (region,) = recorded.regions
    assert region.reentrant == reentrant
    calls = {call.key.name: call for call in recorded.calls}
    assert calls["layers.0"].regions == calls["layers.1"].regions == (0,)
    assert calls["layers.2"].regions == calls["head"].regions == ()
    doubled = next(o for o in recorded.operations if o.name == "aten.mul.Tensor")
    assert region.begin <= calls["layers.0"].begin
    assert doubled.time < region.end < calls["layers.2"].begin


def test_a_trace_leaves_buffers_random_states_and_calls_alone() -> None:
    model, batch = Cnn(), images()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [dict(module.__dict__) for module in model.modules()]
    watch = Watch()
    trace(model, batch)
    assert watch.drawn() == ()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [dict(module.__dict__) for module in model.modules()] == attributes


def test_a_step_that_fails_leaves_the_model_usable() -> None:
    class Model(Chain):
        def run(self, x: Tensor) -> Tensor:
            raise ValueError("broken")

    model = Model()
    with pytest.raises(ValueError, match="broken"):
        trace(model, vectors())
    assert not any("_compiled_call_impl" in module.__dict__ for module in model.modules())


def test_generators_that_the_step_draws_from_are_named() -> None:
    class Model(Chain):
        def run(self, x: Tensor) -> Tensor:
            return self.layers[0](x) * float(numpy.random.rand())

    assert trace(Model(), vectors()).random == ("numpy",)
    assert trace(Gpt(1, noise=True), text()).random == ("torch",)


def test_costs_follow_the_matrix_products() -> None:
    recorded = trace(Gpt(1), text(batch=2))
    (qkv,) = [o for o in recorded.operations if o.name == "aten.addmm.default"][:1]
    assert qkv.cost > 2 * (2 * 12) * WIDTH * 3 * WIDTH
    attention = next(o for o in recorded.operations if "scaled_dot_product" in o.name)
    assert attention.cost > 4 * 2 * 2 * 12 * 12 * (WIDTH // 2)


@pytest.mark.parametrize("make", [Gpt, Cnn, lambda: Gpt(checkpointing="plain", tied="linear")])
def test_a_trace_without_memory_finds_the_same(make: Any) -> None:
    model = make()
    batch = images() if isinstance(model, Cnn) else text()
    real = find_cuts(trace(model, batch))
    attributes = [dict(module.__dict__) for module in model.modules()]
    fake = find_cuts(trace(model, batch, compute=False))
    assert [dict(module.__dict__) for module in model.modules()] == attributes
    assert fake.costs() == real.costs()
    assert build_program(fake, choose_cuts(fake, 4)).parameters == build_program(real, choose_cuts(real, 4)).parameters
    for parameter in model.parameters():
        hollow(parameter)
    fake = find_cuts(trace(model, batch, compute=False))
    assert [cut.call for cut in fake.cuts] == [cut.call for cut in real.cuts]


def test_autocast_casts_a_weight_where_it_is_used() -> None:
    model, batch = Gpt(1, tied="linear"), text()

    def context() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    recorded = trace(model, batch, context=context)
    assert operations_in(recorded, "head").count("aten._to_copy.default") == 2
    assert torch.is_autocast_cache_enabled()
