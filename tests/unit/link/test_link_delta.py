import pytest

from slurmbridge.link.delta import difference
from slurmbridge.pool.errors import InvariantError
from slurmbridge.pool.view import apply_delta
from tests.support.pool_view import make_node, make_view

A, B, C, D, E = (make_node(name) for name in "abcde")

FITS = {
    "one node changed": (make_view(A, B, C), make_view(A, make_node("b", free=3), C, generation=2)),
    "a node came": (make_view(A, B), make_view(A, B, C, generation=2)),
    "a node went": (make_view(A, B, C), make_view(A, C, generation=2)),
    "one came as another went": (make_view(A, B, C, D), make_view(A, B, C, E, generation=2)),
    "a claim is held": (make_view(A), make_view(A, held=[("u1", "a", 7)], generation=2)),
    "a claim is held no more": (make_view(A, held=[("u1", "a", 7)]), make_view(A, generation=2)),
    "a generation was left out": (
        make_view(A, B, C),
        make_view(A, B, make_node("c", free=0), generation=9),
    ),
    "read again, nothing changed": (make_view(A, as_of=1.0), make_view(make_node("a"), as_of=2.0)),
    "another poll interval": (make_view(A), make_view(A, interval_s=5.0)),
}


@pytest.mark.parametrize(("old", "new"), FITS.values(), ids=FITS.keys())
def test_old_view_and_delta_make_the_new_view(old, new):
    delta = difference(old, new)
    assert apply_delta(old, delta) == new


def test_a_delta_holds_only_what_changed():
    old = make_view(A, B, C, held=[("u1", "a", 7), ("u2", "b", 8)])
    new = make_view(
        make_node("a"),
        make_node("b", free=3),
        C,
        held=[("u2", "b", 8), ("u3", "c", 9)],
        generation=2,
    )
    delta = difference(old, new)
    assert set(delta.nodes) == {"b"}
    assert {uid: claim and claim.job_id for uid, claim in delta.held.items()} == {
        "u1": None,
        "u3": 9,
    }


def test_a_view_of_another_term_is_sent_whole():
    assert difference(make_view(A), make_view(A, term="t2")) is None


def test_a_view_that_changed_for_the_most_part_is_sent_whole():
    old = make_view(A, B, C)
    assert difference(old, make_view(*(make_node(n, free=1) for n in "abc"), generation=2)) is None
    assert difference(old, make_view(generation=2)) is None


WRONG = {
    "the generation went back": (make_view(A, generation=5), make_view(A, generation=4)),
    "a node changed under the same generation": (make_view(A), make_view(make_node("a", free=1))),
    "a claim came under the same generation": (make_view(A), make_view(A, held=[("u", "a", 1)])),
}


@pytest.mark.parametrize(("old", "new"), WRONG.values(), ids=WRONG.keys())
def test_views_out_of_order_are_a_bug(old, new):
    with pytest.raises(InvariantError, match="out of order"):
        difference(old, new)
