import time

import pytest

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.record import GpuCount, GpuUse, JobState, SlurmJob
from slurmbridge.slurm.jobtext import read_held, read_jobs

LINE = (
    "JobId={id} JobName={name} UserId=ann(1000) GroupId=users(100) MCS_label=N/A Priority=100"
    " Nice=0 Account={account} QOS=normal JobState={state} Reason=None Dependency=(null) Requeue=1"
    " Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:06 TimeLimit=UNLIMITED TimeMin=N/A"
    " SubmitTime=2026-11-30T11:00:00 StartTime=2026-11-30T12:00:00 EndTime=Unknown Deadline=N/A"
    " PreemptTime=None SuspendTime=None Partition=main AllocNode:Sid=login:1 ReqNodeList=(null)"
    " ExcNodeList=(null) NodeList={nodes} BatchHost=gpu001 NumNodes=1 NumCPUs=4 NumTasks=1"
    " CPUs/Task=1 ReqB:S:C:T=0:0:*:* {tres} Socks/Node=* NtasksPerN:B:S:C=0:0:*:* CoreSpec=*"
    " {groups} MinCPUsNode=1 MinMemoryNode=10M Features=(null) DelayBoot=00:00:00 OverSubscribe=OK"
    " Contiguous=0 Licenses=(null) Network=(null) Command={command} WorkDir=/w"
    " Comment={comment} Power= TresPerNode={asked} \n"
)
DEFAULTS = {
    "id": 7,
    "name": "train",
    "account": "(null)",
    "state": "RUNNING",
    "nodes": "gpu001",
    "tres": "TRES=cpu=4,mem=10M,node=1,billing=4",
    "groups": "JOB_GRES=gpu:a100:2   Nodes=gpu001 CPU_IDs=0-3 Mem=10 GRES=gpu:a100:2(IDX:0-1)",
    "command": "(null)",
    "comment": "a comment",
    "asked": "gres/gpu:a100:2",
}
USE = GpuUse((GpuCount("a100", 2),), (0, 1))


def line(**changes):
    return LINE.format(**DEFAULTS | changes)


def known(name="train", account="", nodes=("gpu001",), job_id=7):
    return {
        job_id: SlurmJob(
            id=job_id,
            name=name,
            comment="",
            user_id=1000,
            account=account,
            partition="main",
            qos="",
            state=JobState("RUNNING"),
            nodes=nodes,
        )
    }


def test_a_record_is_read_whole():
    (job,) = read_jobs(line())
    assert (job.id, job.name, job.comment, job.user, job.user_id) == (
        *(7, "train", "a comment", "ann", 1000),
    )
    assert (job.state, job.nodes, job.gpus) == (JobState("RUNNING"), ("gpu001",), {"gpu001": USE})
    assert (job.end, job.preempted_at, job.restarts, job.priority) == (None, None, 0, 100)
    assert job.start - job.submitted == 3600


def test_the_form_with_many_lines_is_read_the_same():
    several = line().replace(" UserId", "\n   UserId").replace(" JobState", "\n   JobState")
    several = several.replace("   Nodes=", "\n     Nodes=").replace(" Power", "\n   Power")
    assert read_jobs(several + "\n" + line(id=8)) == [*read_jobs(line()), *read_jobs(line(id=8))]


def test_a_cluster_without_jobs_says_so():
    assert read_jobs("No jobs in the system\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
        "error\n" + line(),
        line()[:300],
        line()[:40],
        line() + line(),
        line(name="x\nJobId=8 JobName=y"),
        line(nodes="gpu[001-"),
        line().replace("Restarts=0", "Restarts=0=1"),
        line().replace("NumNodes=1", "NumNodes=one"),
    ],
)
def test_what_is_not_a_whole_listing_is_refused(text):
    with pytest.raises(ParseError):
        read_jobs(text)


GROUPS = {
    "18.08 with an index list": (
        "Nodes=gpu001 CPU_IDs=10-11,15 Mem=81920 GRES_IDX=gpu(IDX:0,2-3,5)",
        {"gpu001": GpuUse((GpuCount("", 4),), (0, 2, 3, 5))},
    ),
    "no count": (
        "Nodes=gpu001 CPU_IDs=20 Mem=8192 GRES=gpu(IDX:5)",
        {"gpu001": GpuUse((GpuCount("", 1),), (5,))},
    ),
    "beside another GRES": (
        "JOB_GRES=gg:g0:1,gpu:1 Nodes=gpu001 CPU_IDs=14 Mem=1 GRES=gg:g0(CNT:1),gpu:1(IDX:3)",
        {"gpu001": GpuUse((GpuCount("", 1),), (3,))},
    ),
    "CPU list cut by Slurm": (
        "JOB_GRES=gpu:1 Nodes=gpu001 CPU_IDs=2-3,112,115- Mem=70000 GRES=gpu:1(IDX:0)",
        {"gpu001": GpuUse((GpuCount("", 1),), (0,))},
    ),
    "count only": (
        "Nodes=gpu001 CPU_IDs=0 Mem=1 GRES=gpu:a100:2",
        {"gpu001": GpuUse((GpuCount("a100", 2),), None)},
    ),
    "one group for several nodes": (
        "Nodes=gpu[001-002] CPU_IDs=0 Mem=1 GRES=gpu:a100:2(IDX:0-1)",
        {"gpu001": USE, "gpu002": USE},
    ),
    "nodes that differ": (
        "   Nodes=gpu001 CPU_IDs=0 Mem=1 GRES=gpu:a100:2(IDX:0-1)   Nodes=gpu002 CPU_IDs= Mem=1 GRES=gpu:h100:1(IDX:7)",
        {"gpu001": USE, "gpu002": GpuUse((GpuCount("h100", 1),), (7,))},
    ),
    "details missing (no -d)": ("JOB_GRES=gpu:a100:2", None),
    "details of another node": ("Nodes=gpu009 CPU_IDs=0 Mem=1 GRES=gpu:a100:2(IDX:0-1)", None),
    "details of half the nodes": (
        "Nodes=gpu002 CPU_IDs=0 Mem=1 GRES=gpu:a100:2(IDX:0-1)",
        None,
    ),
    "a node twice": (
        "Nodes=gpu001 CPU_IDs=0 Mem=1 GRES=gpu:1(IDX:0) Nodes=gpu001 CPU_IDs=1 Mem=1 GRES=gpu:1(IDX:1)",
        None,
    ),
    "unreadable GRES": ("Nodes=gpu001 CPU_IDs=0 Mem=1 GRES=gpu:2(IDX:0)", None),
}


@pytest.mark.parametrize(("groups", "gpus"), GROUPS.values(), ids=GROUPS)
def test_the_gpus_per_node_are_read_in_every_dialect(groups, gpus):
    many = "002" in groups
    nodes = ("gpu001", "gpu002") if many else ("gpu001",)
    text = line(groups=groups, nodes="gpu[001-002]" if many else "gpu001")
    assert read_held(text, known(nodes=nodes)) == {7: gpus}
    (job,) = read_jobs(text)
    assert job.gpus == gpus


def test_a_job_without_gpus_holds_none():
    text = line(groups="Nodes=gpu001 CPU_IDs=0 Mem=1 GRES=", asked="(null)")
    assert read_held(text, known()) == {7: {}}


@pytest.mark.parametrize("evidence", ["groups", "asked", "tres"])
def test_a_completing_job_whose_details_are_cleared_is_unknown_not_free(evidence):
    cleared = {
        "groups": "Nodes=gpu001 CPU_IDs=0 Mem=1 GRES=",
        "asked": "(null)",
        "state": "COMPLETING",
    }
    proof = {
        "groups": {"groups": "JOB_GRES=gpu:a100:2 " + cleared["groups"]},
        "asked": {"asked": "gres:gpu:2"},
        "tres": {"tres": "AllocTRES=cpu=1,gres/gpu=2"},
    }[evidence]
    assert read_held(line(**cleared | proof), known()) == {7: None}


def test_a_job_that_runs_elsewhere_by_now_is_unknown():
    assert read_held(line(nodes="gpu002"), known()) == {7: None}
    assert read_held(line(state="PENDING", nodes="(null)"), known()) == {7: None}
    assert read_held(line(state="CANCELLED"), known()) == {7: None}


def test_a_job_that_is_not_in_the_text_is_left_out():
    assert read_held("", known()) == {}
    assert read_held(line(id=8), known()) == {}


FORGED = (
    "JobName=train UserId=ann(1000) GroupId=users(100) MCS_label=N/A Priority=1 Nice=0"
    " Account=(null) QOS=normal JobState=RUNNING Restarts=0 StartTime=2026-11-30T12:00:00"
    " Partition=main NodeList=gpu001 CoreSpec=* Nodes=gpu001 CPU_IDs=0 Mem=1"
    " GRES=gpu:a100:8(IDX:0-7) MinCPUsNode=1"
)
FIELDS = " NodeList=gpu009 Nodes=gpu009 CPU_IDs=0 Mem=1 GRES=gpu:8(IDX:0-7) JobState=PENDING"
HOSTILE = {
    "fields in the name": {"name": "train" + FIELDS},
    "fields in the comment": {"comment": "x" + FIELDS},
    "fields in the command": {"command": "/bin/x" + FIELDS},
    "fields behind a user in the name": {"name": "train UserId=root(0) GroupId=root(0)" + FIELDS},
    "own record in the name": {"name": "train\nJobId=7 " + FORGED},
    "end of the record in the name": {"name": "t MinCPUsNode=1 Features=(null) Command=x"},
    "regular expression in the name": {"name": "(.*)[a-z]+\\Z$^"},
    "backslashes": {"name": "\\xff\\n"},
    "spaces": {"name": "  "},
    "other forged record in the comment": {"comment": "x\nJobId=8 " + FORGED},
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE)
def test_what_a_user_wrote_changes_nothing_when_the_name_is_known(changes):
    name = changes.get("name", "train")
    assert read_held(line(**changes), known(name)) == {7: {"gpu001": USE}}


@pytest.mark.parametrize(
    "changes",
    [
        {"comment": "x\nJobId=7 " + FORGED},
        {"command": "x\nJobId=7 " + FORGED},
    ],
    ids=["comment", "command"],
)
def test_a_second_record_of_the_same_job_makes_it_unknown_not_other(changes):
    assert read_held(line(**changes), known()) == {7: None}


def test_fields_in_an_account_change_nothing():
    account = "a" + FIELDS + " MinCPUsNode=1"
    assert read_held(line(account=account), known(account=account)) == {7: {"gpu001": USE}}


ALONE = {
    "fields in the name": ("x" + FIELDS, {"gpu001": USE}),
    "a user in the name": ("train UserId=root(0) GroupId=root(0)" + FIELDS, None),
}


@pytest.mark.parametrize(("name", "gpus"), ALONE.values(), ids=ALONE)
def test_read_alone_a_doubtful_record_holds_on_all_nodes_it_names(name, gpus):
    (job,) = read_jobs(line(name=name, comment="slurmbridge/1 forged"))
    assert job.gpus == gpus
    assert job.state.holds_resources
    if gpus is None:
        assert set(job.nodes) == {"gpu001", "gpu009"}
        assert job.comment == ""


def test_arrays_and_het_jobs_are_read():
    text = line().replace("JobId=7", "JobId=7 ArrayJobId=5 ArrayTaskId=3 ArrayTaskThrottle=2")
    text += (
        line(id=8)
        .replace("JobId=8", "JobId=8 HetJobId=8 HetJobOffset=0")
        .replace(" UserId", " SLUID=sF89M8PGT1ZZ00 HetJobIdSet=8-9 UserId")
    )
    assert [(job.id, job.name, job.gpus) for job in read_jobs(text)] == [
        (7, "train", {"gpu001": USE}),
        (8, "train", {"gpu001": USE}),
    ]
    assert read_held(text, known() | known(job_id=8)) == {
        7: {"gpu001": USE},
        8: {"gpu001": USE},
    }


def test_a_requeued_job_that_waits_holds_nothing():
    text = line(state="PENDING", nodes="(null)", groups="").replace("Restarts=0", "Restarts=1")
    (job,) = read_jobs(text)
    assert (job.gpus, job.nodes, job.restarts) == ({}, (), 1)


def test_hostile_text_is_read_in_linear_time():
    # In quadratic time it would take hours.
    begun = time.perf_counter()
    text = line(comment="\nJobId=7 JobName=train UserId=" * 20_000, name="N " * 20_000)
    read_held(text, known("N " * 20_000))
    assert time.perf_counter() - begun < 60


def test_a_waiting_job_tells_its_plan_and_what_it_wants():
    text = (
        line(
            state="PENDING",
            nodes=" SchedNodeList=gpu015",
            groups="",
            tres="ReqTRES=cpu=8,node=1,gres/gpu=1 AllocTRES=(null)",
            asked="",
        )
        .replace("UserId=ann(1000)", "UserId=ann")
        .replace("TresPerNode=", "TresPerJob=gres/gpu:4")
    )
    (job,) = read_jobs(text.replace("StartTime", "AccrueTime=Unknown StartTime"))
    assert (job.planned_nodes, job.gpus_wanted, job.gpus, job.nodes) == (("gpu015",), 4, {}, ())
    assert (job.user, job.user_id) == ("ann", -1)
    array = line(state="PENDING", nodes="(null)", groups="").replace(
        "JobId=7", "JobId=7 ArrayJobId=7 ArrayTaskId=0-99%5 ArrayTaskThrottle=5"
    )
    (waiting,) = read_jobs(array)
    assert (waiting.tasks, waiting.gpus_wanted) == (100, 2)
