"""Every parameter has one owner among its hosts, and owners carry equal weight."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_asyncpipe.plan.placement import Placement
from lightning_asyncpipe.runtime.ownership import ParameterInfo, assign


@st.composite
def worlds(draw):
    stages = draw(st.integers(1, 6))
    placement = Placement(stages, draw(st.integers(1, stages)))
    replicas = draw(st.integers(1, 3))
    infos = [
        ParameterInfo(
            f"p{i}",
            draw(st.integers(1, 1000)),
            draw(st.sampled_from([torch.float32, torch.bfloat16])),
            draw(st.booleans()),
            tuple(sorted(draw(st.sets(st.integers(0, stages - 1), max_size=3)))),
        )
        for i in range(draw(st.integers(0, 12)))
    ]
    return placement, replicas, infos


@settings(deadline=None, max_examples=60)
@given(worlds())
def test_every_parameter_has_one_owner_that_hosts_it(world):
    placement, replicas, infos = world
    ownership = assign(infos, placement, replicas)
    ranks = range(placement.num_stages * replicas)
    for info in infos:
        assert sum(info.name in ownership.owned(rank) for rank in ranks) == 1
        assert ownership.owner[info.name] in ownership.hosts[info.name]
        for stage in info.stages:
            for device in placement.hosts(stage):
                for replica in range(replicas):
                    assert info.name in ownership.hosted(replica * placement.num_stages + device)


@settings(deadline=None, max_examples=60)
@given(worlds())
def test_buckets_hold_each_trainable_parameter_once_and_no_other(world):
    placement, replicas, infos = world
    ownership = assign(infos, placement, replicas)
    held = [name for bucket in ownership.buckets for name in bucket.names]
    assert sorted(held) == sorted(info.name for info in infos if info.trainable)
    for bucket in ownership.buckets:
        for owner, names in bucket.shards:
            assert all(ownership.owner[name] == owner for name in names)
            assert owner in bucket.hosts


def test_owners_of_equal_blocks_hold_equal_shares():
    placement = Placement(4, 2)
    infos = [ParameterInfo(f"s{s}.{i}", 64, torch.float32, True, (s,)) for s in range(4) for i in range(10)]
    ownership = assign(infos, placement)
    assert [len(ownership.owned(rank)) for rank in range(4)] == [10, 10, 10, 10]
