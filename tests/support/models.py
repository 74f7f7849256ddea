"""Small LightningModules, written as any user would write them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 23


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Token and position embeddings, a list of blocks, and a head tied to the token embedding."""

    def __init__(self, blocks: int = 6, width: int = 8, length: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LanguageModel(pl.LightningModule):
    """A causal language model on rows of token ids."""

    def __init__(
        self, model: nn.Module | None = None, lr: float = 1e-2, optimizer: str = "adamw", schedule: bool = True
    ) -> None:
        super().__init__()
        self.model = model if model is not None else GPT()
        self.lr = lr
        self.optimizer_name = optimizer
        self.schedule = schedule

    def logits(self, ids: Tensor) -> Tensor:
        out = self.model(ids)
        return out if isinstance(out, Tensor) else out.logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        optimizer: torch.optim.Optimizer
        if self.optimizer_name == "adamw":
            optimizer = torch.optim.AdamW(parameters, lr=self.lr, betas=(0.9, 0.95))
        else:
            optimizer = torch.optim.SGD(parameters, lr=self.lr, momentum=0.9)
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Rows(Dataset[Tensor]):
    """Rows of token ids, a function of their number alone."""

    def __init__(self, count: int, length: int = 8, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        steps = torch.randint(1, 4, (count, length), generator=generator)
        self.rows = steps.cumsum(1) % VOCABULARY

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def loader(count: int, batch_size: int, length: int = 8, **kwargs: Any) -> DataLoader[Tensor]:
    return DataLoader(Rows(count, length), batch_size=batch_size, **kwargs)
