"""Scenarios that are existing projects: models of other packages, as they come, inside plain LightningModules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos import LightningTransformer, Transformer
from lightning.pytorch.demos.boring_classes import BoringModel, DemoModel, RandomDataset
from lightning.pytorch.demos.lstm import LightningLSTM, SimpleLSTM
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.support.edge_transformers import TransformersModel, gpt2, tokens
from tests.support.edges import Scenario, Scenarios
from tests.support.models import VOCABULARY

PROJECTS = Scenarios()
CLASSES, SIDE = 3, 12


# Models of `transformers`


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16, bos_token_id=0, eos_token_id=0, attention_dropout=0.0,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=SIDE, patch_size=4, num_channels=3, hidden_size=8, intermediate_size=16, num_hidden_layers=4,
            num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=16, num_layers=4, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


class Images(Dataset[dict[str, Tensor]]):
    """Pictures with one of three classes."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.pixels = torch.randn(count, 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(0, CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.pixels[index], "labels": self.labels[index]}


def images(batch_size: int = 7) -> DataLoader[Any]:
    return DataLoader(Images(29), batch_size)


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCABULARY, d_model=8, encoder_layers=4, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16, dropout=0.0,
            pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0, forced_eos_token_id=None,
        )
    )  # fmt: skip


def transformer(name: str, model: Callable[[], nn.Module], batches: Callable[[], Any], stages: int) -> None:
    PROJECTS.add(
        name,
        lambda: TransformersModel(model()),
        batches,
        arguments={"max_epochs": 2, "gradient_clip_val": 1.0},
        strategy={"num_stages": stages, "num_microbatches": 4},
        reference="parts",
    )


transformer("Llama", llama, lambda: tokens("next"), 4)
transformer("ViT", vit, images, 3)
transformer("BART", bart, lambda: tokens("next"), 4)
transformer("T5", t5, lambda: tokens("next"), 3)

# A convolutional network, as torchvision writes them


class BasicBlock(nn.Module):
    """Two convolutions around which the input is added, through a convolution where its shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(BasicBlock(width, width), BasicBlock(width, width))
        self.layer2 = nn.Sequential(BasicBlock(width, 2 * width, 2), BasicBlock(2 * width, 2 * width))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Convolutional(pl.LightningModule):
    """Classifies pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ResNet()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch["pixel_values"]), batch["labels"])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


PROJECTS.add(
    "a residual network",
    Convolutional,
    lambda: images(9),
    arguments={"max_epochs": 3},
    strategy={"num_stages": 4, "num_microbatches": 4},
    reference="parts",
)

# Fine-tuning with adapters


class LoRA(nn.Module):
    """A frozen layer beside which a product of two small matrices is trained."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(inputs, rank, bias=False)
        self.up = nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class Adapted(TransformersModel):
    """A GPT-2 that is frozen; each attention gets an adapter, and only those are trained."""

    def __init__(self) -> None:
        super().__init__(gpt2())
        self.model.requires_grad_(False)
        for block in self.model.transformer.h:
            block.attn.c_attn = LoRA(block.attn.c_attn, 8, 24)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


PROJECTS.add(
    "adapters",
    Adapted,
    lambda: tokens("next"),
    arguments={"max_epochs": 2},
    strategy={"num_stages": 4, "num_microbatches": 4},
    reference="parts",
)

# Lightning's own demonstrations


class SmallTransformer(LightningTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(VOCABULARY, ninp=8, nhead=2, nhid=16, nlayers=2, dropout=0.0)

    def prepare_data(self) -> None:
        pass


class SmallLSTM(LightningLSTM):
    def __init__(self) -> None:
        super().__init__()
        self.model = SimpleLSTM(VOCABULARY, ninp=8, nhid=8, nlayers=2, dropout=0.0)

    def prepare_data(self) -> None:
        pass


def vectors() -> DataLoader[Any]:
    torch.manual_seed(3)
    data = RandomDataset(32, 24)
    data.data = data.data.double()
    return DataLoader(data, 6)


def pairs() -> DataLoader[Any]:
    rows = [(row["input_ids"], row["input_ids"].roll(-1)) for row in tokens("next", padded=False).dataset]
    return DataLoader(rows, 4)


def demonstration(name: str, module: Callable[[], pl.LightningModule], batches: Callable[[], Any], stages: int) -> None:
    PROJECTS.add(
        name,
        module,
        batches,
        arguments={"max_epochs": 2},
        strategy={"num_stages": stages, "num_microbatches": 4},
        reference="parts",
    )


demonstration("BoringModel", BoringModel, vectors, 2)
demonstration("DemoModel", DemoModel, vectors, 2)
demonstration("LightningTransformer", SmallTransformer, pairs, 4)
CARRIES = Scenario(SmallLSTM, pairs, strategy={"num_stages": 3, "num_microbatches": 4})
