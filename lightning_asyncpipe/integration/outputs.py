"""What ``training_step`` gives back: its return value, and what it appended to the module's lists.

Both exist on last stages only. ``read`` checks the return value of one micro-batch, a
``growth.GrowthWatch`` takes the tails of grown lists; ``exchange`` gives both to all ranks where
there is more than the loss, and ``combine`` makes the return value of the batch.

The combined loss is the mean weighted by samples. Of all else that ``training_step`` returns:

* 0-dim tensors and numbers: the mean weighted by samples; integers and booleans stay what they are
  if all micro-batches agree, and become a float mean if not;
* tensors and arrays whose dimension 0 is the micro-batch's size, and lists of that length: joined
  in the order of micro-batches;
* mappings, tuples and other lists: entry by entry;
* strings, None and other tensors: kept if all micro-batches agree;
* anything else: an error that names the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_asyncpipe.errors import PipelineError

_PLAIN = (type(None), bool, int, float, str, bytes)


@dataclass(slots=True)
class MicroBatchOutput:
    """What the last stage gives back for one micro-batch.

    Attributes:
        index: number within the batch.
        size: samples.
        loss: on the rank that ran it with its graph, elsewhere a number.
        extra: what ``training_step`` returned beside the loss, detached.
        grown: what it appended to the module's lists, by attribute, detached.
        replica: data-parallel replica.

    """

    index: int
    size: int
    loss: Tensor | float
    extra: dict[str, Any] = field(default_factory=dict)
    grown: dict[str, list[Any]] = field(default_factory=dict)
    replica: int = 0

    @property
    def needs_exchange(self) -> bool:
        """Whether there is more than a loss, so that the ranks have to call ``exchange``."""
        return bool(self.extra or self.grown)


def read(returned: Any, index: int, size: int, batch_idx: int, replica: int = 0) -> MicroBatchOutput:
    """Check what ``training_step`` returned for a micro-batch.

    Raises:
        MisconfigurationException: it is no scalar loss and no mapping with one, see Lightning.
        PipelineError: it is None.

    """
    if returned is None:
        raise PipelineError(
            f"`training_step` returned None for micro-batch {index} of batch {batch_idx}. A step "
            "cannot be skipped that way here: the other stages have run it. Return a loss; to "
            "leave samples out, give them the weight 0 in it."
        )
    extra: dict[str, Any] = {}
    loss = returned
    if isinstance(returned, Mapping):
        loss = returned.get("loss")
        if loss is None:
            raise MisconfigurationException(
                "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present"
            )
        extra = {key: detached(value) for key, value in returned.items() if key != "loss"}
    if not isinstance(loss, Tensor):
        raise MisconfigurationException(
            "In automatic optimization, `training_step` must return a Tensor, or a dict with a "
            f"Tensor as 'loss'. Found: {type(loss).__name__}"
        )
    if loss.numel() != 1:
        raise MisconfigurationException(
            f"The loss that `training_step` returns must be a scalar, found the shape "
            f"{tuple(loss.shape)}. Return its mean over the samples of the batch."
        )
    return MicroBatchOutput(index, size, loss, extra, replica=replica)


# To all ranks


def exchange(
    local: Sequence[MicroBatchOutput],
    all_gather_object: Callable[[Any], list[Any]],
    device: torch.device | None = None,
) -> list[MicroBatchOutput]:
    """Give all ranks the outputs of all ranks, by replica and micro-batch.

    A collective: call it on every rank or none, as the records of the batch say (``extra``).

    Args:
        local: outputs of the micro-batches whose last stage this rank ran.
        all_gather_object: gives every rank's object; it must take None, numbers, strings, lists,
            tuples, dicts, CPU tensors and arrays.
        device: of this rank; tensors that were on an accelerator arrive there.

    Raises:
        PipelineError: something cannot be sent; names the key or attribute.

    """
    message = []
    for output in local:
        placed: list[bool] = []
        extra = {key: _to_wire(v, f"['{key}']", placed) for key, v in output.extra.items()}
        grown = {name: _to_wire(v, f".{name}", placed) for name, v in output.grown.items()}
        head = (output.replica, output.index, output.size, _number(output.loss))
        message.append((head, extra, grown, placed))
    results = []
    for part in all_gather_object(message):
        for (replica, index, size, loss), extra, grown, placed in part:
            flags = iter(placed)
            extra = {key: _from_wire(value, flags, device) for key, value in extra.items()}
            grown = {key: _from_wire(value, flags, device) for key, value in grown.items()}
            results.append(MicroBatchOutput(index, size, loss, extra, grown, replica))
    return sorted(results, key=lambda output: (output.replica, output.index))


def _to_wire(value: Any, path: str, placed: list[bool]) -> Any:
    """``value`` in types that travel; ``placed`` gets for each tensor whether it left a device."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_nested:
            placed.append(value.device.type != "cpu")
            return value.detach().cpu().as_subclass(Tensor)
    elif isinstance(value, np.generic):
        return _to_wire(value.item(), path, placed)
    elif isinstance(value, _PLAIN) or type(value) is np.ndarray:
        return value
    elif isinstance(value, Mapping) and all(isinstance(key, (str, int)) for key in value):
        return {k: _to_wire(v, f"{path}[{k!r}]", placed) for k, v in value.items()}
    elif isinstance(value, (list, tuple)):
        entries = [_to_wire(v, f"{path}[{i}]", placed) for i, v in enumerate(value)]
        return entries if isinstance(value, list) else tuple(entries)
    where = f"`self{path}`" if path.startswith(".") else f"`{path}` of what `training_step` returns"
    raise PipelineError(
        f"{where} is of type {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "sent to the other ranks. Use tensors, numbers, strings, and lists, tuples, dicts of them."
    )


def _from_wire(value: Any, placed: Iterator[bool], device: torch.device | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(device) if next(placed) and device is not None else value
    if isinstance(value, dict):
        return {key: _from_wire(v, placed, device) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_from_wire(v, placed, device) for v in value])
    return value


def detached(value: Any) -> Any:
    """``value`` with its tensors, also those in mappings, lists and tuples, detached."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: detached(v) for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)([detached(v) for v in value])
    return value


# The return value of the batch


def combine(
    outputs: Sequence[MicroBatchOutput],
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor | dict[str, Any]:
    """The loss of a batch, or a dict with the loss and all else that ``training_step`` returned.

    Args:
        outputs: of all micro-batches, in order.
        device: of the loss.
        dtype: of the loss. It is summed in float64, so that all ranks get the same bits.

    Raises:
        PipelineError: values do not combine; names the key.

    """
    total = sum(output.size for output in outputs)
    value = sum(_number(output.loss) * (output.size / total) for output in outputs)
    loss = torch.tensor(value, dtype=dtype, device=device)
    keys = dict.fromkeys(key for output in outputs for key in output.extra)
    if not keys:
        return loss
    sizes = [output.size for output in outputs]
    combined: dict[str, Any] = {"loss": loss}
    for key in keys:
        if not all(key in output.extra for output in outputs):
            raise _uncombined(f"[{key!r}]", "is missing for some micro-batches")
        combined[key] = _combined([output.extra[key] for output in outputs], sizes, f"[{key!r}]")
    return combined


def _combined(values: list[Any], sizes: list[int], path: str) -> Any:
    first = values[0]
    if len(values) == 1:
        return first
    if all(isinstance(v, Tensor) for v in values):
        return _combined_arrays(values, sizes, path, torch.cat, torch.equal)
    if all(isinstance(v, np.ndarray) for v in values):
        return _combined_arrays(values, sizes, path, np.concatenate, np.array_equal)
    if all(isinstance(v, (bool, int, float, np.generic)) for v in values):
        if not any(isinstance(v, (float, np.floating)) for v in values) and _agree(values):
            return first
        return sum(float(v) * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)
    if all(isinstance(v, Mapping) for v in values):
        if all(list(v) == list(first) for v in values):
            return {k: _combined([v[k] for v in values], sizes, f"{path}[{k!r}]") for k in first}
        raise _uncombined(path, "has different keys for different micro-batches")
    if all(isinstance(v, list) for v in values) and [len(v) for v in values] == sizes:
        return [entry for v in values for entry in v]
    if all(type(v) is type(first) and isinstance(v, (list, tuple)) for v in values):
        if len({len(v) for v in values}) == 1:
            columns = enumerate(zip(*values, strict=True))
            entries = [_combined(list(c), sizes, f"{path}[{i}]") for i, c in columns]
            return entries if isinstance(first, list) else tuple(entries)
        raise _uncombined(path, "has different lengths for different micro-batches")
    if all(isinstance(v, _PLAIN) for v in values) and _agree(values):
        return first
    kinds = sorted({type(v).__name__ for v in values})
    raise _uncombined(path, f"({', '.join(kinds)}) differs between micro-batches")


def _combined_arrays(
    values: list[Any],
    sizes: list[int],
    path: str,
    join: Callable[[list[Any]], Any],
    equal: Callable[[Any, Any], bool],
) -> Any:
    if all(v.ndim == 0 for v in values):
        tensors = [torch.as_tensor(v) for v in values]
        inexact = any(t.is_floating_point() or t.is_complex() for t in tensors)
        if not inexact and all(torch.equal(t, tensors[0]) for t in tensors):
            return values[0]
        wide = torch.complex128 if any(t.is_complex() for t in tensors) else torch.float64
        weighted = [t.to(wide) * n for t, n in zip(tensors, sizes, strict=True)]
        mean = torch.stack(weighted).sum() / sum(sizes)
        return mean.to(tensors[0].dtype if inexact else torch.get_default_dtype())
    if all(v.ndim >= 1 and v.shape[0] == n for v, n in zip(values, sizes, strict=True)):
        return join(values)
    if all(v.shape == values[0].shape and equal(v, values[0]) for v in values):
        return values[0]
    raise _uncombined(path, f"has the shapes {[tuple(v.shape) for v in values]} for micro-batches of {sizes}")


def _number(loss: Tensor | float) -> float:
    return float(loss.detach()) if isinstance(loss, Tensor) else loss


def _agree(values: list[Any]) -> bool:
    return all(type(v) is type(values[0]) and v == values[0] for v in values)


def _uncombined(path: str, reason: str) -> PipelineError:
    return PipelineError(
        f"`{path}` of what `training_step` returns {reason}, so the batch has no value for it. "
        "Return a scalar, a tensor or list with one entry per sample, or what is the same for all "
        "parts of a batch."
    )
