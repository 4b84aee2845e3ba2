"""What does not fit on a node is found, and told once it has stood for a while."""

import pytest

from slurmbridge.node import audit
from slurmbridge.node.book import BookEntry, NativeJob
from slurmbridge.node.device import DeviceMap, Gpu
from slurmbridge.node.identity import Listed, PodFacts, Want
from slurmbridge.node.look import GpuUser, Sample
from slurmbridge.pool.noderecord import GpuOwner, NodeFinding, NodePod, NodeReport

DEVICES = DeviceMap(gpus=tuple(Gpu(i, f"GPU-{i}", i, f"/dev/nvidia{i}") for i in range(4)))


def kinds(pods=(), book=(), native=(), owners=(), **sample):
    facts = audit.Facts(DEVICES, Sample(0.0, **sample), pods, book, native, owners)
    return [(f.kind, f.gpus) for f in audit.find(facts)]


def entry(uid, *gpus):
    return BookEntry(uid, f"a/{uid}", 7, set(gpus))


ALIVE = {"p": frozenset({11}), "q": frozenset({12})}


def test_a_node_in_order_has_no_finding():
    assert (
        kinds(
            [PodFacts("p", "a", "p", (Want("m", 1),), 7, (0,))],
            [entry("p", 0)],
            [NativeJob(9, "alice", "", "", (1,))],
            (GpuOwner(0, "claim", 7, "p"), GpuOwner(1, "native", 9)),
            processes=ALIVE,
            users=(GpuUser(11, "p", 0, "train"), GpuUser(50, "", 1, "python")),
            listing=(Listed("a", "p", {"m": frozenset({"GPU-0"})}),),
        )
        == []
    )


def test_two_owners_of_one_gpu_are_found():
    assert kinds(book=[entry("p", 0), entry("q", 0)], processes=ALIVE) == [("shared_gpu", (0,))]
    jobs = [NativeJob(9, "alice", "", "", (0,))]
    assert kinds(book=[entry("p", 0)], native=jobs, processes=ALIVE) == [("shared_gpu", (0,))]
    assert kinds(book=[entry("p", 0)], native=jobs) == []


def test_a_process_on_a_gpu_that_is_not_its_own_is_found():
    users = (GpuUser(11, "p", 1, "train"),)
    assert kinds(book=[entry("p", 0)], processes=ALIVE, users=users) == [("outside_claim", (1,))]
    assert kinds(users=(GpuUser(50, "", 2, "python"),)) == [("stray_process", (2,))]


STRAYS = {
    "of the job that has it": (9, "", False),
    "of a process whose job is not known": (0, "", False),
    "of another job": (8, "process 50 (python) of job 8 uses GPU 1, which job 9 has", True),
}


@pytest.mark.parametrize("case", STRAYS)
def test_a_native_process_on_a_native_gpu_is_judged_by_its_job_where_that_is_known(case):
    job, text, is_found = STRAYS[case]
    users = (GpuUser(50, "", 1, "python", job),)
    native = [NativeJob(9, "alice", "", "", (1,))]
    found = audit.find(audit.Facts(DEVICES, Sample(0.0, users=users), (), (), native))
    assert [(f.kind, f.text) for f in found] == [("stray_process", text)] * is_found


def test_devices_by_the_kubelet_without_a_claim_or_beside_it_are_found():
    listing = (Listed("a", "p", {"m": frozenset({"GPU-0"})}),)
    none = PodFacts("p", "a", "p", (Want("m", 1),))
    other = PodFacts("p", "a", "p", (Want("m", 1),), 7, (3,))
    assert kinds([none], listing=listing) == [("no_claim", (0,))]
    assert kinds([other], listing=listing) == [("outside_claim", (0,))]


def test_a_privileged_pod_and_a_ledger_that_says_otherwise_are_found():
    loose = PodFacts("p", "a", "p", loose=("privileged",))
    assert kinds([loose], processes=ALIVE) == [("loose_pod", ())]
    owners = (GpuOwner(0, "native", 9),)
    assert kinds(book=[entry("p", 0)], owners=owners, processes=ALIVE) == [("ledger", (0,))]


RUNS = {
    "its image shows all": ({"all"}, (), True),
    "another pod's GPU": ({"GPU-1"}, (), True),
    "its own GPU": ({"GPU-0"}, (), False),
    "nothing": ({"void", "none"}, (), False),
    "not said": ((), (), False),
    "as its spec says already": ({"all"}, ("NVIDIA_VISIBLE_DEVICES=all",), True),
}


@pytest.mark.parametrize("case", RUNS)
def test_what_a_pod_really_runs_with_is_compared_with_what_it_was_given(case):
    seen, loose, is_found = RUNS[case]
    pod = PodFacts("p", "a", "p", (Want("m", 1),), 7, (0,), loose=loose)
    sample = {"processes": ALIVE, "visible": {"p": frozenset(seen)}}
    assert kinds([pod], book=[entry("p", 0)], **sample) == [("loose_pod", ())] * is_found
    # Also of a pod that the API server no longer knows.
    assert kinds(book=[entry("p", 0)], **sample) == [("loose_pod", ())] * is_found


CLOSED = {"none": set(), "gpu": {2}, "node": {0, 1, 2, 3}}


@pytest.mark.parametrize("policy", CLOSED)
def test_a_finding_closes_what_the_policy_says(policy):
    stray = [NodeFinding("stray_process", "process 1", "", gpus=(2,))]
    loose = [NodeFinding("loose_pod", "pod a/b", "")]
    assert audit.closed_by([*stray, *loose], DEVICES, policy) == CLOSED[policy]
    assert audit.closed_by(loose, DEVICES, policy) == set()


def test_a_finding_is_told_after_it_has_stood():
    facts = audit.Facts(DEVICES, Sample(0.0, users=(GpuUser(50, "", 2, "x"),)), (), (), ())
    found = audit.find(facts)
    told, since = audit.settle(100.0, found, {})
    assert told == []
    told, since = audit.settle(104.0, found, since)
    assert [f.since for f in told] == [100.0]
    assert audit.settle(105.0, [], since) == ([], {})


def test_a_report_says_that_a_pod_is_gone_only_when_it_saw_everything():
    left = NodeReport("n", registered=True, is_whole=True, pods=(NodePod("p", "a/p"),))
    assert not left.has_left("p")
    assert left.has_left("q")
    assert not NodeReport("n", registered=True, is_whole=False).has_left("q")
