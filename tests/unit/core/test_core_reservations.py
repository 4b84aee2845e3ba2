"""Reservations in the core: who gets in, what the claim names, and what people are told."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.pool import keys
from slurmbridge.pool.policy import IdentityRule
from slurmbridge.pool.record import Reservation
from tests.support.builders import T0, Story, make_pod, make_policy, make_settings, none, only
from tests.unit.core.test_core_gang_queue import member

RULE = IdentityRule(namespaces=("*",), accounts=("phys", "chem"), reservations=("r",))
SETTINGS = {"owner_uid": 0, "topology_labels": ()}


def story(*pods, nodes=("n1", "n2"), where=("n1",), states=None, **fields):
    made = Story(*nodes, settings=make_settings(make_policy(identities=(RULE,)), **SETTINGS))
    for name, state in (states or {}).items():
        made.nodes[name] = made.nodes[name].state(state)
    fields = {"users": ("root",)} | fields
    flags = frozenset(fields.pop("flags", ()))
    start = T0 + fields.pop("start_s", -60)
    made.reservations.append(Reservation("r", start, start + 36000, where, flags, **fields))
    return made.start(*pods)


def solo(**notes):
    return make_pod("p").gpus(8).but(gates=(keys.GATE,)).wrote(DURATION="30m", **notes)


def asked(made):
    return [(a.request.slurm_node, a.request.ask.reservation) for a in made.of(act.Allocate)]


def told(made):
    made.pass_time(40)
    return [a.annotations[keys.REASON] for a in made.of(act.AnnotatePod)][-1]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [("n1", "r")]),
        ({"accounts": ("phys",)}, [("n1", "r")]),
        ({"users": (), "accounts": ("chem",)}, []),
        ({"users": ("alice",)}, []),
        ({"start_s": 600}, []),
        ({"start_s": 600, "flags": ("FLEX",)}, [("n1", "r")]),
    ],
)
def test_a_pod_that_names_a_reservation_gets_in_where_slurm_would_let_its_claim(fields, expected):
    assert asked(story(solo(RESERVATION="r"), **fields)) == expected


def test_a_claim_names_the_magnetic_reservation_that_takes_its_pod_in():
    assert asked(story(solo(), flags=("MAGNETIC",))) == [("n1", "r")]
    assert asked(story(solo(), flags=("MAGNETIC",), users=("alice",))) == [("n2", "")]


def test_a_pod_in_a_magnetic_reservation_that_is_over_a_limit_is_not_asked_for_again_at_once():
    made = story(solo(), flags=("MAGNETIC",))
    for _ in range(5):
        made.handle(ev.AllocateRefused("uid-p", "limit", "over the limit"))
        made.poll()
    assert asked(made) == [("n1", "r")]


def test_a_node_in_maintenance_is_open_to_those_of_its_reservation_alone():
    states = {"n1": "IDLE+MAINTENANCE"}
    maint = {"states": states, "flags": ("MAINT",)}
    assert asked(story(solo(RESERVATION="r"), **maint)) == [("n1", "r")]
    assert asked(story(solo(), **maint)) == [("n2", "")]
    assert asked(story(solo(RESERVATION="r"), states=states)) == []


def test_a_refusal_names_the_reservation():
    assert told(story(solo(), where=("n1", "n2"))).endswith("reserved in Slurm (r)")
    denied = story(solo(RESERVATION="r"), users=("alice",))
    assert told(denied).endswith("may not use the Slurm reservation asked for: r")


def test_a_gang_is_told_which_reservation_keeps_it_out_and_is_not_queued_for_one_of_others():
    pods = [member(i, RESERVATION="r", DURATION="30m") for i in range(2)]
    made = story(*pods, where=("n1", "n2"), users=("alice",))
    assert "its account may not use the reservation r" in told(made)
    assert none(made.actions, act.QueueGroup, act.AllocateGroup)
    made = story(
        *(member(i, DURATION="30m", MODE="immediate") for i in range(2)), where=("n1", "n2")
    )
    assert "nodes are reserved in Slurm (r)" in told(made)


def test_the_claim_of_a_gang_names_a_magnetic_reservation_where_all_of_it_is_inside():
    pods = [member(i, DURATION="30m") for i in range(2)]
    made = story(*pods, where=("n1", "n2"), flags=("MAGNETIC",))
    request = only(made.of(act.AllocateGroup), act.AllocateGroup).request
    assert request.ask.reservation == "r"
    made = story(*pods, flags=("MAGNETIC",))  # one member inside, one outside: a claim each
    assert sorted(asked(made)) == [("n1", "r"), ("n2", "")]
