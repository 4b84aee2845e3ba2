"""Node state between Kubernetes and Slurm: what is drained, what is resumed, what is shown."""

from __future__ import annotations

import itertools

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core.explain import status
from slurmbridge.core.mapping import map_names
from slurmbridge.core.nodewatch import condition_of, most_silent, patience_s
from slurmbridge.core.settings import NodeSync
from slurmbridge.pool.drain import CORDONED, NOT_READY, our_reason, write_reason
from slurmbridge.pool.errors import ParseError
from tests.support.builders import (
    CLUSTER,
    T0,
    Story,
    make_kube_node,
    make_node,
    make_pod,
    make_settings,
    none,
    only,
    plain,
)

OURS = f"slurmbridge: cluster {CLUSTER}: node n1 is cordoned [root@2026-11-30T18:31:08]"
SILENT = OURS.replace("cordoned", "not ready")


def story(*names, **sync):
    return Story(*(names or ("n1", "n2")), settings=make_settings(node_sync=NodeSync(**sync)))


@pytest.fixture(name="pool")
def _pool():
    return story().start().forget()


def kube(told, name, **fields):
    """Something about a Kubernetes node changes."""
    node = told.kube_nodes[name].but(**fields)
    return told.handle(ev.NodeChanged(node.obj))


def silent(told, *names, since=-1000):
    """Nodes that have not been Ready since before our start."""
    for name in names:
        told.kube_nodes[name].but(ready=False, ready_changed=T0 + since)
    return told


def orders(actions):
    """Orders about Slurm nodes: `+n1` drained, `-n1` resumed."""
    return [
        ("+" if isinstance(a, act.DrainNode) else "-") + a.slurm_node
        for a in actions
        if isinstance(a, (act.DrainNode, act.ResumeNode))
    ]


def drained(told, name="n1", reason=OURS, state="IDLE+DRAIN"):
    told.nodes[name].state(state).but(reason=reason)


# Kubernetes to Slurm.


def test_a_cordoned_node_is_drained_with_a_reason_of_ours(pool):
    kube(pool, "n1", unschedulable=True)
    found = pool.pass_time(3)
    order = only(found, act.DrainNode)
    assert order == act.DrainNode("n1", "slurmbridge: cluster blue: node n1 is cordoned")
    assert only(found, act.Tell).reason == "SlurmDrained"


def test_an_order_is_given_again_only_when_slurm_does_not_show_it_for_a_while(pool):
    kube(pool, "n1", unschedulable=True)
    assert orders(pool.pass_time(9)) == ["+n1"]
    assert orders(pool.pass_time(4)) == ["+n1"]
    drained(pool)
    assert orders(pool.pass_time(60)) == []


def test_an_uncordoned_node_is_resumed_after_it_has_been_well_for_a_while(pool):
    drained(pool)
    assert orders(pool.pass_time(9)) == []
    assert only(pool.pass_time(4), act.ResumeNode) == act.ResumeNode("n1", CLUSTER)


def test_a_new_leader_takes_back_the_drain_of_the_last_one():
    told = story()
    drained(told)
    told.start().forget()
    assert orders(told.again().pass_time(13)) == ["-n1"]


def test_a_node_that_is_not_ready_is_drained_after_the_time_that_kubernetes_tells():
    told = silent(story(), "n1", since=-295).start().forget()
    assert orders(told.pass_time(3)) == []
    found = told.pass_time(5)
    assert orders(found) == ["+n1"]
    assert only(found, act.DrainNode).reason.endswith("is not ready")


@pytest.mark.parametrize("told", [None, T0 - 1_000_000, T0 + 1_000_000])
def test_what_we_have_seen_ourselves_we_count_ourselves(pool, told):
    pool.pass_time(2)
    kube(pool, "n1", ready=False, ready_changed=told)
    assert orders(pool.pass_time(298)) == []
    assert orders(pool.pass_time(6)) == ["+n1"]


def test_a_moment_of_readiness_that_we_have_missed_counts():
    told = silent(story(), "n1", since=-200).start().forget()
    told.pass_time(50)
    kube(told, "n1", ready_changed=told.now - 1)
    assert orders(told.pass_time(200)) == []


def test_one_that_is_ready_again_in_between_starts_from_the_beginning(pool):
    kube(pool, "n1", ready=False, ready_changed=None)
    pool.pass_time(250)
    kube(pool, "n1", ready=True)
    pool.pass_time(2)
    kube(pool, "n1", ready=False, ready_changed=None)
    assert orders(pool.pass_time(250)) == []


@pytest.mark.parametrize("flag", ["POWERED_DOWN", "POWERING_UP", "REBOOT_ISSUED"])
def test_a_node_that_slurm_itself_has_stopped_is_not_drained_for_being_silent(flag):
    # A drained node is never powered up again, so it would never be Ready again.
    told = silent(story(), "n1")
    told.nodes["n1"].state(f"IDLE+CLOUD+{flag}")
    assert orders(told.start().forget().pass_time(60)) == []


def test_one_that_was_powered_down_after_our_drain_is_resumed():
    told = silent(story(), "n1")
    drained(told, reason=SILENT, state="IDLE+DRAIN+CLOUD+POWERED_DOWN")
    assert orders(told.start().forget().pass_time(15)) == ["-n1"]


def test_nothing_is_decided_on_an_old_reading(pool):
    kube(pool, "n1", unschedulable=True)
    for _ in range(20):
        pool.now += 1
        if pool.machine.state.is_stale:
            assert orders(pool.tick()) == []


# Whose drain it is.


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("IDLE+DRAIN", "bad dimm [alice@2026-11-30T18:31:08]"),
        ("IDLE+DRAIN", "slurmbridge [alice@2026-11-30T18:31:08]"),
        ("IDLE+DRAIN", OURS.replace("blue", "red")),
        ("IDLE+DRAIN", OURS.replace("cordoned", "cordoned : Reboot ASAP")),
        ("IDLE+DRAIN", "x " + OURS),
        ("IDLE+DRAIN", ""),
        ("DOWN", "Not responding [slurm@2026-11-30T18:31:08]"),
        ("DOWN+DRAIN", "dead [alice@2026-11-30T18:31:08]"),
        ("IDLE+FAIL", OURS),
        ("IDLE+DRAIN+FAIL", OURS),
        ("IDLE+DRAIN+REBOOT_REQUESTED", OURS),
        ("IDLE", OURS),
    ],
)
@pytest.mark.parametrize("cordoned", [False, True])
def test_what_another_did_is_neither_taken_back_nor_replaced(pool, state, reason, cordoned):
    drained(pool, reason=reason, state=state)
    kube(pool, "n1", unschedulable=cordoned)
    expected = ["+n1"] if cordoned and state == "IDLE" else []
    assert orders(pool.pass_time(9)) == expected
    if state != "IDLE":
        assert orders(pool.pass_time(100)) == []


def test_a_drain_of_ours_on_a_node_that_went_down_is_taken_back(pool):
    # UNDRAIN leaves DOWN as it is.
    drained(pool, state="DOWN+DRAIN+NOT_RESPONDING")
    assert orders(pool.pass_time(15)) == ["-n1"]


def test_a_drain_that_an_operator_made_his_by_a_reason_of_his_own_stays(pool):
    kube(pool, "n1", unschedulable=True)
    pool.pass_time(2)
    drained(pool)
    pool.pass_time(2)
    drained(pool, reason="fan broken [alice@2026-11-30T19:00:00]")
    kube(pool, "n1", unschedulable=False)
    assert orders(pool.pass_time(100)) == []


def test_reasons_name_nothing_but_clusters_and_nodes():
    with pytest.raises(ParseError):
        write_reason("blue", "n1 State=RESUME", CORDONED)
    with pytest.raises(ParseError):
        write_reason("BLUE'", "n1", CORDONED)
    for why in (CORDONED, NOT_READY):
        text = write_reason("blue", "gpu-7.example.org", why)
        assert our_reason(make_node("n").but(reason=text).obj, "blue") == why


# Budget and flapping.


def test_when_many_nodes_fall_silent_none_is_drained_and_it_is_told():
    names = [f"n{i}" for i in range(20)]
    told = story(*names)
    for i, name in enumerate(names):
        # The first of them long before the last, as the node controller notices them.
        silent(told, name, since=-290 + 3 * i)
    told.start().forget()
    assert orders(told.pass_time(400)) == []
    assert len(status(told.machine.state)["nodeSync"]["held"]) == 20
    for name in names[2:]:
        kube(told, name, ready=True)
    assert orders(told.pass_time(3)) == ["+n0", "+n1"]
    assert status(told.machine.state)["nodeSync"]["held"] == []


def test_drains_of_ours_count_against_the_budget():
    names = [f"n{i}" for i in range(20)]
    told = silent(story(*names), *names[:3])
    for name in names[:2]:
        drained(told, name, reason=SILENT)
    assert orders(told.start().forget().pass_time(60)) == []


def test_nodes_that_slurm_has_out_of_use_already_do_not_count():
    names = [f"n{i}" for i in range(20)]
    told = silent(story(*names), *names[:10])
    for name in names[1:10]:
        told.nodes[name].state("DOWN+NOT_RESPONDING").but(reason="Not responding")
    assert orders(told.start().forget().pass_time(2)) == ["+n0"]


def test_cordons_are_a_persons_will_but_come_at_a_bounded_rate():
    names = [f"n{i}" for i in range(20)]
    told = story(*names, per_minute=6).start().forget()
    for name in names:
        kube(told, name, unschedulable=True)
    assert len(orders(told.pass_time(1))) == 6


@pytest.mark.parametrize(
    ("drains", "expected"), [(0, 10), (1, 10), (2, 20), (3, 40), (5, 160), (40, 1800)]
)
def test_a_node_that_flaps_has_to_be_well_for_longer_each_time(drains, expected):
    assert patience_s(NodeSync(), [T0 - i for i in range(drains)], T0) == expected


def test_what_was_more_than_an_hour_ago_is_forgiven():
    assert patience_s(NodeSync(), [T0 - 4000, T0 - 3700, T0], T0) == 10


def test_a_node_that_is_cordoned_and_uncordoned_all_the_time_settles(pool):
    changes = 0
    for turn in range(120):
        kube(pool, "n1", unschedulable=turn % 2 == 0)
        for order in orders(pool.pass_time(15)):
            drained(pool) if order == "+n1" else pool.nodes["n1"].state("IDLE").but(reason="")
            changes += 1
    assert changes <= 12


def test_the_budget_is_a_share_of_the_pool_and_at_least_a_few():
    assert [most_silent(NodeSync(), n) for n in (1, 20, 100, 5000)] == [2, 2, 10, 500]


# Switches.


def test_cordons_can_be_left_to_kubernetes_and_drains_of_before_are_taken_back():
    told = story(cordon=False).start().forget()
    drained(told)
    kube(told, "n1", unschedulable=True)
    assert orders(told.pass_time(15)) == ["-n1"]


def test_silence_can_be_left_to_slurm():
    told = silent(story(not_ready_s=0), "n1", since=-100_000).start().forget()
    assert orders(told.pass_time(15)) == []


def test_conditions_can_be_switched_off():
    told = story(condition=False).start().forget()
    drained(told, reason="x")
    assert none(told.pass_time(15), act.ShowNode)


# Slurm to Kubernetes.

SHOWN = {
    "well": (make_node("g").state("MIXED+PLANNED"), "True", "Usable"),
    "jobs end on it": (make_node("g").state("MIXED+COMPLETING"), "True", "Usable"),
    "drained": (make_node("g").state("MIXED+DRAIN").but(reason="dimm"), "False", "Drained"),
    "by us": (make_node("g").state("IDLE+DRAIN").but(reason=OURS), "False", "DrainedForKubernetes"),
    "down": (make_node("g").state("DOWN+NOT_RESPONDING"), "False", "Down"),
    "down, drained by us": (make_node("g").state("DOWN+DRAIN").but(reason=OURS), "False", "Down"),
    "failing": (make_node("g").state("IDLE+FAIL"), "False", "Failing"),
    "rebooting": (make_node("g").state("DOWN+REBOOT_ISSUED"), "False", "Rebooting"),
    "powered down": (make_node("g").state("IDLE+CLOUD+POWERED_DOWN"), "False", "PoweredDown"),
    "powering up": (make_node("g").state("ALLOCATED+CLOUD+POWERING_UP"), "False", "PoweringUp"),
    "maintenance": (make_node("g").state("IDLE+MAINTENANCE"), "False", "Maintenance"),
    "a flag of tomorrow": (make_node("g").state("IDLE+FROBNICATED"), "False", "NotUsable"),
}


@pytest.mark.parametrize("name", SHOWN)
def test_shown_in_kubernetes(name):
    node, expected, reason = SHOWN[name]
    shown = condition_of(node.obj, "g", CLUSTER)
    assert (shown.status, shown.reason) == (expected, reason)
    assert len(shown.message) <= 256


def test_a_node_that_slurm_does_not_know_is_shown_so():
    assert condition_of(None, "g", CLUSTER).reason == "UnknownToSlurm"


def test_the_message_does_not_change_with_jobs():
    states = ("IDLE+DRAIN", "MIXED+DRAIN+COMPLETING", "ALLOCATED+DRAIN+PLANNED")
    told = {condition_of(make_node("g").state(s).obj, "g", CLUSTER).message for s in states}
    assert len(told) == 1


def test_a_drain_by_an_operator_is_shown_once_and_nothing_else_is_done(pool):
    shown(pool, pool.pass_time(10))
    drained(pool, reason="bad dimm")
    found = pool.pass_time(9)
    (told,) = [a for a in found if isinstance(a, act.ShowNode) and a.name == "n1"]
    shown(pool, found)
    found += pool.pass_time(60)
    assert [a for a in found if isinstance(a, act.ShowNode)] == [told]
    assert (told.status, told.reason) == ("False", "Drained")
    assert "bad dimm" in told.message
    assert orders(found) == []


def shown(told, actions):
    """The API server takes the conditions."""
    for a in actions:
        if isinstance(a, act.ShowNode):
            kube(told, a.name, slurm_ready=(a.status, a.reason, a.message))


def test_what_a_node_says_already_is_not_written_again(pool):
    shown(pool, pool.pass_time(8))
    assert none(pool.pass_time(60), act.ShowNode)
    assert none(pool.again().pass_time(60), act.ShowNode)


def test_a_state_that_passes_within_moments_is_not_shown(pool):
    shown(pool, pool.pass_time(8))
    for _ in range(10):
        drained(pool, reason="x")
        assert none(pool.pass_time(2), act.ShowNode)
        pool.nodes["n1"].state("IDLE").but(reason="")
        assert none(pool.pass_time(2), act.ShowNode)


def test_conditions_of_a_big_pool_are_written_a_few_at_a_time():
    told = story(*(f"n{i}" for i in range(200))).start().forget()
    counts = [len([a for a in told.pass_time(1) if isinstance(a, act.ShowNode)]) for _ in range(9)]
    assert max(counts) == 50
    assert sum(counts) == 200


# Names that differ, nodes that come and go.


def test_names_are_mapped():
    told = Story("gpu-1", settings=make_settings(names=(("gpu-1", "n7"),)))
    told.nodes = {"n7": make_node("n7")}
    told.start().forget()
    kube(told, "gpu-1", unschedulable=True)
    order = only(told.pass_time(2), act.DrainNode)
    assert (order.slurm_node, order.reason) == (
        "n7",
        "slurmbridge: cluster blue: node gpu-1 is cordoned",
    )


def test_several_slurm_nodes_on_one_machine_are_drained_together_and_take_no_pods():
    told = Story("big", settings=make_settings(names=(("big", "big[1-2]"),)))
    told.nodes = {name: make_node(name).gpus(4) for name in ("big1", "big2")}
    told.start().forget()
    pod = make_pod("a").gpus(1)
    told.see(pod)
    assert only(told.ask(pod, "big"), act.Reply).reason == "unknown_node"
    kube(told, "big", unschedulable=True)
    assert orders(told.pass_time(2)) == ["+big1", "+big2"]
    for name in told.nodes:
        drained(told, name, reason=OURS.replace("n1", "big"))
    kube(told, "big", unschedulable=False)
    assert sorted(orders(told.pass_time(13))) == ["-big1", "-big2"]


def test_a_host_list_makes_several_and_a_name_does_not():
    nodes = {"a": make_kube_node("a").obj, "b": make_kube_node("b").obj}
    names = map_names(
        nodes, ["a", "x1", "x2"], {"b": "x[1-2]", "a": "a"}, "", {}, ["nvidia.com/gpu"], {}
    )
    assert dict(names.slurm_of) == {"a": "a"}
    assert dict(names.several) == {"b": ("x1", "x2")}
    assert names.problems["b"] == "several Slurm nodes on one Kubernetes node"


def test_a_renamed_kubernetes_node_takes_the_drain_of_its_old_name_back():
    told = story()
    drained(told, reason=OURS.replace("node n1", "node old-name"))
    told.start().forget()
    assert orders(told.pass_time(13)) == ["-n1"]


def test_while_its_kubernetes_node_is_deleted_a_drain_of_ours_stays(pool):
    # Most nodes that are cordoned and deleted are on their way out.
    drained(pool)
    pool.handle(ev.NodeGone(pool.kube_nodes["n1"].obj))
    assert orders(pool.pass_time(100)) == []
    pool.handle(ev.NodeChanged(pool.kube_nodes["n1"].but(uid="another").obj))
    assert orders(pool.pass_time(13)) == ["-n1"]


def test_a_node_that_is_gone_from_slurm_is_shown_and_not_drained(pool):
    shown(pool, pool.pass_time(8))
    del pool.nodes["n1"]
    kube(pool, "n1", unschedulable=True)
    found = pool.pass_time(8)
    assert orders(found) == []
    (told,) = [a for a in found if isinstance(a, act.ShowNode)]
    assert (told.name, told.reason) == ("n1", "UnknownToSlurm")


def test_a_dynamic_node_without_gres_takes_no_pods_and_is_synced(pool):
    pool.nodes["n1"].but(gpus=())
    pool.pass_time(1)
    pod = make_pod("a").gpus(1)
    pool.see(pod)
    assert only(pool.ask(pod, "n1"), act.Reply).reason == "gpu_count"
    kube(pool, "n1", unschedulable=True)
    assert orders(pool.pass_time(2)) == ["+n1"]


# Fencing.


def test_a_fenced_node_gives_the_claims_of_its_deleted_pods_back(pool):
    pod = make_pod("a").gpus(2)
    pool.run(pod, 10, "n1", "0-1")
    kube(pool, "n1", ready=False)
    pool.gone(pod)
    assert none(pool.pass_time(100), act.End)
    kube(pool, "n1", fenced=True)
    assert {a.job_id for a in pool.pass_time(35) if isinstance(a, act.End)} == {10}


def test_status_names_the_nodes_that_we_have_drained(pool):
    drained(pool)
    kube(pool, "n1", unschedulable=True)
    pool.pass_time(3)
    assert status(pool.machine.state)["nodeSync"] == {"drained": ["n1"], "held": []}


def test_a_drain_that_slurm_does_not_carry_out_is_asked_for_less_and_less_often():
    told = story()
    told.start().forget()
    kube(told, "n1", unschedulable=True)
    asked = [told.now for _ in range(4000) if orders(told.pass_time(1))]
    pauses = [round(later - sooner) for sooner, later in itertools.pairwise(asked)]
    assert pauses[:4] == [10, 20, 40, 80]
    assert max(pauses) == 600
    drained(told, reason=OURS)
    kube(told, "n1", unschedulable=False)
    assert orders(told.pass_time(13)) == ["-n1"], "many tries are one drain: no patience is needed"


def test_what_is_remembered_of_deleted_nodes_is_forgotten():
    told = story()
    told.start()
    kube(told, "n1", ready=False)
    told.pass_time(20)
    state = told.machine.state
    assert state.nodes.silent
    told.handle(ev.NodeGone(plain(told.kube_nodes["n1"])))
    told.pass_time(70)
    assert not state.nodes.silent.keys() & {"n1"}
    assert not state.nodes.shown.keys() & {"n1"}
