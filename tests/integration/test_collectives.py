"""Collectives that ranks would call at different times are refused inside a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import all_reduce as imported_all_reduce
from torch.distributed.nn.functional import all_gather as gather_with_gradient
from torchmetrics import MeanMetric

from lightning_asyncpipe.errors import CollectiveInStepError, PipelineError
from lightning_asyncpipe.integration import collectives
from lightning_asyncpipe.integration.collectives import forbid_in_step, in_step

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def world(tmp_path: Any) -> Iterator[None]:
    """A world of one process, in which every collective would succeed."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def synchronised_metric() -> None:
    metric = MeanMetric(distributed_available_fn=lambda: True)
    metric.update(1.0)
    metric.compute()


COLLECTIVES: dict[str, tuple[Callable[[], Any], str]] = {
    "all_reduce": (lambda: dist.all_reduce(torch.ones(1)), "torch.distributed.all_reduce"),
    "barrier": (lambda: dist.barrier(), "torch.distributed.barrier"),
    "broadcast": (lambda: dist.broadcast(torch.ones(1), 0), "torch.distributed.broadcast"),
    "objects": (
        lambda: dist.all_gather_object([None], 1),
        "torch.distributed.all_gather_object",
    ),
    "group": (lambda: dist.new_group(), "torch.distributed.new_group"),
    "imported by name": (
        lambda: imported_all_reduce(torch.ones(1)),
        "torch.distributed.all_reduce",
    ),
    "with gradient": (
        lambda: gather_with_gradient(torch.ones(1)),
        "torch.distributed.all_gather",
    ),
    "metric": (synchronised_metric, "MeanMetric.compute"),
}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_inside_a_step_raises_and_outside_works(name: str) -> None:
    collective, call = COLLECTIVES[name]
    collective()
    with in_step(), pytest.raises(CollectiveInStepError, match=rf"`{call}` was called inside"):
        collective()
    collective()


@pytest.mark.usefixtures("world")
def test_other_threads_are_not_concerned() -> None:
    errors: list[BaseException] = []

    def collect() -> None:
        try:
            dist.all_reduce(torch.ones(1))
        except BaseException as error:
            errors.append(error)

    with in_step():
        thread = threading.Thread(target=collect)
        thread.start()
        thread.join()
    assert errors == []


@pytest.mark.usefixtures("world")
def test_questions_about_the_world_are_allowed_inside_a_step() -> None:
    with in_step():
        assert dist.get_rank() == 0
        assert dist.get_world_size() == 1
        metric = MeanMetric()
        assert float(metric(torch.tensor(2.0))) == 2.0


def test_everything_is_put_back_after_the_outermost_step() -> None:
    before = [getattr(owner, name) for owner, name, _ in collectives._replacements()]

    def fail_inside() -> None:
        with in_step():
            pass
        with pytest.raises(CollectiveInStepError):
            dist.barrier()
        raise KeyError

    with pytest.raises(KeyError), in_step():
        fail_inside()
    assert [getattr(owner, name) for owner, name, _ in collectives._replacements()] == before
    forbid_in_step("anything")


def test_the_error_says_what_to_do() -> None:
    with in_step(), pytest.raises(PipelineError, match=r"`self.all_gather`.*on_train_batch_end"):
        forbid_in_step("self.all_gather")
