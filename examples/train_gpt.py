#!/usr/bin/env python3
"""Train a small GPT on the sources of Python's standard library, as asynchronous pipelines.

The model and the training step below are ordinary: nothing in them knows of pipelines. What makes
the run a pipelined one is the ``strategy`` that is given to the ``Trainer``.

    python examples/train_gpt.py                # 4 devices, 2 pipelines, 16 micro-batches a step
    python examples/train_gpt.py --compare      # the same training on one device afterwards
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_asyncpipe import AsyncMultiPipeStrategy

VOCABULARY = 256  # bytes
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


# --- data ---


def standard_library_files() -> list[Path]:
    """Sorted paths of the standard library's own Python sources, without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in sorted(root.rglob("*.py")) if EXCLUDED.isdisjoint(path.relative_to(root).parts)]


class RandomCrops(Dataset[Tensor]):
    """``count`` sequences of ``length + 1`` bytes from random places of a text.

    The places are drawn once from ``seed``, so the order is random already and a loader need not
    shuffle.
    """

    def __init__(self, text: Tensor, length: int, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.text, self.length = text, length
        self.starts = torch.randint(len(text) - length, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.starts[index])
        return self.text[start : start + self.length + 1].long()


class StandardLibrary(L.LightningDataModule):
    """Byte sequences of the standard library; every tenth file is held out for validation."""

    def __init__(self, length: int, batch_size: int, steps: int, seed: int = 0) -> None:
        super().__init__()
        self.length, self.batch_size, self.steps, self.seed = length, batch_size, steps, seed

    def setup(self, stage: str | None = None) -> None:
        contents = [path.read_bytes() for path in standard_library_files()]
        train = b"".join(c for i, c in enumerate(contents) if i % 10 != 9)
        validation = b"".join(contents[9::10])
        self.train = RandomCrops(
            torch.frombuffer(bytearray(train), dtype=torch.uint8),
            self.length,
            self.batch_size * self.steps,
            self.seed,
        )
        self.validation = RandomCrops(
            torch.frombuffer(bytearray(validation), dtype=torch.uint8), self.length, 256, seed=1
        )

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.validation, batch_size=32)


# --- model ---


class Block(nn.Module):
    """A pre-LayerNorm transformer block with causal attention; (batch, time, width) to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, time_, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time_, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, time_, width))
        y: Tensor = self.mlp(self.norm2(x))
        return x + y


class GPT(nn.Module):
    """Token and position embeddings, blocks, and a head tied to the token embedding.

    Takes tokens of shape (batch, time) and returns logits of shape (batch, time, ``VOCABULARY``).
    """

    def __init__(self, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for embedding in (self.token_embedding, self.position_embedding):
            nn.init.normal_(embedding.weight, std=width**-0.5)
        self.head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class LitGPT(L.LightningModule):
    """The GPT with its loss and optimizer: AdamW, linear warm-up, then a cosine down to a tenth."""

    def __init__(
        self,
        width: int = 96,
        depth: int = 8,
        heads: int = 4,
        length: int = 128,
        learning_rate: float = 2e-3,
        steps: int = 300,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate, self.steps = learning_rate, steps
        self.model = GPT(width, depth, heads, length)

    def loss(self, sequences: Tensor) -> Tensor:
        """Mean cross-entropy in nats a byte; sequences of shape (batch, length + 1)."""
        logits = self.model(sequences[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("validation_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95))
        warmup = max(1, self.steps // 5)

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            progress = (step - warmup) / max(1, self.steps - warmup)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


# --- running ---


class Clock(L.Callback):
    """Measures the seconds per step, from the end of step ``skip`` to the end of the last one."""

    def __init__(self, skip: int = 5) -> None:
        self.skip = skip
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    def seconds_per_step(self) -> float | None:
        """None where the training had too few steps to tell, or ran in another process."""
        ends = self.ends[self.skip :]
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None


def fit(args: argparse.Namespace, strategy: Any, devices: int) -> tuple[L.Trainer, Clock]:
    """Train one model from ``args.seed``; the same data in the same order whatever the strategy."""
    L.seed_everything(args.seed, verbose=False)
    clock = Clock()
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        precision=args.precision,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        callbacks=[clock],
        use_distributed_sampler=False,  # it would shuffle, and one device has none
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    module = LitGPT(args.width, args.depth, args.heads, args.length, args.learning_rate, args.steps)
    trainer.fit(module, StandardLibrary(args.length, args.batch_size, args.steps))
    return trainer, clock


def validation_loss(checkpoint: Path, args: argparse.Namespace) -> float:
    """Mean loss of a saved model over fixed validation sequences, in float32 on one device."""
    module = LitGPT.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    data = StandardLibrary(args.length, args.batch_size, args.steps)
    trainer = L.Trainer(
        devices=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return float(trainer.validate(module, data, verbose=False)[0]["validation_loss"])


def report(statistics: Mapping[str, Any], results: Mapping[str, tuple[float, float | None]]) -> str:
    """The table that the run ends with.

    ``results`` maps a name to its validation loss and tokens per second (None: not measured), the
    pipelined run first; ``statistics`` are those of the strategy, of which any may be absent.
    """
    lines = [f"{'':<14}{'validation loss':>17}{'tokens / s':>14}"]
    for name, (loss, speed) in results.items():
        lines.append(f"{name:<14}{loss:>17.4f}{'-' if speed is None else f'{speed:,.0f}':>14}")
    losses = [loss for loss, _ in results.values()]
    if len(losses) > 1:
        lines.append(f"{'difference':<14}{(losses[0] / losses[1] - 1) * 100:>+15.2f} %")
    labels = {
        "utilisation": ("utilisation of the devices", "{:.3f}"),
        "microbatches": ("micro-batches trained", "{:,d}"),
        "stale_microbatches": ("  of these with a stale forward", "{:,d}"),
        "stale_share": ("share of stage forwards that were stale", "{:.3f}"),
        "max_staleness": ("largest staleness, in updates", "{:d}"),
    }
    known = [(key, *label) for key, label in labels.items() if statistics.get(key) is not None]
    if known:
        lines.append("")
    lines += [f"{text:<40}{form.format(statistics[key]):>9}" for key, text, form in known]
    return "\n".join(lines)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT as asynchronous pipelines.")
    pipe = parser.add_argument_group("pipelines")
    pipe.add_argument("--devices", type=int, default=4, help="processes, and stages of the model")
    pipe.add_argument("--pipelines", type=int, default=2, help="pipelines over these devices")
    pipe.add_argument("--microbatches", type=int, default=16, help="micro-batches per step")
    pipe.add_argument("--max-staleness", type=int, default=1, help="0 trains synchronously")
    pipe.add_argument("--weight-stash", action="store_true", help="backward on the weights of the forward")
    pipe.add_argument("--start-method", default="popen", choices=["popen", "spawn", "fork", "forkserver"])
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=300)
    training.add_argument("--batch-size", type=int, default=16, help="sequences per step")
    training.add_argument("--precision", default="32-true")
    training.add_argument("--learning-rate", type=float, default=2e-3)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--compare", action="store_true", help="then train on one device too")
    training.add_argument("--checkpoint", type=Path, default=Path("checkpoints/train_gpt.ckpt"))
    model = parser.add_argument_group("model")
    model.add_argument("--width", type=int, default=96)
    model.add_argument("--depth", type=int, default=8, help="transformer blocks")
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--length", type=int, default=128, help="bytes per sequence")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    strategy = AsyncMultiPipeStrategy(
        num_pipelines=args.pipelines,
        num_microbatches=args.microbatches,
        max_staleness=args.max_staleness,
        weight_stash=args.weight_stash,
        start_method=args.start_method,
    )
    trainer, clock = fit(args, strategy, args.devices)
    trainer.save_checkpoint(args.checkpoint)  # every rank takes part, one writes
    statistics = trainer.strategy.statistics()  # type: ignore[attr-defined]
    if not trainer.is_global_zero:
        return

    def result(checkpoint: Path, clock: Clock) -> tuple[float, float | None]:
        seconds = clock.seconds_per_step()
        speed = args.batch_size * args.length / seconds if seconds else None
        return validation_loss(checkpoint, args), speed

    results = {"pipelined": result(args.checkpoint, clock)}
    if args.compare:
        trainer, clock = fit(args, "auto", 1)
        checkpoint = args.checkpoint.with_name(f"{args.checkpoint.stem}-one-device.ckpt")
        trainer.save_checkpoint(checkpoint)
        results["one device"] = result(checkpoint, clock)
    print(report(statistics, results))


if __name__ == "__main__":
    main()
