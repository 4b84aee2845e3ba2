"""From a pod's wishes and the site's rules to what is asked of Slurm, or a reason."""

from __future__ import annotations

import pytest

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.policy import Granularity, IdentityRule, Refusal, honour, parse_wish, resolve
from tests.support.builders import make_claim_job, make_pod, make_policy

TEAM = IdentityRule(
    namespaces=("team-*",),
    service_accounts=("default", "train-?"),
    accounts=("science", "guests"),
    qos=("normal", "high"),
    partitions=("claims",),
    reservations=("course",),
)
OPS = IdentityRule(namespaces=("ops",))
RULES = make_policy(identities=(TEAM, OPS), partition="kube")


def team(**annotations):
    return make_pod("a").but(namespace="team-x", service_account="default").wrote(**annotations)


def asked(pod, policy=RULES):
    ask = resolve(pod.obj, policy)
    assert not isinstance(ask, Refusal), ask
    return ask


def refused(pod, policy=RULES):
    refusal = resolve(pod.obj, policy)
    assert isinstance(refusal, Refusal), refusal
    return refusal


def test_the_first_of_each_list_is_the_default_but_no_reservation_is():
    ask = asked(team())
    assert (ask.account, ask.qos, ask.partition) == ("science", "normal", "claims")
    assert ask.reservation == ""


def test_a_pod_may_choose_what_its_rule_lists():
    ask = asked(team(ACCOUNT="guests", QOS="high", RESERVATION="course"))
    assert (ask.account, ask.qos, ask.reservation) == ("guests", "high", "course")


def test_without_rules_nobody_chooses_and_slurm_and_the_bridge_decide():
    ask = asked(make_pod("a"), make_policy(partition="kube"))
    assert (ask.account, ask.qos, ask.partition) == ("", "", "kube")
    assert refused(make_pod("a").wrote(ACCOUNT="science"), make_policy()).reason == "identity"


REFUSED = {
    "an account of others": (team(ACCOUNT="admin"), "identity"),
    "a partition of others": (team(PARTITION="gpu"), "identity"),
    "a namespace without a rule": (make_pod("a").but(namespace="other"), "identity"),
    "a service account without a rule": (team().but(service_account="evil"), "identity"),
    "patterns tell upper case from lower": (team().but(namespace="Team-x"), "identity"),
    "an empty list is no choice": (
        make_pod("a").but(namespace="ops").wrote(QOS="high"),
        "identity",
    ),
    "an option instead of a name": (team(ACCOUNT="--uid=root"), "annotation"),
    "a list instead of a name": (team(PARTITION="claims,gpu"), "annotation"),
    "a space": (team(QOS="high low"), "annotation"),
    "a newline at the end": (team(QOS="high\n"), "annotation"),
    "a quote": (team(ACCOUNT="science'"), "annotation"),
    "a shell's business": (team(ACCOUNT="$(reboot)"), "annotation"),
    "a very long name": (team(ACCOUNT="a" * 129), "annotation"),
    "another alphabet": (team(ACCOUNT="sci\u0435nce"), "annotation"),
    "a mode that is none": (team(MODE="now"), "annotation"),
    "a duration that is none": (team(DURATION="soon"), "annotation"),
    "an empty duration": (team(DURATION=""), "annotation"),
    "a duration of nothing": (team(DURATION="0m"), "annotation"),
    "a duration below nothing": (team(DURATION="-5m"), "annotation"),
    "longer than allowed": (team(DURATION="43201m"), "duration"),
    "a deadline longer than allowed": (
        team().but(active_deadline_s=43_201 * 60),
        "duration",
    ),
    "a request that cannot be read": (team().but(gpu=None, fault="two kinds of GPU"), "request"),
    "no GPU": (team().but(gpu=None), "request"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    pod, reason = REFUSED[name]
    assert refused(pod).reason == reason


TIMES = {
    "no duration: the default, renewed": (team(), 60, True),
    "a duration, with grace": (team(DURATION="90m"), 92, False),
    "seconds are rounded up": (team(DURATION="61s"), 3, False),
    "exactly the longest": (team(DURATION="43200m"), 43_202, False),
    "a deadline": (team().but(active_deadline_s=3600), 62, False),
    "the shorter of both": (team(DURATION="2h").but(active_deadline_s=3600), 62, False),
    "the shorter of both, the other way": (
        team(DURATION="30m").but(active_deadline_s=3600),
        32,
        False,
    ),
    "seconds, and a grace of seconds": (team(DURATION="10s").but(grace_s=5), 2, False),
    "a long grace": (team(DURATION="1h").but(grace_s=600), 71, False),
    "a deadline and a grace that is no whole minute": (
        team().but(active_deadline_s=3600, grace_s=61),
        63,
        False,
    ),
    "a grace alone": (team().but(grace_s=600), 60, True),
    "a deadline of nothing is none": (team().but(active_deadline_s=0), 60, True),
}


@pytest.mark.parametrize(
    ("pod", "minutes", "rolling"),
    [
        (team(DURATION="10h"), 602, False),
        (team().but(active_deadline_s=36_000, grace_s=600), 611, False),
        (team(DURATION="soon"), 60, True),
        (team(), 60, True),
    ],
)
def test_a_pod_that_was_let_in_under_milder_rules_keeps_its_own_time(pod, minutes, rolling):
    ask = honour(pod.obj, make_policy(max_minutes=120))
    assert (ask.minutes, ask.rolling) == (minutes, rolling)


@pytest.mark.parametrize("name", TIMES)
def test_time(name):
    pod, minutes, rolling = TIMES[name]
    ask = asked(pod)
    assert (ask.minutes, ask.rolling) == (minutes, rolling)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90m", 5400),
        ("1h30m", 5400),
        ("45s", 45),
        ("1h1m1s", 3661),
        ("1-12:00:00", 129_600),
        ("02:00:00", 7200),
        (" 5m ", 300),
    ],
)
def test_durations_in_both_dialects(text, seconds):
    assert parse_wish(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "90", "m", "1.5h", "30m1h", "1d", "1-12", "\u0663m", "1h 30m", "9" * 30 + "m"]
)
def test_what_is_no_duration(text):
    with pytest.raises(ParseError):
        parse_wish(text)


def test_granularity_decides_whether_others_may_share_the_node():
    assert asked(make_pod("a"), make_policy(granularity=Granularity.NODE)).exclusive_user
    assert not asked(make_pod("a"), make_policy(granularity=Granularity.GPU)).exclusive_user


def test_the_first_rule_that_matches_counts():
    first = IdentityRule(namespaces=("team-x",), accounts=("first",))
    assert asked(team(), make_policy(identities=(first, TEAM))).account == "first"


def test_a_pod_that_was_let_in_keeps_the_identity_of_its_claim_when_policy_changes():
    pod = make_pod("a").gpus(2).obj
    job = make_claim_job(10, pod, "n", "0-1").but(account="old", qos="q", partition="p").obj
    ask = honour(pod, make_policy(identities=(OPS,)), job)
    assert (ask.account, ask.qos, ask.partition) == ("old", "q", "p")
    assert (ask.gpu.count, ask.rolling) == (2, True)
    assert honour(make_pod("b").but(gpu=None).obj, make_policy(), job).gpu.count == 2
