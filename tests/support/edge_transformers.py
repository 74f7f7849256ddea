"""Scenarios with models of `transformers`, as they come."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.edges import Scenarios
from tests.support.models import VOCABULARY

TRANSFORMERS = Scenarios()


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


class TransformersModel(pl.LightningModule):
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


for name, model, labels, padded in (
    ("GPT-2", gpt2, "next", False),
    ("GPT-2 with padding", gpt2, "next", True),
    ("BERT with its masked-language loss", bert_for_masked_language, "masked", True),
    ("BERT with a classifier", bert_for_classification, "class", True),
):
    TRANSFORMERS.add(
        name,
        lambda model=model: TransformersModel(model()),
        lambda labels=labels, padded=padded: tokens(labels, padded),
        arguments={"gradient_clip_val": 1.0},
        reference="parts",
    )
for name, model in {"GPT-2 with dropout": lambda: gpt2(0.1), "GPT-2 with checkpointing": checkpointed_gpt2}.items():
    TRANSFORMERS.add(
        name, lambda model=model: TransformersModel(model()), lambda: tokens("next", padded=False), reference="none"
    )
