"""Small models whose steps are written in the ways in which people write them, and what runs them in stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_asyncpipe.runtime.cuts import Candidates, choose_cuts, find_cuts
from lightning_asyncpipe.runtime.program import StageProgram, build_program
from lightning_asyncpipe.runtime.proof import loss_of
from lightning_asyncpipe.runtime.stages import StageForward, StageRunner, StageTask
from lightning_asyncpipe.runtime.trace import trace_step

torch.set_num_threads(1)

VOCABULARY = 32
WIDTH = 16
LENGTH = 12


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.proj(y.transpose(1, 2).reshape(batch, length, WIDTH)))


def mlp(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout))


class Block(nn.Module):
    """A pre-LN block, or a post-LN one."""

    def __init__(self, dropout: float = 0.0, post: bool = False) -> None:
        super().__init__()
        self.post = post
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(dropout), mlp(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.ln_1(x + self.attn(x))
            return self.ln_2(x + self.mlp(x))
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """A language model with a step; `options` choose how it is written."""

    def __init__(
        self,
        layers: int = 4,
        *,
        tied: str = "matmul",
        post: bool = False,
        dropout: float = 0.0,
        checkpointing: str = "",
        residual: bool = False,
        noise: bool = False,
    ) -> None:
        super().__init__()
        self.tied, self.checkpointing = tied, checkpointing
        self.residual, self.noise = residual, noise
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([Block(dropout, post) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(WIDTH)
        if tied != "matmul":
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied == "linear":
            self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.blocks:
            if self.checkpointing:
                y = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                y = block(x)
            x = x + y if self.residual else y
        x = self.ln_f(x)
        return x @ self.wte.weight.T if self.tied == "matmul" else self.head(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        if self.noise:
            tokens = torch.where(torch.rand(tokens.shape) < 0.2, torch.zeros_like(tokens), tokens)
        logits = self(tokens)
        if self.noise:
            logits = logits + 0.1 * torch.randn_like(logits)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Vit(nn.Module):
    """Learned positions and a class token, used outside modules."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + 4, WIDTH))
        self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = x + self.pos_embed
        x = self.norm(self.blocks(x))
        return F.cross_entropy(self.head(x[:, 0]), labels)


class Cnn(nn.Module):
    """Nested containers, batch normalisation, activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(8, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.head(self.features(images).flatten(1)), labels)


class Chain(nn.Module):
    """Linear layers one after the other; subclasses write :meth:`run` in their own ways."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, 1)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.run(batch)).square().mean()


def vectors(batch: int = 3) -> Tensor:
    """Numbers, [batch, width]."""
    return torch.randn(batch, WIDTH)


def text(batch: int = 2, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Tokens and targets, [batch, length] each."""
    tokens = torch.randint(VOCABULARY, (batch, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def images(batch: int = 4) -> tuple[Tensor, Tensor]:
    """Images [batch, 3, 8, 8] and labels [batch]."""
    return torch.randn(batch, 3, 8, 8), torch.randint(10, (batch,))


def candidates(model: nn.Module, *arguments: Any, **options: Any) -> Candidates:
    """The valid cuts of ``model.training_step(*arguments)``."""
    return find_cuts(trace_step(model, model.training_step, arguments, **options))


def program_for(
    model: nn.Module, stages: int, *arguments: Any, cuts: list[str] | None = None, **options: Any
) -> StageProgram:
    """A program of `stages` stages for ``model.training_step(*arguments)``."""
    found = candidates(model, *arguments, **options)
    return build_program(found, choose_cuts(found, stages, cuts))


@dataclass
class Outcome:
    """What training on one micro-batch gives."""

    value: Any
    gradients: dict[str, Tensor]


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of a model's parameters, which are cleared."""
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def ordinary(model: nn.Module, *arguments: Any, context: Callable[[], Any] = nullcontext) -> Outcome:
    """Run the step as on one device, without anything of this package."""
    with context():
        value = model.training_step(*arguments)
    loss_of(value).backward()
    return Outcome(value, take_gradients(model))


def forwards(runner: StageRunner, task: StageTask, **options: Any) -> list[StageForward]:
    """The forwards of all stages of one micro-batch, each from a copy of what the one before sent."""
    made: list[StageForward] = []
    activation = None
    for stage in range(runner.program.num_stages):
        forward = runner.forward(stage, task, activation, **options)
        made.append(forward)
        if forward.output is not None:
            activation = forward.output.clone(memory_format=torch.contiguous_format)
            activation.requires_grad_(forward.requires_grad)
    return made


def backwards(runner: StageRunner, made: list[StageForward]) -> None:
    """The backwards of all stages."""
    made[-1].root = loss_of(made[-1].value)
    gradient = None
    for forward in reversed(made):
        gradient = runner.backward(forward, gradient)
        gradient = None if gradient is None else gradient.clone()


def staged(
    model: nn.Module,
    program: StageProgram,
    *arguments: Any,
    key: tuple[int, ...] = (0, 0, 0),
    context: Callable[[], Any] = nullcontext,
) -> Outcome:
    """Run the step stage by stage."""
    runner = StageRunner(model, program, model.training_step, context)
    try:
        made = forwards(runner, StageTask(arguments, key=key))
        backwards(runner, made)
        return Outcome(made[-1].value, take_gradients(model))
    finally:
        runner.close()


def assert_equal(a: Outcome, b: Outcome, program: StageProgram | None = None) -> None:
    """Losses and gradients are equal to the last bit.

    With a program, the gradient of a parameter that several stages use may be rounded otherwise: its parts are summed
    in another order.
    """
    assert torch.equal(loss_of(a.value), loss_of(b.value))
    assert a.gradients.keys() == b.gradients.keys()
    for name, gradient in a.gradients.items():
        other = b.gradients[name]
        if program is not None and sum(name in stage for stage in program.parameters) > 1:
            scale = float(other.abs().max())
            torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-6 * scale)
        else:
            assert torch.equal(gradient, other), name
