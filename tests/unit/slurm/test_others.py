"""All nodes but one, as a host list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmbridge.pool.hostlist import expand
from slurmbridge.slurm.others import MOST_CHARS, Others

NAMES = st.lists(
    st.one_of(
        st.integers(0, 130).map(lambda n: f"gpu{n:03}"),
        st.integers(0, 130).map(lambda n: f"gpu{n}"),
        st.integers(0, 20).map(lambda n: f"r{n % 3}-n{n:02}"),
        st.sampled_from(["login", "a", "10.0.0.7"]),
    ),
    min_size=1,
    max_size=60,
    unique=True,
)


@given(NAMES, st.data())
def test_the_list_holds_every_other_name_and_not_the_one(names, data):
    one = data.draw(st.sampled_from(names))
    text = Others(names).but(one)
    found = expand(text) if text else []
    assert sorted(found) == sorted(set(names) - {one})


@pytest.mark.parametrize(
    ("names", "one", "text"),
    [
        ([f"gpu{n:04}" for n in range(1, 5001)], "gpu0007", "gpu[0001-0006,0008-5000]"),
        (["n1", "n2"], "n1", "n[2]"),
        (["n1"], "n1", ""),
        (["n1", "n2"], "n3", ""),
        (["n1", "n;2"], "n1", ""),
        ([], "n1", ""),
    ],
)
def test_a_list_is_short_and_says_nothing_rather_than_something_wrong(names, one, text):
    assert Others(names).but(one) == text


def test_names_that_do_not_fold_give_no_list():
    names = [f"host-{n * 7919}-x" for n in range(1000)]
    assert len(",".join(names)) > MOST_CHARS
    assert Others(names).but(names[0]) == ""


def test_it_knows_its_names():
    others = Others({"n1": 0, "n2": 0})
    assert others.are({"n2": 1, "n1": 1}.keys())
    assert not others.are(["n1"])
    assert not others.are(["n1", "n3"])
