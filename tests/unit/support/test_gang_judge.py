"""The judge of gangs' plans: what it takes for carried out, and for true."""

from __future__ import annotations

import pytest

from tests.support.checker import Job
from tests.support.gang_judge import Placed, Plan, Truth, local_time, unplanned

START = "2026-01-02T10:00:00"
AT = local_time(START)


def plan(at, *nodes):
    seats = tuple((f"default/g-{i}", 4, node) for i, node in enumerate(nodes))
    return Plan(at, "g", seats, {}, ())


def claim(number, *, group):
    return Job(number, "RUNNING", {}, claim=True, group=group, start=START)


def test_a_gang_in_one_claim_may_stand_where_any_plan_has_put_it_that_is_older_than_the_claim():
    one = claim(7, group=True)
    members = [Placed("default/g-0", "n2", one), Placed("default/g-1", "n1", one)]
    first, second = plan(AT - 3, "n1", "n2"), plan(AT - 2, "n3", "n3")
    assert unplanned(members, [first, second]) == []
    assert unplanned(members, [second])
    assert unplanned(members, [plan(AT + 3, "n1", "n2")])
    assert unplanned(members, [plan(AT - 3, "n1", "n1"), plan(AT - 3, "n2", "n2")])


def test_of_members_with_claims_of_their_own_each_stands_where_a_plan_has_put_it():
    members = [Placed(f"default/g-{i}", f"n{i}", claim(7 + i, group=False)) for i in range(2)]
    assert unplanned(members, [plan(AT - 3, "n0", "n5"), plan(AT - 2, "n5", "n1")]) == []
    assert len(unplanned(members, [plan(AT - 3, "n1", "n0")])) == 2


@pytest.mark.parametrize(("asked", "free"), [("gres:gpu:3", (5, 5)), ("(null)", (0, 8))])
def test_a_job_that_is_over_held_what_it_asked_for_and_anything_where_that_is_not_told(asked, free):
    text = (
        f"JobId=7 JobName=x UserId=root(0) JobState=CANCELLED StartTime={START}"
        f" EndTime=2026-01-02T10:01:00 NodeList=n1 NumNodes=1 Comment=  TresPerNode={asked} \n"
    )
    truth = Truth(text, total=8, slack_s=5)
    assert truth.limits("n1", AT + 30) == free
    assert truth.limits("n1", AT + 90) == (8, 8)
