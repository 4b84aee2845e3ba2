"""The judge of a chaos run: it finds what it is there for, and puts down to the run what that did."""

from __future__ import annotations

import random  # noqa: TID251 - seeded
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.chaos import judge as module
from tests.support.chaos.bag import Bag
from tests.support.chaos.end import BOOK_S, Book, Limit
from tests.support.chaos.judge import Causes, Judge
from tests.support.chaos.run import Report, subjects
from tests.support.chaos.stalls import Stalls
from tests.support.checker import Job, Reading, indices

NODE = "gpu001"


def raw(name: str, job: int, gpus: str, share: str = "", **meta: Any) -> dict[str, Any]:
    """A bound pod as the API server tells it; its UID is its name."""
    notes = {"slurmbridge.dev/claim": f"{job}/{name}", "slurmbridge.dev/gpus": gpus}
    if share:
        notes["slurmbridge.dev/share"] = share
    limits = {"nvidia.com/gpu": str(len(indices(gpus)))}
    return {
        "metadata": {"namespace": "ns", "name": name, "uid": name, "annotations": notes, **meta},
        "spec": {"nodeName": NODE, "containers": [{"resources": {"limits": limits}}]},
        "status": {"phase": "Running"},
    }


def job(number: int, gpus: str, pod: str = "", node: str = NODE, **more: Any) -> Job:
    """A running job, the claim of a pod where one is named."""
    held = indices(gpus)
    told = {"state": "RUNNING", "claim": bool(pod), "pod": pod, "nodes": frozenset({node})} | more
    return Job(number, gpus={node: (len(held), held)}, **told)


class Scene:
    """A judge with what it reads, and the clock that it reads it by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.causes = Causes()
        self.stalls = Stalls(lambda: self.now)
        self.judge = Judge(SimpleNamespace(read=lambda: self.reading), self.causes, self.stalls)

    def see(self, pods: list[dict[str, Any]], jobs: list[Job], after_s: float = 0.2) -> Judge:
        self.now += after_s
        self.reading = Reading(pods, jobs, pods, {NODE: 8})
        self.judge.look()
        return self.judge


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def found(judge: Judge) -> list[str]:
    kinds = [text.split()[0] for text in judge.double_owned + judge.bare]
    return sorted(set(kinds)) + ["wrong-eviction"] * len(judge.wrong_evictions)


GANG = [raw("g-0", 7, "0-1", "7/gpu001/0-1"), raw("g-1", 7, "2-3", "7/gpu001/2-3")]


def test_pods_in_their_claims_beside_native_jobs_are_no_finding(scene: Scene) -> None:
    pods = [*GANG, raw("a", 8, "4")]
    jobs = [job(7, "0-3", group=True), job(8, "4", "a"), job(9, "5-7")]
    assert found(scene.see(pods, jobs)) == []
    assert (scene.judge.bound, scene.judge.seen_bound) == (3, 3)


@pytest.mark.parametrize(
    ("pods", "jobs", "kinds"),
    [
        ([], [job(7, "0"), job(8, "0")], ["double-owned"]),
        (
            [raw("a", 7, "0"), raw("b", 8, "0")],
            [job(7, "0", "a"), job(8, "1", "b")],
            ["shared-index", "taken"],
        ),
        ([raw("a", 7, "0"), raw("b", 7, "1")], [job(7, "0-1", "a")], ["shared-claim", "taken"]),
        ([raw("a", 7, "0"), raw("b", 7, "1")], [], ["shared-claim"]),
        ([*GANG, raw("b", 7, "4")], [], ["shared-claim"]),
        ([raw("a", 7, "0")], [job(7, "0", "a", node="gpu002")], ["wrong-node"]),
        ([raw("a", 7, "0")], [job(7, "1-7", "a"), job(9, "0")], ["taken"]),
    ],
)
def test_who_has_what_another_owns_is_found_in_one_look(
    scene: Scene, pods: list[dict[str, Any]], jobs: list[Job], kinds: list[str]
) -> None:
    assert found(scene.see(pods, jobs)) == kinds


def test_a_gang_whose_claim_slurm_has_forgotten_shares_nothing_that_it_should_not(
    scene: Scene,
) -> None:
    scene.causes.crashes.append(scene.now)
    assert found(scene.see(GANG, [])) == []
    assert found(scene.see(GANG, [job(7, "4", "other")], after_s=2)) == []


def test_one_id_given_twice_by_a_slurmctld_that_had_crashed_is_no_shared_claim(
    scene: Scene,
) -> None:
    pods, jobs = [raw("a", 7, "0"), raw("b", 7, "1")], [job(7, "1", "b")]
    scene.see(pods[:1], [job(7, "0", "a")])
    scene.causes.crashes.append(scene.now)
    assert found(scene.see(pods, jobs, after_s=40)) == []


def test_one_id_given_twice_for_the_same_pod_on_another_node_is_its_claim_no_more(
    scene: Scene,
) -> None:
    pods, elsewhere = [raw("a", 7, "0")], job(7, "0", "a", node="gpu002")
    scene.causes.crashes.append(scene.now - 5)
    assert found(scene.see(pods, [elsewhere])) == []
    assert found(scene.see(pods, [elsewhere], after_s=20)) == []
    assert scene.judge.longest_kept_s == pytest.approx(20)


def test_a_pod_that_runs_without_a_claim_that_nobody_took_is_found(scene: Scene) -> None:
    pods = [raw("a", 7, "0")]
    scene.see(pods, [job(7, "0", "a")])
    assert found(scene.see(pods, [], after_s=30)) == []
    assert found(scene.see(pods, [], after_s=1.5)) == ["no-claim"]
    assert scene.judge.longest_kept_s == pytest.approx(1.5)


@pytest.mark.parametrize("cause", ["scancel", "node down", "crash", "late crash"])
def test_a_gpu_that_the_run_itself_took_away_is_a_race_and_no_second_owner(
    scene: Scene, cause: str
) -> None:
    pods = [raw("a", 7, "0")]
    scene.see(pods, [job(7, "0", "a")])
    scene.now += 10 if cause == "crash" else 20
    if cause == "scancel":
        scene.causes.cancelled.add(7)
    elif cause == "node down":
        scene.causes.taken_down[NODE] = scene.now
    else:
        scene.causes.crashes.append(scene.now)
    if cause == "late crash":
        # slurmctld could not save either while the machine stood still.
        scene.stalls.tick(scene.now - 8)
    for _ in range(10):
        scene.see(pods, [job(9, "0")])
    assert found(scene.judge) == []
    assert scene.judge.races["ns/a on gpu001/0"] == pytest.approx(1.8)


@pytest.mark.parametrize("node", ["gpu002", "gpu003"])
def test_a_gang_goes_with_any_node_of_its_claim_and_with_no_other(scene: Scene, node: str) -> None:
    both = frozenset({NODE, "gpu002"})
    scene.see(GANG[:1], [job(7, "0-3", group=True, nodes=both)])
    scene.causes.taken_down[node] = scene.now
    rest = job(7, "", group=True, state="COMPLETING", nodes=frozenset({NODE}))
    scene.see(GANG[:1], [rest])
    kinds = [] if node in both else ["no-claim"]
    assert found(scene.see(GANG[:1], [rest], after_s=2)) == kinds


def test_a_claim_that_slurmctld_must_have_saved_is_not_put_down_to_its_crash(scene: Scene) -> None:
    pods = [raw("a", 7, "0")]
    scene.see(pods, [job(7, "0", "a")])
    scene.now += 20
    scene.causes.crashes.append(scene.now)
    scene.see(pods, [job(9, "0")])
    assert found(scene.see(pods, [job(9, "0")], after_s=2)) == ["no-claim", "taken"]


def test_only_a_pod_that_had_its_claim_was_evicted_wrongly(scene: Scene) -> None:
    mine, going = raw("a", 7, "0"), {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    jobs = [job(7, "0", "a"), job(8, "1", "b"), job(9, "2", "c")]
    pods = [mine, raw("b", 8, "1"), raw("c", 9, "2")]
    scene.see(pods, jobs)
    scene.causes.deleted.add("b")
    scene.causes.cancelled.add(9)
    gone = [raw("a", 7, "0", **going), raw("b", 8, "1", **going), raw("c", 9, "2", **going)]
    assert found(scene.see(gone, jobs[:2])) == ["wrong-eviction"]
    assert scene.judge.evictions == {"unexplained": 1, "scancel": 1}


def test_a_deadline_is_put_off_by_what_the_machine_has_lost_meanwhile() -> None:
    now = 100.0
    stalls = Stalls(lambda: now)
    began = stalls.tick(now)
    now = 100.15
    began = stalls.tick(began)  # as late as it may be
    assert stalls.lost_s == 0
    now = 130.25
    stalls.tick(began)
    assert (stalls.lost_s, stalls.longest_s) == (pytest.approx(30), pytest.approx(30))
    assert stalls.between(0, 100.2) == 0
    assert stalls.since(131) == 0
    now = 160.0
    assert not stalls.is_over(110, 25)
    assert stalls.is_over(110, 15)


def test_of_the_logs_that_is_told_which_is_about_the_findings(scene: Scene) -> None:
    scene.see([*GANG, raw("p5", 8, "4"), raw("p50", 9, "5")], [])
    report = Report(1, 7, Counter(), Counter(), scene.judge, scene.stalls, leaked=["x: job 12"])
    lines = ["gang g is due", "JobId=7 done", '"job":12,', "pod ns/p5", "JobId=70", '"job":123']
    told = subjects(report)
    assert [line for line in lines if told.search(line)] == ['"job":12,']
    scene.judge.wrong_evictions.append("ns/g-1 on gpu001")
    told = subjects(report)
    assert [line for line in lines if told.search(line)] == lines[:3]


def test_nothing_may_stand_still_for_long_but_what_goes_on_may_last(scene: Scene) -> None:
    limit = Limit(60, scene.stalls)
    for left in (5, 4, 3):
        scene.now += 50
        limit.see(left)
        assert not limit.is_over()
    for left in (3, 4):
        scene.now += 50
        limit.see(left)
    assert limit.is_over()
    scene.stalls.tick(scene.now - 50)
    assert not limit.is_over()


def test_every_kind_of_fault_comes_round_before_one_comes_again() -> None:
    bag = Bag("abcd", random.Random(1))
    first = [bag.draw() for _ in range(3)]
    bag.put_back(first[0])
    rest = [bag.draw(), bag.draw()]
    assert sorted([*first, rest[0]]) == list("abcd")
    assert rest[1] == first[0]


JOB = (
    "JobId=7 JobName=x JobState={state} StartTime=2026-01-01T00:00:00 NodeList=gpu001 JOB_GRES=gpu:2"
    " Nodes=gpu001 CPU_IDs=0 Mem=1 GRES={gres} MinCPUsNode=1"
)


@pytest.mark.parametrize(
    ("used", "jobs", "is_wrong"),
    [
        (2, "", True),
        (3, JOB.format(state="RUNNING", gres="gpu:a100:2(IDX:0-1)"), True),
        (2, JOB.format(state="RUNNING", gres="gpu:a100:2(IDX:0-1)"), False),
        (0, "", False),
        # Of these Slurm does not tell the GPUs.
        (2, JOB.format(state="COMPLETING", gres=""), False),
        (2, JOB.format(state="RUNNING", gres="gpu:a100:0(IDX:)"), False),
    ],
)
def test_gpus_that_slurmctld_counts_for_no_job_are_counted_anew_in_the_end(
    scene: Scene, used: int, jobs: str, is_wrong: bool
) -> None:
    node = f"NodeName=gpu001 Gres=gpu:a100:8 GresUsed=gpu:a100:{used}(IDX:0-1)"
    done = []

    def run(*argv: str, timeout_s: float) -> str:
        done.append(argv[1])
        return {"node": node, "job": jobs}.get("".join(argv[2:3]), "")

    book = Book(SimpleNamespace(slurm=SimpleNamespace(run=run)))
    assert not book.mend()
    scene.now += BOOK_S
    assert book.mend() is is_wrong
    assert ("reconfigure" in done) is is_wrong
