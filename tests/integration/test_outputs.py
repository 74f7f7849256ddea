"""What ``training_step`` returns and appends, from micro-batches to a batch, on every rank."""

from __future__ import annotations

from collections import UserDict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor

from lightning_asyncpipe.errors import PipelineError
from lightning_asyncpipe.integration.growth import GrowthWatch
from lightning_asyncpipe.integration.outputs import MicroBatchOutput, combine, exchange, read
from lightning_asyncpipe.runtime import codec

torch.set_num_threads(1)

SIZES = [3, 2]


def through_codec(obj: Any) -> list[Any]:
    """The objects of a world of one rank, as the network gives them."""
    return [codec.decode(codec.encode(obj))]


def returned(*values: Any) -> list[MicroBatchOutput]:
    """Outputs of micro-batches of 3 and 2 samples whose step returned ``values`` under "x"."""
    return [read({"loss": torch.tensor(float(i)), "x": value}, i, SIZES[i], 0) for i, value in enumerate(values)]


def combined(*values: Any) -> Any:
    result = combine(exchange(returned(*values), through_codec))
    assert isinstance(result, dict)
    return result["x"]


# The loss


def test_the_loss_of_a_batch_is_the_mean_over_samples() -> None:
    losses = torch.tensor([0.1, 0.2, 0.4])
    outputs = [read(losses[i], i, size, 0) for i, size in enumerate([2, 2, 1])]
    result = combine(outputs)
    assert isinstance(result, Tensor)
    torch.testing.assert_close(result, torch.tensor((0.2 + 0.4 + 0.4) / 5))
    assert combine(outputs, dtype=torch.float64).dtype is torch.float64


def test_a_loss_alone_needs_no_exchange() -> None:
    assert not read(torch.tensor(1.0), 0, 2, 0).needs_exchange
    assert not read({"loss": torch.tensor(1.0)}, 0, 2, 0).needs_exchange
    assert read({"loss": torch.tensor(1.0), "x": None}, 0, 2, 0).needs_exchange
    assert MicroBatchOutput(0, 2, 1.0, grown={"outs": [1]}).needs_exchange


def test_the_loss_keeps_its_graph_and_the_rest_loses_it() -> None:
    weight = torch.ones(3, requires_grad=True)
    value = {"loss": weight.sum(), "x": weight * 2, "deep": [{"y": (weight * 3,)}]}
    output = read(value, 0, 3, 0)
    assert isinstance(output.loss, Tensor)
    assert output.loss.requires_grad
    assert not output.extra["x"].requires_grad
    assert not output.extra["deep"][0]["y"][0].requires_grad
    assert float(combine([output])["loss"]) == 3.0  # type: ignore[index,arg-type]


def test_none_cannot_skip_a_step() -> None:
    with pytest.raises(PipelineError, match=r"None for micro-batch 1 of batch 7.*cannot be skipped"):
        read(None, 1, 2, 7)


@pytest.mark.parametrize("value", [{"x": 1}, {"loss": None}, 3.0, "loss", (torch.ones(()),)])
def test_what_lightning_refuses_is_refused_as_lightning_does(value: Any) -> None:
    with pytest.raises(MisconfigurationException) as expected:
        ClosureResult.from_training_step_output(value)
    with pytest.raises(MisconfigurationException) as raised:
        read(value, 0, 2, 0)
    assert str(raised.value)[:50] == str(expected.value)[:50]


@pytest.mark.parametrize("loss", [torch.ones(2), {"loss": torch.ones(2, 1)}, {"loss": 0.5}])
def test_a_loss_is_a_scalar_tensor(loss: Any) -> None:
    with pytest.raises(MisconfigurationException, match="loss"):
        read(loss, 0, 2, 0)


def test_a_loss_of_one_element_is_a_scalar() -> None:
    assert float(combine([read(torch.tensor([2.0]), 0, 2, 0)])) == 2.0  # type: ignore[arg-type]


# Everything else


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.0, 2.0), 1.4),
        ((1, 2.0), 1.4),
        ((4, 4), 4),
        ((4, 5), 4.4),
        ((True, True), True),
        ((True, False), 0.6),
        ((np.float32(1.0), np.float32(2.0)), 1.4),
        (("a", "a"), "a"),
        ((None, None), None),
        ((b"x", b"x"), b"x"),
        (([1, 2, 3], [4, 5]), [1, 2, 3, 4, 5]),
        ((["a", "b", "c"], ["d", "e"]), ["a", "b", "c", "d", "e"]),
        (([1.0], [2.0]), [1.4]),
        (((1.0, "k"), (2.0, "k")), (1.4, "k")),
        (({"a": 1.0, "b": {"c": 3}}, {"a": 2.0, "b": {"c": 3}}), {"a": 1.4, "b": {"c": 3}}),
        ((UserDict(a=1.0), UserDict(a=2.0)), {"a": 1.4}),
    ],
)
def test_numbers_strings_and_containers_combine_by_rule(values: Any, expected: Any) -> None:
    result = combined(*values)
    assert type(result) is type(expected)
    assert result == pytest.approx(expected) if not isinstance(result, (dict, tuple)) else True
    if isinstance(result, dict):
        assert result["a"] == pytest.approx(1.4)
        assert {k: v for k, v in result.items() if k != "a"} == {k: v for k, v in expected.items() if k != "a"}
    if isinstance(result, tuple):
        assert result[0] == pytest.approx(1.4)
        assert result[1:] == expected[1:]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (([1.0, 2.0, 3.0], [4.0, 5.0]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])),
        ((1.0, 2.0), torch.tensor(1.4)),
        ((3, 3), torch.tensor(3)),
        ((3, 4), torch.tensor(3.4)),
        ((True, False), torch.tensor(0.6)),
        ((1j, 2j), torch.tensor(1.4j)),
        (([7.0], [7.0]), torch.tensor([7.0])),
    ],
)
def test_tensors_combine_by_rule(values: Any, expected: Tensor) -> None:
    result = combined(*(torch.tensor(value) for value in values))
    torch.testing.assert_close(result, expected)
    if expected.ndim == 1:
        assert combined(*(np.array(value) for value in values)).tolist() == expected.tolist()


def test_half_precision_scalars_keep_their_dtype() -> None:
    values = [torch.tensor(v, dtype=torch.bfloat16) for v in (1.0, 2.0)]
    assert combined(*values).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (("a", "b"), "differs between micro-batches"),
        ((None, 1.0), "differs between micro-batches"),
        ((torch.ones(4), torch.ones(5)), "has the shapes"),
        ((torch.ones(4), torch.zeros(4)), "has the shapes"),
        ((np.ones(4), np.zeros(4)), "has the shapes"),
        (({"a": 1}, {"b": 1}), "has different keys"),
        (([1, 2], [1]), "has different lengths"),
        (((1, 2), (1,)), "has different lengths"),
    ],
)
def test_what_has_no_value_for_a_batch_is_an_error_that_names_the_key(values: Any, reason: str) -> None:
    with pytest.raises(PipelineError, match=rf"\['x'\].*{reason}"):
        combined(*values)
    with pytest.raises(PipelineError, match=rf"\['x'\]\['deep'\].*{reason}"):
        combined(*({"deep": value} for value in values))


def test_a_key_that_is_missing_for_a_micro_batch_is_an_error() -> None:
    outputs = returned(1.0, 2.0)
    del outputs[1].extra["x"]
    with pytest.raises(PipelineError, match=r"\['x'\].*missing"):
        combine(outputs)


def test_a_single_micro_batch_keeps_what_it_returned() -> None:
    value = {"a": torch.ones(7), "b": "text", "c": None}
    result = combined(value)
    assert torch.equal(result.pop("a"), value["a"])
    assert result == {"b": "text", "c": None}


# Between ranks


Point = namedtuple("Point", "x y")


def test_outputs_of_all_ranks_arrive_in_the_order_of_micro_batches() -> None:
    ranks = [[MicroBatchOutput(2, 1, 0.5, {"x": 2}), MicroBatchOutput(0, 1, 0.5, {"x": 0})]]
    ranks.append([MicroBatchOutput(1, 1, 0.5, {"x": 1}, replica=0)])
    ranks.append([MicroBatchOutput(0, 1, 0.5, {"x": 3}, {"outs": [4]}, replica=1)])
    sent: list[Any] = []
    for local in ranks:
        exchange(local, lambda obj: sent.append(obj) or [])  # type: ignore[func-returns-value]
    results = exchange([], lambda obj: [codec.decode(codec.encode(m)) for m in sent])
    assert [output.extra["x"] for output in results] == [0, 1, 2, 3]
    assert results[3].grown == {"outs": [4]}
    assert combine(results) == {"loss": torch.tensor(0.5), "x": 1.5}


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (torch.eye(2).to_sparse(), "torch.Tensor"),
        ({(1, 2): 3}, "builtins.dict"),
        (torch.nn.Linear(1, 1), "Linear"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, kind: str) -> None:
    with pytest.raises(PipelineError, match=rf"`\['x'\]\[0\]` of what .*{kind}"):
        exchange([MicroBatchOutput(0, 1, 0.0, {"x": [value]})], through_codec)
    with pytest.raises(PipelineError, match=rf"`self\.outs\[1\]` is of type .*{kind}"):
        exchange([MicroBatchOutput(0, 1, 0.0, grown={"outs": [1, value]})], through_codec)


def test_a_named_tuple_travels_as_a_tuple() -> None:
    [output] = exchange([MicroBatchOutput(0, 1, 0.0, {"x": Point(1, 2)})], through_codec)
    assert output.extra["x"] == (1, 2)


# Lists that grow


class Exit(BaseException):
    """How a stage that is not the last leaves the step."""


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Any] = []
        self.queue: deque[Any] = deque(["q0"])
        self.recent: deque[Any] = deque([1, 2, 3], maxlen=3)
        self.other = [1, 2]


def test_what_a_last_stage_appends_is_taken_and_committed_in_order() -> None:
    model = Model()
    held = model.outs
    watch = GrowthWatch(model)
    weight = torch.ones(2, requires_grad=True)
    outputs = []
    for i in range(2):
        with watch.watching():
            model.outs.append({"loss": weight * i})
            model.outs += [i]
            model.queue.extend("ab")
        assert (model.outs, list(model.queue)) == ([], ["q0"])
        outputs.append(MicroBatchOutput(i, 1, 0.0, grown=watch.take()))
        assert watch.take() == {}
    assert model.outs is held
    watch.commit(exchange(outputs, through_codec))
    assert model.outs is held
    assert [v if isinstance(v, int) else v["loss"].tolist() for v in held] == [[0, 0], 0, [1, 1], 1]
    assert not any(v["loss"].requires_grad for v in held if isinstance(v, dict))
    assert list(model.queue) == ["q0", "a", "b", "a", "b"]
    assert model.other == [1, 2]


def test_what_a_stage_appends_before_it_leaves_the_step_is_dropped() -> None:
    model = Model()
    watch = GrowthWatch(model)

    def leave() -> None:
        model.outs.append("dummy")
        raise Exit

    with pytest.raises(Exit), watch.watching():
        leave()
    assert model.outs == []
    assert watch.take() == {}


def test_nothing_is_committed_twice() -> None:
    model = Model()
    watch = GrowthWatch(model)
    with watch.watching():
        model.outs.append(1)
    with watch.watching():
        pass
    assert watch.take() == {}


def test_a_list_that_is_replaced_by_a_longer_one_has_grown() -> None:
    model = Model()
    watch = GrowthWatch(model)
    held = model.other
    with watch.watching():
        model.other = [*model.other, 3]
        model.outs = ["first"]
    assert model.other is held
    assert watch.take() == {"other": [3], "outs": ["first"]}


def test_an_attribute_that_is_set_anew_is_left_alone() -> None:
    model = Model()
    watch = GrowthWatch(model)
    with watch.watching():
        model.other = [5, 6, 7]
        model.queue = None  # type: ignore[assignment]
    assert model.other == [5, 6, 7]
    assert watch.take() == {}


@pytest.mark.parametrize("appended", [1, 2, 3, 5])
@pytest.mark.parametrize("held", [0, 1, 3])
def test_a_deque_with_a_limit_gets_back_what_an_append_removed(held: int, appended: int) -> None:
    model = Model()
    before = [object() for _ in range(held)]
    model.recent = deque(before, maxlen=3)
    watch = GrowthWatch(model)
    added = [f"new {i}" for i in range(appended)]
    with watch.watching():
        model.recent.extend(added)
    assert list(model.recent) == before
    output = MicroBatchOutput(0, 1, 0.0, grown=watch.take())
    watch.commit([output])
    assert list(model.recent) == [*before, *added][-3:]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.other.clear(),
        lambda model: model.other.pop(),
        lambda model: (model.other.pop(0), model.other.append(9)),
        lambda model: model.queue.appendleft(0),
    ],
)
def test_a_list_that_loses_entries_is_an_error_that_names_it(change: Any) -> None:
    model = Model()
    with pytest.raises(PipelineError, match=r"self\.(other|queue)"), GrowthWatch(model).watching():
        change(model)


def test_an_error_of_the_user_is_not_covered() -> None:
    model = Model()

    def fail() -> None:
        model.other.clear()
        raise KeyError

    with pytest.raises(KeyError), GrowthWatch(model).watching():
        fail()
