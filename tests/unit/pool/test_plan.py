"""When Slurm wants its nodes back: planned jobs, PLANNED without a job, reservations."""

from __future__ import annotations

import pytest

from slurmbridge.pool.plan import (
    PLANNED_ALONE_S,
    plan_start,
    planned_alone,
    planned_starts,
    windows_by_node,
)
from slurmbridge.pool.policy import Policy
from slurmbridge.pool.reason import Reason
from slurmbridge.pool.record import Reservation
from slurmbridge.pool.verdict import judge_one
from slurmbridge.pool.view import Terms, Window
from tests.support.builders import T0, make_job, make_node, plain
from tests.support.pool_view import NOW, make_ask
from tests.support.pool_view import make_node as make_view_node


def starts_of(*jobs):
    return planned_starts([plain(j) for j in jobs])


def alone_of(*nodes, starts=None, since=None, now=T0):
    return planned_alone([plain(n) for n in nodes], starts or {}, since or {}, now)


def test_the_earliest_of_several_planned_jobs_counts():
    jobs = (make_job(1).planned(T0 + 90, "n1", "n2"), make_job(2).planned(T0 + 60, "n1"))
    assert starts_of(*jobs) == {"n1": T0 + 60, "n2": T0 + 90}


def test_only_pending_jobs_with_a_start_and_nodes_are_planned():
    assert starts_of(make_job(1).on("n1", "0"), make_job(2).state("PENDING").but(start=None)) == {}
    assert starts_of(make_job(3).state("PENDING").but(start=T0)) == {}


def test_a_start_that_has_passed_still_holds_the_node():
    assert plan_start("n1", starts_of(make_job(1).planned(T0 - 30, "n1")), {}, T0) == T0 - 30


def test_planned_without_a_job_is_believed_from_when_it_was_first_seen():
    first = alone_of(make_node("n1").state("IDLE+PLANNED"), make_node("n2"))
    later = alone_of(make_node("n1").state("IDLE+PLANNED"), since=first, now=T0 + 50)
    assert first == later == {"n1": T0}
    assert plan_start("n1", {}, later, T0 + 50) == T0


def test_the_answer_for_a_flag_without_a_job_is_the_same_from_reading_to_reading():
    alone = {"n1": T0}
    assert plan_start("n1", {}, alone, T0 + 1) == plan_start("n1", {}, alone, T0 + 2)


def test_a_stale_planned_flag_no_longer_keeps_pods_away():
    assert plan_start("n1", {}, {"n1": T0}, T0 + PLANNED_ALONE_S - 1) == T0
    assert plan_start("n1", {}, {"n1": T0}, T0 + PLANNED_ALONE_S) is None


def test_a_flag_that_was_cleared_meanwhile_starts_anew():
    gone = alone_of(make_node("n1"), since={"n1": T0}, now=T0 + 500)
    again = alone_of(make_node("n1").state("IDLE+PLANNED"), since=gone, now=T0 + 600)
    assert again == {"n1": T0 + 600}


def test_a_planned_node_whose_job_is_seen_is_not_alone():
    assert alone_of(make_node("n1").state("IDLE+PLANNED"), starts={"n1": T0 + 9}) == {}


def test_nothing_planned():
    assert plan_start("n1", {}, {}, T0) is None


def test_reservations_are_windows_by_node_in_order_of_their_start():
    later = Reservation("r2", T0 + 100, T0 + 200, ("n1",))
    now = Reservation("r1", T0 - 10, None, ("n1", "n2"), frozenset({"FLEX"}))
    empty = Reservation("any", T0, T0 + 1, ())
    flex, plain_terms = Terms(flex=True, user=True), Terms(user=True)
    assert windows_by_node((later, now, empty), {}) == {
        "n1": (Window("r1", T0 - 10, None, flex), Window("r2", T0 + 100, T0 + 200, plain_terms)),
        "n2": (Window("r1", T0 - 10, None, flex),),
    }


@pytest.mark.parametrize(
    "flag", ["FLEX", "ANY_NODES", "MAGNETIC", "OVERLAP", "IGNORE_JOBS", "REPLACE", "TIME_FLOAT"]
)
def test_whatever_the_flags_of_a_reservation_a_pod_outside_ends_before_it(flag):
    """They say what jobs inside may do, when it starts for them, and which nodes it may swap."""
    soon = Reservation("r", NOW + 300, NOW + 7200, ("n1",), frozenset({flag}))
    node = make_view_node("n1", windows=windows_by_node((soon,), {})["n1"])
    ask = make_ask(1, minutes=60)
    assert judge_one(ask, node, Policy("c"), NOW) is Reason.RESERVED
    assert judge_one(make_ask(1, minutes=4), node, Policy("c"), NOW) is None


@pytest.mark.parametrize(
    ("tres", "cpus"), [("cpu=8", 8), ("cpu=128", 0), ("cpu=8,gres/gpu=4", 0), ("", 0)]
)
def test_a_reservation_of_some_cores_leaves_the_others_and_one_with_gpus_does_not(tres, cpus):
    nodes = {n: plain(make_node(n)) for n in ("n1", "n2")}
    cores = Reservation("r", NOW, None, ("n1", "n2"), tres=tres)
    assert {w.cpus for ws in windows_by_node((cores,), nodes).values() for w in ws} == {cpus}
