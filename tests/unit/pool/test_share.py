"""Floors and ceilings of node groups: amounts, what they leave, what is wrong with them."""

import pytest

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.share import NodeGroup, Side, faults, gpus_of, most_for_jobs, most_for_pods


def group(name="g", nodes="n[1-4]", **fields):
    return NodeGroup(name=name, nodes=nodes, **fields)


@pytest.mark.parametrize(
    ("amount", "expected"), [(0, 0), (7, 7), ("0%", 0), ("25%", 8), ("33%", 10), ("100%", 32)]
)
def test_amounts_are_numbers_or_shares(amount, expected):
    assert gpus_of(amount, 32) == expected


@pytest.mark.parametrize("amount", [-1, 10**9, "", "25", "101%", "-5%", "2.5%", "٢%", "5 %"])
def test_anything_else_is_refused(amount):
    with pytest.raises(ParseError):
        gpus_of(amount, 32)


@pytest.mark.parametrize(
    ("kubernetes", "slurm", "pods", "jobs"),
    [
        (Side(), Side(), 32, 32),
        (Side(ceiling=5), Side(), 5, 32),
        (Side(), Side(floor=8), 24, 32),
        (Side(ceiling=30), Side(floor=8), 24, 32),
        (Side(ceiling=0), Side(), 0, 32),
        (Side(floor=4), Side(ceiling="50%"), 32, 16),
        (Side(floor="75%"), Side(ceiling=100), 32, 8),
        (Side(ceiling=1000), Side(floor=1000), 0, 32),
    ],
)
def test_what_each_side_may_have(kubernetes, slurm, pods, jobs):
    one = group(kubernetes=kubernetes, slurm=slurm)
    assert (most_for_pods(one, 32), most_for_jobs(one, 32)) == (pods, jobs)


def test_good_groups_have_no_fault():
    groups = [
        group("a", kubernetes=Side(0, "50%"), slurm=Side("25%", None)),
        NodeGroup(name="b", partition="big"),
        NodeGroup(name="c", selector={"rack": "r1"}, slurm=Side(floor=3)),
    ]
    assert list(faults(groups)) == []


@pytest.mark.parametrize(
    ("groups", "path"),
    [
        ([group("a"), group("a", nodes="m1")], "[1].name"),
        ([group("")], "[0].name"),
        ([NodeGroup(name="a")], "[0]"),
        ([group(partition="p")], "[0]"),
        ([group(nodes="n[1-")], "[0].nodes"),
        ([group("a"), group("b", nodes="n[4-9]")], "[1].nodes"),
        ([group(kubernetes=Side(floor=5, ceiling=4))], "[0].kubernetes.floor"),
        ([group(slurm=Side(floor="50%", ceiling="40%"))], "[0].slurm.floor"),
        ([group(slurm=Side(floor="x"))], "[0].slurm.floor"),
        ([group(slurm=Side(ceiling="101%"))], "[0].slurm.ceiling"),
        ([group(kubernetes=Side(floor="60%"), slurm=Side(floor="60%"))], "[0]"),
    ],
)
def test_each_fault_is_told_with_its_path(groups, path):
    assert [where for where, _ in faults(groups)] == [path]
