"""Alarms stand while their cause does, are seen at least for a while, and are never too many."""

from slurmbridge.node.alarms import LEAST_S, MOST, MOST_S, Alarms
from slurmbridge.node.book import BookEntry


def entry(uid, job_id, *gpus):
    return BookEntry(uid, f"a/{uid}", job_id, set(gpus))


HELD = entry("u-1", 7, 0, 1)
OTHER = entry("u-2", 8, 2, 3)


def raised(job_id=7, gpus=(), book=(HELD, OTHER)):
    alarms = Alarms()
    found = alarms.raise_for(job_id, gpus, "claim held", book, 0.0, 1_800_000_000.0)
    assert (found.kind, found.subject, found.since) == ("alarm", f"job {job_id}", 1_800_000_000.0)
    assert alarms.findings == (found,)
    return alarms


def test_the_alarm_of_a_held_claim_ends_once_its_pod_is_gone():
    alarms = raised()
    alarms.prune({"u-1", "u-2"}, 10 * MOST_S)
    assert alarms.findings, "it stands as long as the pod does"
    alarms.prune({"u-2"}, 10 * MOST_S)
    assert alarms.findings == ()


def test_a_cause_that_ends_at_once_is_seen_all_the_same():
    alarms = raised()
    alarms.prune((), LEAST_S - 1.0)
    assert alarms.findings
    alarms.prune((), LEAST_S + 1.0)
    assert alarms.findings == ()


def test_the_alarm_of_a_native_job_is_about_the_pods_on_its_gpus():
    alarms = raised(job_id=99, gpus=(3, 4))
    alarms.prune({"u-1", "u-2"}, 10 * MOST_S)
    assert alarms.findings
    alarms.prune({"u-1"}, LEAST_S + 1.0)
    assert alarms.findings == ()


def test_an_alarm_of_which_nobody_knows_the_cause_ends_after_a_day():
    alarms = raised(job_id=99, book=())
    alarms.prune((), MOST_S - 1.0)
    assert alarms.findings
    alarms.prune((), MOST_S + 1.0)
    assert alarms.findings == ()


def test_a_new_alarm_for_a_job_takes_the_place_of_its_old_one_and_the_oldest_goes():
    alarms = raised()
    alarms.raise_for(7, (), "again", (), 1.0, 0.0)
    assert [one.text for one in alarms.findings] == ["again"]
    for job_id in range(100, 100 + MOST):
        alarms.raise_for(job_id, (), "more", (), 2.0, 0.0)
    assert len(alarms.findings) == MOST
    assert alarms.findings[0].subject == "job 100"
