"""Scenarios about models: what is frozen, shared, random, written in place, normalised or checkpointed."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.support.edge_data import WIDTH, Points, Regression, Tower, shuffled, sized
from tests.support.edges import Scenarios
from tests.support.models import VOCABULARY, GPT, LanguageModel, loader

MODELS = Scenarios()


# What is trained


class Frozen(Regression):
    """Some layers are frozen; the optimizer gets all parameters or those that are trained."""

    def __init__(self, *layers: int, head: bool = False, all_to_optimizer: bool = True) -> None:
        super().__init__()
        for layer in layers:
            self.net.layers[layer].requires_grad_(False)
        self.net.head.requires_grad_(not head)
        self.all_to_optimizer = all_to_optimizer

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad or self.all_to_optimizer]
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


MODELS.add("frozen layers here and there", lambda: Frozen(1, 4), lambda: sized(8, 8, 5, 8))
MODELS.add("a frozen first stage", lambda: Frozen(0, 1, all_to_optimizer=False), lambda: sized(8, 8, 5, 8))
MODELS.add("a frozen stage in the middle", lambda: Frozen(2, 3), lambda: sized(8, 8, 5, 8))
MODELS.add("a frozen last stage", lambda: Frozen(4, 5, head=True), lambda: sized(8, 8, 5, 8))
MODELS.add(
    "a frozen last stage on a rank of its own",
    lambda: Frozen(4, 5, head=True, all_to_optimizer=False),
    lambda: sized(8, 8, 5, 8),
    strategy={"num_microbatches": 4, "num_pipelines": 1, "cuts": ["net.layers.2", "net.layers.4"]},
)
MODELS.add(
    "only the last layer is trained",
    lambda: Frozen(0, 1, 2, 3, 4, 5),
    lambda: sized(8, 8, 5, 8),
    strategy={"num_microbatches": 4, "num_pipelines": 1},
)


class FreezesLater(Regression):
    """Freezes the first layers after an epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.layers[:3].requires_grad_(False)


MODELS.add("layers that are frozen later", FreezesLater, lambda: sized(8, 8, 5), arguments={"max_epochs": 3})


class Unused(Regression):
    """Holds parameters that no batch uses, and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.bias = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def inputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return x, y if len(y) < 3 else y + self.bias

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


MODELS.add(
    "parameters that are not used",
    Unused,
    lambda: sized(12, 5, 12, 4, 12),
    reference="parts",
    strategy={"num_microbatches": 4, "num_pipelines": 2},
)


class Groups(Regression):
    """Parameter groups with options of their own, and a schedule."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [
            {"params": others, "weight_decay": 0.0},
            {"params": decayed, "weight_decay": 0.1, "lr": 3e-2},
        ]
        optimizer = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


MODELS.add("parameter groups", Groups, lambda: sized(8, 8, 5, 8), arguments={"max_epochs": 3})


class SharedLayer(Regression):
    """One layer is used at every depth, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.net.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)] * 6)


MODELS.add("one layer in all stages", SharedLayer, lambda: sized(8, 8, 5, 8))
MODELS.add("tied embeddings", lambda: LanguageModel(GPT(blocks=3)), lambda: loader(20, 5))


# Writing in place


class Scaled(nn.Module):
    """Reads its input in a way that needs no copy of it in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(0.5 * x))


class InPlaceTower(nn.Module):
    """A residual stream that is added to, scaled and overwritten in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Scaled() for _ in range(5))
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x[:, 0] = self.first[0]
        for layer in self.layers:
            x += layer(x)
            x.mul_(0.9)
        return self.head(x).squeeze(-1)


class ActivationsInPlace(nn.Module):
    """A plain sequence in which every second module overwrites its input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(module for _ in range(4) for module in (nn.Linear(WIDTH, WIDTH), nn.ELU(inplace=True)))
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).squeeze(-1)


class Of(Regression):
    """A regression with a given network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


class WithMomentum(Of):
    """The same with SGD, which does not blow up gradients that are zero but for rounding."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


MODELS.add("a residual stream that is written in place", lambda: Of(InPlaceTower()), lambda: sized(8, 8, 5, 8))
MODELS.add("activations in place", lambda: Of(ActivationsInPlace()), lambda: sized(8, 8, 5, 8))
MODELS.add(
    "a cut before an activation in place",
    lambda: Of(ActivationsInPlace()),
    lambda: sized(8, 8, 5, 8),
    strategy={"num_microbatches": 4, "cuts": ["net.body.1", "net.body.5"]},
)


# Random numbers


class DropoutTower(Tower):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), 0.3, self.training)
        return self.head(x).squeeze(-1)


class CheckpointedBlock(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return x + checkpoint(self.body, x, use_reentrant=False)
        return x + self.body(x)


class CheckpointedTower(nn.Module):
    """Blocks that are checkpointed, by themselves or by the model around them."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CheckpointedBlock(inside) for _ in range(4))
        self.outside = not inside
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.outside else block(x)
        return self.head(x).squeeze(-1)


class Noisy(Regression):
    """Draws in the step, before and after the model, and uses the early noise late, as diffusion does."""

    def __init__(self, dropout: bool = False) -> None:
        super().__init__()
        self.net = DropoutTower() if dropout else Tower()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        noise = torch.randn_like(x)
        time = torch.rand(len(x), dtype=x.dtype)
        mask = torch.rand(x.shape) < 0.3
        predicted = self.net((x + noise * time[:, None]).masked_fill(mask, 0.0))
        target = y + noise.mean(1) + 0.1 * torch.randn_like(y)
        loss = ((predicted - target) ** 2 * (1 + time)).mean()
        self.log("loss", loss)
        self.log("noise", noise.mean(), on_step=True)
        return loss


MODELS.add("dropout", lambda: Of(DropoutTower()), lambda: sized(8, 8, 5, 8), reference="none")
MODELS.add(
    "dropout of attention and blocks",
    lambda: LanguageModel(GPT(blocks=3, dropout=0.2)),
    lambda: loader(20, 5),
    reference="none",
)
MODELS.add("noise in the step", Noisy, lambda: sized(8, 8, 5, 8), reference="none")
MODELS.add("noise in the step and dropout", lambda: Noisy(True), lambda: sized(8, 8, 5, 8), reference="none")
for inside in (True, False):
    MODELS.add(
        f"checkpointed blocks with dropout, {'inside' if inside else 'outside'}",
        lambda inside=inside: Of(CheckpointedTower(inside)),
        lambda: sized(8, 8, 5, 8),
        reference="none",
    )

class RememberedDropout(nn.Module):
    """Dropout that keeps a fingerprint of each of its masks."""

    masks: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, dtype=x.dtype) < 0.7
        if type(mask) is Tensor:
            self.masks.append(hash(tuple(mask.flatten().tolist())))
        return x * mask / 0.7


class RemembersMasks(Regression):
    """Checkpointed blocks; `seen` says how often each mask was drawn in training."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.net = CheckpointedTower(inside)
        for block in self.net.blocks:
            block.body = nn.Sequential(nn.Linear(WIDTH, 16), RememberedDropout(), nn.Linear(16, WIDTH))

    def on_train_start(self) -> None:
        RememberedDropout.masks.clear()

    def on_train_end(self) -> None:
        self.seen = sorted(Counter(RememberedDropout.masks).values())


# Running statistics


class NormTower(nn.Module):
    def __init__(self, momentum: float | None = 0.1, affine: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=momentum, affine=affine), nn.GELU())
            for _ in range(5)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)


class ConvTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
            for _ in range(4)
        )
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem((x[:, None, :, None] * x[:, None, None, :]))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3))).squeeze(-1)


for name, make in {
    "batch normalisation": NormTower,
    "batch normalisation with a cumulative average": lambda: NormTower(momentum=None),
    "batch normalisation without weights": lambda: NormTower(affine=False),
    "convolutions with batch normalisation": ConvTower,
}.items():
    MODELS.add(
        name,
        lambda make=make: WithMomentum(make()),
        lambda: sized(9, 8, 5, 3, 9),
        arguments={"max_epochs": 2},
        reference="parts",
    )


class FrozenStatistics(WithMomentum):
    """Fine-tunes with the statistics of some layers in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(NormTower())

    def on_train_epoch_start(self) -> None:
        for block in self.net.blocks[:3]:
            block[1].eval()


MODELS.add(
    "batch normalisation partly in evaluation mode", FrozenStatistics, lambda: sized(9, 8, 5, 3), reference="parts"
)


class Counting(Tower):
    """Keeps a buffer that no step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale * self.hidden)


MODELS.add("constant buffers", lambda: Of(Counting()), lambda: sized(8, 8, 5))


# Other kinds of layers


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 4, -1)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x[:, -1]).squeeze(-1)


class Normed(nn.Module):
    """Weights that are computed from parameters at each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).squeeze(-1)


class Autoencoder(pl.LightningModule):
    """Two networks of the module, called one after the other by the step itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class WithRegularisation(Regression):
    """Adds a penalty on all weights to the loss, in the step: it needs every parameter at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self.net(x), y) + 0.01 * self.net.head.weight.square().sum()


class CallsItself(Regression):
    """Has a `forward` of its own, which the step calls."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self(x), y)


class Hooked(Of):
    """Has hooks on modules and parameters that change what passes."""

    def __init__(self) -> None:
        super().__init__(Tower())
        self.net.layers[1].register_forward_hook(lambda module, args, output: output * 0.9)
        self.net.layers[2].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
        self.net.layers[3].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
        self.net.layers[4].weight.register_hook(lambda gradient: gradient * 0.5)


class SparseEmbedding(pl.LightningModule):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(self.tokens(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


MODELS.add("a step that calls the module", CallsItself, lambda: sized(8, 8, 5))
MODELS.add("hooks of modules and parameters", Hooked, lambda: sized(8, 8, 5))
MODELS.add("sparse gradients", SparseEmbedding, lambda: loader(20, 5))
MODELS.add("recurrent layers", lambda: Of(Recurrent()), lambda: sized(8, 8, 5))
MODELS.add("weight normalisation", lambda: Of(Normed()), lambda: sized(8, 8, 5))
MODELS.add("Lightning's own first example", Autoencoder, lambda: DataLoader(Points(24), 8))
MODELS.add("a penalty on the weights of the last layer", WithRegularisation, lambda: shuffled(24, 8))


# transformers


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=4, n_head=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def checkpointed_gpt2() -> nn.Module:
    model = gpt2(0.1)
    model.gradient_checkpointing_enable()
    return model


def _bert_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3,
    )  # fmt: skip


def bert_for_masked_language() -> nn.Module:
    from transformers import BertForMaskedLM

    return BertForMaskedLM(_bert_config())


def bert_for_classification() -> nn.Module:
    from transformers import BertForSequenceClassification

    return BertForSequenceClassification(_bert_config())


class Transformer(pl.LightningModule):
    """A model of `transformers` that computes its own loss from a batch of keyword arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of token ids with padding at the end, and labels of a kind."""

    def __init__(self, count: int, labels: str, padded: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(1, VOCABULARY, (count, 8), generator=generator)
        lengths = torch.randint(3, 9, (count,), generator=generator) if padded else torch.full((count,), 8)
        self.mask = (torch.arange(8) < lengths[:, None]).long()
        self.ids = self.ids * self.mask
        if labels == "class":
            self.labels = torch.randint(0, 3, (count,), generator=generator)
        else:
            chosen = torch.rand(count, 8, generator=generator) < (0.3 if labels == "masked" else 1.0)
            chosen[:, 0] = True
            self.labels = torch.where(chosen & (self.mask == 1), self.ids, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "attention_mask": self.mask[index], "labels": self.labels[index]}


def tokens(labels: str, padded: bool = True) -> DataLoader[Any]:
    return DataLoader(Tokens(29, labels, padded), 7)


TRANSFORMERS = {
    "GPT-2": (gpt2, "next", False),
    "GPT-2 with padding": (gpt2, "next", True),
    "BERT with its masked-language loss": (bert_for_masked_language, "masked", True),
    "BERT with a classifier": (bert_for_classification, "class", True),
}
for name, (model, labels, padded) in TRANSFORMERS.items():
    MODELS.add(
        name,
        lambda model=model: Transformer(model()),
        lambda labels=labels, padded=padded: tokens(labels, padded),
        arguments={"gradient_clip_val": 1.0},
        reference="parts",
    )
for name, model in {"GPT-2 with dropout": lambda: gpt2(0.1), "GPT-2 with checkpointing": checkpointed_gpt2}.items():
    MODELS.add(
        name, lambda model=model: Transformer(model()), lambda: tokens("next", padded=False), reference="none"
    )
