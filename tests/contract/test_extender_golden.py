"""The bytes of kube-scheduler 1.32 to 1.37, as its own types encode them (see the README there)."""

from __future__ import annotations

from pathlib import Path

import pytest

from extender import wire
from slurmbridge.pool.podspec import read_pod
from slurmbridge.pool.record import GpuRequest

GOLDEN = Path(__file__).parent / "extender_golden"
VERSIONS = sorted(p.name for p in GOLDEN.glob("v1.*"))
NAMES = ["gpu-0001", "gpu-0002", "gpu-0003"]
LOW = "11111111-2222-3333-4444-555555555555"

pytestmark = pytest.mark.parametrize("version", VERSIONS)


def golden(version, name):
    return (GOLDEN / version / f"{name}.json").read_bytes()


def test_all_supported_releases_are_here(version):
    assert ["v1.32", "v1.33", "v1.34", "v1.35", "v1.36", "v1.37"] == VERSIONS
    assert 10 == len(list((GOLDEN / version).glob("*.json")))


def test_the_pod_is_read(version):
    choice = wire.read_choice(golden(version, "filter_names"))
    pod = read_pod(choice.pod, {"nvidia.com/gpu": "a100"})
    assert GpuRequest(2, "a100") == pod.gpu
    assert (4, 12288) == (pod.cpus, pod.memory_mib), "250m of the sidecar and 3500m are 4 CPUs"
    assert ("team-a", "train-0", "trainer") == (pod.namespace, pod.name, pod.service_account)
    assert {"slurmbridge.dev/account": "team-a"} == pod.annotations
    assert (5400, 45, "Pending") == (pod.active_deadline_s, pod.grace_s, pod.phase)


def test_names_and_whole_nodes_are_read(version):
    for name, is_full, expected in (
        ("filter_names", False, NAMES),
        ("filter_nodes", True, NAMES),
        ("filter_empty", False, []),
    ):
        choice = wire.read_choice(golden(version, name))
        assert expected == choice.names
        assert is_full == (choice.nodes is not None)


def test_our_filter_answer_is_byte_for_byte_that_of_go(version):
    choice = wire.read_choice(golden(version, "filter_names"))
    assert golden(version, "answer_filter") == wire.write_passed(choice, [1])


def test_our_other_answers_are_byte_for_byte_those_of_go(version):
    scores = wire.write_scores(["gpu-0002", "gpu-0001"], [10, 0])
    assert golden(version, "answer_prioritize") == scores
    assert golden(version, "answer_bind") == wire.write_error("no")
    victims = {"gpu-0001": wire.Victims((LOW,), 1)}
    assert golden(version, "answer_preempt") == wire.write_victims(victims)


def test_bind_is_read(version):
    bind = wire.read_bind(golden(version, "bind"))
    uid = "3f6a7c1e-7d43-4b57-9d2b-3c2f1f0e8a11"
    assert wire.Bind("train-0", "team-a", uid, "gpu-0002") == bind


def test_preempt_is_read_in_both_forms(version):
    meta = wire.read_preempt(golden(version, "preempt_meta"))
    both = {"gpu-0001": wire.Victims((LOW,), 1), "gpu-0002": wire.Victims((LOW,), 0)}
    assert both == meta.victims
    whole = wire.read_preempt(golden(version, "preempt_victims"))
    assert {"gpu-0001": wire.Victims((LOW,), 1)} == whole.victims
