"""A step that runs in stages gives the loss and the gradients of an ordinary run, to the last bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.runtime.cuts import choose_cuts
from lightning_asyncpipe.runtime.hollow import hollow, is_hollow
from lightning_asyncpipe.runtime.program import StageProgram, build_program
from lightning_asyncpipe.runtime.stages import StageRunner, StageTask
from tests.runtime.stage_models import (
    LENGTH,
    WIDTH,
    Chain,
    Cnn,
    Gpt,
    Outcome,
    Vit,
    assert_equal,
    backwards,
    candidates,
    forwards,
    images,
    ordinary,
    program_for,
    staged,
    take_gradients,
    text,
    vectors,
)


class InPlaceAround(Chain):
    """The code around the layers works in place on what they return."""

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x += 1
            x.relu_()
        return x


class InPlaceUnits(Chain):
    """Modules work in place on what the ones before return."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return x


class Shared(Chain):
    """Layers that are called several times."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.layers[1](self.layers[0](x).tanh())
        return self.layers[0](x)


class Masked(nn.Module):
    """Returns a tuple, an argument of its own among it, and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, tag: str = "") -> Any:
        return (self.linear(x) * mask, mask), {"size": len(x), "tag": tag, "none": None}


class Tuples(Chain):
    """Structures pass from module to module."""

    def __init__(self) -> None:
        super().__init__(0)
        self.masked = nn.ModuleList([Masked() for _ in range(3)])

    def run(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), 1)
        mask[0] = 0
        for layer in self.masked:
            (x, mask), extra = layer(x, mask, tag="a")
            assert extra == {"size": len(x), "tag": "a", "none": None}
            x = x * mask
        return x


class EverywhereParameter(Chain):
    """A parameter that the step reads before the layers and uses between all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(2 * WIDTH))
        self.scale = nn.Parameter(torch.ones(()))

    def run(self, x: Tensor) -> Tensor:
        shift = self.shift[:WIDTH] * self.scale
        for layer in self.layers:
            x = layer(x + shift)
        return x


class Recurrent(Chain):
    """Recurrent layers, which keep a list of their weights beside the parameters."""

    def __init__(self) -> None:
        super().__init__(1)
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def run(self, x: Tensor) -> Tensor:
        y, _ = self.first(x[:, None])
        y, _ = self.second(y)
        return self.layers[0](y[:, -1])


class Encoder(Chain):
    """torch's own transformer layers."""

    def __init__(self) -> None:
        super().__init__(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def run(self, x: Tensor) -> Tensor:
        return self.encoder(x[:, None])[:, 0]


class Expanded(Chain):
    """A tensor whose elements share memory is sent."""

    def run(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).mean(0, keepdim=True).expand(len(x), WIDTH)
        return self.layers[2](self.layers[1](x))


class Transposed(Chain):
    """A tensor that is not contiguous is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = Turn()

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = self.turn(layer(x))
            x = y.t().contiguous() * y.stride(1)
        return x


class Turn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).t()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], int]] = {
    "tied by matmul": (lambda: Gpt(), text, 11),
    "tied linear": (lambda: Gpt(tied="linear"), text, 11),
    "untied": (lambda: Gpt(tied=""), text, 11),
    "post-LN": (lambda: Gpt(post=True), text, 11),
    "residual around blocks": (lambda: Gpt(residual=True), text, 5),
    "checkpointed": (lambda: Gpt(checkpointing="plain"), text, 5),
    "vision transformer": (Vit, images, 8),
    "convolutional": (Cnn, images, 7),
    "in place around layers": (InPlaceAround, vectors, 5),
    "in place in modules": (InPlaceUnits, vectors, 7),
    "shared layers": (Shared, vectors, 7),
    "tuples": (Tuples, vectors, 4),
    "a parameter everywhere": (EverywhereParameter, vectors, 5),
    "recurrent": (Recurrent, vectors, 3),
    "torch's encoder": (Encoder, vectors, 7),
    "expanded": (Expanded, vectors, 4),
    "not contiguous": (Transposed, vectors, 5),
}


@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_stages_gives_the_gradients_of_an_ordinary_run(name: str) -> None:
    make, data, most = MODELS[name]
    model, batch = make(), data()
    found = candidates(model, batch, 0)
    assert len(found.cuts) + 1 >= most
    expected = ordinary(model, batch, 0)
    sums = name in ("shared layers", "a parameter everywhere", "not contiguous")
    for stages in {1, 2, 3, most, len(found.cuts) + 1}:
        program = build_program(found, choose_cuts(found, stages))
        assert_equal(staged(model, program, batch, 0), expected, program if sums else None)


def hugging_face(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    tokens = torch.randint(64, (2, 10))
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, 7:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    tokenizer = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    if name == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=WIDTH, n_layer=3, n_head=2, **none, **tokenizer
        )
        return transformers.GPT2LMHeadModel(config), batch
    common = {
        "vocab_size": 64,
        "hidden_size": WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
        **tokenizer,
    }
    if name == "bert":
        config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **common)
        batch["labels"] = torch.tensor([0, 1])
        return transformers.BertForSequenceClassification(config), batch
    config = transformers.LlamaConfig(num_key_value_heads=1, **common)
    model = transformers.LlamaForCausalLM(config)
    if name == "llama, checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, batch


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "llama, checkpointed"])
def test_unmodified_transformers(name: str) -> None:
    inner, batch = hugging_face(name)
    inner.train()
    model = Wrapped(inner)
    found = candidates(model, batch, 0)
    expected = ordinary(model, batch, 0)
    for stages in (2, 3, len(found.cuts) + 1):
        program = build_program(found, choose_cuts(found, stages))
        assert_equal(staged(model, program, batch, 0), expected)


def test_named_cuts_are_where_the_stages_begin() -> None:
    model, batch = Gpt(), text()
    program = program_for(model, 3, batch, 0, cuts=["blocks.1", "blocks.3"])
    assert [cut.begins for cut in program.cuts] == ["blocks.1", "blocks.3"]
    assert "blocks.1.mlp.0.weight" in program.parameters[1]
    assert "blocks.1.mlp.0.weight" not in program.parameters[0] + program.parameters[2]
    assert_equal(staged(model, program, batch, 0), ordinary(model, batch, 0))


@pytest.mark.parametrize("frozen", ["wte wpe blocks.0", "blocks.1", "wte wpe blocks"])
def test_frozen_parts_get_no_gradient_and_ask_for_none(frozen: str) -> None:
    model, batch = Gpt(tied=""), text()
    for name in frozen.split():
        model.get_submodule(name).requires_grad_(False)
    program = program_for(model, 3, batch, 0, cuts=["blocks.1", "blocks.3"])
    assert_equal(staged(model, program, batch, 0), ordinary(model, batch, 0))
    runner = StageRunner(model, program, model.training_step)
    made = forwards(runner, StageTask((batch, 0)))
    assert made[0].requires_grad == ("wte" not in frozen)
    backwards(runner, made)
    runner.close()


def test_parameters_of_other_stages_may_be_hollow() -> None:
    model, batch = Gpt(), text()
    program = program_for(model, 4, batch, 0)
    expected = ordinary(model, batch, 0)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    runner = StageRunner(model, program, model.training_step)
    task = StageTask((batch, 0))

    def host(stage: int) -> None:
        for name, parameter in model.named_parameters():
            parameter.data = weights[name].clone()
            if name not in program.parameters[stage]:
                hollow(parameter)
                assert is_hollow(parameter)
                assert parameter.shape == weights[name].shape

    made, gradients, activation = [], {}, None
    for stage in range(4):
        host(stage)
        made.append(runner.forward(stage, task, activation))
        activation = made[-1].output
        if activation is not None:
            activation.requires_grad_()
        # The backward sees the weights of its own stage too.
    made[-1].root = made[-1].value
    gradient = None
    for stage in reversed(range(4)):
        host(stage)
        # A graph keeps the tensors of its forward; run that again where its weights are.
        entry = None if stage == 0 else made[stage - 1].output
        forward = runner.forward(stage, task, entry)
        if stage == 3:
            forward.root = forward.value
            assert torch.equal(forward.value, expected.value)
        gradient = runner.backward(forward, gradient)
        for name, found in take_gradients(model).items():
            assert name in program.parameters[stage]
            gradients[name] = gradients[name] + found if name in gradients else found
    runner.close()
    for name, value in expected.gradients.items():
        assert torch.equal(gradients[name], value), name


def test_sequence_lengths_may_change() -> None:
    model = Gpt()
    program = program_for(model, 4, text(), 0)
    runner = StageRunner(model, program, model.training_step)
    for length in (LENGTH, 5, 7, 5):
        batch = text(batch=3, length=length)
        made = forwards(runner, StageTask((batch, 0)))
        backwards(runner, made)
        found = Outcome(made[-1].value, take_gradients(model))
        assert_equal(found, ordinary(model, batch, 0))
        inferred = runner.skipped.inferred
    # The last length was seen before.
    forwards(runner, StageTask((text(batch=3, length=5), 1)))
    assert runner.skipped.inferred == inferred
    runner.close()


def test_autocast_is_entered_around_the_forward() -> None:
    model, batch = Gpt(), text()

    def context() -> Any:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    program = program_for(model, 4, batch, 0, context=context)
    found = staged(model, program, batch, 0, context=context)
    assert_equal(found, ordinary(model, batch, 0, context=context))


def test_a_second_set_of_weights_gets_the_gradients() -> None:
    for model, batch in ((Gpt(tied="linear", checkpointing="plain"), text()), (Recurrent(), vectors())):
        program = program_for(model, 2, batch, 0)
        other = {p: (p.detach() + 0.1).requires_grad_() for p in model.parameters()}
        runner = StageRunner(model, program, model.training_step)
        task = StageTask((batch, 0))
        made = forwards(runner, task, weights=other)
        # Other forwards with the real weights lie between this one and its backward.
        plain = forwards(runner, task)
        backwards(runner, plain)
        with_real = take_gradients(model)
        backwards(runner, made)
        assert not take_gradients(model)
        runner.close()
        assert_equal(Outcome(plain[-1].value, with_real), ordinary(model, batch, 0))
        found = {n: g for n, p in model.named_parameters() if (g := other[p].grad) is not None}
        with torch.no_grad():
            for parameter, leaf in other.items():
                parameter.copy_(leaf)
        assert_equal(Outcome(made[-1].value, found), ordinary(model, batch, 0))


def test_a_stage_frees_the_variables_of_the_step() -> None:
    alive: list[weakref.ref[Any]] = []

    class Model(Gpt):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            marker = nn.Identity()
            alive.append(weakref.ref(marker))
            return super().training_step(batch, batch_idx)

    model, batch = Model(checkpointing="plain"), text()
    program = program_for(model, 3, batch, 0)
    runner = StageRunner(model, program, model.training_step)
    gc.disable()
    try:
        alive.clear()
        made = forwards(runner, StageTask((batch, 0)))
        assert [reference() for reference in alive] == [None] * 3
    finally:
        gc.enable()
    assert made[0].value is None
    runner.close()


def test_user_code_that_catches_exceptions_does_not_catch_the_end_of_a_stage() -> None:
    class Model(Gpt):
        def forward(self, tokens: Tensor) -> Tensor:
            try:
                return super().forward(tokens)
            except Exception:
                return torch.zeros(2, LENGTH, 32)

    model, batch = Model(), text()
    program = program_for(model, 3, batch, 0)
    assert_equal(staged(model, program, batch, 0), ordinary(model, batch, 0))


def test_code_that_catches_everything_cannot_go_on_after_the_end_of_a_stage() -> None:
    class Model(Chain):
        def run(self, x: Tensor) -> Tensor:
            try:
                return super().run(x)
            except:  # noqa: E722
                return self.layers[3](x)
            finally:
                done.append(len(done))

    done: list[int] = []
    model, batch = Model(), vectors()
    program = program_for(model, 3, batch, 0)
    assert_equal(staged(model, program, batch, 0), ordinary(model, batch, 0))


def test_further_calls_after_the_stage_has_begun_may_depend_on_the_batch() -> None:
    class Model(Chain):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = self.layers[0](batch)
            for _ in range(1 + batch_idx):
                x = self.layers[1](x)
            return self.head(x).mean()

    model, batch = Model(), vectors()
    program = program_for(model, 2, batch, 0, cuts=["layers.1"])
    assert_equal(staged(model, program, batch, 2), ordinary(model, batch, 2))
    runner = StageRunner(model, program_for(model, 2, batch, 0, cuts=["head"]), model.training_step)
    with pytest.raises(PipelineError, match=r"called 'layers.1' 2 times, but less often when"):
        runner.forward(1, StageTask((batch, 1)), torch.zeros(3, WIDTH))
    runner.close()


def test_further_calls_of_modules_without_parameters_may_depend_on_the_batch() -> None:
    class Model(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Tanh()

        def run(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                x = self.act(layer(x)) if i < self.times else layer(x)
            return x

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.times = batch_idx
            return super().training_step(batch, batch_idx)

    model, batch = Model(), vectors()
    program = program_for(model, 2, batch, 1, cuts=["layers.3"])
    assert_equal(staged(model, program, batch, 2), ordinary(model, batch, 2))


def test_a_module_that_was_not_called_when_traced_is_named() -> None:
    class Model(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(1, 1)
            self.spare = nn.Parameter(torch.ones(1))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return self.extra(loss[None]).sum() if batch_idx else loss

    model, batch = Model(), vectors()
    program = program_for(model, 2, batch, 0)
    assert program.unused == ("spare", "extra.weight", "extra.bias")
    assert_equal(staged(model, program, batch, 0), ordinary(model, batch, 0))
    with pytest.raises(PipelineError, match="called 'extra', which has parameters that it did not use when"):
        staged(model, program, batch, 1)
    assert_equal(staged(model, program_for(model, 1, batch, 0), batch, 1), ordinary(model, batch, 1))


def test_a_part_of_a_unit_that_was_idle_when_traced_stays_with_the_unit() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

        def forward(self, x: Tensor, choice: int) -> Tensor:
            return self.experts[choice](x)

    class Model(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.routed = nn.ModuleList([Experts(), Experts()])

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            for routed in self.routed:
                batch = routed(batch, batch_idx).tanh()
            return self.head(self.run(batch)).mean()

    model, batch = Model(), vectors()
    program = program_for(model, 3, batch, 0, cuts=["routed.1", "layers.0"])
    assert program.unused == ()
    assert "routed.1.experts.1.weight" in program.parameters[1]
    assert_equal(staged(model, program, batch, 1), ordinary(model, batch, 1))


def test_hooks_fire_where_their_module_runs() -> None:
    model, batch = Gpt(), text()
    seen: list[str] = []
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, index=index: seen.append(f"forward {index}"))
        block.register_full_backward_hook(lambda *_, index=index: seen.append(f"backward {index}"))
    program = program_for(model, 4, batch, 0, cuts=["blocks.1", "blocks.2", "blocks.3"])
    seen.clear()
    staged(model, program, batch, 0)
    assert seen == [f"forward {i}" for i in range(4)] + [f"backward {i}" for i in (3, 2, 1, 0)]


def test_an_error_in_the_step_leaves_the_runner_usable() -> None:
    class Model(Gpt):
        broken = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if self.broken:
                raise ValueError("broken")
            return loss

    model, batch = Model(), text()
    runner = StageRunner(model, program_for(model, 2, batch, 0), model.training_step)
    task = StageTask((batch, 0))
    first = runner.forward(0, task)
    model.broken = True
    with pytest.raises(ValueError, match="broken"):
        runner.forward(1, task, first.output)
    model.broken = False
    backwards(runner, forwards(runner, task))
    found = take_gradients(model)
    runner.close()
    for name, gradient in ordinary(model, batch, 0).gradients.items():
        assert torch.equal(found[name], gradient)


def test_a_step_that_takes_another_way_is_named() -> None:
    class Model(Gpt):
        layers = 4

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.wte(tokens)
            for block in list(self.blocks)[: self.layers]:
                x = block(x)
            return self.ln_f(x) @ self.wte.weight.T

    model, batch = Model(), text()
    program = program_for(model, 2, batch, 0, cuts=["blocks.3"])
    runner = StageRunner(model, program, model.training_step)
    model.layers = 2
    with pytest.raises(PipelineError, match=r"inside stage 0: it did not call 'blocks.2'"):
        runner.forward(0, StageTask((batch, 0)))
    with pytest.raises(PipelineError, match="before stage 1 began"):
        runner.forward(1, StageTask((batch, 0)), torch.zeros(2, LENGTH, WIDTH))
    with pytest.raises(PipelineError, match="stage 1 needs"):
        runner.forward(1, StageTask((batch, 0)))
    runner.close()


def test_a_closed_runner_leaves_the_model_as_it_was() -> None:
    model, batch = Gpt(), text()
    before = [dict(module.__dict__) for module in model.modules()]
    runner = StageRunner(model, program_for(model, 2, batch, 0), model.training_step)
    assert torch.equal(model.training_step(batch, 0), model.training_step(batch, 0))
    runner.close()
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_a_program_survives_json() -> None:
    import json

    program = program_for(Gpt(tied="linear"), 4, text(), 0)
    assert StageProgram.from_dict(json.loads(json.dumps(program.to_dict()))) == program


def test_a_compiled_module_is_one_unit() -> None:
    model, batch = Gpt(), text()
    expected = ordinary(model, batch, 0)
    for block in model.blocks:
        block.compile(backend="eager")
    found = candidates(model, batch, 0)
    assert not any(cut.call.name.startswith("blocks.1.") for cut in found.cuts)
    program = build_program(found, choose_cuts(found, 3))
    assert_equal(staged(model, program, batch, 0), expected)


def test_what_the_loss_needs_beside_the_output_may_be_anything() -> None:
    class Model(Gpt):
        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "name": "x", "weight": F.softmax(loss.detach()[None], 0)}

    model, batch = Model(), text()
    found = staged(model, program_for(model, 3, batch, 0), batch, 0)
    assert found.value["name"] == "x"
    assert_equal(found, ordinary(model, batch, 0))
