"""Whose claim is a job? Only its name, comment and owner together say so."""

from __future__ import annotations

import msgspec
import pytest

from slurmbridge.pool.claim import ClaimId, claim_of, read_comment, write_comment
from slurmbridge.pool.errors import ParseError
from tests.support.builders import CLUSTER, OWNER, make_claim, make_claim_job, make_pod

POD = make_pod("a")
GOOD = make_claim_job(10, POD, "n", "0").obj


def test_a_comment_is_read_back_as_it_was_written():
    claim_id = ClaimId("blue-2", "2f6d5a1e-8f11-4b6e-9b0a-0d5f3f0c7a10")
    assert read_comment(write_comment(claim_id, "team-a/train-0")) == claim_id
    group = ClaimId("blue", "g1", "group")
    assert read_comment(write_comment(group, "ns/job")) == group


def test_name_comment_and_owner_make_a_claim_ours():
    assert claim_of(GOOD, CLUSTER, OWNER) == ClaimId(CLUSTER, "uid-a")


NOT_OURS = {
    "another user with our name and comment": make_claim_job(10, POD).but(user_id=1001),
    "our user, our comment, another name": make_claim_job(10, POD).but(name="train"),
    "our user and name, no comment": make_claim_job(10, POD).but(comment=""),
    "a claim of another cluster on the same Slurm": make_claim_job(10, POD).but(
        name="slurmbridge-red", comment=write_comment(ClaimId("red", "uid-a"), "default/a")
    ),
    "another cluster's comment under our name": make_claim_job(10, POD).but(
        comment=write_comment(ClaimId("red", "uid-a"), "default/a")
    ),
    "a comment that merely begins like ours": make_claim_job(10, POD).but(
        comment=GOOD.comment + " and more"
    ),
    "a comment in front of ours": make_claim_job(10, POD).but(comment="x " + GOOD.comment),
    "a filler of a cover": make_claim_job(10, POD).but(
        comment=GOOD.comment.replace("pod=", "filler=")
    ),
    "a newline at the end": make_claim_job(10, POD).but(comment=GOOD.comment + "\n"),
    "a later version of the form": make_claim_job(10, POD).but(
        comment=GOOD.comment.replace("slurmbridge/1", "slurmbridge/2")
    ),
    "digits of another alphabet in the UID": make_claim_job(10, POD).but(
        comment=GOOD.comment.replace("uid-a", "uid-\u0663")
    ),
}


@pytest.mark.parametrize("name", NOT_OURS)
def test_not_ours(name):
    assert claim_of(NOT_OURS[name].obj, CLUSTER, OWNER) is None


@pytest.mark.parametrize(
    ("cluster", "uid", "ref"),
    [
        ("Blue", "u", "d/a"),
        ("b l", "u", "d/a"),
        ("blue", "u pod=v", "d/a"),
        ("blue", "", "d/a"),
        ("blue", "u", "d/a b"),
        ("blue", "u", ""),
        ("blue", "u", "d/" + "x" * 600),
        ("blue", "u", "d/a\nJobId=1"),
    ],
)
def test_what_kubernetes_never_writes_is_not_put_into_a_comment(cluster, uid, ref):
    with pytest.raises(ParseError):
        write_comment(ClaimId(cluster, uid), ref)


def test_a_claim_covers_its_pod_only_while_it_runs():
    claim = make_claim(10, POD, "n", "0")
    assert claim.is_running
    states = ["RUNNING+COMPLETING", "SUSPENDED", "PENDING", "CANCELLED", "PREEMPTED"]
    for state in states:
        job = make_claim_job(10, POD).state(state).obj
        assert not msgspec.structs.replace(claim, state=job.state).is_running
