import pytest

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.hostlist import MAX_NAMES, expand, fold, natural
from tests.unit.pool.vectors import rows


@pytest.mark.parametrize(("text", "count", "first", "last"), rows("hostlist.tsv", 4))
def test_the_collected_expressions_are_read_as_slurm_means_them(text, count, first, last):
    if count == "ERROR":
        with pytest.raises(ParseError) as caught:
            expand(text)
        assert caught.value.part in text
        return
    names = expand(text)
    assert [str(len(names)), *names[:1], *names[-1:]] == [count, *([first, last] if first else [])]
    assert sorted(expand(fold(names))) == sorted(set(names))


@pytest.mark.parametrize(
    "text",
    [
        "n[1-2",
        "n1-2]",
        "n[[1-2]]",
        "n[]",
        "n[1-]",
        "n[-2]",
        "n[1,]",
        "n[a-b]",
        "n1,,n2",
        "n1,",
        ",n1",
        "n 1",
        "n[1 -2]",
        "...",
        "-w",
        "n1;id",
        "n$(id)",
        "n\nm",
        "n\x00",
        "n[1-010]",
        "n[100-99]",
        "n[001-99]",
        "nö1",
        "gpu:4",
    ],
)
def test_what_is_not_surely_a_list_of_names_is_refused(text):
    with pytest.raises(ParseError):
        expand(text)


@pytest.mark.parametrize(
    "text",
    [
        "n[1-999999999999999999]",
        "n[0-99999][0-99999]",
        "n[1-100000],m[1-100001]",
        "n[1-9]" * 40,
        "n" * 300,
        "x" * 250 + "[100000-299999]",
        "n[" + "1" * 19 + "]",
        "a[" * 100_000,
        ",".join(["n[1-2]"] * 200_000),
    ],
)
@pytest.mark.timeout(30)
def test_hostile_lists_end_in_an_error_and_do_not_hang(text):
    with pytest.raises(ParseError) as caught:
        expand(text)
    assert len(str(caught.value)) < 600


def test_the_largest_list_allowed_is_given():
    assert len(expand(f"n[1-{MAX_NAMES}]")) == MAX_NAMES


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], ""),
        (["a"], "a"),
        (["a1"], "a1"),
        (["a2", "a1", "a1"], "a[1-2]"),
        (["n8", "n9", "n10", "n11"], "n[8-11]"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["n9", "n09", "n10"], "n[9,09-10]"),
        (["n099", "n100"], "n[099-100]"),
        (["n99", "n100"], "n[99-100]"),
        (["node", "node1"], "node,node1"),
        (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"),
        (["h1-ib0", "h1-ib1"], "h1-ib[0-1]"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
    ],
)
def test_names_are_folded_sorted_and_once(names, folded):
    assert fold(names) == folded


def test_folding_refuses_what_is_no_name():
    with pytest.raises(ParseError):
        fold(["n1", "n[2-3]"])


def test_numbers_in_names_are_ordered_as_numbers():
    names = ["w-10", "w-9", "w-1", "a-2-x-3", "a-2-x-20"]
    assert sorted(names, key=natural) == ["a-2-x-3", "a-2-x-20", "w-1", "w-9", "w-10"]
