"""Which pod is being admitted, and which devices it gets."""

import json

import pytest

from slurmbridge.node.device import DeviceMap, Gpu
from slurmbridge.node.identity import (
    Listed,
    PodFacts,
    Veto,
    Want,
    admitted_pod,
    check_devices,
    owner_of,
    prefer,
    unknown_names,
)
from slurmbridge.node.podfacts import read_facts

DEVICES = DeviceMap(gpus=tuple(Gpu(i, f"GPU-{i}", i, f"/dev/nvidia{i}") for i in range(8)))


def pod(name, *gpus, job_id=7, containers=("main",), **more):
    wants = tuple(Want(c, n) for c, n in zip(containers, more.pop("wants", (1,)), strict=False))
    return PodFacts(
        uid=f"uid-{name}", namespace="a", name=name, wants=wants, job_id=job_id,
        indices=gpus or None, **more,
    )  # fmt: skip


def listed(name, **devices):
    return Listed("a", name, {c: frozenset(ids) for c, ids in devices.items()})


def who(pods, listing, served=(), ids=()):
    found = admitted_pod(pods, listing, served, ids, DEVICES)
    return found.code if isinstance(found, Veto) else found.name


def test_the_one_gpu_pod_without_devices_is_being_admitted():
    pods = [pod("old", 0), pod("new", 1), PodFacts("u", "a", "cpu-only")]
    listing = [listed("old", main=["GPU-0"]), listed("new"), listed("cpu-only")]
    assert who(pods, listing) == "new"


def test_a_pod_that_waits_for_its_second_container_is_the_one():
    two = pod("two", 1, 2, containers=("a", "b"), wants=(1, 1))
    assert who([two], [listed("two", a=["GPU-1"])]) == "two"


def test_a_pod_of_the_same_name_as_one_that_is_ending_is_told_apart():
    old = pod("web-0", 0, deleting=True, created="2026-01-02")
    new = PodFacts("uid-new", "a", "web-0", (Want("main", 1),), 8, (1,), created="2026-01-01")
    found = admitted_pod(
        [old, new], [listed("web-0", main=["GPU-0"]), listed("web-0")], (), (), DEVICES
    )
    assert found.uid == "uid-new"


def test_of_several_the_one_that_was_not_served_yet_is_meant():
    # An init container's devices of a running pod are not always listed.
    pods = [pod("init-only", 0), pod("new", 1)]
    assert who(pods, [listed("init-only"), listed("new")]) == "ambiguous"
    assert who(pods, [listed("init-only"), listed("new")], {("uid-init-only", "main")}) == "new"


def test_of_several_the_one_whose_claim_has_the_devices_is_meant():
    pods = [pod("one", 0), pod("two", 1)]
    assert who(pods, [listed("one"), listed("two")], ids=["GPU-1"]) == "two"


def test_nobody_is_guessed():
    assert who([pod("over", 1, is_over=True)], [listed("over")]) == "nobody"
    assert who([], [listed("unknown")]) == "nobody"
    assert unknown_names([], [listed("unknown"), listed("known", main=["GPU-0"])]) == [
        ("a", "unknown")
    ]


ALL = [f"GPU-{i}" for i in range(8)]
PREFER = {
    "the claim's devices by index": (pod("p", 3, 5), 2, ALL, [], ["GPU-3", "GPU-5"]),
    "the lowest first for the first container": (pod("p", 3, 5), 1, ALL, [], ["GPU-3"]),
    "the rest for the next": (pod("p", 3, 5), 1, ["GPU-0", "GPU-5"], [], ["GPU-5"]),
    "what must be included is": (pod("p", 3, 5), 1, ALL, ["GPU-5"], ["GPU-5"]),
    "no claim": (pod("p", 3, job_id=None), 1, ALL, [], "no_claim"),
    "a faulty claim": (pod("p", 3, fault="odd"), 1, ALL, [], "claim_form"),
    "no indices": (pod("p"), 1, ALL, [], "no_indices"),
    "an index that the node lacks": (pod("p", 9), 1, ALL, [], "unknown_gpu"),
    "more asked than claimed": (pod("p", 3), 2, ALL, [], "too_few"),
    "a device that another pod still has": (pod("p", 3), 1, ["GPU-0"], [], "held"),
    "a reuse outside the claim": (pod("p", 3), 1, ALL, ["GPU-4"], "outside"),
}  # fmt: skip


@pytest.mark.parametrize("case", PREFER)
def test_a_container_gets_devices_of_its_claim_or_a_reason(case):
    one, size, available, must, expected = PREFER[case]
    chosen = prefer(one, size, available, must, DEVICES)
    assert (chosen.code if isinstance(chosen, Veto) else chosen) == expected


def test_allocate_takes_only_devices_of_the_claim():
    assert check_devices(pod("p", 3, 5), ["GPU-5"], DEVICES) is None
    assert check_devices(pod("p", 3, 5), ["GPU-4"], DEVICES).code == "outside"
    assert check_devices(pod("p", 3, job_id=None), ["GPU-3"], DEVICES).code == "no_claim"


def test_a_starting_container_is_known_by_its_exact_devices():
    listing = [listed("p", a=["GPU-1"], b=["GPU-2"]), listed("q", main=["GPU-1", "GPU-2"])]
    assert owner_of(["GPU-2"], listing).name == "p"
    assert owner_of(["GPU-2", "GPU-1"], listing).name == "q"
    assert owner_of(["GPU-3"], listing) is None


def facts(annotations=None, **spec):
    body = {
        "metadata": {"name": "p", "namespace": "a", "uid": "u-1", "annotations": annotations or {}},
        "spec": spec or {"containers": [{"name": "m", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]},
        "status": {"phase": "Pending"},
    }  # fmt: skip
    return read_facts(json.dumps(body).encode(), "nvidia.com/gpu")


def test_the_claim_is_read_from_the_annotations_and_must_be_the_pods_own():
    good = facts({"slurmbridge.dev/claim": "12/u-1", "slurmbridge.dev/gpus": "0-1"})
    assert (good.job_id, good.indices, good.fault) == (12, (0, 1), "")
    assert good.wants == (Want("m", 2),)
    other = facts({"slurmbridge.dev/claim": "12/u-2", "slurmbridge.dev/gpus": "0-1"})
    assert (other.job_id, "another pod" in other.fault) == (None, True)
    assert "cannot be read" in facts({"slurmbridge.dev/claim": "x/u-1"}).fault
    assert facts({"slurmbridge.dev/claim": "12/u-1", "slurmbridge.dev/gpus": "a"}).indices is None


LOOSE = {
    "privileged": ({"containers": [{"name": "m", "securityContext": {"privileged": True}}]}, "privileged"),
    "all devices by variable": (
        {"containers": [{"name": "m", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}]},
        "NVIDIA_VISIBLE_DEVICES=all",
    ),
    "privileged for kubectl debug": (
        {"ephemeralContainers": [{"name": "d", "securityContext": {"privileged": True}}]},
        "privileged",
    ),
    "all devices for kubectl debug": (
        {"ephemeralContainers": [{"name": "d", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}]},
        "NVIDIA_VISIBLE_DEVICES=all",
    ),
    "devices by CDI": (
        {"annotations": {"cdi.k8s.io/x": "nvidia.com/gpu=all"}},
        "annotation cdi.k8s.io/x",
    ),
    "the host's /dev": ({"volumes": [{"hostPath": {"path": "/dev/"}}]}, "hostPath /dev"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOOSE)
def test_ways_around_the_plugin_are_seen(case):
    spec, expected = LOOSE[case]
    assert facts(**spec).loose == (expected,)
    harmless = {"containers": [{"name": "m", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]}]}  # fmt: skip
    assert facts(**harmless).loose == ()
