import pytest

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.gres import (
    format_indices,
    parse_gres,
    parse_gres_used,
    parse_indices,
    parse_job_gres,
    parse_tres,
    tres_gpus,
)
from slurmbridge.pool.record import GpuCount, GpuUse
from tests.unit.pool.vectors import rows

READERS = {"total": parse_gres, "used": parse_gres_used, "job": parse_job_gres, "tres": tres_gpus}


def written(value):
    """The value in the notation of the table: `types @ indices + shared`, ? for not numbered."""
    if value is None:
        return "UNKNOWN"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, tuple):
        return ",".join(f"{c.type}:{c.count}" for c in value) or "-"
    indices = "?" if value.indices is None else format_indices(value.indices) or "-"
    shared = f" + {format_indices(value.shared)}" if value.shared else ""
    return f"{written(value.counts)} @ {indices}{shared}"


@pytest.mark.parametrize(("what", "text", "expected"), rows("gres.tsv", 3))
def test_the_collected_texts_are_read_or_refused_with_the_faulty_part(what, text, expected):
    if expected.startswith("ERROR"):
        with pytest.raises(ParseError) as caught:
            READERS[what](text)
        assert caught.value.part == expected.removeprefix("ERROR ")
    else:
        assert written(READERS[what](text)) == expected


def test_memory_of_a_tres_text_is_mib_and_types_are_kept():
    text = "cpu=4,mem=80G,node=1,billing=33,gres/gpu=2,gres/gpu:h100=2,license/x=1"
    assert parse_tres(text) == {
        "cpu": 4,
        "mem": 81920,
        "node": 1,
        "billing": 33,
        "gres/gpu": 2,
        "gres/gpu:h100": 2,
        "license/x": 1,
    }


@pytest.mark.parametrize(
    ("text", "mib"),
    [("mem=70000M", 70000), ("mem=1280.50G", 1311232), ("mem=1T", 1048576), ("mem=500", 500)],
)
def test_memory_is_read_in_every_unit(text, mib):
    assert parse_tres(text) == {"mem": mib}


@pytest.mark.parametrize("text", ["cpu", "cpu=x", "=4", "mem=1G,", "cpu=4,mem=8", "gres/gpu=2e9x"])
def test_a_tres_text_that_is_cut_or_wrong_is_refused(text):
    if text == "cpu=4,mem=8":  # cut from mem=80G: nothing can tell
        assert parse_tres(text)["mem"] == 8
        return
    with pytest.raises(ParseError):
        parse_tres(text)


@pytest.mark.parametrize("text", ["0", "0,2-3", "0-7", "0,2,4,6-9"])
def test_index_lists_come_back_as_they_were(text):
    assert format_indices(parse_indices(text)) == text


def test_nothing_used_is_no_index():
    assert parse_indices("N/A") == parse_indices("") == ()
    assert format_indices(()) == ""


@pytest.mark.parametrize(
    "text", ["a", "1-", "3-1", "0-99999", "1,1", "0-3,2", "-1", "1 ,2", "99999999"]
)
def test_a_wrong_index_list_is_refused(text):
    with pytest.raises(ParseError):
        parse_indices(text)


@pytest.mark.parametrize(
    "text", ["gpu:1(" * 50_000, "gpu:1," * 20_000, "(" * 70_000, "gpu:1(IDX:" + "0," * 40_000]
)
@pytest.mark.parametrize("reader", [*READERS.values(), parse_tres])
def test_hostile_texts_end_in_an_error(reader, text):
    with pytest.raises(ParseError):
        reader(text)


def test_a_use_says_how_many_and_which():
    use = parse_gres_used("gpu:a100:2(IDX:0,3),gpu:h100:1(IDX:5)")
    assert use == GpuUse((GpuCount("a100", 2), GpuCount("h100", 1)), (0, 3, 5))
    assert use.total == len(use.indices)
