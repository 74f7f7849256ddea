"""Equal data have one fingerprint on every rank, other data another one."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_asyncpipe.runtime.fingerprint import _EXACT_BYTES, _summed_on_device, fingerprint
from lightning_asyncpipe.runtime.microbatch import split


class Graphs:
    """A batch class that can be sliced."""

    def __init__(self, nodes: list[Tensor]) -> None:
        self.nodes = nodes

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, part: slice) -> Graphs:
        return Graphs(self.nodes[part])


def test_equal_data_have_one_fingerprint_whatever_their_memory() -> None:
    ids = torch.randint(0, 1000, (8, 256))
    batch = {"ids": ids, "mask": torch.ones(8, 256, dtype=torch.bool), "n": 3, "t": ["a", "b"]}
    again = {
        "ids": ids.t().contiguous().t(),
        "mask": batch["mask"].clone(),
        "n": 3,
        "t": ["a", "b"],
    }
    assert fingerprint(batch) == fingerprint(again)
    for one, other in zip(split(ids, 4), split(ids.clone(), 4), strict=True):
        assert fingerprint(one.data) == fingerprint(other.data)


def test_fingerprints_fit_a_signed_word_and_are_never_zero() -> None:
    values = [fingerprint(torch.tensor([i])) for i in range(100)]
    assert all(-(2**63) <= v < 2**63 and v != 0 for v in values)
    assert len(set(values)) == 100


def test_different_data_have_different_fingerprints() -> None:
    x = torch.randint(0, 1000, (4, 16))
    changed = x.clone()
    changed[3, 15] += 1
    transposed = x.t().contiguous()
    variants: list[Any] = [
        x,
        changed,
        transposed,
        x.float(),
        x.int(),
        x.reshape(16, 4),
        x.flip(0),
        x.roll(1, 0),
        {"x": x, "n": 1},
        {"x": x, "n": 12},
        {"x": x, "n": [1, 2]},
        {"x": x, "t": "a"},
        {"x": x, "t": "b"},
        np.arange(4),
        np.arange(4, dtype=np.float32),
        Graphs([x]),
        Graphs([changed]),
        x.double().requires_grad_(),
        x.bfloat16(),
        torch.ones(0, 3),
        torch.ones(0, 4),
    ]
    assert len({fingerprint(v) for v in variants}) == len(variants)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16, torch.int64])
def test_large_tensors_are_told_apart_by_one_changed_element(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 100, (4, 3, 100, 101), generator=generator).to(dtype)
    assert x.nbytes > _EXACT_BYTES
    assert fingerprint(x) == fingerprint(x.clone())
    for position in [0, x.numel() - 1, *torch.randint(x.numel(), (50,), generator=generator)]:
        changed = x.clone()
        changed.view(-1)[position] += 1
        assert fingerprint(changed) != fingerprint(x)
    assert len({fingerprint(x), fingerprint(x.flip(0)), fingerprint(x.roll(1, 0))}) == 3


def test_what_is_read_of_a_long_tensor_on_a_device_is_short_and_tells_elements_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    flat = torch.randint(0, 256, (500_003,), dtype=torch.uint8, generator=generator)
    covered = _summed_on_device(flat)
    assert covered.numel() < 20_000
    for position in [0, flat.numel() - 1, *torch.randint(flat.numel(), (50,), generator=generator)]:
        changed = flat.clone()
        changed[position] ^= 1
        assert not torch.equal(_summed_on_device(changed), covered)


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    program = (
        "import torch; from lightning_asyncpipe.runtime.fingerprint import fingerprint;"
        "print(fingerprint({'x': torch.arange(12).reshape(3, 4), 's': 'text'}))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(other.stdout) == fingerprint({"x": torch.arange(12).reshape(3, 4), "s": "text"})


def test_a_long_tensor_takes_a_fraction_of_the_time_that_reading_it_all_would() -> None:
    x = torch.randint(0, 50_000, (64, 16_384))
    assert _seconds(lambda: fingerprint(x)) < 0.5 * _seconds(lambda: hashlib.blake2b(x.numpy()).digest())


def _seconds(call: Any) -> float:
    """The shortest of several calls."""

    def once() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return min(once() for _ in range(9))
