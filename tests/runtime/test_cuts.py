"""A step is cut where one tensor crosses; elsewhere the error says what does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_asyncpipe.errors import CutError
from lightning_asyncpipe.runtime.cuts import Candidates, choose_cuts, find_cuts
from lightning_asyncpipe.runtime.program import Role, build_program
from lightning_asyncpipe.runtime.trace import trace_step
from tests.runtime.stage_models import (
    WIDTH,
    Chain,
    Cnn,
    Gpt,
    Vit,
    candidates,
    images,
    program_for,
    text,
    vectors,
)


def begins(found: Candidates) -> list[str]:
    return [cut.begins for cut in found.cuts]


def test_a_chain_can_be_cut_before_every_layer() -> None:
    found = candidates(Chain(), vectors(), 0)
    assert [(cut.way, cut.begins) for cut in found.cuts][:4] == [
        ("result", "layers.1"),
        ("argument", "layers.1"),
        ("result", "layers.2"),
        ("argument", "layers.2"),
    ]


def test_blocks_with_residuals_can_be_cut_between_and_after_the_attention() -> None:
    found = candidates(Gpt(2, tied=""), text(), 0)
    assert begins(found)[1:5] == ["blocks.0", "blocks.0.ln_2", "blocks.1", "blocks.1.ln_2"]
    assert [cut.way for cut in found.cuts][1:5] == ["argument", "filled", "result", "filled"]


def test_costs_and_messages_are_those_of_the_traced_operations() -> None:
    found = candidates(Gpt(4), text(), 0)
    costs = found.costs()
    assert len(costs) == len(found.cuts) + 1
    assert sum(costs) == pytest.approx(sum(o.cost for o in found.trace.operations))
    messages = dict(zip(begins(found), found.messages(), strict=True))
    assert messages["blocks.1"] == messages["blocks.3"] > 0


def test_stages_are_balanced() -> None:
    program = program_for(Gpt(8, tied=""), 4, text(), 0)
    blocks = [
        {name.split(".")[1] for name in names if name.startswith("blocks.") and "mlp.0.w" in name}
        for names in program.parameters
    ]
    assert [len(stage) for stage in blocks] == [2, 2, 2, 2]


def test_the_calls_that_are_intercepted_do_not_depend_on_the_cuts() -> None:
    found = candidates(Gpt(), text(), 0)
    keys = {tuple(node.key for node in build_program(found, choose_cuts(found, n)).nodes) for n in (1, 2, 5)}
    assert len(keys) == 1


def test_a_stage_skips_what_lies_before_it_as_a_whole() -> None:
    program = program_for(Gpt(), 2, text(), 0, cuts=["blocks.3"])
    roles = {node.key.name: program.role(1, node) for node in program.nodes}
    assert roles["blocks.1"] is roles["wte"] is Role.SKIP
    assert roles[""] is roles["blocks.3"] is Role.ENTER
    assert roles["ln_f"] is Role.RUN
    assert program.role(0, program.nodes[0]) is Role.ENTER


def test_parameters_belong_to_the_stages_that_use_them() -> None:
    program = program_for(Gpt(tied="matmul"), 3, text(), 0, cuts=["blocks.1", "blocks.3"])
    assert [("wte.weight" in names) for names in program.parameters] == [True, False, True]
    program = program_for(Vit(), 2, images(), 0, cuts=["blocks.1"])
    assert {"cls_token", "pos_embed"} <= set(program.parameters[0])
    assert not {"cls_token", "pos_embed"} & set(program.parameters[1])


def test_a_parameter_that_only_python_sees_is_in_every_stage() -> None:
    class Model(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))
            self.spare = nn.Parameter(torch.ones(()))

        def run(self, x: Tensor) -> Tensor:
            factor = self.factor.item()
            return super().run(x) * factor

    program = program_for(Model(), 3, vectors(), 0)
    assert all("factor" in names for names in program.parameters)
    assert program.unused == ("spare",)


class SkipConnection(Chain):
    def run(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        x = self.layers[2](self.layers[1](first))
        return self.layers[3](x + first)


def test_a_skip_connection_across_a_named_cut_is_named() -> None:
    found = candidates(SkipConnection(), vectors(), 0)
    assert begins(found)[:2] == ["layers.1", "layers.3"]
    with pytest.raises(CutError) as error:
        choose_cuts(found, 2, ["layers.2"])
    message = str(error.value)
    assert "no stage can begin at 'layers.2': one tensor may cross, but 2 do" in message
    assert f"a float32 tensor [3, {WIDTH}] made by 'layers.0' is used after it by the step" in message
    assert f"a float32 tensor [3, {WIDTH}] made by 'layers.1' is used after it by 'layers.2'" in message


def test_a_detached_value_crosses_too() -> None:
    class Model(Chain):
        def run(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            scale = x.detach().abs().mean()
            return self.layers[2](self.layers[1](x)) * scale

    found = candidates(Model(), vectors(), 0)
    with pytest.raises(CutError, match=r"a float32 tensor \[\] made by the step is used after it"):
        choose_cuts(found, 2, ["layers.2"])


def test_a_result_of_the_step_crosses_too() -> None:
    class Model(Chain):
        def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
            first = self.layers[0](batch)
            return {"loss": self.head(self.layers[1](first)).mean(), "features": first}

    with pytest.raises(CutError, match="is used after it as the step's result"):
        choose_cuts(candidates(Model(), vectors(), 0), 2, ["head"])


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    found = candidates(Gpt(), text(), 0)
    with pytest.raises(CutError, match=r"calls no module 'block.2'. Near names: blocks\.\d"):
        choose_cuts(found, 2, ["block.2"])


@pytest.mark.parametrize("names", [["blocks.1"], ["blocks.1", "blocks.2", "blocks.3"]])
def test_the_number_of_names_must_fit_the_number_of_stages(names: list[str]) -> None:
    with pytest.raises(CutError, match=f"3 stages need 2 cuts, but .* names {len(names)}"):
        choose_cuts(candidates(Gpt(), text(), 0), 3, names)


@pytest.mark.parametrize("names", [["blocks.2", "blocks.1"], ["blocks.2", "blocks.2"]])
def test_names_must_be_in_order_and_different(names: list[str]) -> None:
    with pytest.raises(CutError, match=r"'blocks\.\d' does not begin after 'blocks.2' does"):
        choose_cuts(candidates(Gpt(), text(), 0), 3, names)


def test_a_name_inside_a_unit_is_only_good_for_its_first_module() -> None:
    found = candidates(Gpt(checkpointing="plain"), text(), 0)
    assert choose_cuts(found, 2, ["blocks.2.ln_1"]) == choose_cuts(found, 2, ["blocks.2"])
    with pytest.raises(CutError, match="2 do"):
        choose_cuts(found, 2, ["blocks.2.attn"])


def test_too_many_stages_are_refused_with_the_number_that_is_possible() -> None:
    with pytest.raises(CutError) as error:
        choose_cuts(candidates(SkipConnection(), vectors(), 0), 9)
    assert "9 stages were asked for, but the step can be cut into 5 at most" in str(error.value)
    assert "one tensor may cross, but 2 do" in str(error.value)


def test_a_sum_over_branches_can_only_be_cut_in_the_first_one() -> None:
    class Model(Chain):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return sum(layer(batch).sum() for layer in self.layers)

    with pytest.raises(CutError) as error:
        choose_cuts(candidates(Model(), vectors(), 0), 3)
    assert str(error.value) == (
        "3 stages were asked for, but the step can be cut into 2 at most. Before 'layers.2', for "
        "example: a float32 tensor [] made by the step is used after it by the step; but it is "
        "neither a result nor an argument of a call of a module there. Use fewer stages, or change "
        "the model so that one tensor passes from part to part."
    )


def test_a_step_without_modules_cannot_be_cut() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return (batch * self.weight).sum()

    with pytest.raises(CutError, match="2 stages were asked for, but the step cannot be cut at all"):
        choose_cuts(candidates(Model(), vectors(), 0), 2)


def test_a_compiled_model_is_told_to_compile_its_parts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
            self.net.compile(backend="eager")

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).mean()

    with pytest.raises(CutError, match="'net' is compiled, and so one part; compile its submodules instead"):
        choose_cuts(candidates(Model(), vectors(), 0), 3)


def test_reentrant_checkpoints_are_refused_with_the_way_out() -> None:
    found = candidates(Gpt(checkpointing="reentrant"), text(), 0)
    with pytest.raises(CutError, match="use_reentrant=False"):
        choose_cuts(found, 2, ["blocks.2"])
    with pytest.raises(CutError, match="use_reentrant=False"):
        choose_cuts(found, 9)


def test_a_cut_inside_a_checkpointed_part_is_refused() -> None:
    class Model(Chain):
        def run(self, x: Tensor) -> Tensor:
            def pair(x: Tensor) -> Tensor:
                return self.layers[1](self.layers[0](x))

            def scaled(x: Tensor) -> Tensor:
                return self.layers[2](x) * 2

            x = checkpoint(pair, x, use_reentrant=False)
            x = checkpoint(scaled, x, use_reentrant=False)
            return self.layers[3](x)

    found = candidates(Model(), vectors(), 0)
    # Between the two checkpoints the result of the second layer is sent; the doubled one is an argument.
    assert [(cut.way, cut.begins) for cut in found.cuts][:2] == [
        ("result", "layers.2"),
        ("argument", "layers.3"),
    ]
    with pytest.raises(CutError, match=r"inside a call of torch\.utils\.checkpoint"):
        choose_cuts(found, 2, ["layers.1"])


def test_work_in_place_after_a_cut_is_done_on_a_copy() -> None:
    found = candidates(Cnn(), images(), 0)
    copies = {cut.call.name: cut.copy_entry for cut in found.cuts}
    assert copies["features.0.1"]  # the activation after it works in place
    assert not copies["features.0.0"]


def test_a_module_whose_output_needs_no_parameter_is_no_place_to_cut() -> None:
    class Model(Chain):
        def __init__(self) -> None:
            super().__init__(2)
            self.masks = nn.Dropout(0.5)

        def run(self, x: Tensor) -> Tensor:
            mask = self.masks(torch.ones(WIDTH))
            return self.layers[1](self.layers[0](x) * mask)

    found = candidates(Model(), vectors(), 0)
    assert begins(found)[0] == "layers.1"
    program = build_program(found, found.cuts)
    (node,) = [node for node in program.nodes if node.key.name == "masks"]
    assert program.role(program.num_stages - 1, node) is Role.RUN


def test_nothing_after_the_last_cut_is_no_stage() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Chain()

        def forward(self, x: Tensor) -> Any:
            return self.inner.training_step(x, 0)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch)

    found = candidates(Model(), vectors(), 0)
    assert all(cost > 0 for cost in found.costs())


def test_ways_that_did_not_work_can_be_excluded() -> None:
    model, batch = Chain(), vectors()
    trace = trace_step(model, model.training_step, (batch, 0))
    found = find_cuts(trace)
    first = found.cuts[0]
    again = find_cuts(trace, {(first.value, first.way)})
    assert first not in again.cuts
    assert len(again.cuts) == len(found.cuts) - 1
