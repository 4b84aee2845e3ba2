"""Who owns each GPU of a node, by what the node, the jobs and our own book say."""

from __future__ import annotations

import pytest

from slurmbridge.pool.ledger import Charge, GpuState, build_node
from slurmbridge.pool.record import GpuCount, GpuUse
from tests.support.builders import make_job, make_node, make_pod, plain, use

LETTERS = {
    GpuState.FREE: ".",
    GpuState.NATIVE: "N",
    GpuState.CLAIM: "C",
    GpuState.RELEASING: "R",
    GpuState.HELD: "H",
    GpuState.UNKNOWN: "?",
}
POD = make_pod("a").obj.uid


def ledger(node, *jobs, claims=None, charges=()):
    return build_node(plain(node), [plain(j) for j in jobs], claims or {}, charges)


def board(*args, **kwargs):
    """One letter per GPU."""
    return "".join(LETTERS[owner.state] for owner in ledger(*args, **kwargs).gpus)


def node(gpus=8, used="", kind=""):
    return make_node("n").gpus(gpus, kind).used(used)


# narrative: (node, jobs, board)
READINGS = {
    "an idle node": (node(), [], "........"),
    "a native job": (node(used="0-3"), [make_job(1).on("n", "0-3")], "NNNN...."),
    "two jobs with a gap": (
        node(used="0,6-7"),
        [make_job(1).on("n", "0"), make_job(2).on("n", "6-7")],
        "N.....NN",
    ),
    "A12: a node that registered without GRES has no GPU to give": (
        make_node("n").but(gpus=(), gpus_used=use()),
        [],
        "",
    ),
    "B01: a reservation that began over a running job adds nothing and takes nothing": (
        node(used="0-1").state("MIXED+RESERVED"),
        [make_job(1).on("n", "0-1")],
        "NN......",
    ),
    "B02: after a restart the node knows less than the jobs: the union counts": (
        node(used="0-2"),
        [make_job(1).on("n", "0-2"), make_job(2).on("n", "3-4")],
        "NNNNN...",
    ),
    "B02: the node says nothing is used, three jobs run": (
        node(),
        [make_job(i).on("n", str(i)) for i in range(3)],
        "NNN.....",
    ),
    "B03: a node down after a restart": (
        node().state("DOWN+NOT_RESPONDING"),
        [make_job(1).on("n", "0-7")],
        "NNNNNNNN",
    ),
    "B04: a suspended job keeps its GPUs": (
        node(),
        [make_job(1).state("SUSPENDED").on("n", "0-3")],
        "NNNN....",
    ),
    "B05: a job stuck in COMPLETING": (
        node(used="0"),
        [make_job(1).state("COMPLETED+COMPLETING").on("n", "0")],
        "R.......",
    ),
    "B18: a completing node says 0 used, and no job tells": (
        node().state("IDLE+COMPLETING"),
        [],
        "RRRRRRRR",
    ),
    "B18: a completing job's details are cleared: nothing is free": (
        node(used="5").state("MIXED+COMPLETING"),
        [make_job(1).state("CANCELLED+COMPLETING").on_unknown("n"), make_job(2).on("n", "5")],
        "?????N??",
    ),
    "a completing job that tells its GPUs": (
        node().state("IDLE+COMPLETING"),
        [make_job(1).state("CANCELLED+COMPLETING").on("n", "0-1")],
        "RR......",
    ),
    "C05: only GresUsed tells": (node(used="0-7"), [], "HHHHHHHH"),
    "C07: without details nothing is known": (make_node("n").used_unknown(), [], "????????"),
    "C08: a hidden partition's job shows in the node alone": (
        node(used="0-7"),
        [make_job(1).on("n", "4-5")],
        "HHHHNNHH",
    ),
    "C19: GPUs in a job's name are text": (
        node(),
        [make_job(1).but(name="x NodeList=n GRES=gpu:8(IDX:0-7)", nodes=("n",), gpus={})],
        "........",
    ),
    "C21: both components of a het job": (
        node(used="0-7"),
        [make_job(700).on("n", "0-3"), make_job(701).on("n", "4-7")],
        "NNNNNNNN",
    ),
    "C22: requeued and pending again: it holds nothing": (
        node(),
        [make_job(1).state("PENDING").on("n", "0-3")],
        "........",
    ),
    "a finished job": (node(), [make_job(1).state("COMPLETED").on("n", "0-3")], "........"),
    "an unknown job state holds": (node(), [make_job(1).state("WEIRD").on("n", "0")], "N......."),
    "a job with GPUs that Slurm does not tell": (
        node(used="0"),
        [make_job(1).on("n", "0"), make_job(2).on_unknown("n")],
        "N???????",
    ),
    "a job of CPUs alone": (node(), [make_job(1).but(nodes=("n",), gpus={})], "........"),
    "count only: from the high end": (
        make_node("n").used_count(3),
        [make_job(1).on("n", count=3)],
        ".....NNN",
    ),
    "count only: the node knows of one more": (
        make_node("n").used_count(4),
        [make_job(1).on("n", count=3)],
        "....HNNN",
    ),
    "count only: an untyped count over typed GPUs is not counted twice": (
        make_node("n").types(a100=4, h100=4).but(gpus_used=use(count=3)),
        [make_job(1).on("n", count=3)],
        ".....NNN",
    ),
    "count only: a type that the node does not have takes any": (
        make_node("n").gpus(8).but(gpus_used=use(count=2, kind="a100")),
        [],
        "......HH",
    ),
    "by type": (
        make_node("n")
        .types(a100=4, h100=4)
        .but(gpus_used=GpuUse((GpuCount("a100", 1), GpuCount("h100", 2)))),
        [],
        "...H..HH",
    ),
    "a GPU in shards is taken whole": (
        make_node("n").but(gpus_used=GpuUse((), (), (2,))),
        [],
        "..H.....",
    ),
    "a GPU in shards where whole ones are not numbered": (
        make_node("n").but(gpus_used=GpuUse((GpuCount("", 1),), None, (2,))),
        [],
        "..H.....",
    ),
    "more used than there are (a GPU has died)": (
        make_node("n").gpus(6).used_count(8),
        [make_job(1).on("n", count=8)],
        "NNNNNN",
    ),
}


@pytest.mark.parametrize("name", READINGS)
def test_reading(name):
    node_, jobs, expected = READINGS[name]
    assert board(node_, *jobs) == expected


CHARGES = {
    "a claim younger than the reading": ([Charge(POD, use("0-1"), 10)], [], {}, "CC......"),
    "the same claim in the reading adds nothing": (
        [Charge(POD, use("0-1"), 10)],
        [make_job(10).on("n", "0-1")],
        {10: POD},
        "CC......",
    ),
    "a claim that is asked for, by count": ([Charge(POD, use(count=2))], [], {}, "......HH"),
    "its claim in the reading says less than it was given": (
        [Charge(POD, use("0-1"), 10)],
        [make_job(10).on("n", "0")],
        {10: POD},
        "CC......",
    ),
    "its job id is a stranger's now: its GPUs stay charged": (
        [Charge(POD, use("0-1"), 10)],
        [make_job(10).on("n", "4")],
        {},
        "CC..N...",
    ),
    "its job id is another pod's claim now": (
        [Charge(POD, use("0-1"), 10)],
        [make_job(10).on("n", "4")],
        {10: "other"},
        "CC..C...",
    ),
    "A01, A05: a pod whose claim is gone": (
        [Charge(POD, use("2"), 10, uncovered=True)],
        [],
        {},
        "..H.....",
    ),
    "the same by count": ([Charge(POD, use(count=2), uncovered=True)], [], {}, "......HH"),
}


@pytest.mark.parametrize("name", CHARGES)
def test_charge(name):
    charges, jobs, claims, expected = CHARGES[name]
    assert board(node(), *jobs, claims=claims, charges=charges) == expected


def test_an_uncovered_pod_is_named_so_that_no_claim_is_made_beside_it():
    found = ledger(node(), charges=[Charge(POD, use("2"), uncovered=True)])
    assert found.uncovered == (POD,)
    assert ledger(node(), charges=[Charge(POD, use("2"), 10)]).uncovered == ()


CONFLICTS = {
    "two jobs on one GPU": (
        [make_job(1).on("n", "0"), make_job(2).on("n", "0-1")],
        [],
        ["GPU 0: job 1 and job 2"],
    ),
    "a job on a GPU that is not there": (
        [make_job(1).on("n", "9")],
        [],
        ["GPU 9 of job 1 is not on the node"],
    ),
    "more by count than there are": (
        [make_job(1).on("n", count=9)],
        [],
        ["job 1 holds 1 GPUs more than the node has"],
    ),
    "a native job on the GPU of a pod without a claim": (
        [make_job(1).on("n", "2")],
        [Charge(POD, use("2"), uncovered=True)],
        [f"GPU 2: job 1 and a pod without a claim ({POD})"],
    ),
    "a job that is ending on such a GPU": (
        [make_job(1).state("CANCELLED+COMPLETING").on("n", "2")],
        [Charge(POD, use("2"), uncovered=True)],
        [],
    ),
    "a claim younger than the reading that still shows its predecessor": (
        [make_job(1).on("n", "2")],
        [Charge(POD, use("2"), 10)],
        [],
    ),
    "none": ([make_job(1).on("n", "0"), make_job(2).on("n", "1")], [], []),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_conflict(name):
    jobs, charges, texts = CONFLICTS[name]
    assert list(ledger(node(), *jobs, charges=charges).conflicts) == texts


def test_the_first_owner_of_a_gpu_stays_and_says_who_it_is():
    found = ledger(node(), make_job(10).on("n", "0"), claims={10: POD})
    assert (found.gpus[0].job_id, found.gpus[0].uid) == (10, POD)


def test_free_gpus_are_counted_by_type_in_the_order_of_the_node():
    found = ledger(make_node("n").types(h100=2, a100=3).used("0,2", kind=""), make_job(1))
    assert found.free() == (GpuCount("h100", 1), GpuCount("a100", 2))


def test_native_jobs_are_listed_without_claims_and_without_finished_ones():
    found = ledger(
        node(),
        make_job(3).but(nodes=("n",)),
        make_job(1).on("n", "0"),
        make_job(10).on("n", "1"),
        make_job(4).state("FAILED").on("n", "2"),
        claims={10: POD},
    )
    assert found.native_jobs == (1, 3)


def test_cpus_and_memory_never_go_below_nothing():
    over = node().but(cpus_used=70, memory_used_mib=600_000)
    assert (ledger(over).cpus_free, ledger(over).memory_free_mib) == (0, 0)


@pytest.mark.parametrize(
    ("used", "numbered"), [(use(""), True), (use("0"), True), (use(count=1), False), (None, False)]
)
def test_numbered_says_whether_positions_are_indices(used, numbered):
    assert ledger(make_node("n").but(gpus_used=used)).numbered is numbered
