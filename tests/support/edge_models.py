"""Scenarios about models: what is frozen, shared, random, written in place, normalised or checkpointed."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.support.edge_basics import WIDTH, Points, Regression, Tower, shuffled, sized
from tests.support.edges import Scenarios
from tests.support.models import GPT, VOCABULARY, LanguageModel, loader

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
        x = self.stem(x[:, None, :, None] * x[:, None, None, :])
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
