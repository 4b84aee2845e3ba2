"""The nodes' own word in a chaos run: the witness finds what it is there for, and nothing else."""

from types import SimpleNamespace

import pytest

from tests.support.chaos.devices import Devices
from tests.support.chaos.judge import Told
from tests.support.node_checker import PodSeen

NODE = "gpu001"
TOLD = {
    "a": Told("default/a", NODE, frozenset({0, 1})),
    "b": Told("default/b", NODE, frozenset({2})),
}


def pod(uid, *gpus):
    return PodSeen(uid, frozenset(f"GPU-{NODE}-{i}" for i in gpus), frozenset(gpus))


@pytest.fixture
def devices():
    return Devices(SimpleNamespace(node={}, names=[], overlaps=list), TOLD.get)


def judged(devices, stood, table=None, listed=None, node=NODE):
    devices._judge(node, stood, table or {}, listed or {})
    return devices.overlaps_found()


def test_pods_and_jobs_on_their_own_gpus_are_no_finding(devices):
    stood = {"a": pod("a", 0, 1), "b": pod("b", 2), "job 7": {3, 4}}
    table = {"a": ("default/a", {0, 1}), "b": ("default/b", {2})}
    listed = {"a": frozenset({f"GPU-{NODE}-0", f"GPU-{NODE}-1"})}
    assert judged(devices, stood, table, listed) == []
    assert devices.checked == {"a", "b"}
    assert devices.native_seen == {"job 7"}


@pytest.mark.parametrize(
    "other", [{"b": pod("b", 1)}, {"job 7": {1}}, {"stranger": pod("stranger", 1)}]
)
def test_a_second_owner_is_found(devices, other):
    assert any(
        "gpu001/1 is used by" in text for text in judged(devices, {"a": pod("a", 0, 1), **other})
    )


def test_two_native_jobs_on_one_gpu_are_found(devices):
    assert judged(devices, {"job 7": {3}, "job 8": {3}})


@pytest.mark.parametrize("who", ["process", "agent", "kubelet"])
def test_another_gpu_than_the_claims_is_found_whoever_says_so(devices, who):
    stood = {"a": pod("a", 0, 5 if who == "process" else 1)}
    table = {"a": ("default/a", {0, 5} if who == "agent" else {0, 1})}
    listed = {"a": frozenset({f"GPU-{NODE}-5"} if who == "kubelet" else ())}
    (text,) = judged(devices, stood, table, listed)
    assert text.startswith(f"{NODE}: {who} says")


def test_a_pod_on_another_node_than_its_claims_is_found(devices):
    assert judged(devices, {"a": pod("a", 0, 1)}, node="gpu002")


def test_the_agents_table_counts_as_owned_while_the_pod_has_a_process(devices):
    table = {"a": ("default/a", {0, 1}), "gone": ("default/gone", {0})}
    stood = {"a": PodSeen("a", frozenset({f"GPU-{NODE}-0"}), frozenset()), "job 7": {1}}
    (text,) = judged(devices, stood, table)
    assert "gpu001/1 is used by ['a', 'job 7']" in text


def test_a_lock_that_a_pod_takes_from_itself_is_no_second_owner():
    lines = ["p1 GPU-gpu001-0 p1", "job-4 GPU-gpu001-1 p2"]
    found = Devices(SimpleNamespace(node={}, names=[], overlaps=lambda: lines), TOLD.get)
    assert found.overlaps_found() == ["lock: job-4 GPU-gpu001-1 p2"]
