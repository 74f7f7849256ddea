"""Who owns which parameter: one owner among its replicas steps it, the others receive it.

A parameter is hosted by every rank that hosts a stage that uses it, in every data-parallel replica. One of these hosts
owns it: the owner gathers the gradients of all hosts, holds the optimizer state, and sends the new weights back. So a
rank holds 1/D of a model's optimizer state although it hosts N/D of its weights. Owners are balanced by bytes.

Parameters that are hosted by the same ranks travel together: they form a :class:`Bucket`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_asyncpipe.plan.placement import Placement


@dataclass(frozen=True)
class ParameterInfo:
    """What ownership needs to know of one parameter.

    Attributes:
        name: its first name in the module.
        numel: number of elements.
        dtype: its data type.
        trainable: whether it requires a gradient.
        stages: the stages that use it, ascending; empty for one that no stage uses.
    """

    name: str
    numel: int
    dtype: torch.dtype
    trainable: bool
    stages: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Trainable parameters of one data type that the same stages use.

    Attributes:
        index: position among the buckets; the same on every rank.
        stages: the stages that use the parameters, ascending.
        dtype: data type of the parameters.
        hosts: the global ranks that hold them, in the order in which gradients are added up.
        shards: for each owner (a global rank), the names of the parameters that it owns.
    """

    index: int
    stages: tuple[int, ...]
    dtype: torch.dtype
    hosts: tuple[int, ...]
    shards: tuple[tuple[int, tuple[str, ...]], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All its parameters, owner by owner."""
        return tuple(name for _, names in self.shards for name in names)


@dataclass(frozen=True)
class Ownership:
    """The owner of every parameter and the buckets in which gradients and weights travel."""

    owner: dict[str, int]
    hosts: dict[str, tuple[int, ...]]
    buckets: tuple[Bucket, ...]

    def owned(self, rank: int) -> frozenset[str]:
        """Names of the parameters that `rank` owns, frozen ones included."""
        return frozenset(name for name, owner in self.owner.items() if owner == rank)

    def hosted(self, rank: int) -> frozenset[str]:
        """Names of the parameters that `rank` holds."""
        return frozenset(name for name, hosts in self.hosts.items() if rank in hosts)


def hosts_of(stages: Sequence[int], placement: Placement, replicas: int) -> tuple[int, ...]:
    """Global ranks that host any of `stages`, ascending; those of stage 0 for no stage at all."""
    devices = sorted({device for stage in stages or (0,) for device in placement.hosts(stage)})
    return tuple(replica * placement.num_stages + device for replica in range(replicas) for device in devices)


def assign(parameters: Sequence[ParameterInfo], placement: Placement, replicas: int = 1) -> Ownership:
    """Give every parameter an owner among its hosts, the largest first, to the host that owns least so far.

    Only trainable parameters weigh: a frozen one has no optimizer state and never travels after the start.
    """
    load = [0] * (placement.num_stages * replicas)
    owner: dict[str, int] = {}
    hosts = {info.name: hosts_of(info.stages, placement, replicas) for info in parameters}
    order = sorted(range(len(parameters)), key=lambda i: (-parameters[i].nbytes, i))
    for i in order:
        info = parameters[i]
        if not info.trainable:
            owner[info.name] = hosts[info.name][0]
            continue
        rank = min(hosts[info.name], key=lambda host: (load[host], host))
        owner[info.name] = rank
        load[rank] += info.nbytes
    return Ownership(owner, hosts, _buckets(parameters, owner, hosts))


def _buckets(
    parameters: Sequence[ParameterInfo], owner: dict[str, int], hosts: dict[str, tuple[int, ...]]
) -> tuple[Bucket, ...]:
    groups: dict[tuple[tuple[int, ...], str], list[ParameterInfo]] = {}
    for info in parameters:
        if info.trainable:
            groups.setdefault((info.stages or (0,), str(info.dtype)), []).append(info)
    buckets = []
    for index, key in enumerate(sorted(groups)):
        members = groups[key]
        owners = sorted({owner[info.name] for info in members})
        shards = tuple((rank, tuple(info.name for info in members if owner[info.name] == rank)) for rank in owners)
        buckets.append(Bucket(index, key[0], members[0].dtype, hosts[members[0].name], shards))
    return tuple(buckets)
