"""Whose a reservation is: users, accounts, groups and "-" as Slurm prints them, FLEX, MAGNETIC."""

from __future__ import annotations

import numpy as np
import pytest

from slurmbridge.pool.policy import Policy
from slurmbridge.pool.reason import Reason
from slurmbridge.pool.record import Reservation
from slurmbridge.pool.reserved import allows, drawn_into, keepers, terms_of
from slurmbridge.pool.verdict import compile_view, judge_one, rank
from slurmbridge.pool.view import Terms, Window
from tests.support.pool_view import NOW, make_ask, make_node, make_view

MINE = Terms(user=True)
MAGNET = Terms(user=True, magnetic=True)


def terms(exact=True, user="slurm", flags=(), **fields):
    made = Reservation("r", NOW, None, ("n1",), frozenset(flags), **fields)
    return terms_of(made, user, exact=exact)


@pytest.mark.parametrize(
    ("fields", "account", "expected"),
    [
        ({"users": ("slurm",)}, "", True),
        ({"users": ("alice", "slurm")}, "phys", True),
        ({"users": ("alice",)}, "phys", False),
        ({"users": ("-alice",)}, "", True),
        ({"users": ("-slurm",)}, "", False),
        ({"accounts": ("phys",)}, "phys", True),
        ({"accounts": ("phys",)}, "chem", False),
        ({"accounts": ("phys",)}, "", None),  # Slurm's default account: which one is not known
        ({"accounts": ("-phys",)}, "phys", False),
        ({"accounts": ("-phys",)}, "chem", True),
        ({"users": ("alice",), "accounts": ("phys",)}, "phys", False),
        ({"users": ("slurm",), "accounts": ("phys",)}, "phys", True),
        ({"groups": ("hpc",)}, "", None),
        ({"groups": ("hpc",), "accounts": ("phys",)}, "chem", False),
    ],
)
def test_user_and_account_must_both_be_allowed(fields, account, expected):
    assert allows(terms(**fields), account) is expected


def test_where_accounts_stand_below_others_slurm_alone_knows_about_those_not_named():
    assert allows(terms(exact=False, accounts=("phys",)), "optics") is None
    assert allows(terms(exact=False, accounts=("phys",)), "phys") is True
    assert allows(terms(exact=False, accounts=("-phys",)), "optics") is None


def test_a_user_whose_name_is_not_known_may_perhaps():
    assert allows(terms(user="", users=("slurm",)), "") is None
    assert allows(terms(user=""), "") is True


def verdict(window, policy_minutes=1440, **ask):
    node = make_node(windows=(window,))
    return judge_one(make_ask(**ask), node, Policy("c", plan_horizon_minutes=policy_minutes), NOW)


def at(start_min, end_min, terms=MINE, cpus=0):
    return Window("mine", NOW + 60 * start_min, NOW + 60 * end_min, terms, cpus)


FLEX = Terms(flex=True, user=True)


@pytest.mark.parametrize(
    ("window", "ask", "expected"),
    [
        (at(-5, 90), {"reservation": "mine"}, None),
        (at(-5, 90, Terms(user=False)), {"reservation": "mine"}, Reason.RESERVATION_DENIED),
        (at(-5, 90, Terms()), {"reservation": "mine"}, None),
        (at(5, 90), {"reservation": "mine"}, Reason.OUTSIDE_RESERVATION),
        (at(5, 90, FLEX), {"reservation": "mine"}, None),
        (at(-5, 30), {"reservation": "mine"}, Reason.OUTSIDE_RESERVATION),
        (at(-5, 30, FLEX), {"reservation": "mine"}, None),
        (at(-5, 0, FLEX), {"reservation": "mine"}, Reason.OUTSIDE_RESERVATION),
        (at(-5, 90), {}, Reason.RESERVED),
        (at(5, 90, FLEX), {}, Reason.RESERVED),
        (at(-5, 90, MAGNET), {}, None),
        (at(-5, 30, MAGNET), {}, Reason.RESERVED),
        (at(-5, 90, MAGNET), {"rolling": True}, Reason.RESERVED),
        (at(5, 90, MAGNET), {}, Reason.RESERVED),
        (at(-5, 90, Terms(magnetic=True)), {}, Reason.RESERVED),
        (at(-5, 90, Terms(magnetic=True, user=True, accounts=("phys",))), {}, Reason.RESERVED),
        (at(-5, 90, MAGNET), {"reservation": "other"}, Reason.OUTSIDE_RESERVATION),
        (at(-5, 90, Terms(), cpus=60), {}, None),
        (at(-5, 90, Terms(), cpus=61), {}, Reason.CPU_BUSY),
        (at(5, 90, Terms(), cpus=61), {"minutes": 5}, None),
    ],
)
def test_a_pod_may_be_inside_beside_or_neither(window, ask, expected):
    assert verdict(window, **ask) is expected


def test_a_claim_names_the_magnetic_reservation_that_takes_its_pod_in():
    node = make_node(windows=(at(-5, 90, MAGNET),))
    assert drawn_into(make_ask(), node, NOW, NOW + 3600) == "mine"
    assert drawn_into(make_ask(), node, NOW, NOW + 6000) == ""
    assert drawn_into(make_ask(reservation="x"), node, NOW, NOW + 3600) == "x"


def test_nodes_of_a_magnetic_reservation_come_first():
    index = compile_view(
        make_view(make_node("a", free=1), make_node("b", windows=(at(-5, 90, MAGNET),)))
    )
    ranks = rank(make_ask(), "u", index, np.arange(2, dtype=np.int32), NOW, horizon_minutes=60)
    assert ranks[1] > ranks[0]


def test_the_reservations_that_keep_a_pod_out_are_named():
    nodes = [make_node(windows=(at(-5, 90),)), make_node(windows=(Window("b", NOW, None),))]
    assert keepers(make_ask(), nodes, NOW, NOW + 60) == ("b", "mine")
    assert keepers(make_ask(reservation="mine"), nodes, NOW, NOW + 60) == ("b",)
