"""Every precision of Lightning's trains as on one device, scaled losses included."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins import (
    BitsandbytesPrecision,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
)
from torch.utils.data import DataLoader

from lightning_asyncpipe import AsyncMultiPipeStrategy, ReferenceStrategy
from lightning_asyncpipe.integration.precision import check_precision, shared_copies
from lightning_asyncpipe.runtime import weight_copies
from lightning_asyncpipe.runtime.engine import ACTIVATION, GRADIENT
from lightning_asyncpipe.runtime.exchange import REDUCE, UPDATE
from lightning_asyncpipe.runtime.program import StageProgram
from tests.support.edge_basics import Points, Regression
from tests.support.edge_transformers import TRANSFORMERS
from tests.support.edges import PartsOnOneDevice
from tests.support.fit import fit, parameters_of
from tests.support.launch import run_ranks
from tests.support.precise import (
    PRECISIONS,
    STEPS,
    Overflows,
    in_precision,
    on_one_device,
    train_example,
    train_overflowing,
)
from tests.support.reference import largest_difference

pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}


def rounding(precision: str) -> float:
    """The relative error of one rounding, with room for what 20 steps make of it.

    In the 16-bit modes weights or activations are rounded to 8 or 11 bits at every operation on either side, in another
    order where gradients of micro-batches are added up: one device adds them in 16 bits under 16-bit weights, the
    pipelines in float32. A loss is an average over many of these errors, so that it stays within one rounding. In 32
    and 64 bits nothing but the order of sums differs.
    """
    return float(torch.finfo(DTYPES[precision]).eps) * (1.0 if DTYPES[precision].itemsize == 2 else 16.0)


def assert_follows(found: dict[str, Any], expected: dict[str, Any], precision: str) -> None:
    assert len(found["losses"]) == STEPS
    assert found["losses"] == pytest.approx(expected["losses"], rel=rounding(precision))
    assert found["losses"][-1] < 0.9 * found["losses"][0]
    # Of a gradient the rounding errors are those of the weights beneath it too.
    assert found["norms"] == pytest.approx(expected["norms"], rel=8 * rounding(precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_synchronous_training_follows_one_device(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_copies, "SMALLEST", 1)
    found = train_example(precision, ReferenceStrategy(4, num_microbatches=4, max_staleness=0))
    assert_follows(found, on_one_device(precision, 4), precision)
    kept = DTYPES[precision] if precision.endswith("true") else torch.float32
    assert {parameter.dtype for parameter in found["parameters"].values()} == {kept}


@pytest.mark.parametrize(
    ("precision", "correction", "versions"), [("bf16-mixed", "none", 1), ("16-mixed", "extrapolate", 2)]
)
def test_shared_copies_of_weights_change_no_bit(
    precision: str, correction: Any, versions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early forwards on weights of their own have a version more."""
    made: list[int] = []

    class Counted(weight_copies._Shared):
        def __init__(self, source: torch.Tensor) -> None:
            super().__init__(source)
            made.append(source.numel())

    monkeypatch.setattr(weight_copies, "_Shared", Counted)
    results = []
    for smallest in (1, 1 << 60):
        monkeypatch.setattr(weight_copies, "SMALLEST", smallest)
        strategy = ReferenceStrategy(4, num_microbatches=4, staleness_correction=correction)
        results.append(train_example(precision, strategy))
    shared, own = results
    assert shared["statistics"]["stale_share"] > 0
    assert shared["losses"] == own["losses"]
    assert largest_difference(shared["parameters"], own["parameters"]) == 0.0
    cast = 4 * 8 + 1  # weights and biases of four layers in each of four blocks, and the head
    assert 0.9 * STEPS * cast < len(made) <= STEPS * cast * versions


def test_shared_copies_change_no_bit_of_a_checkpointed_transformer_with_tied_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = TRANSFORMERS["GPT-2 with checkpointing"]
    results = []
    for smallest in (1, 1 << 60):
        monkeypatch.setattr(weight_copies, "SMALLEST", smallest)
        torch.manual_seed(0)
        module = scenario.module()
        arguments = {**scenario.trainer_arguments(), "precision": "bf16-mixed"}
        _, losses = fit(module, scenario.batches(), ReferenceStrategy(2, **scenario.strategy), **arguments)
        results.append((losses, parameters_of(module)))
    assert results[0][0] == results[1][0]
    assert largest_difference(results[0][1], results[1][1]) == 0.0


def test_compiled_code_makes_its_own_copies() -> None:
    module = Regression()
    program = StageProgram((), (), (tuple(name for name, _ in module.named_parameters()),))
    plugin = MixedPrecision("bf16-mixed", "cpu")
    assert shared_copies(plugin, module, program) is not None
    assert shared_copies(Precision(), module, program) is None
    module.net.head.compile(backend="eager")
    assert shared_copies(plugin, module, program) is None


# Scaled losses

EARLY = {"num_pipelines": 1, "num_microbatches": 4}  # with forwards that run before the step


def test_an_overflow_skips_the_step_and_lowers_the_scale_as_on_one_device() -> None:
    expected = train_overflowing(PartsOnOneDevice(4))
    found = train_overflowing(ReferenceStrategy(2, num_microbatches=4, max_staleness=0))
    assert found["scales"] == expected["scales"] == [1024.0, 1024.0, 512.0, 256.0, 256.0, 256.0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=rounding("16-mixed"))
    assert largest_difference(found["parameters"], expected["parameters"]) < rounding("16-mixed")
    assert_untouched_by(found["owned"], (2, 3))


def assert_untouched_by(owned: list[dict[str, torch.Tensor]], skipped: tuple[int, ...]) -> None:
    """Parameters are what they were after these steps and no other ones."""
    for step in range(1, len(owned)):
        for name, parameter in owned[step].items():
            assert torch.equal(parameter, owned[step - 1][name]) == (step in skipped), (step, name)


def test_gradients_do_not_depend_on_the_scale() -> None:
    """With powers of two, scaling and unscaling are exact, also where forwards ran before the scale changed."""
    found = []
    for scale, factor in ((64.0, 0.5), (4096.0, 0.25)):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, backoff_factor=factor)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        strategy = ReferenceStrategy(2, **EARLY)
        found.append(train_overflowing(strategy, at=(2,), precision=None, plugins=plugin))
        assert found[-1]["scales"][:3] == [scale, scale, factor * scale]
    assert found[0]["statistics"]["stale_microbatches"] > 0
    assert found[0]["losses"] == found[1]["losses"]
    assert largest_difference(found[0]["parameters"], found[1]["parameters"]) == 0.0


def test_forwards_around_a_skipped_step_are_not_stale() -> None:
    """No update lies between them and their backwards."""
    found = {at: train_overflowing(ReferenceStrategy(2, **EARLY), at=at)["statistics"] for at in ((), tuple(range(6)))}
    assert found[()]["stale_microbatches"] > 0
    assert found[tuple(range(6))]["stale_microbatches"] == 0
    assert found[tuple(range(6))]["max_staleness"] == 0


def test_losses_in_16_bits_can_be_scaled_beyond_their_range() -> None:
    class InHalf(Overflows):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx).half()

    torch.manual_seed(0)
    module = InHalf(())
    arguments = in_precision("16-mixed", 2.0**16)  # infinite in float16
    fit(module, DataLoader(Points(48), 8), ReferenceStrategy(2, num_microbatches=4), **arguments)
    assert module.seen[1::3] == [2.0**16] * 6


def test_a_scaler_that_is_not_enabled_does_nothing() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=False))
    found = train_overflowing(ReferenceStrategy(2, num_microbatches=4), at=(), precision=None, plugins=plugin)
    expected = train_overflowing(ReferenceStrategy(2, num_microbatches=4), at=())
    assert found["losses"] == expected["losses"]


# No numbers


def test_anomalies_are_detected_where_they_are_on_one_device() -> None:
    messages = []
    for strategy in (PartsOnOneDevice(4), ReferenceStrategy(2, num_microbatches=4)):
        module = Overflows((1,), float("nan"))
        arguments = {**in_precision("16-mixed"), "detect_anomaly": True}
        with pytest.raises(RuntimeError, match="returned nan values") as raised:
            fit(module, DataLoader(Points(48), 8), strategy, **arguments)
        messages.append(str(raised.value))
        assert len(module.seen) == 3
    assert messages[0] == messages[1]


def test_early_stopping_stops_at_a_loss_that_is_no_number_as_on_one_device() -> None:
    class Diverges(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * (float("nan") if self.current_epoch == 2 else 1.0)

        def on_train_epoch_end(self) -> None:
            self.log(
                "last", self.trainer.callback_metrics["loss_epoch"] * (torch.nan if self.current_epoch == 2 else 1)
            )

    epochs = []
    for strategy in ("auto", ReferenceStrategy(3, num_microbatches=4)):
        stop = EarlyStopping("last", patience=9, check_on_train_epoch_end=True, check_finite=True)
        trainer, _ = fit(Diverges(), DataLoader(Points(16), 8), strategy, max_epochs=6, callbacks=[stop])
        epochs.append(trainer.current_epoch)
    assert epochs == [3, 3]


# Ranks


class Messages(pl.Callback):
    """The data types of the messages that this rank sends, by kind."""

    def __init__(self) -> None:
        self.dtypes: dict[int, set[str]] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        transport = trainer.strategy._require_assembly().executor.transport
        send = transport.send

        def noted(peer: int, key: Any, tensor: Any, *args: Any) -> None:
            if tensor is not None:
                self.dtypes.setdefault(key.kind, set()).add(str(tensor.dtype))
            send(peer, key, tensor, *args)

        transport.send = noted


RANKS_IN = ("bf16-true", "16-true", "bf16-mixed", "16-mixed")
# Two replicas have halves of the gradient, so other parts of it overflow: nothing may be predicted from it here.
EXTRAPOLATED = {**EARLY, "staleness_correction": "extrapolate"}
REPLICAS = {"num_stages": 2, "data_parallel_size": 2, **EXTRAPOLATED}


def _on_four_ranks(directory: Path) -> dict[str, Any]:
    """What each of four ranks does."""
    weight_copies.SMALLEST = 1
    found: dict[str, Any] = {}
    for precision in RANKS_IN:
        messages = Messages()
        strategy = AsyncMultiPipeStrategy(num_pipelines=2, num_microbatches=4)
        found[precision] = train_example(precision, strategy, 4, messages)
        found[precision]["messages"] = messages.dtypes
    for name, options in {"synchronous": {"max_staleness": 0}, "asynchronous": {}}.items():
        strategy = AsyncMultiPipeStrategy(**REPLICAS, **options)
        at = (2, 3) if int(os.environ["LOCAL_RANK"]) >= 2 else ()
        found[name] = train_overflowing(strategy, 4, directory / f"{name}.ckpt", at)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precision")


@pytest.fixture(scope="module")
def ranks(directory: Path) -> list[dict[str, Any]]:
    """What each of four ranks has found."""
    return run_ranks(_on_four_ranks, 4, directory, timeout=200.0)


@pytest.mark.parametrize("precision", RANKS_IN)
def test_ranks_do_what_one_process_does_that_emulates_them(precision: str, ranks: Any) -> None:
    expected = train_example(precision, ReferenceStrategy(4, num_pipelines=2, num_microbatches=4))
    assert expected["statistics"]["stale_share"] > 0
    for rank in ranks:
        assert_follows(rank[precision], expected, precision)
        assert rank[precision]["norms"] == ranks[0][precision]["norms"]
        assert largest_difference(rank[precision]["parameters"], ranks[0][precision]["parameters"]) == 0.0


@pytest.mark.parametrize("precision", RANKS_IN)
def test_messages_have_the_data_type_of_what_they_carry(precision: str, ranks: Any) -> None:
    """Activations travel as they are (the example's residual stream stays float32 under autocast), gradients in
    float32 on their way to their owners, new weights in the type of the parameter."""
    weights = str(DTYPES[precision]) if precision.endswith("true") else "torch.float32"
    for kind, dtype in {ACTIVATION: weights, GRADIENT: weights, REDUCE: "torch.float32", UPDATE: weights}.items():
        assert set().union(*(rank[precision]["messages"].get(kind, set()) for rank in ranks)) == {dtype}


@pytest.mark.parametrize("name", ["synchronous", "asynchronous"])
def test_an_overflow_in_one_replica_skips_the_step_everywhere(name: str, ranks: Any, directory: Path) -> None:
    """Two parameters on four ranks: two of these own nothing and find nothing, one finds the overflow.

    Both replicas get the same data, so that they train as one does.
    """
    first = ranks[0][name]
    for rank in ranks:
        found = rank[name]
        assert found["scales"] == [1024.0, 1024.0, 512.0, 256.0, 256.0, 256.0]
        assert_untouched_by(found["owned"], (2, 3))
        assert found["norms"] == first["norms"]
        assert largest_difference(found["parameters"], first["parameters"]) == 0.0
    assert sorted(len(rank[name]["owned"][0]) for rank in ranks) == [0, 0, 1, 1]
    assert (first["statistics"]["stale_microbatches"] > 0) == (name == "asynchronous")
    options = {**EXTRAPOLATED, "max_staleness": int(name == "asynchronous")}
    expected = train_overflowing(ReferenceStrategy(2, **options))
    assert first["losses"] == pytest.approx(expected["losses"], rel=rounding("16-mixed"))
    assert largest_difference(first["parameters"], expected["parameters"]) < rounding("16-mixed")
    checkpoint = torch.load(directory / f"{name}.ckpt", weights_only=True)
    assert checkpoint["MixedPrecision"] == {
        "scale": 256.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 2,
    }


# Plugins


class KeepsInputs(HalfPrecision):
    def convert_input(self, data: Any) -> Any:
        return data


class UnscalesAfterwards(HalfPrecision):
    def post_backward(self, tensor: Any, module: Any) -> Any:
        return super().post_backward(tensor, module)


class HasScaler(HalfPrecision):
    scaler = torch.amp.GradScaler("cpu")


class ClipsByItself(MixedPrecision):
    def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None:
        pass


class OtherScaler(torch.amp.GradScaler):
    pass


def with_backward_of_its_own() -> Precision:
    plugin = Precision()
    plugin.backward = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return plugin


REFUSED = {
    "bitsandbytes": (
        lambda: object.__new__(BitsandbytesPrecision),
        ["BitsandbytesPrecision is not supported", "forms of its own", "'bf16-mixed'"],
    ),
    "transformer engine": (
        lambda: object.__new__(TransformerEnginePrecision),
        ["TransformerEnginePrecision is not supported"],
    ),
    "an override of the backward": (
        lambda: UnscalesAfterwards("16-true"),
        ["UnscalesAfterwards overrides `post_backward`", "stage by stage", "in `training_step`"],
    ),
    "a backward on the plugin itself": (with_backward_of_its_own, ["Precision overrides `backward`"]),
    "an override of the clipping": (
        lambda: ClipsByItself("bf16-mixed", "cpu"),
        ["ClipsByItself overrides `clip_grad_by_norm`", "one rank alone", "`configure_gradient_clipping`"],
    ),
    "half precision with a scaler": (lambda: HasScaler("16-true"), ["HasScaler has a scaler", "'16-mixed'"]),
    "another scaler": (
        lambda: MixedPrecision("16-mixed", "cpu", OtherScaler("cpu")),
        ["scaler OtherScaler is not supported", "`torch.amp.GradScaler`"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_plugins_that_would_act_on_a_part_are_refused(name: str) -> None:
    make, expected = REFUSED[name]
    with pytest.raises(MisconfigurationException) as raised:
        check_precision(make())
    for text in expected:
        assert text in str(raised.value)


@pytest.mark.parametrize(
    "plugin",
    [
        Precision(),
        DoublePrecision(),
        HalfPrecision("bf16-true"),
        KeepsInputs("bf16-true"),
        MixedPrecision("bf16-mixed", "cpu"),
        MixedPrecision("16-mixed", "cpu"),
    ],
    ids=lambda plugin: type(plugin).__name__,
)
def test_lightnings_own_and_what_leaves_gradients_alone_are_admitted(plugin: Precision) -> None:
    check_precision(plugin)


def test_a_refused_plugin_ends_the_fit() -> None:
    with pytest.raises(MisconfigurationException, match="overrides `post_backward`"):
        fit(
            Regression(),
            DataLoader(Points(8), 8),
            ReferenceStrategy(2),
            precision=None,
            plugins=UnscalesAfterwards("bf16-true"),
        )
