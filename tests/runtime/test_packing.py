"""Small tensors of one kind are laid end to end, worked on at once, and taken apart again."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_asyncpipe.runtime import packing
from lightning_asyncpipe.runtime.packing import end_to_end, packs, spread, taken_apart


def tensors(*sizes: int) -> dict[str, Tensor]:
    return {str(i): torch.arange(float(size)) for i, size in enumerate(sizes)}


def test_small_tensors_of_one_kind_are_together_and_large_ones_alone():
    large = packing.SMALL + 1
    found = packs(tensors(1, 2, large, 3, 4, large), {"0": "a", "1": "b", "2": "a", "3": "a", "4": "b", "5": "b"})
    assert sorted(found) == [["0", "3"], ["1", "4"], ["2"], ["5"]]


def test_tensors_of_two_types_are_never_together():
    mixed = {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.float64)}
    assert sorted(packs(mixed, dict.fromkeys(mixed, 0))) == [["a"], ["b"]]


def test_no_pack_is_larger_than_full():
    many = tensors(*[packing.SMALL] * 9, 1)
    found = list(packs(many, dict.fromkeys(many, 0)))
    assert sorted(name for names in found for name in names) == sorted(many)
    assert [sum(many[name].numel() for name in names) <= packing.FULL for names in found] == [True] * 3


def test_what_is_taken_apart_has_the_shapes_and_strides_and_memory_of_its_own():
    like = [
        torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.tensor(1.0),
        torch.randn(0),
        torch.ones(2),
    ]
    parts = taken_apart(end_to_end(like), like)
    for part, tensor in zip(parts, like, strict=True):
        assert torch.equal(part, tensor)
        assert part.stride() == tensor.stride()
    parts[1].zero_()
    assert [part._version for part in parts] == [1, 2, 1, 1]
    assert torch.equal(parts[3], torch.ones(2))


def test_a_tensor_alone_is_not_copied():
    alone = [torch.ones(2, 2)]
    assert end_to_end(alone) is alone[0]
    assert taken_apart(alone[0], alone)[0] is alone[0]


def test_a_number_for_each_tensor_multiplies_all_of_its_elements():
    like = [torch.ones(2, 1), torch.ones(3)]
    scaled = end_to_end(like) * spread([torch.tensor(2.0), torch.tensor(3.0)], like)
    assert scaled.tolist() == [2, 2, 3, 3, 3]
    assert float(spread([torch.tensor(2.0)], like[:1])) == 2.0
