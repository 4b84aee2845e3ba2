import secrets

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmbridge.pool.errors import ParseError
from slurmbridge.slurm.queue import (
    FIELDS,
    count_tasks,
    make_mark,
    queue_argv,
    read_queue,
    read_row,
    read_rows,
)
from tests.unit.slurm.listings import VERSIONS, text

MARK = "QueueMarkAbc"
HEADER = [field.upper() for field in FIELDS]
ROW = {
    "JobID": "12",
    "State": "RUNNING",
    "NodeList": "gpu[001-002]",
    "StartTime": "2026-11-30T12:00:00",
    "RestartCnt": "0",
    "ArrayTaskID": "N/A",
    "NumNodes": "2",
    "NumTasks": "2",
    "EndTime": "NONE",
    "SubmitTime": "2026-11-30T11:00:00",
    "SchedNodes": "(null)",
    "PreemptTime": "N/A",
    "PriorityLong": "4294901759",
    "Partition": "main",
    "QOS": "normal",
    "Reservation": "(null)",
    "Reason": "None",
    "UserID": "1000",
    "UserName": "ann",
    "tres-alloc": "cpu=2",
    "tres-per-job": "N/A",
    "tres-per-node": "N/A",
    "tres-per-socket": "N/A",
    "tres-per-task": "N/A",
    "Account": "(null)",
    "Name": "train",
    "Comment": "(null)",
}


def row(**changes):
    names = {name.lower().replace("-", "_"): name for name in FIELDS}
    cells = ROW | {names[key]: value for key, value in changes.items()}
    return tuple(cells[name] for name in FIELDS)


def listing(*rows):
    return "".join(MARK.join((*cells, "\n")) for cells in [tuple(HEADER), *rows])


def test_a_header_alone_is_an_empty_queue():
    assert read_queue(listing(), MARK) == []


def test_a_job_is_read_from_its_row():
    (job,) = read_queue(listing(row()), MARK)
    assert (job.id, job.nodes, job.gpus, job.end) == (12, ("gpu001", "gpu002"), None, None)
    assert (job.comment, job.account, job.qos, job.user) == ("", "", "normal", "ann")


NO_LISTING = {
    "nothing": "",
    "an error on stdout": "slurm_load_jobs error: Unable to contact slurm controller\n",
    "rows of another call": listing(row()).replace(MARK, "QueueMarkXyz"),
    "no header": listing(row())[len(listing()) :],
    "cut in a row": listing(row(), row(jobid="13"))[:-40],
    "cut before the last line break": listing(row())[:-1],
    "text behind": listing(row()) + "squeue: error",
    "one field too many": listing((*row(), "x")),
}


@pytest.mark.parametrize("text", NO_LISTING.values(), ids=NO_LISTING)
def test_what_is_not_a_whole_listing_is_refused(text):
    with pytest.raises(ParseError):
        read_queue(text, MARK)


def test_a_field_that_this_squeue_does_not_know_is_named():
    header = [("" if name == "PREEMPTTIME" else name) for name in HEADER]
    with pytest.raises(ParseError, match="PreemptTime"):
        read_rows(MARK.join((*header, "\n")), MARK)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_cut_of_a_real_listing_is_refused_or_ends_between_rows(version):
    whole = text(version, "queue")
    rows = read_rows(whole, MARK)
    for at in range(0, len(whole), 97):
        try:
            shorter = read_rows(whole[:at], MARK)
        except ParseError:
            continue
        assert shorter == rows[: len(shorter)]
        assert whole[:at].endswith(MARK + "\n")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_no_text_of_a_user_changes_another_field(name, comment, account):
    first = row(name=name, comment=comment, account=account)
    rows = read_rows(listing(first, row(jobid="13")), MARK)
    assert rows == [first, row(jobid="13")]


def test_a_mark_is_new_each_time_and_fit_for_squeue():
    marks = {make_mark(secrets.choice) for _ in range(100)}
    assert len(marks) == 100
    argv = queue_argv(min(marks), "--jobs=12")
    assert argv[:5] == ["squeue", "--all", "--states=all", "--noconvert", "--jobs=12"]
    with pytest.raises(ParseError):
        queue_argv("a,b:0")


TASKS = {
    "N/A": 1,
    "7": 1,
    "0-9999": 10_000,
    "0-9999%50": 10_000,
    "1,3,5-9:2%1": 5,
    "7-8%1": 2,
    "1-3,5,...": 4,
    "[0-2]": 1,
}


@pytest.mark.parametrize(("text", "tasks"), TASKS.items())
def test_the_tasks_of_an_array_are_counted(text, tasks):
    assert count_tasks(text) == tasks


WANTED = {
    "per node": ({"tres_per_node": "gres/gpu:a100:4"}, 8),
    "per node, old spelling": ({"tres_per_node": "gres:gpu:4"}, 8),
    "per job beside a lower TRES": (
        {"tres_per_job": "gres/gpu:4", "tres_alloc": "cpu=8,gres/gpu=1"},
        4,
    ),
    "per task": ({"tres_per_task": "gres/gpu=2", "numtasks": "4"}, 8),
    "per task, tasks not known": ({"tres_per_task": "gres/gpu=2", "numtasks": "4294967294"}, None),
    "per socket": ({"tres_per_socket": "gres/gpu:1"}, None),
    "TRES only": ({"tres_alloc": "cpu=2,gres/gpu=3,gres/gpu:h100=3"}, 3),
    "no GPU": ({}, 0),
    "unreadable": ({"tres_per_node": "gres/gpu:a:b:c"}, None),
}


@pytest.mark.parametrize(("changes", "gpus"), WANTED.values(), ids=WANTED)
def test_what_a_waiting_job_wants_is_counted_by_its_request(changes, gpus):
    waiting = read_row(row(state="PENDING", nodelist="", **changes))
    assert waiting.gpus_wanted == gpus
    assert waiting.gpus == {}


LIVES = {
    "waiting": ("PENDING", "", {}, ()),
    "waiting again, batch host of the last run": ("PENDING", "(null)", {}, ()),
    "completing holds": ("COMPLETING", "gpu002", None, ("gpu002",)),
    "requeued and completing holds": ("COMPLETING", "gpu[001-002]", None, ("gpu001", "gpu002")),
    "suspended holds": ("SUSPENDED", "gpu001", None, ("gpu001",)),
    "configuring holds": ("CONFIGURING", "gpu001", None, ("gpu001",)),
    "a state of a later Slurm holds": ("HIBERNATED", "gpu001", None, ("gpu001",)),
    "over": ("NODE_FAIL", "gpu001", {}, ("gpu001",)),
}


@pytest.mark.parametrize(("state", "nodes", "gpus", "expected"), LIVES.values(), ids=LIVES)
def test_a_job_holds_until_it_is_surely_over(state, nodes, gpus, expected):
    job = read_row(row(state=state, nodelist=nodes))
    assert (job.gpus, job.nodes) == (gpus, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"jobid": "12_1"},
        {"state": ""},
        {"nodelist": "gpu[001-"},
        {"userid": "ann"},
        {"starttime": "14:24:22"},
        {"prioritylong": "0.5"},
    ],
    ids=str,
)
def test_a_row_that_cannot_be_read_is_refused(changes):
    with pytest.raises(ParseError):
        read_row(row(**changes))
