import json

import pytest

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.nodestate import parse_job_state, parse_node_state, why_not_usable
from slurmbridge.pool.record import JobState
from tests.unit.pool.vectors import FOLDER, rows


def read(text):
    """A table cell: a text, a JSON list, or two JSON lists (state and state_flags)."""
    if not text.startswith("["):
        return parse_node_state(text)
    states, _, flags = text.partition("] ")
    return parse_node_state(
        json.loads(states + "]" if flags else states), json.loads(flags) if flags else ()
    )


@pytest.mark.parametrize(("text", "state", "why"), rows("node_states.tsv", 3))
def test_the_collected_states_are_read_and_judged(text, state, why):
    if state == "REFUSED":
        with pytest.raises(ParseError):
            read(text)
        return
    assert str(read(text)) == state
    assert (why_not_usable(read(text)) or "yes") == why


def test_only_four_of_all_flags_that_slurm_knows_leave_a_node_usable():
    known = [line.split() for line in (FOLDER / "states_known.tsv").read_text().splitlines()[1:]]
    nodes = [word for kind, word in known if kind == "node"]
    usable = {w for w in nodes if _usable_beside_idle(w)}
    assert len(nodes) == 34
    assert usable == {"CLOUD", "DYNAMIC_NORM", "PLANNED", "RESERVED", "IDLE"}


def _usable_beside_idle(word):
    try:
        return why_not_usable(parse_node_state(["IDLE", word])) is None
    except ParseError:  # a second base
        return False


JOB_STATES = {
    "running": ("RUNNING", JobState("RUNNING"), True),
    "pending": ("PENDING", JobState("PENDING"), False),
    "short": ("CG", JobState("UNKNOWN", frozenset({"COMPLETING"})), True),
    "squeue hides the base of a completing job": (
        "COMPLETING",
        JobState("UNKNOWN", frozenset({"COMPLETING"})),
        True,
    ),
    "list": (["RUNNING"], JobState("RUNNING"), True),
    "cancelled, epilog runs": (
        ["CANCELLED", "COMPLETING"],
        JobState("CANCELLED", frozenset({"COMPLETING"})),
        True,
    ),
    "flag first": (
        ["COMPLETING", "CANCELLED"],
        JobState("CANCELLED", frozenset({"COMPLETING"})),
        True,
    ),
    "requeued and waiting": (
        ["PENDING", "REQUEUED"],
        JobState("PENDING", frozenset({"REQUEUED"})),
        False,
    ),
    "requeued, still completing": (
        ["PENDING", "REQUEUED", "COMPLETING"],
        JobState("PENDING", frozenset({"REQUEUED", "COMPLETING"})),
        True,
    ),
    "requeue alone says nothing of the base": (
        "REQUEUED",
        JobState("UNKNOWN", frozenset({"REQUEUED"})),
        True,
    ),
    "held after requeue": (
        "SPECIAL_EXIT",
        JobState("PENDING", frozenset({"SPECIAL_EXIT"})),
        False,
    ),
    "booting": ("CF", JobState("RUNNING", frozenset({"CONFIGURING"})), True),
    "suspended holds its GPUs": ("SUSPENDED", JobState("SUSPENDED"), True),
    "stopped": ("STOPPED", JobState("RUNNING", frozenset({"STOPPED"})), True),
    "over": ("NODE_FAIL", JobState("NODE_FAIL"), False),
    "revoked": ("REVOKED", JobState("REVOKED"), False),
    "a state of a later Slurm holds": ("HIBERNATED", JobState("HIBERNATED"), True),
    "a flag of a later Slurm": (
        ["RUNNING", "NEW_FLAG"],
        JobState("RUNNING", frozenset({"NEW_FLAG"})),
        True,
    ),
}


@pytest.mark.parametrize(("text", "state", "holds"), JOB_STATES.values(), ids=JOB_STATES)
def test_job_states_are_read_and_an_unknown_one_holds(text, state, holds):
    assert parse_job_state(text) == state
    assert state.holds_resources is holds


@pytest.mark.parametrize("text", ["", [], ["RUNNING", "PENDING"], "JobState=X", ["A"] * 100, "é"])
def test_what_is_no_job_state_is_refused(text):
    with pytest.raises(ParseError):
        parse_job_state(text)


def test_no_job_state_that_slurm_knows_is_refused():
    known = [line.split() for line in (FOLDER / "states_known.tsv").read_text().splitlines()[1:]]
    words = [word for kind, word in known if kind == "job"]
    assert len(words) == 28
    finished = {w for w in words if not parse_job_state(w).holds_resources}
    assert finished == {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PENDING", "PREEMPTED", "REVOKED", "TIMEOUT"),
        *("EXPEDITING", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
    }
