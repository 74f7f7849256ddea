"""How a batch is split into micro-batches, and when two micro-batches have one fingerprint."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_asyncpipe.runtime import microbatch
from lightning_asyncpipe.runtime.batch import batch_size, samples
from lightning_asyncpipe.runtime.microbatch import MicroBatch, split

torch.set_num_threads(1)

Pair = namedtuple("Pair", "x y")


def rows(n: int, *shape: int) -> Tensor:
    return torch.arange(float(n)).reshape(n, *(1 for _ in shape)).expand(n, *shape).clone()


def data(batch: Any, count: int, **options: Any) -> list[Any]:
    return [part.data for part in split(batch, count, **options)]


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 4))
@settings(deadline=None)
def test_sizes_are_those_of_tensor_split_with_enough_samples_in_each(n: int, count: int, min_samples: int) -> None:
    batch = rows(n)
    parts = split(batch, count, min_samples=min_samples)
    used = max(1, min(count, n // min_samples))
    assert [p.size for p in parts] == [len(p) for p in batch.tensor_split(used)]
    assert [p.index for p in parts] == list(range(used))
    assert torch.equal(torch.cat([p.data for p in parts]), batch)
    assert len(parts) == 1 or min(p.size for p in parts) >= min_samples


def test_parts_are_views_of_the_batch() -> None:
    batch = {"x": rows(6, 3), "y": np.arange(6)}
    for part in data(batch, 3):
        assert part["x"].untyped_storage().data_ptr() == batch["x"].untyped_storage().data_ptr()
        assert part["y"].base is batch["y"]


def test_one_micro_batch_is_the_batch_itself() -> None:
    batch = {"x": rows(1), "packed": pack_sequence([rows(2)])}
    [part] = split(batch, 4)
    assert part == MicroBatch(batch, 1, 0)
    assert part.data is batch


@pytest.mark.parametrize("options", [{"count": 0}, {"count": 2, "min_samples": 0}])
def test_counts_below_one_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        split(rows(4), **options)


@dataclasses.dataclass
class Sample:
    x: Tensor
    names: list[str]
    scale: float = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Tensor
    inner: Sample


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    total: Tensor = dataclasses.field(init=False, default_factory=lambda: torch.tensor(3.0))


def test_mappings_keep_their_type() -> None:
    made = defaultdict(list, {"x": rows(4)})
    for part in data(made, 2):
        assert type(part) is defaultdict
        assert part["missing"] == []
    ordered = OrderedDict([("b", rows(4)), ("a", rows(4))])
    for part in data(ordered, 2):
        assert type(part) is OrderedDict
        assert list(part) == ["b", "a"]
    user = UserDict({"x": rows(4)})
    assert [type(part) for part in data(user, 2)] == [UserDict, UserDict]
    assert len(user["x"]) == 4


def test_a_batch_of_transformers_keeps_its_type_and_its_encodings() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": rows(4, 3), "labels": rows(4)})
    encoding._encodings = ["e0", "e1", "e2", "e3"]
    first, second = data(encoding, 2)
    assert type(first) is transformers.BatchEncoding
    assert torch.equal(second["input_ids"], rows(4, 3)[2:])
    assert second.encodings == ["e2", "e3"]
    assert encoding.encodings == ["e0", "e1", "e2", "e3"]

    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=rows(4, 2))
    part = data(output, 2)[1]
    assert type(part) is type(output)
    assert torch.equal(part.last_hidden_state, rows(4, 2)[2:])


def test_tuples_named_tuples_and_dataclasses_keep_their_type() -> None:
    batch = Pair(rows(4), (rows(4), [rows(4), None]))
    second = data(batch, 2)[1]
    assert type(second) is Pair
    assert torch.equal(second.x, torch.tensor([2.0, 3.0]))
    assert type(second.y) is tuple
    assert torch.equal(second.y[1][0], torch.tensor([2.0, 3.0]))
    assert second.y[1][1] is None

    frozen = Frozen(rows(3), Sample(rows(3), ["a", "b", "c"]))
    first = data(frozen, 2)[0]
    assert type(first) is Frozen
    assert first.inner.names == ["a", "b"]
    assert first.inner.scale == 2.0
    assert len(frozen.x) == 3

    slotted = data(Slotted(rows(4)), 2)[1]
    assert torch.equal(slotted.x, torch.tensor([2.0, 3.0]))
    assert slotted.total.item() == 3.0


def test_what_has_no_samples_goes_to_every_micro_batch() -> None:
    config = object()
    constants = {
        "zero_dim": torch.tensor(7),
        "number": 3,
        "flag": True,
        "none": None,
        "text": "abcd",
        "size": torch.Size([4, 4, 4, 4]),
        "object": config,
        "set": {1, 2},
        "deque": deque([1, 2, 3, 4]),
        "numpy_number": np.float32(2.0),
        "module": torch.nn.Linear(1, 1),
        "empty": [],
    }
    for part in data({"x": rows(4), **constants}, 2):
        for key, value in constants.items():
            assert part[key] is value, key


def test_tensors_of_another_length_go_to_every_micro_batch_with_one_warning() -> None:
    microbatch._warned_paths.clear()
    batch = {"x": rows(4), "weights": {"w": rows(7)}, "bias": np.zeros(3)}
    with pytest.warns(UserWarning, match="every micro-batch gets all") as caught:
        parts = data(batch, 2)
    assert all(part["weights"]["w"] is batch["weights"]["w"] for part in parts)
    messages = sorted(str(w.message) for w in caught)
    assert [m.split(" has shape")[0] for m in messages] == [
        "`batch['bias']`",
        "`batch['weights']['w']`",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data(batch, 2)


def test_bags_are_split_as_a_list_and_as_values_with_offsets_a_warning_says_so() -> None:
    microbatch._warned_paths.clear()
    bags, labels = [torch.arange(n) for n in (3, 1, 4, 2)], torch.arange(4)
    first, last = data((bags, labels), 2)
    assert [len(bag) for bag in first[0]] == [3, 1]
    assert [len(bag) for bag in last[0]] == [4, 2]
    assert last[1].tolist() == [2, 3]
    with pytest.warns(UserWarning, match=r"`batch\[1\]` has shape \(10,\).* a list with an entry for each sample"):
        data((labels, torch.cat(bags), torch.tensor([0, 3, 4, 8])), 2)


def test_the_first_tensor_with_a_dimension_gives_the_batch_size() -> None:
    from lightning.pytorch.utilities.data import extract_batch_size

    batch = {"labels": [rows(3), rows(5)], "x": rows(5)}
    assert batch_size(batch) == 3 == extract_batch_size(batch)
    assert batch_size((torch.tensor(1.0), np.zeros(9), Sample(rows(6), ["a"]))) == 6
    assert batch_size([np.zeros((9, 2)), "abc"]) == 9
    assert batch_size("text") == 1
    assert batch_size(["a", "b"]) == 1
    assert batch_size(torch.tensor(1.0)) == 1
    assert batch_size(None) == 1


def test_without_tensors_there_is_one_micro_batch() -> None:
    texts = ["a", "b", "c"]
    assert [p.data for p in split(texts, 2)] == [texts]


def test_lists_with_an_entry_per_sample_are_split() -> None:
    class Image:
        pass

    images = tuple(Image() for _ in range(4))
    batch = {"x": rows(4), "names": ["a", "b", "c", "d"], "images": images, "ids": [1, 2, 3, 4]}
    first, second = data(batch, 2)
    assert first["names"] == ["a", "b"]
    assert second["ids"] == [3, 4]
    assert type(second["images"]) is tuple
    assert second["images"] == images[2:]


def test_targets_of_varying_length_are_split_by_sample() -> None:
    boxes = [torch.zeros(n, 4) for n in (3, 4, 1, 2)]  # one has as many rows as there are samples
    targets = [{"boxes": b, "image_id": torch.tensor([i])} for i, b in enumerate(boxes)]
    first, second = data({"x": rows(4), "boxes": boxes, "targets": targets}, 2)
    assert [len(b) for b in first["boxes"]] == [3, 4]
    assert second["boxes"][0] is boxes[2]
    assert second["targets"] == targets[2:]
    scalars = [torch.tensor(float(i)) for i in range(4)]
    assert data({"x": rows(4), "s": scalars}, 2)[1]["s"] == scalars[2:]


@pytest.mark.parametrize(
    "shapes", [[(5, 2), (3, 2), (4, 2), (5, 2)], [(5, 2)] * 4, [(3, 8, 6), (3, 5, 7), (3, 9, 9), (3, 5, 7)]]
)
@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("labels", ["a tensor", "a list of mappings", "numbers"])
def test_samples_in_a_list_beside_their_labels_are_split_by_sample(
    shapes: list[tuple[int, ...]], kind: Any, labels: str
) -> None:
    entries = kind(torch.rand(shape) for shape in shapes)
    beside: Any = {
        "a tensor": torch.arange(4),
        "a list of mappings": kind({"boxes": torch.rand(n, 4)} for n in (5, 1, 3, 2)),
        "numbers": kind(range(4)),
    }[labels]
    for batch in ((entries, beside), {"x": entries, "y": beside}, Pair(entries, beside)):
        assert samples(batch) == 4
        parts = [part if isinstance(part, tuple) else tuple(part.values()) for part in data(batch, 2)]
        for index, (x, y) in enumerate(parts):
            assert x == entries[2 * index : 2 * index + 2]
            assert type(x) is kind
            assert y is not beside
            assert len(y) == 2


def test_inputs_in_a_list_are_fields_where_something_beside_them_has_their_rows() -> None:
    batch = ([rows(6, 2), rows(6, 3)], rows(6))
    assert samples(batch) == 6
    assert [len(part[0][1]) for part in data(batch, 3)] == [2, 2, 2]
    assert samples(([rows(6, 2), rows(6, 2)], "text")) == 6
    assert samples(([rows(6, 2), rows(6, 2)], rows(6), rows(2))) == 6
    views, targets = (rows(6, 2), rows(6, 2)), (rows(6), rows(6))
    assert [len(part[0][1]) for part in data((views, targets), 3)] == [2, 2, 2]
    for nested in ((views, targets), {"x": views, "y": targets}, (views, [{"y": y} for y in targets])):
        assert samples(nested) == 6


def test_images_of_different_sizes_are_split_by_sample() -> None:
    images = [torch.rand(3, n, n + 1) for n in (5, 7, 6, 9)]
    assert data({"x": rows(4), "images": images}, 2)[1]["images"] == images[2:]
    last = [torch.rand(n, n + 1, 3) for n in (5, 7, 6, 9)]
    assert data({"x": rows(4), "images": last}, 2)[0]["images"] == last[:2]


def test_fields_of_a_batch_are_fields_also_where_there_are_as_many_as_samples() -> None:
    first, second = data([rows(2), rows(2)], 2)
    assert torch.equal(first[0], torch.tensor([0.0]))
    assert torch.equal(second[1], torch.tensor([1.0]))
    pair = [{"x": rows(2)}, {"x": rows(2)}]
    assert [part[1]["x"].tolist() for part in data(pair, 2)] == [[0.0], [1.0]]


class Graphs:
    """A batch class that can be sliced."""

    def __init__(self, nodes: list[Tensor]) -> None:
        self.nodes = nodes

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, part: slice) -> Graphs:
        return Graphs(self.nodes[part])


def test_objects_that_can_be_sliced_are_sliced() -> None:
    graphs = Graphs([torch.ones(3, 2), torch.ones(4, 2), torch.ones(1, 2)])
    assert batch_size(graphs) == 3
    assert [len(part) for part in data(graphs, 2)] == [2, 1]
    assert [len(part["g"]) for part in data({"x": rows(3), "g": graphs}, 2)] == [2, 1]


class Opaque:
    def __init__(self) -> None:
        self.inner = {"tensors": [torch.ones(4)]}


class OpaqueSlots:
    __slots__ = ("tensor",)

    def __init__(self) -> None:
        self.tensor = torch.ones(4)


class SlicesToList(Graphs):
    def __getitem__(self, part: slice) -> Any:
        return self.nodes[part]


class FailsToSlice(Graphs):
    def __getitem__(self, part: slice) -> Any:
        raise KeyError(part)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Opaque, "it holds tensors"),
        (OpaqueSlots, "it holds tensors"),
        (lambda: {torch.ones(4)}, "it holds tensors"),
        (lambda: deque([torch.ones(4)] * 4), "slicing it failed"),
        (lambda: SlicesToList([torch.ones(2)] * 4), "a slice of it is a list"),
        (lambda: FailsToSlice([torch.ones(2)] * 4), "slicing it failed"),
        (lambda: Graphs([torch.ones(2)]), "its length is 1, the batch has 4 samples"),
        (lambda: pack_sequence([torch.ones(2)] * 4), "a packed sequence"),
        (lambda: torch.eye(4).to_sparse(), "torch.sparse_coo tensor"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)] * 4), "nested"),
        (lambda: MappingProxyType({"x": torch.ones(4)}), "a copy with other values"),
    ],
)
def test_what_cannot_be_split_is_refused_with_path_type_and_remedy(make: Any, reason: str) -> None:
    value = make()
    with pytest.raises(TypeError) as raised:
        split({"x": rows(4), "more": (1, value)}, 2)
    message = str(raised.value)
    assert "`batch['more'][1]`" in message
    assert type(value).__qualname__ in message
    assert reason in message
    assert "`__len__`" in message
