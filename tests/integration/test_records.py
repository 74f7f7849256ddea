"""What micro-batches log reaches the trainer as if one device had logged the whole batch."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection

from lightning_asyncpipe.integration.records import (
    LogCall,
    MergedCall,
    MicroBatchRecord,
    Recorder,
    StepExchange,
    merge,
    replay,
)
from lightning_asyncpipe.runtime.microbatch import split

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore")

Log = Callable[[Any, Tensor], None]


class Model(LightningModule):
    def __init__(self, log_step: Log) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.log_step = log_step

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        self.log_step(self, batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(0)
        samples: Any = list(torch.randn(11, 2, generator=generator))
        return DataLoader(samples, batch_size=4)


class InMicroBatches(SingleDeviceStrategy):
    """Runs and logs each batch in micro-batches of two samples or one."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.exchange = StepExchange(lambda tensor: lambda: [tensor])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        module: Any = self.lightning_module
        records, loss = [], torch.zeros(())
        for part in split(batch, 3):
            recorder = Recorder(part.size)
            with self.precision_plugin.train_step_context(), recorder.recording(module):
                value = module.training_step(part.data, batch_idx)
            records.append(recorder.record(part.index, value))
            loss = loss + value * (part.size / len(batch))
        assert "log" not in vars(module)
        replay(module, merge(self.exchange.exchange(records)[0]))
        return loss


class Lines(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    name = "lines"  # type: ignore[assignment]
    version = 0  # type: ignore[assignment]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))


class Noting(Callback):
    """Copies the trainer's metrics after each batch and epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, trainer: Trainer) -> None:
        for metrics in (
            trainer.logged_metrics,
            trainer.callback_metrics,
            trainer.progress_bar_metrics,
        ):
            self.seen.append({key: torch.as_tensor(value) for key, value in metrics.items()})

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.note(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        self.note(trainer)

    def on_train_end(self, trainer: Trainer, *args: Any) -> None:
        self.note(trainer)


def fit(log: Log, strategy: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(0)
    lines, noting = Lines(), Noting()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=lines,
        callbacks=[noting],
        log_every_n_steps=1,
        max_epochs=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Model(log))
    return noting.seen, lines.lines


def default(module: Any, batch: Tensor) -> None:
    module.log("mean", batch.mean())


def everywhere(module: Any, batch: Tensor) -> None:
    module.log("both", batch.mean(), on_step=True, on_epoch=True, prog_bar=True)
    module.log("step", batch[:, 0].mean(), on_step=True, on_epoch=False, logger=False)
    module.log("epoch", batch.square().mean(), on_step=False, on_epoch=True, prog_bar=True)


def reductions(module: Any, batch: Tensor) -> None:
    flags = {"on_step": True, "on_epoch": True}
    for name in ("mean", "avg", "Mean"):
        module.log(f"s_{name}", batch.mean(), reduce_fx=name, **flags)
    module.log("mean", batch.mean(), reduce_fx=torch.mean, **flags)
    for name in ("sum", torch.sum, sum):
        module.log(f"s_{name}", batch.sum(), reduce_fx=name, **flags)
    for name in ("max", torch.max, max):
        module.log(f"m_{name}", batch.max(), reduce_fx=name, **flags)
    for name in ("min", torch.min, min):
        module.log(f"m_{name}", batch.min(), reduce_fx=name, **flags)


def dictionaries(module: Any, batch: Tensor) -> None:
    module.log_dict({"a": batch.mean(), "b": batch.mean(0)[1:]}, on_epoch=True, prog_bar=True)


def kinds(module: Any, batch: Tensor) -> None:
    module.log("int", 3, on_epoch=True)
    module.log("float", 0.1, on_epoch=True)
    module.log("flag", True)
    module.log("count", torch.tensor(len(batch)), reduce_fx="sum", on_epoch=True)
    module.log("double", batch.double().mean(), on_epoch=True)
    module.log("half", batch.double().mean().to(torch.bfloat16).new_tensor(2.5), on_epoch=True)
    module.log("graph", batch.mean(), enable_graph=True)


def weighted(module: Any, batch: Tensor) -> None:
    tokens = (batch > 0).sum()
    module.log("tokens", batch[batch > 0].sum() / tokens, batch_size=int(tokens), on_epoch=True)


def repeated(module: Any, batch: Tensor) -> None:
    module.log("twice", batch.mean(), on_step=True, on_epoch=True)
    module.log("other", batch.mean())
    module.log("twice", batch.square().mean(), on_step=True, on_epoch=True)


def nothing(module: Any, batch: Tensor) -> None:
    pass


def positional(module: Any, batch: Tensor) -> None:
    module.log("p", batch.mean(), True, False, True, True, "mean", False, True)
    module.log(name="q", value=batch.mean(), sync_dist=True, rank_zero_only=True, on_epoch=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "64-true"}, {"accumulate_grad_batches": 2}],
    ids=["32", "64", "accumulated"],
)
@pytest.mark.parametrize(
    "log",
    [
        default,
        everywhere,
        reductions,
        dictionaries,
        kinds,
        weighted,
        repeated,
        nothing,
        positional,
    ],
)
def test_metrics_are_those_of_one_device_on_the_whole_batch(log: Log, options: dict[str, Any]) -> None:
    expected, expected_lines = fit(log, SingleDeviceStrategy("cpu"), **options)
    seen, lines = fit(log, InMicroBatches(), **options)
    assert len(seen) == len(expected)
    for one, other in zip(seen, expected, strict=True):
        assert list(one) == list(other)
        for key, value in one.items():
            assert value.dtype == other[key].dtype, key
            torch.testing.assert_close(value, other[key])
    assert [step for step, _ in lines] == [step for step, _ in expected_lines]
    for (_, one), (_, other) in zip(lines, expected_lines, strict=True):
        assert one == pytest.approx(other)


def test_a_user_s_own_log_method_runs_on_the_values_of_the_batch() -> None:
    calls: list[Any] = []

    class Prefixed(Model):
        def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            calls.append((name, float(value)))
            super().log(f"train/{name}", value, *args, **kwargs)

    trainer = quiet_trainer(InMicroBatches())
    trainer.fit(Prefixed(lambda module, batch: module.log("size", len(batch), reduce_fx="sum")))
    assert calls == [("size", 4.0), ("size", 4.0), ("size", 3.0)]
    assert set(trainer.logged_metrics) == {"train/size"}


def quiet_trainer(strategy: Any, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


@pytest.mark.parametrize(
    "log",
    [
        lambda module, batch: module.log("x", batch),
        lambda module, batch: module.log("x", "text"),
        lambda module, batch: module.log("x", [1.0]),
        lambda module, batch: module.log("x", {"a": {"b": 1.0}}),
        lambda module, batch: module.log("x", 1.0, on_step=False, on_epoch=False),
        lambda module, batch: module.log("x/dataloader_idx_0", 1.0),
        lambda module, batch: module.log("x", 1.0, reduce_fx="median"),
        lambda module, batch: module.log("x", 1.0, reduce_fx=torch.std),
        lambda module, batch: [
            module.log("x", 1.0, prog_bar=True),
            module.log("x", 1.0, prog_bar=False),
        ],
    ],
)
def test_wrong_arguments_raise_what_they_raise_on_one_device(log: Log) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011
        quiet_trainer(SingleDeviceStrategy("cpu")).fit(Model(log))
    with pytest.raises(expected.type) as raised:
        quiet_trainer(InMicroBatches()).fit(Model(log))
    start = str(expected.value).split("(")[0].split("{")[0]
    assert str(raised.value).startswith(start)


@pytest.mark.parametrize(
    ("metric", "advice"), [(MeanMetric(), "no attribute of the module"), (MetricCollection([MeanMetric()]), "log_dict")]
)
def test_metrics_that_no_rank_could_find_are_refused_with_what_to_do(metric: Any, advice: str) -> None:
    with pytest.raises(MisconfigurationException, match=f"'acc'.*{advice}"):
        quiet_trainer(InMicroBatches()).fit(Model(lambda m, b: m.log("acc", metric)))


def test_nothing_is_recorded_on_a_barebones_trainer() -> None:
    quiet = {"barebones": True, "max_epochs": 1, "accelerator": "cpu"}
    trainer = Trainer(strategy=InMicroBatches(), **quiet)
    trainer.fit(Model(lambda module, batch: module.log("x", "never looked at")))


def test_calls_that_do_not_count_are_not_looked_at() -> None:
    module = Model(nothing)
    recorder = Recorder(4, keep=lambda: False)
    with recorder.recording(module):
        module.log("x", "not a value")
        module.log_dict({"a": object()})
    assert recorder.record(0, 0.0).calls == ()


def test_log_is_restored_also_where_the_step_is_left_by_an_exception() -> None:
    class Exit(BaseException):
        pass

    module = Model(nothing)
    own: Any = lambda *args, **kwargs: None  # noqa: E731
    with pytest.raises(Exit), Recorder().recording(module):
        raise Exit
    assert "log" not in vars(module)
    vars(module)["log"] = own
    with Recorder().recording(module):
        pass
    assert module.log is own


def test_values_are_those_of_the_call_not_of_later() -> None:
    module = Model(nothing)
    module.trainer = quiet_trainer(SingleDeviceStrategy("cpu"))
    value = torch.ones((), dtype=torch.float64)
    recorder = Recorder()
    with recorder.recording(module):
        module.log("x", value)
        value += 1
    assert list(recorder.record(0, 0.0).values) == [1.0]


# Merging


def call(name: str, **changes: Any) -> LogCall:
    flags = (False, None, None, None, "mean", False, True, None, False, "float32")
    return LogCall(name, *flags)._replace(**changes)


def record(index: int, **values: float | tuple[float, float]) -> MicroBatchRecord:
    pairs = [v if isinstance(v, tuple) else (v, 1.0) for v in values.values()]
    return MicroBatchRecord(
        index,
        1,
        0.0,
        tuple(call(name) for name in values),
        [v for v, _ in pairs],
        [n for _, n in pairs],
    )


def plain(merged: Sequence[MergedCall]) -> list[Any]:
    return [(entry.call.name, entry.value, entry.batch_size) for entry in merged]


def test_a_key_of_some_micro_batches_is_reduced_over_those() -> None:
    records = [record(0, a=1.0), record(1, b=(5.0, 2.0), a=3.0), record(2, b=(2.0, 4.0))]
    assert plain(merge(records)) == [("a", 2.0, 2.0), ("b", 3.0, 6.0)]
    assert merge([]) == []


def test_a_key_logged_twice_is_merged_call_by_call() -> None:
    once = record(0, a=1.0)
    twice = record(1, a=3.0)
    twice.calls, twice.values, twice.batch_sizes = twice.calls * 2, [3.0, 7.0], [1.0, 1.0]
    assert plain(merge([once, twice])) == [("a", 2.0, 2.0), ("a", 7.0, 1.0)]


def test_weights_of_zero_leave_a_plain_mean() -> None:
    records = [record(0, a=(1.0, 0.0)), record(1, a=(4.0, 0.0))]
    assert plain(merge(records)) == [("a", 2.5, 0.0)]


def test_not_a_number_stays_one_in_every_reduction() -> None:
    for reduction in ("mean", "sum", "max", "min"):
        records = [
            MicroBatchRecord(i, 1, 0.0, (call("x", reduce_fx=reduction),), [value], [1])
            for i, value in enumerate([1.0, float("nan"), 2.0])
        ]
        [merged] = merge(records)
        assert merged.value != merged.value


def test_other_arguments_in_another_micro_batch_are_an_error() -> None:
    one, other = record(0, a=1.0), record(1, a=1.0)
    other.calls = (call("a", prog_bar=True),)
    with pytest.raises(MisconfigurationException, match=r"'a'.*prog_bar=False and prog_bar=True"):
        merge([one, other])
    other.calls = (call("a", dtype="float64"),)
    assert plain(merge([one, other])) == [("a", 1.0, 2.0)]


def test_lightning_does_not_recommend_sync_dist_for_what_all_ranks_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lightning.pytorch.trainer.connectors.logger_connector import result

    monkeypatch.setattr(result, "_distributed_is_initialized", lambda: True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(lambda m, b: m.log("shared", b.mean(), on_epoch=True), InMicroBatches())
        fit(lambda m, b: m.log("unshared", b.mean(), on_epoch=True), SingleDeviceStrategy("cpu"))
    advised = [str(w.message) for w in caught if "sync_dist=True" in str(w.message)]
    assert [("'shared'" in m, "'unshared'" in m) for m in advised] == [(False, True)]


# Exchanging


class Ranks:
    """``StepExchange`` of several ranks in one process: each collective is a list of tensors."""

    def __init__(self, size: int, **options: Any) -> None:
        self.size = size
        self.options = options
        self.gathers = 0
        self.exchanges: list[StepExchange] = [StepExchange(self._unused, **options) for _ in range(size)]

    def _unused(self, tensor: Tensor) -> Callable[[], list[Tensor]]:
        raise AssertionError

    def exchange(self, local: Sequence[Sequence[MicroBatchRecord]], payloads: Sequence[Sequence[int]]) -> list[Any]:
        """Runs the ranks as threads that meet in every collective."""
        import threading

        barrier = threading.Barrier(self.size, timeout=20)
        offered: dict[int, Tensor] = {}
        results: list[Any] = [None] * self.size
        gathers = [0] * self.size

        def run(rank: int) -> None:
            def begin_all_gather(tensor: Tensor) -> Callable[[], list[Tensor]]:
                gathers[rank] += 1
                barrier.wait()
                offered[rank] = tensor.clone()
                barrier.wait()
                assert len({(t.shape, t.dtype) for t in offered.values()}) == 1
                every = [offered[r].clone() for r in range(self.size)]
                return lambda: every

            exchange = self.exchanges[rank]
            exchange._begin_all_gather = begin_all_gather
            results[rank] = exchange.exchange(local[rank], payloads[rank])

        threads = [threading.Thread(target=run, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(gathers)) == 1
        self.gathers = gathers[0]
        return results


def records_of(rank: int, count: int, keys: int, replica: int = 0) -> list[MicroBatchRecord]:
    calls = tuple(call(f"key{i}") for i in range(keys))
    return [
        MicroBatchRecord(
            2 * j + rank,
            j + 1,
            0.1 * rank + j,
            calls,
            [float(j + i) for i in range(keys)],
            [1.5] * keys,
            replica,
            extra=j == 0,
        )
        for j in range(count)
    ]


def test_every_rank_gets_all_records_in_the_order_of_micro_batches() -> None:
    ranks = Ranks(3)
    local = [records_of(0, 2, 3), [], records_of(1, 2, 3)]
    payloads = [(1, -(2**63)), (2**63 - 1,), ()]
    for results in (ranks.exchange(local, payloads), ranks.exchange(local, payloads)):
        for records, words in results:
            assert [r.index for r in records] == [0, 1, 2, 3]
            assert records == sorted([*local[0], *local[2]], key=lambda r: r.index)
            assert words == [(1, -(2**63), 0, 0), (2**63 - 1, 0, 0, 0), (0, 0, 0, 0)]


def test_records_of_replicas_come_one_replica_after_the_other() -> None:
    ranks = Ranks(2)
    results = ranks.exchange([records_of(0, 2, 1, replica=1), records_of(1, 2, 1)], [(), ()])
    order = [(r.replica, r.index) for r in results[0][0]]
    assert order == [(0, 1), (0, 3), (1, 0), (1, 2)]


def test_one_collective_suffices_unless_keys_are_new_or_space_is_short() -> None:
    ranks = Ranks(2, capacity=64)
    payloads: list[tuple[int, ...]] = [(), ()]

    def gathers(*local: list[MicroBatchRecord]) -> int:
        results = ranks.exchange(local, payloads)
        expected = sorted([*local[0], *local[1]], key=lambda r: r.index)
        assert [records for records, _ in results] == [expected, expected]
        return ranks.gathers

    assert gathers(records_of(0, 2, 3), records_of(1, 2, 3)) == 2  # names
    assert gathers(records_of(0, 2, 3), records_of(1, 2, 3)) == 1
    assert gathers([], records_of(1, 2, 3)) == 1
    assert gathers(records_of(0, 2, 3), records_of(1, 2, 4)) == 2  # one rank has a new name
    assert gathers(records_of(0, 2, 4), records_of(1, 2, 3)) == 1  # which all know by now
    assert gathers(records_of(0, 40, 4), records_of(1, 2, 3)) == 2  # longer
    assert gathers(records_of(0, 2, 3), records_of(1, 40, 4)) == 1  # no more: it has grown
    assert gathers(records_of(0, 90, 5), records_of(1, 2, 6)) == 3  # both


def test_losses_and_values_may_be_tensors_and_arrive_as_numbers() -> None:
    sent = MicroBatchRecord(0, 2, torch.tensor(0.25, requires_grad=True), (call("x"),), [torch.tensor(1.5)], [2])
    [[received], _] = StepExchange(lambda tensor: lambda: [tensor]).exchange([sent])
    assert (received.loss, received.values, received.batch_sizes) == (0.25, [1.5], [2.0])


def test_values_that_are_no_finite_numbers_arrive() -> None:
    values = [float("inf"), float("-inf"), -0.0]
    calls = tuple(call(str(v)) for v in values)
    sent = MicroBatchRecord(0, 2, float("nan"), calls, values, [1, 1, 1])
    [[received], _] = StepExchange(lambda tensor: lambda: [tensor]).exchange([sent])
    assert received.values == values
    assert received.loss != received.loss


def test_a_payload_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="payload of 3 words"):
        StepExchange(lambda tensor: lambda: [tensor], payload_words=2).exchange([], [1, 2, 3])


def test_recording_exchanging_and_merging_a_step_is_cheap() -> None:
    module = Model(nothing)
    module.trainer = quiet_trainer(SingleDeviceStrategy("cpu"))
    exchange = StepExchange(lambda tensor: lambda: [tensor] * 4)
    value, loss = torch.tensor(1.5), torch.tensor(0.5)

    def step() -> None:
        records = []
        for i in range(2):
            recorder = Recorder(4)
            with recorder.recording(module):
                module.log("loss", value, prog_bar=True)
                module.log_dict({"a": value, "b": 1.0, "c": 2.0}, on_step=True, on_epoch=True)
            records.append(recorder.record(i, loss))
        assert len(merge(exchange.exchange(records, [1, 2])[0])) == 4

    times = []
    for _ in range(100):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3e-3
