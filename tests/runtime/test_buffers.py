"""Running statistics are those of one device that runs the micro-batches in order."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_asyncpipe.runtime.buffers import RunningStatistics, preserved_buffers
from lightning_asyncpipe.runtime.stages import StageRunner, StageTask
from tests.runtime.stage_models import Cnn, backwards, forwards, images, program_for


class Norms(nn.Module):
    """Every kind of layer that keeps running statistics; one of them is called twice, one does not train."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.lazy = nn.LazyBatchNorm2d(momentum=momentum)
        self.two = nn.BatchNorm2d(3, momentum=momentum)
        self.instance = nn.InstanceNorm2d(3, momentum=momentum or 0.2, track_running_stats=True)
        self.one = nn.BatchNorm1d(3, momentum=momentum, affine=False)
        self.three = nn.BatchNorm3d(3, momentum=momentum)
        self.frozen = nn.BatchNorm1d(3, momentum=momentum).eval()
        self.none = nn.BatchNorm1d(3, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.two(self.lazy(x)) + x.square())
        x = self.instance(x)
        x = self.three(x[..., None])[..., 0]
        return self.none(self.frozen(self.one(x.flatten(2))))


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize("momentum", [0.1, None])
def test_committed_records_give_what_a_sequence_of_forwards_gives(momentum: float | None) -> None:
    model = Norms(momentum).double()
    batches = [torch.randn(4, 3, 5, 5, dtype=torch.float64) * i for i in range(1, 5)]
    with preserved_buffers(model.two):
        model(batches[0])
    model.lazy.reset_running_stats()
    sequential = copy.deepcopy(model)
    outputs = [sequential(batch) for batch in batches]
    for layer in (model.two, model.lazy, model.instance, model.one, model.three):
        layer.reset_running_stats()
        sequential.get_submodule(next(n for n, m in model.named_modules() if m is layer)).reset_running_stats()
    outputs = [sequential(batch) for batch in batches]
    recorder = RunningStatistics(model)
    before = buffers_of(model)
    records = []
    for index in (2, 0, 3, 1):  # whatever the order of the forwards
        recorder.begin()
        assert torch.equal(model(batches[index]), outputs[index])
        records.append((index, recorder.end()))
    after = buffers_of(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    for _, staged in sorted(records, key=lambda pair: pair[0]):
        sent = recorder.unpack(recorder.pack(staged))
        assert [r.module for r in sent] == [r.module for r in staged]
        recorder.commit(sent)
    for name, buffer in sequential.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, rtol=1e-12, atol=1e-12)
    recorder.close()
    model(batches[0])
    assert int(model.one.num_batches_tracked) == len(batches) + 1


def test_stages_leave_running_statistics_to_the_commit() -> None:
    model = Cnn()
    sequential = copy.deepcopy(model)
    batches = [images() for _ in range(3)]
    runner = StageRunner(model, program_for(model, 4, batches[0], 0), model.training_step)
    before = buffers_of(model)
    records = []
    for batch in batches:
        made = forwards(runner, StageTask((batch, 0)))
        backwards(runner, made)
        records.append([record for forward in made for record in forward.buffer_records])
        assert not any(forward.recomputed_records() for forward in made)
        sequential.training_step(batch, 0)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    for record in records:
        runner.statistics.commit(record)
    runner.close()
    for name, buffer in sequential.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer)


def test_a_part_that_runs_again_counts_again_as_on_one_device() -> None:
    class Checkpointed(Cnn):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0]
            for part in self.features:
                x = checkpoint(part, x, use_reentrant=False)
            return nn.functional.cross_entropy(self.head(x.flatten(1)), batch[1])

    model = Checkpointed()
    sequential = copy.deepcopy(model)
    batch = images()
    sequential.training_step(batch, 0).backward()
    assert int(sequential.features[1][1].num_batches_tracked) == 2
    runner = StageRunner(model, program_for(model, 2, batch, 0), model.training_step)
    made = forwards(runner, StageTask((batch, 0)))
    backwards(runner, made)
    for forward in made:
        runner.statistics.commit([*forward.buffer_records, *forward.recomputed_records()])
    runner.close()
    for name, buffer in sequential.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer)


class Counting(Cnn):
    """A step that changes other buffers too, one in place and one by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("constant", torch.ones(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += len(batch[0])
        self.replaced = self.replaced + 1
        return super().training_step(batch, batch_idx)


def test_other_buffers_that_a_step_changes_are_named_once() -> None:
    model, batch = Counting(), images()
    named: list[Sequence[str]] = []
    program = program_for(model, 2, batch, 0)
    assert (float(model.seen), float(model.replaced)) == (0, 0)
    runner = StageRunner(model, program, model.training_step, statistics=RunningStatistics(model, named.append))
    for _ in range(2):
        forwards(runner, StageTask((batch, 0)))
    runner.close()
    assert sorted(name for names in named for name in names) == ["replaced", "seen"]
    recorder = RunningStatistics(model)
    recorder.begin()
    model.training_step(batch, 0)
    with pytest.warns(UserWarning, match="changes the buffers 'seen', 'replaced'\\. Only") as caught:
        recorder.end()
    assert len(caught) == 1
    recorder.close()
