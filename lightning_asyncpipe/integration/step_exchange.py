"""The records of a batch's micro-batches, exchanged between ranks in one small collective."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_HEADER = 3  # words: length of the message, bytes of new call tables, records
_PER_RECORD = 6  # integers: replica, index, stage, size, extra, table of calls


class LogCall(NamedTuple):
    """What a ``self.log`` call was given beside a value and a ``batch_size``.

    ``dtype`` is that in which one device would store the value, "float32" or "float64". ``metric`` is the path of the
    metric object that was given as the value.
    """

    name: str
    prog_bar: bool
    logger: bool | None
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: str
    enable_graph: bool
    add_dataloader_idx: bool
    metric_attribute: str | None
    rank_zero_only: bool
    dtype: str
    metric: str | None = None


@dataclass(slots=True)
class MicroBatchRecord:
    """What a stage has to say about one micro-batch.

    Attributes:
        index: number within the batch.
        size: samples.
        loss: a number, or a scalar tensor that is read only when the record is exchanged.
        calls: the ``self.log`` calls, in order.
        values: one per call; scalar tensors are read only when the record is exchanged.
        batch_sizes: one per call.
        replica: data-parallel replica.
        extra: whether ``training_step`` gave more than a loss, which the ranks have to exchange.
        metrics: whether it gave something to metrics, which they have to exchange.
        stage: the stage; what only some stage can know is said by that one.

    """

    index: int
    size: int
    loss: float | Tensor = 0.0
    calls: tuple[LogCall, ...] = ()
    values: Sequence[float | Tensor] = ()
    batch_sizes: Sequence[float] = ()
    replica: int = 0
    extra: bool = False
    metrics: bool = False
    stage: int = 0


def joined(records: Iterable[MicroBatchRecord]) -> list[MicroBatchRecord]:
    """One record for each micro-batch from those of its stages, which are given in order; the loss is the last's."""
    found: dict[tuple[int, int], MicroBatchRecord] = {}
    for record in records:
        before = found.get((record.replica, record.index))
        if before is not None:
            record = MicroBatchRecord(
                record.index,
                record.size,
                record.loss,
                before.calls + record.calls,
                [*before.values, *record.values],
                [*before.batch_sizes, *record.batch_sizes],
                record.replica,
                before.extra or record.extra,
                before.metrics or record.metrics,
                record.stage,
            )
        found[record.replica, record.index] = record
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Begun:
    """An exchange under way: the whole message, the new tables as text, and how to get what all ranks sent."""

    message: NDArray[np.int64]
    text: bytes
    arrive: Callable[[], list[Tensor]]


class StepExchange:
    """Gives every rank the records of all ranks, in one small collective per batch.

    The collective may begin as soon as the records are known and be finished where they are needed.
    A rank's message is a fixed number of 64-bit words: header, payload, and for each record six
    integers, the loss, and value and ``batch_size`` of each log call. Names and flags of the calls
    (a *table*, as JSON) travel once: a record refers to its table by hash. A second collective
    follows when a rank has a new table, or more to say than fits; the message then grows for good.

    Args:
        begin_all_gather: given a CPU tensor, begins to collect those of all ranks, which have the same shape; calling
            what it returns waits for them.
        payload_words: integers that each rank may send along.
        capacity: words of a message to begin with.

    """

    def __init__(
        self,
        begin_all_gather: Callable[[Tensor], Callable[[], list[Tensor]]],
        payload_words: int = 4,
        capacity: int = 256,
    ) -> None:
        self._begin_all_gather = begin_all_gather
        self._payload_words = payload_words
        self._capacity = capacity
        self._hashes: dict[tuple[LogCall, ...], int] = {}
        self._tables: dict[int, tuple[LogCall, ...]] = {0: ()}  # known to all ranks

    def begin(self, local: Sequence[MicroBatchRecord], payload: Sequence[int] = ()) -> Begun:
        """Begin to exchange records; a collective, so that every rank has to call it.

        Args:
            local: the records of the micro-batches whose last stage this rank ran.
            payload: at most ``payload_words`` integers of 64 bits.
        """
        new = {h: r.calls for r in local if (h := self._hash(r.calls)) not in self._tables}
        text = _dump(new) if new else b""
        message = self._pack(local, payload, len(text))
        return Begun(message, text, self._begin_gather(message, self._capacity))

    def finish(self, begun: Begun) -> tuple[list[MicroBatchRecord], list[tuple[int, ...]]]:
        """Wait for what all ranks sent, and exchange what did not fit; a collective as well.

        Returns:
            The records of all ranks, by replica, micro-batch and stage, and each rank's payload,
            padded with zeros.

        """
        rows = _rows(begun.arrive())
        longest = max(int(row[0]) for row in rows)
        if longest > self._capacity:
            self._capacity = 1 << (longest - 1).bit_length()
            rows = _rows(self._begin_gather(begun.message, self._capacity)())
        most = max(int(row[1]) for row in rows)
        if most:
            self._share_tables(begun.text, [int(row[1]) for row in rows], most)
        records = [record for row in rows for record in self._unpack(row)]
        records.sort(key=lambda record: (record.replica, record.index, record.stage))
        end = _HEADER + self._payload_words
        return records, [tuple(row[_HEADER:end].tolist()) for row in rows]

    def exchange(
        self, local: Sequence[MicroBatchRecord], payload: Sequence[int] = ()
    ) -> tuple[list[MicroBatchRecord], list[tuple[int, ...]]]:
        """Exchange records at once: :meth:`begin`, then :meth:`finish`."""
        return self.finish(self.begin(local, payload))

    def _hash(self, calls: tuple[LogCall, ...]) -> int:
        if not calls:
            return 0
        known = self._hashes.get(calls)
        if known is None:
            digest = hashlib.blake2b(json.dumps(calls).encode(), digest_size=8).digest()
            known = self._hashes[calls] = int.from_bytes(digest, "little", signed=True) or 1
        return known

    def _pack(self, local: Sequence[MicroBatchRecord], payload: Sequence[int], text: int) -> NDArray[np.int64]:
        if len(payload) > self._payload_words:
            raise ValueError(f"a payload of {len(payload)} words was given, the limit is {self._payload_words}")
        start = _HEADER + self._payload_words
        integers = [0, text, len(local), *payload, *[0] * (self._payload_words - len(payload))]
        numbers: list[float | Tensor] = []
        for r in local:
            integers += (r.replica, r.index, r.stage, r.size, r.extra + 2 * r.metrics, self._hash(r.calls))
            numbers += (r.loss, *r.values, *r.batch_sizes)
        integers[0] = len(integers) + len(numbers)
        message = np.zeros(max(integers[0], self._capacity), dtype=np.int64)
        middle = start + _PER_RECORD * len(local)
        message[:middle] = integers
        message.view(np.float64)[middle : integers[0]] = _read(numbers)
        return message

    def _begin_gather(self, message: NDArray[np.int64], length: int) -> Callable[[], list[Tensor]]:
        padded = np.pad(message, (0, max(0, length - message.size)))
        return self._begin_all_gather(torch.from_numpy(padded[:length]))

    def _share_tables(self, text: bytes, lengths: list[int], longest: int) -> None:
        padded = np.frombuffer(text.ljust(longest, b" "), dtype=np.uint8).copy()
        rows = self._begin_all_gather(torch.from_numpy(padded))()
        for row, length in zip(rows, lengths, strict=True):
            if length:
                self._tables.update(_load(row.numpy().tobytes()[:length]))

    def _unpack(self, row: NDArray[np.int64]) -> Iterator[MicroBatchRecord]:
        length, _, count = row[:_HEADER].tolist()
        start = _HEADER + self._payload_words
        middle = start + _PER_RECORD * count
        integers = row[start:middle].tolist()
        floats = row.view(np.float64)[middle:length].tolist()
        at = 0
        for i in range(0, len(integers), _PER_RECORD):
            replica, index, stage, size, extra, table = integers[i : i + _PER_RECORD]
            calls = self._tables[table]
            n = len(calls)
            values = floats[at + 1 : at + 1 + n]
            sizes = floats[at + 1 + n : at + 1 + 2 * n]
            yield MicroBatchRecord(
                index, size, floats[at], calls, values, sizes, replica, bool(extra & 1), bool(extra & 2), stage
            )
            at += 1 + 2 * n


def _rows(tensors: list[Tensor]) -> list[NDArray[np.int64]]:
    return [tensor.numpy() for tensor in tensors]


def _dump(tables: dict[int, tuple[LogCall, ...]]) -> bytes:
    return json.dumps({str(key): calls for key, calls in tables.items()}).encode()


def _load(text: bytes) -> dict[int, tuple[LogCall, ...]]:
    return {int(key): tuple(LogCall(*call) for call in calls) for key, calls in json.loads(text).items()}


def _read(numbers: list[float | Tensor]) -> list[float]:
    """Plain numbers; those on an accelerator are fetched together, since each read waits for it."""
    tensors = [x.detach().double().reshape(()) for x in numbers if isinstance(x, Tensor)]
    if not tensors:
        return cast("list[float]", numbers)
    fetched = iter(torch.stack(tensors).tolist())
    return [next(fetched) if isinstance(x, Tensor) else x for x in numbers]
