"""Jobs that are over while their Epilogs go on, or hang: told of, and given to nobody."""

from __future__ import annotations

import pytest

from slurmbridge import cli
from slurmbridge.core import action as act
from slurmbridge.core import completing, explain
from slurmbridge.metrics import PoolCollector
from tests.support.builders import T0, Story, make_job, make_node, make_pod, only


def ends(job_id, *nodes, at=0.0):
    """A native job that was over at that second, and whose Epilog runs."""
    return make_job(job_id).state("CANCELLED+COMPLETING").on_unknown(*nodes).but(end=T0 + at)


def metric(story):
    gauges = PoolCollector(lambda: story.machine, lambda: 0).collect()
    (gauge,) = [g for g in gauges if g.name == "slurmbridge_completing_seconds"]
    return gauge.samples[0].value


@pytest.fixture
def story():
    return Story("n1", "n2", "n3").start()


def test_an_epilog_of_seconds_is_nothing_to_tell_of(story):
    story.slurm(ends(7, "n1", at=10))
    story.poll(at=40)
    assert completing.longest_s(story.machine.state) == pytest.approx(30, abs=0.1)
    assert completing.long_ones(story.machine.state) == completing.Completing()


def test_a_job_that_is_completing_for_an_hour_is_told_with_its_nodes(story):
    story.slurm(ends(7, "n1", "n2", at=10), ends(8, "n3", at=3500), make_job(9).on("n3", "0"))
    story.nodes["n1"].state("IDLE+COMPLETING")
    story.poll(at=3610)
    told = explain.status(story.machine.state)["completing"]
    assert told == {"longestSeconds": 3600, "nodes": "n[1-3]", "jobs": (7, 8)}
    assert metric(story) == pytest.approx(3600, abs=0.1)
    assert (story.free("n1"), story.free("n3")) == (0, 0)


def test_what_is_not_read_any_more_does_not_grow_older(story):
    """It may be over for long; that slurmctld is not read has its own alert."""
    story.slurm(ends(7, "n1", at=0))
    story.poll(at=100)
    story.tick(at=5000)
    assert completing.longest_s(story.machine.state) == pytest.approx(100, abs=0.1)


def test_jobs_on_nodes_outside_the_pool_are_not_ours_to_tell_of(story):
    story.nodes["other"] = make_node("other")
    story.slurm(ends(7, "other", at=0))
    story.poll(at=3600)
    assert completing.long_ones(story.machine.state) == completing.Completing()
    assert metric(story) == 0


def test_a_job_on_a_node_of_the_pool_and_one_outside_names_the_first_alone(story):
    story.nodes["other"] = make_node("other")
    story.slurm(ends(7, "n2", "other", at=0))
    story.poll(at=3600)
    assert completing.long_ones(story.machine.state).nodes == ("n2",)


def test_200_nodes_that_wait_for_one_epilog_are_told_in_one_line(monkeypatch, capsys):
    names = [f"gpu{i:03d}" for i in range(1, 201)]
    story = Story(*names, "gpu201").start()
    for name in names:
        story.nodes[name].state("IDLE+COMPLETING")
    story.slurm(*(ends(i, name, at=0) for i, name in enumerate(names, start=1000)))
    story.poll(at=700)
    pod = make_pod("a").gpus(1)
    story.see(pod)
    assert only(story.ask(pod, "gpu007"), act.Reply).reason, "the core goes on to answer"
    status = explain.status(story.machine.state)
    monkeypatch.setattr(cli, "_ask", lambda *_, **__: status)
    assert cli.main(["status"]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("COMPLETING")]
    assert line.startswith("COMPLETING gpu[001-200] for up to 700 s: jobs 1000, 1001, ")
    assert len(line) < 200
