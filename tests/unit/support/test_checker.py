"""The judge of the end-to-end tests is judged itself: every kind of violation, and what is none."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.checker import Job, Pod, hosts, indices, judge, read_jobs, read_nodes, read_pods

NODES = {"gpu001": 8, "gpu002": 8}


def job(number: int, held: str = "0-1", node: str = "gpu001", **more: object) -> Job:
    had = indices(held)
    told = {"state": "RUNNING", "claim": True} | more
    return Job(number, gpus={node: (len(had), had)}, nodes=frozenset({node}), **told)  # type: ignore[arg-type]


def pod(name: str = "a", number: int = 7, told: str = "0-1", **more: object) -> Pod:
    fields = {"node": "gpu001", "asked": len(indices(told)), "claim": f"{number}/{name}"} | more
    return Pod(uid=name, name=f"ns/{name}", gpus=told, **fields)  # type: ignore[arg-type]


CASES: dict[str, tuple[list[Pod], list[Job], list[str]]] = {
    "a pod on exactly the GPUs of its running claim": ([pod()], [job(7)], []),
    "a native job on other GPUs of the node": ([pod()], [job(7), job(8, "2-7", claim=False)], []),
    "a claim that waits for its pod": ([], [job(7)], []),
    "two jobs hold one GPU": ([], [job(7), job(8, "1-2")], ["double-owned"]),
    "two jobs hold the same index of two nodes": ([], [job(7), job(8, node="gpu002")], []),
    "a GPU in an Epilog is given away": (
        [],
        [job(7, state="COMPLETING"), job(8)],
        ["double-owned"] * 2,
    ),
    "an ended job's old indices are taken again": ([], [job(7, state="CANCELLED"), job(8)], []),
    "no annotation": ([pod(claim="")], [job(7)], ["no-claim"]),
    "an annotation that is no claim": ([pod(claim="x/a")], [job(7)], ["no-claim"]),
    "the claim of another pod": ([pod(claim="7/b")], [job(7)], ["foreign-claim"]),
    "the claim is unknown to Slurm": ([pod()], [], ["claim-not-running"]),
    "the claim is still pending": ([pod()], [job(7, state="PENDING")], ["claim-not-running"]),
    "the claim is completing": ([pod()], [job(7, state="COMPLETING")], ["claim-not-running"]),
    "the claim runs on another node": ([pod()], [job(7, node="gpu002")], ["wrong-node"]),
    "the claim has fewer GPUs than asked": ([pod(told="0-1")], [job(7, "0")], ["too-few"]),
    "the pod was told other GPUs": ([pod(told="2-3")], [job(7)], ["wrong-indices"]),
    "the pod was told none": ([pod(told="", asked=2)], [job(7)], ["wrong-indices"]),
    "two pods in one claim": (
        [pod("a"), pod("b")],
        [job(7)],
        ["shared-claim", "shared-index", "shared-index"],
    ),
    "the claim's id is a group's by now": (
        [pod()],
        [job(7, node="gpu002", group=True)],
        ["claim-not-running"],
    ),
    "two pods of a group share its claim": (
        [pod("a", told="0-1", share="7/gpu001/0-1"), pod("b", told="2-3", share="7/gpu001/2-3")],
        [job(7, "0-3", group=True)],
        [],
    ),
    "two pods of a group whose claim Slurm has forgotten": (
        [pod("a", told="0-1", share="7/gpu001/0-1"), pod("b", told="2-3", share="7/gpu001/2-3")],
        [],
        ["claim-not-running"] * 2,
    ),
    "another pod is in a group's claim that Slurm has forgotten": (
        [pod("a", told="0-1", share="7/gpu001/0-1"), pod("b", told="2-3", share="6/gpu001/2-3")],
        [],
        ["claim-not-running"] * 2 + ["shared-claim"],
    ),
    "two single pods name a job that Slurm has forgotten": (
        [pod("a", told="0-1"), pod("b", told="2-3")],
        [],
        ["claim-not-running"] * 2 + ["shared-claim"],
    ),
    "a member of a group was told a GPU too much": (
        [pod("a", told="0-2", asked=2, share="7/gpu001/0-1")],
        [job(7, "0-3", group=True)],
        ["wrong-indices"],
    ),
    "two members of a group on one GPU": (
        [pod("a", told="0-1", share="7/-/0-1"), pod("b", told="1-2", share="7/-/1-2")],
        [job(7, "0-3", group=True)],
        ["shared-index"],
    ),
    "a pod on a node that Slurm does not know": ([pod(node="cpu001", claim="")], [], []),
}


@pytest.mark.parametrize("case", CASES)
def test_violations(case: str) -> None:
    pods, jobs, expected = CASES[case]
    assert sorted(v.kind for v in judge(pods, jobs, pods, NODES).violations) == expected


def test_a_pod_that_changed_between_the_readings_is_not_judged() -> None:
    before = pod(claim="")
    after = dataclasses.replace(before, claim="7/a")
    assert judge([before], [job(7)], [after], NODES).violations == ()
    assert judge([before], [job(7)], [], NODES).violations == ()


def test_a_pod_that_came_between_the_readings_still_names_its_claim() -> None:
    assert judge([], [job(7)], [pod()], NODES).idle_claims == ()
    assert judge([], [job(7)], [], NODES).idle_claims == (7,)


def test_gpus_without_indices_are_counted_and_need_no_indices() -> None:
    counted = Job(7, "RUNNING", {"gpu001": (3, frozenset())}, frozenset({"gpu001"}), claim=True)
    sample = judge([pod(told="", asked=3)], [counted], [pod(told="", asked=3)], NODES)
    assert sample.violations == ()
    assert (sample.gpus_used, sample.gpus_total) == (3, 16)


LINE = (
    "JobId=7 JobName=a JobState=FAKE Nodes=x UserId=root(0) Priority=1 JobState=RUNNING Reason=None StartTime=2026-11-30T15:00:00"
    " NodeList=gpu[001-002,004] BatchHost=gpu001 NumNodes=3 JOB_GRES=gpu:a100:5  "
    " Nodes=gpu[001-002] CPU_IDs=0 Mem=1024 GRES=gpu:a100:2(IDX:0,3)  "
    " Nodes=gpu004 CPU_IDs=0-1 Mem=10 GRES=gpu:a100:1(IDX:7),gpu:h100:1(IDX:8) MinCPUsNode=1"
    " Comment=slurmbridge/1 cluster=c group=u ref=ns/a Nodes=x CPU_IDs=0 Mem=1 GRES=gpu:9"
)


def test_a_job_line_is_read_with_all_its_nodes_and_none_of_its_users_text() -> None:
    line = LINE.replace(" JobState=FAKE Nodes=x", "")
    (read,) = read_jobs("\n" + line + "\n")
    assert read == Job(
        id=7,
        state="RUNNING",
        gpus={
            "gpu001": (2, frozenset({0, 3})),
            "gpu002": (2, frozenset({0, 3})),
            "gpu004": (2, frozenset({7, 8})),
        },
        nodes=frozenset({"gpu001", "gpu002", "gpu004"}),
        claim=True,
        group=True,
        start="2026-11-30T15:00:00",
    )


def test_no_jobs_are_read_from_the_text_that_says_so() -> None:
    assert read_jobs("No jobs in the system\n") == []


def test_nodes_are_read_with_their_configured_gpus() -> None:
    text = (
        "NodeName=gpu001 Arch=x86_64 Gres=gpu:a100:8(S:0-1) GresDrain=N/A GresUsed=gpu:a100:2(IDX:0-1)\n"
        "NodeName=cpu001 Arch=x86_64 Gres=(null) GresUsed=\n"
    )
    assert read_nodes(text) == {"gpu001": 8, "cpu001": 0}


def test_hostlists_are_expanded() -> None:
    assert hosts("gpu[001-003,007],x1") == ["gpu001", "gpu002", "gpu003", "gpu007", "x1"]
    assert hosts("(null)") == []


def test_only_live_bound_pods_with_gpus_are_read() -> None:
    def item(name: str, gpus: str, node: str, phase: str) -> dict[str, object]:
        limits = {"nvidia.com/gpu": gpus} if gpus else {}
        return {
            "metadata": {"name": name, "namespace": "ns", "uid": name},
            "spec": {"nodeName": node, "containers": [{"resources": {"limits": limits}}, {}]},
            "status": {"phase": phase},
        }

    items = [
        item("live", "2", "gpu001", "Pending"),
        item("done", "2", "gpu001", "Succeeded"),
        item("waits", "2", "", "Pending"),
        item("cpu", "", "gpu001", "Running"),
    ]
    (read,) = read_pods(items, str.upper)
    assert (read.name, read.node, read.asked, read.claim) == ("ns/live", "GPU001", 2, "")
