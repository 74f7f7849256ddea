"""What the package relies on in torch, beside its public interface. If one of these fails, torch has changed."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.format_utils
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_asyncpipe import _private
from lightning_asyncpipe.runtime.hollow import hollow, is_hollow
from lightning_asyncpipe.runtime.shards import PartReader, write_index, write_part


def test_calls_of_modules_can_be_intercepted() -> None:
    assert _private.interception_works()


def test_interceptions_nest_and_can_be_removed_in_any_order() -> None:
    def adding(amount: int) -> Any:
        return lambda call: lambda x: call(x) + amount

    module = nn.Identity()
    first = _private.intercept(module, adding(1))
    second = _private.intercept(module, adding(10))
    assert module(0) == 11
    first.remove()
    assert module(0) == 10
    second.remove()
    assert module(0) == 0
    module = nn.Identity()
    module.compile(backend="eager")
    assert _private.is_compiled(module)
    _private.intercept(module, adding(1)).remove()
    assert _private.is_compiled(module)


def test_an_interception_is_outside_the_hooks_of_the_module() -> None:
    module = nn.Identity()
    module.register_forward_hook(lambda *_: 5)
    seen = []
    interception = _private.intercept(module, lambda call: lambda x: seen.append(call(x)))
    module(1)
    assert seen == [5]
    assert not _private.is_compiled(module)
    with _private.without_hooks(module):
        module(1)
    module(1)
    assert seen == [5, 1, 5]
    interception.remove()


def test_copies_of_an_intercepted_module_are_not_intercepted() -> None:
    module = nn.Linear(2, 2)
    interception = _private.intercept(module, lambda call: lambda x: None)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other(torch.zeros(2)) is not None
    assert module(torch.zeros(2)) is None
    interception.remove()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_calls_are_recognised(reentrant: bool) -> None:
    seen = []

    def inner(x: Tensor) -> Tensor:
        seen.append(_private.checkpoint_frames())
        return x * 2

    def outer(x: Tensor) -> Tensor:
        return checkpoint(inner, inner(x), use_reentrant=False)

    x = torch.ones(2, requires_grad=True)
    inner(x)
    checkpoint(outer, x, use_reentrant=reentrant)
    assert [[kind for _, kind in frames] for frames in seen] == [[], [reentrant], [reentrant, False]]
    assert seen[1][0][0] is seen[2][0][0]
    assert not _private.on_stack(seen[1][0][0])


def test_fake_tensors_mix_with_real_parameters_and_hollow_ones() -> None:
    linear = nn.Linear(3, 5)
    hollow(linear.weight)
    mode = _private.fake_mode()
    x = _private.to_fake(mode, torch.randn(2, 4, 3).transpose(0, 1))
    with mode:
        y = linear(x)
    assert (y.shape, y.stride(), y.dtype) == ((4, 2, 5), (10, 5, 1), torch.float32)
    assert isinstance(y, _private.FakeTensor)


def test_tensors_that_were_made_fake_can_be_swapped_afterwards() -> None:
    """What a mode remembers of them are weak references, which ``swap_tensors`` refuses."""
    linear = nn.Linear(3, 5)
    with _private.shapes_only() as mode:
        with mode:
            linear(_private.to_fake(mode, torch.randn(2, 3)))
        assert weakref.getweakrefcount(linear.weight)
    assert mode is not None
    assert not weakref.getweakrefcount(linear.weight)
    _private.swap(linear.weight, nn.Parameter(torch.ones(5, 3)))
    assert torch.equal(linear.weight, torch.ones(5, 3))


def test_operations_that_fail_are_not_reported_where_only_shapes_are_wanted(
    caplog: Any,
) -> None:
    def fails(mode: _private.FakeTensorMode) -> None:
        with mode, pytest.raises(RuntimeError):
            torch.mm(torch.ones(2, 3), torch.ones(2, 3))

    fails(_private.fake_mode())
    assert caplog.records
    caplog.clear()
    with _private.shapes_only() as mode:
        fails(mode)
    assert not caplog.records
    fails(_private.fake_mode())
    assert caplog.records


def test_storages_have_an_identity_while_they_live() -> None:
    x = torch.zeros(4)
    assert _private.storage_key(x) == _private.storage_key(x[1:]) == _private.storage_key(x.detach())
    assert _private.storage_key(x) != _private.storage_key(x.clone())
    assert _private.storage_key(torch.eye(2).to_sparse()) is None


def test_schemas_say_what_operations_write() -> None:
    aten = torch.ops.aten
    assert _private.written_arguments(aten.add_.Tensor) == ((0, "self"),)
    assert _private.written_arguments(aten.add.out)[0][1] == "out"
    assert _private.written_arguments(aten._foreach_add_.Scalar) == ((0, "self"),)
    assert _private.written_arguments(aten.view.default) == ()
    assert [_private.makes_views(op) for op in (aten.t.default, aten.split.Tensor)] == [True, True]
    assert [_private.makes_views(op) for op in (aten.mul.Tensor, aten.mul_.Tensor)] == [False, False]


def test_recurrent_layers_hold_their_weights_twice() -> None:
    layer = nn.GRU(2, 3)
    slots = _private.parameter_slots(layer)
    assert len(slots) == 2 * len(list(layer.parameters()))
    assert all(container[key] is parameter for container, key, parameter in slots)


def test_a_hollow_parameter_is_the_same_object_with_no_memory() -> None:
    for shape in ((), (1,), (3, 5), (0, 2)):
        parameter = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
        assert not is_hollow(parameter)
        hollow(parameter)
        assert is_hollow(parameter)
        assert (parameter.shape, parameter.dtype) == (torch.Size(shape), torch.bfloat16)
        assert parameter.untyped_storage().nbytes() <= 6
        parameter.data = torch.ones(shape, dtype=torch.bfloat16)
        assert not is_hollow(parameter)


def test_function_transforms_are_noticed() -> None:
    seen = []

    def inner(x: Tensor) -> Tensor:
        seen.append(_private.in_function_transform())
        return x.sum()

    for function in (inner, torch.func.vmap(inner), torch.func.grad(inner)):
        function(torch.ones(2))
    assert seen == [False, True, True]
    assert not _private.in_function_transform()


def test_the_index_of_a_checkpoint_is_made_of_what_its_reader_knows(tmp_path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones((), dtype=torch.bfloat16), "empty": torch.ones(0)}
    write_index([write_part(tensors, tmp_path, 3)], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".metadata", "__3_0.distcp"]
    reader = PartReader(tmp_path)
    found = {name: reader.empty(name) for name in tensors}
    reader.read(found)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    torch.distributed.checkpoint.format_utils.dcp_to_torch_save(tmp_path, tmp_path / "by torch")
    assert torch.equal(torch.load(tmp_path / "by torch", weights_only=True)["a"], tensors["a"])
