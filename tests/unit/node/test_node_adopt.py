"""What an agent without its book takes over, and from when on it takes new pods."""

from types import SimpleNamespace

import pytest

from slurmbridge.agent import Agent
from slurmbridge.node.book import Book
from slurmbridge.node.device import DeviceMap, Gpu
from slurmbridge.node.identity import Listed, PodFacts, Want, admitted_pod
from slurmbridge.node.look import Sample

DEVICES = DeviceMap(gpus=tuple(Gpu(i, f"GPU-{i}", i, f"/dev/nvidia{i}") for i in range(8)))
INIT, MAIN, HELP = Want("prepare", 1, "init"), Want("main", 1), Want("help", 1, "sidecar")
NEW = PodFacts("u-new", "a", "new", (MAIN,), 8, (3,))


def adopted(tmp_path, wants, devices, processes=()):
    """The book after a look, and the pod that a new one is told apart from."""
    pod = PodFacts("u-old", "a", "old", wants, 7, (0, 1))
    listing = (Listed("a", "old", {name: frozenset(ids) for name, ids in devices.items()}),)
    agent = SimpleNamespace(
        _devices=DEVICES,
        _pods=SimpleNamespace(known=lambda: [pod]),
        book=Book(str(tmp_path / "book.json")),
    )
    running = {"u-old": frozenset(processes)} if processes else {}
    Agent._adopt(agent, Sample(0.0, processes=running, listing=listing))
    found = admitted_pod([pod, NEW], [*listing, Listed("a", "new")], agent.book.served, (), DEVICES)
    return agent.book, found


@pytest.mark.parametrize(
    ("wants", "devices", "gpus"),
    [
        ((INIT, MAIN), {"main": ["GPU-0"]}, {0}),
        ((INIT, HELP, MAIN), {"help": ["GPU-1"], "main": ["GPU-0"]}, {0, 1}),
        ((INIT,), {}, set()),
    ],
    ids=["init and app", "sidecar too", "init only"],
)
def test_an_init_container_of_a_pod_that_runs_counts_as_served(tmp_path, wants, devices, gpus):
    book, found = adopted(tmp_path, wants, devices, processes=[17])
    assert book.pods["u-old"].gpus == gpus
    assert book.pods["u-old"].served == {want.container for want in wants}
    assert found == NEW


def test_a_pod_with_nothing_but_an_init_container_may_still_be_on_its_way(tmp_path):
    book, _ = adopted(tmp_path, (INIT,), {})
    assert book.pods == {}


def test_who_is_still_being_admitted_is_not_taken_for_served(tmp_path):
    book, _ = adopted(tmp_path, (INIT, HELP, MAIN), {"help": ["GPU-0"]})
    assert book.pods["u-old"].served == {"help"}


@pytest.mark.parametrize("lists", [0, 1])
def test_no_pod_is_bound_here_before_the_agent_knows_the_pods(lists):
    agent = SimpleNamespace(
        _closed=frozenset(),
        _orders=SimpleNamespace(closed=()),
        _pods=SimpleNamespace(known=list, reflector=SimpleNamespace(lists=lists)),
        book=SimpleNamespace(pods={}, native={}),
        slurm_name="n1",
        _registration=SimpleNamespace(registered=True),
        _devices=DEVICES,
        _leaving=False,
        _gate=SimpleNamespace(held={}),
        _findings=(),
        _alarms=SimpleNamespace(findings=()),
    )
    assert Agent._make_report(agent, Sample(0.0)).registered is bool(lists)
