"""Gradients to their owners, new weights back to the replicas.

The reduction of a stage's gradients begins where the schedule says that its last backward has run, and the owner adds
up what its hosts sent in a fixed order, so that two runs give the same bits. New weights leave at the start of the next
segment; a replica switches where its schedule says UPDATE, before it uses the stage again.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_asyncpipe._private import preserve_versions
from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.runtime.channels import MessageKey, Transport
from lightning_asyncpipe.runtime.gradients import (
    GradientAccumulator,
    accumulation_dtype,
    add_sums,
    pack_gradients,
    pack_weights,
    shard_of,
    unpack_gradients,
)
from lightning_asyncpipe.runtime.ownership import Bucket, Ownership
from lightning_asyncpipe.runtime.stash import WeightStash

REDUCE, UPDATE = 2, 3


class WeightExchange:
    """Moves one rank's gradients and weights.

    Args:
        rank: global rank.
        placement: which device hosts what.
        replicas: number of data-parallel replicas.
        ownership: owners and buckets, the same on every rank.
        parameters: the trainable parameters that this rank hosts, by name.
        transport: carries the messages.
        stash: told of new weights, and of what is sent with them; None where early forwards run on the live ones.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        replicas: int,
        ownership: Ownership,
        parameters: Mapping[str, Parameter],
        transport: Transport,
        stash: WeightStash | None = None,
    ) -> None:
        self.rank = rank
        self.replicas_outdated = False
        self.accumulator = GradientAccumulator(parameters)
        self._placement = placement
        self._replicas = replicas
        self._ownership = ownership
        self._parameters = dict(parameters)
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._transport = transport
        self._stash = stash
        self._reduced: set[int] = set()
        self._outdated: set[int] = set()
        self._serial = -1

    # Who sends what to whom

    def peers(self, replica: int) -> list[int]:
        """The ranks from which this one may receive: its own replica, and hosts of the same stages elsewhere."""
        size = self._placement.num_stages
        return [
            rank
            for rank in range(size * self._replicas)
            if rank != self.rank
            and (
                rank // size == replica
                or any(rank in bucket.hosts and self.rank in bucket.hosts for bucket in self._ownership.buckets)
            )
        ]

    def published_by(self, peer: int) -> list[MessageKey]:
        """The weights that `peer` sends to this rank after an optimizer step, in order."""
        return [
            MessageKey(UPDATE, bucket.index, peer, -1, 0)
            for bucket in self._ownership.buckets
            if self.rank in bucket.hosts and shard_of(bucket, peer)
        ]

    def reduced_by(self, peer: int, stage: int, reduced: set[int]) -> list[MessageKey]:
        """The gradients that `peer` sends to this rank where its schedule says REDUCE(`stage`).

        Args:
            reduced: the stages that `peer` has reduced before in the segment; `stage` is added.
        """
        return [
            MessageKey(REDUCE, bucket.index, peer, -1, 0)
            for bucket in self._completed(peer, stage, reduced)
            if shard_of(bucket, self.rank)
        ]

    def _completed(self, rank: int, stage: int, reduced: set[int]) -> list[Bucket]:
        """The buckets of `rank` to which no gradient is added any more once `stage` is done as well."""
        reduced.add(stage)
        hosted = set(self._placement.hosted(rank % self._placement.num_stages))
        return [
            bucket
            for bucket in self._ownership.buckets
            if rank in bucket.hosts and stage in bucket.stages and hosted.intersection(bucket.stages) <= reduced
        ]

    # Gradients

    def reduce(self, stage: int, serial: int) -> None:
        """Send what this rank has gathered for the stage to the owners."""
        self._serial = serial
        for bucket in self._completed(self.rank, stage, self._reduced):
            for owner, names in bucket.shards:
                if owner != self.rank:
                    packed = self._packed(bucket, names)
                    self._transport.send(owner, MessageKey(REDUCE, bucket.index, self.rank, serial, 0), packed)

    def _packed(self, bucket: Bucket, names: tuple[str, ...]) -> Tensor:
        """The sums of `names`, which no gradient is added to any more; they then live in the message alone."""
        device = self._parameters[names[0]].device
        packed = pack_gradients(self.accumulator, names, self._shapes, accumulation_dtype(bucket.dtype), device)
        for name, part in unpack_gradients(packed, names, self._shapes).items():
            self.accumulator.replace(name, part)
        return packed

    def collect(self) -> dict[str, Tensor]:
        """Wait for the gradients of the parameters that this rank owns, summed over all hosts, by name.

        Parameters that got no gradient anywhere are left out. The window's sums are forgotten. Nothing is copied: the
        sums are made in the memory of what the first host gathered.
        """
        sums: dict[str, Tensor] = {}
        for bucket in self._ownership.buckets:
            names = shard_of(bucket, self.rank)
            if not names:
                continue
            if self._stash is not None:
                self._stash.before_update(names)
            for host in bucket.hosts:
                add_sums(sums, self._own(names) if host == self.rank else self._received(bucket, host, names))
        self.accumulator.clear()
        self._reduced.clear()
        return sums

    def _own(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        found = {name: total for name in names if (total := self.accumulator.get(name)) is not None}
        return {name: total.to_dense() if total.is_sparse else total for name, total in found.items()}

    def _received(self, bucket: Bucket, host: int, names: tuple[str, ...]) -> dict[str, Tensor]:
        packed = self._transport.take(MessageKey(REDUCE, bucket.index, host, self._serial, 0)).tensor
        assert packed is not None
        return unpack_gradients(packed, names, self._shapes)

    # Weights

    def stepped(self) -> None:
        """The owners have stepped: every replica is one version behind until it is updated."""
        self.replicas_outdated = True
        self._outdated = {bucket.index for bucket in self._ownership.buckets if self.rank in bucket.hosts}

    def publish(self, serial: int) -> None:
        """Send the new weights of what this rank owns to the other hosts."""
        self._serial = serial
        self.replicas_outdated = False
        for bucket in self._ownership.buckets:
            names, others = shard_of(bucket, self.rank), [host for host in bucket.hosts if host != self.rank]
            if not names or not others:
                continue
            companions = self._stash.companions(names) if self._stash is not None else []
            weights = pack_weights(self._parameters, names, companions)
            for host in others:
                self._transport.send(host, MessageKey(UPDATE, bucket.index, self.rank, serial, 0), weights)

    def update(self, stage: int | None = None) -> None:
        """Switch this rank's copy of a stage (None: of every stage) to the new weights; waits for them."""
        for bucket in self._ownership.buckets:
            if bucket.index in self._outdated and (stage is None or stage in bucket.stages):
                self._outdated.discard(bucket.index)
                for owner, names in bucket.shards:
                    if owner != self.rank:
                        key = MessageKey(UPDATE, bucket.index, owner, self._serial, 0)
                        received = self._transport.take(key).tensor
                        assert received is not None
                        self._write(received, names)

    def _write(self, weights: Tensor, names: tuple[str, ...]) -> None:
        parameters = [self._parameters[name] for name in names]
        *parts, companions = weights.tensor_split(list(accumulate(p.numel() for p in parameters)))
        if self._stash is not None:
            self._stash.before_update(names)
            self._stash.arrived(names, companions)
        with torch.no_grad(), preserve_versions(parameters):
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(part.view(parameter.shape))

    def settle(self, serial: int) -> None:
        """Bring all replicas up to date outside a segment; every rank has to call it at the same point."""
        if not self.replicas_outdated:
            return
        for peer in self.peers(self.rank // self._placement.num_stages):
            keys = [key._replace(batch=serial) for key in self.published_by(peer)]
            if keys:
                self._transport.expect(peer, keys)
        self.publish(serial)
        self.update()
