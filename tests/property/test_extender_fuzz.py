"""Whatever comes over the wire is an answer or a fault of ours; the few answered are the best."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extender import wire
from extender.filter import Freshness, Situation, choose
from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.podspec import read_pod
from slurmbridge.pool.policy import Policy
from slurmbridge.pool.record import GpuRequest, PodRecord
from slurmbridge.pool.verdict import PASSES, compile_view, judge, rank
from tests.support.extender import choice
from tests.support.pool_view import NOW, make_ask, make_node, make_view

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["Pod", "NodeNames", "metadata", "spec", "name", "limits", "containers"]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | trees.map(lambda t: json.dumps(t).encode()))
def test_any_bytes_are_read_or_refused(data):
    for read in (wire.read_choice, wire.read_bind, wire.read_preempt):
        try:
            read(data)
        except ParseError as error:
            assert len(error.part) <= 256


@settings(max_examples=200, deadline=None)
@given(trees, st.sampled_from(["limits", "requests", "annotations"]))
def test_a_strange_pod_is_read_or_refused_and_never_half_read(tree, where):
    body = choice(["a"])
    if where == "annotations":
        body["Pod"]["metadata"]["annotations"] = tree
    else:
        body["Pod"]["spec"]["containers"][0]["resources"][where] = tree
    try:
        asked = wire.read_choice(json.dumps(body).encode())
    except ParseError:
        return
    pod = read_pod(asked.pod, {"nvidia.com/gpu": ""})
    assert pod.gpu is None or (pod.gpu.count > 0 and not pod.fault)


names_of_nodes = st.lists(st.text(max_size=12), min_size=1, max_size=30, unique=True)


@settings(max_examples=100, deadline=None)
@given(names_of_nodes)
def test_names_survive_the_way_there_and_back(names):
    asked = wire.read_choice(json.dumps(choice(names)).encode())
    assert names == json.loads(wire.write_all(asked))["NodeNames"]
    refused = dict.fromkeys(asked.names, "why")
    assert refused == json.loads(wire.write_refused(asked, refused))["FailedAndUnresolvableNodes"]


@settings(max_examples=100, deadline=None)
@given(
    free=st.lists(st.integers(0, 8), min_size=1, max_size=40),
    gpus=st.integers(1, 8),
    candidates=st.integers(1, 20),
    uid=st.text("abc123", min_size=1, max_size=8),
)
def test_no_node_left_out_is_better_than_one_answered(free, gpus, candidates, uid):
    nodes = [make_node(f"n{i}", free=f, claimed=i % 2) for i, f in enumerate(free)]
    names = [n.kube_node for n in nodes]
    index = compile_view(make_view(*nodes))
    policy = Policy("c", candidates=candidates)
    there = Situation(index, policy, Freshness.FRESH, NOW, set(names))
    pod = PodRecord(uid=uid, namespace="n", name="p", phase="Pending", gpu=GpuRequest(gpus))
    answer = choose(pod, names, there)
    ask = make_ask(gpus, cpus=0, memory_mib=0, minutes=policy.default_minutes, rolling=True)
    rows = np.arange(len(names), dtype=np.int32)
    codes = judge(ask, uid, index, rows, NOW, horizon_minutes=policy.plan_horizon_minutes)
    fits = [i for i in range(len(names)) if codes[i] == PASSES]
    assert min(candidates, len(fits)) == len(answer.passed)
    assert set(answer.passed) <= set(fits)
    assert bool(answer.refused) == (not fits)
    ranks = rank(ask, uid, index, rows, NOW, horizon_minutes=policy.plan_horizon_minutes)
    left_out = [ranks[i] for i in fits if i not in answer.passed]
    if left_out:
        assert max(left_out) <= min(ranks[i] for i in answer.passed)


@pytest.mark.parametrize("version", ["lower", "UPPER"])
def test_any_case_of_the_keys_is_read_alike(version):
    turn = str.lower if version == "lower" else str.upper
    body = {turn(key): value for key, value in choice(["a", "b"]).items()}
    assert ["a", "b"] == wire.read_choice(json.dumps(body).encode()).names
