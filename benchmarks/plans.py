#!/usr/bin/env python3
"""The plans that are chosen for three models on four devices: the GPT of the example, GPT-2 and BERT of `transformers`.

Each is measured in one process that emulates the devices, under the given precision, and not trained. GPT-2 and BERT
have their usual sizes (124 M and 110 M parameters) and random weights. Messages are taken to travel at a usual speed,
since there are no processes between which to measure.

    python benchmarks/plans.py [gpt gpt2 bert] [--precision bf16-mixed]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_asyncpipe import ReferenceStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_gpt import LitGPT

GPT_LENGTH, LENGTH = 128, 32


class LanguageModel(L.LightningModule):
    """A model of `transformers` that computes its own loss from tokens of shape (samples, length)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def gpt() -> tuple[L.LightningModule, Tensor]:
    """The example's model, and tokens for one step."""
    return LitGPT(), torch.randint(256, (16, GPT_LENGTH + 1))


def gpt2() -> tuple[L.LightningModule, Tensor]:
    """GPT-2 small, and tokens for one step."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return LanguageModel(GPT2LMHeadModel(GPT2Config()).train()), torch.randint(50_000, (16, LENGTH))


def bert() -> tuple[L.LightningModule, Tensor]:
    """BERT base, which predicts tokens, and tokens for one step."""
    from transformers import BertConfig, BertForMaskedLM

    return LanguageModel(BertForMaskedLM(BertConfig()).train()), torch.randint(30_000, (16, LENGTH))


MODELS: dict[str, Callable[[], tuple[L.LightningModule, Tensor]]] = {"gpt": gpt, "gpt2": gpt2, "bert": bert}


class PlansOnly(L.Callback):
    """Ends a training before it begins."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = True


def main() -> None:
    """Prints a table for each model, as a run does at its start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="|".join(MODELS))
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--precision", default="32-true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models:
        L.seed_everything(0, verbose=False)
        module, tokens = MODELS[name]()
        trainer = L.Trainer(
            strategy=ReferenceStrategy(args.devices, partition="profile"),
            accelerator="cpu",
            devices=1,
            precision=args.precision,
            callbacks=[PlansOnly()],
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
        )
        print(f"\n{name}, {sum(p.numel() for p in module.parameters()) / 1e6:.1f} M parameters", flush=True)
        begin = time.perf_counter()
        trainer.fit(module, DataLoader(tokens, batch_size=len(tokens)))  # type: ignore[arg-type]
        print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
