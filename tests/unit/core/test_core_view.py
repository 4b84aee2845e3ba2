"""What others see: the view, its generations, node annotations, names of both sides."""

from __future__ import annotations

import json

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core import explain
from slurmbridge.core.mapping import map_names
from slurmbridge.pool.record import GpuCount
from tests.support.builders import (
    T0,
    Story,
    make_job,
    make_kube_node,
    make_node,
    make_pod,
    make_policy,
    make_settings,
)


@pytest.fixture
def story():
    return Story("n1", "n2").start()


def test_a_view_is_due_whenever_something_in_it_changed_whoever_looked_first(story):
    story.machine.view()
    assert not story.machine.view_is_due
    pod = make_pod("a")
    story.see(pod)
    story.ask(pod, "n1")  # judging the node reads its view
    assert story.machine.view_is_due
    story.machine.view()
    story.grant(pod, 10, "n1", "0")
    assert story.machine.view_is_due
    assert story.machine.view().held["uid-a"].job_id == 10
    assert not story.machine.view_is_due


def test_a_reading_that_changes_nothing_makes_no_view_due(story):
    story.slurm(make_job(1).planned(T0 + 900, "n1"))
    story.nodes["n2"].state("IDLE+PLANNED")
    story.pass_time(2)
    story.machine.view()
    story.pass_time(3)
    assert not story.machine.view_is_due


def test_generations_grow_within_a_term(story):
    first, second = story.machine.view(), story.machine.view()
    assert (first.term, second.generation) == ("t1", first.generation + 1)
    assert second.as_of == T0


def test_a_view_that_was_handed_out_does_not_change(story):
    before = story.machine.view()
    story.slurm(make_job(1).on("n1", "0-7")).poll()
    story.machine.view()
    assert before.nodes["n1"].free_total == 8


def test_a_node_that_leaves_slurm_is_blocked_not_set_free(story):
    del story.nodes["n2"]
    story.poll()
    assert story.machine.view().nodes["n2"].blocked == "unknown to Slurm"
    assert explain.who(story.machine.state, "n2") is None


def test_a_node_that_leaves_kubernetes_leaves_the_view(story):
    story.machine.view()
    story.handle(ev.NodeGone(story.kube_nodes["n2"].obj))
    assert story.machine.view_is_due
    assert story.machine.view().nodes.keys() == {"n1"}


def test_a14_two_nodes_for_one_are_both_blocked_and_others_hear_of_it(story):
    story.machine.view()
    twin = make_kube_node("n2.example.internal").obj
    story.handle(ev.NodeChanged(twin))
    assert story.machine.view_is_due
    view = story.machine.view()
    assert view.nodes["n2"].blocked == view.nodes[twin.name].blocked != ""
    story.handle(ev.NodeGone(twin))
    story.handle(ev.NodeChanged(make_kube_node("n2").but(labels={"a": "b"}).obj))
    assert story.machine.view().nodes["n2"].free_total == 8


def test_gpus_that_kubernetes_does_not_offer_are_taken_off_every_type():
    story = Story("n1")
    story.nodes["n1"] = make_node("n1").types(a100=4, h100=4).used("", kind="a100")
    story.kube_nodes["n1"].gpus(6)
    free = story.start().machine.view().nodes["n1"].free
    assert free == (GpuCount("a100", 2), GpuCount("h100", 2))


def test_e08_more_gpus_in_kubernetes_than_in_slurm_close_the_node(story):
    # Time-slicing multiplies them, a machine got more of them: which are Slurm's is not known.
    story.handle(ev.NodeChanged(story.kube_nodes["n1"].gpus(16).obj))
    assert story.machine.view().nodes["n1"].blocked == "gpu_count"
    story.handle(ev.NodeChanged(story.kube_nodes["n1"].gpus(8).obj))
    assert story.machine.view().nodes["n1"].blocked == ""


def test_reload_looks_at_every_node_again(story):
    story.machine.view()
    story.machine.reload(make_settings(make_policy(resources={"example.com/gpu": ""})))
    assert story.machine.view_is_due
    assert story.free("n1") == 0


# Node annotations.


def notes(actions):
    return {a.name: json.loads(a.value) for a in actions if isinstance(a, act.AnnotateNode)}


def test_a_node_says_who_owns_its_gpus():
    pod = make_pod("a").gpus(2)
    story = Story("n1").slurm(make_job(1).on("n1", "4-7")).start(pod).run(pod, 10, "n1", "0-1")
    story.nodes["n1"].but(reason="fan")
    story.poll()
    assert notes(story.tick())["n1"] == {
        "version": 1,
        "slurmNode": "n1",
        "state": "IDLE",
        "usable": True,
        "reason": "fan",
        "numbered": True,
        "gpus": {"claim:10": "0-1", "free": "2-3", "native:1": "4-7"},
    }


def test_annotations_are_written_together_and_seldom_and_only_changed_ones(story):
    assert notes(story.tick()).keys() == {"n1", "n2"}
    story.slurm(make_job(1).on("n1", "0")).poll()
    assert notes(story.tick()) == {}
    story.poll(at=20)
    assert notes(story.tick()).keys() == {"n1"}
    story.poll(at=40)
    assert notes(story.tick()) == {}


def test_while_pods_wait_they_are_written_even_less_often(story):
    story.tick()
    story.see(make_pod("a").gpus(9).refused())
    story.slurm(make_job(1).on("n1", "0")).poll(at=20)
    assert notes(story.tick()) == {}
    story.poll(at=65)
    assert notes(story.tick()).keys() == {"n1"}


def test_nothing_is_written_from_a_stale_reading(story):
    assert notes(story.tick(at=100)) == {}


# Names.


def names(kube, slurm, pairs=None, label="", selector=None, before=None):
    return map_names(
        {n.obj.name: n.obj for n in kube},
        slurm,
        pairs or {},
        label,
        selector or {},
        ["nvidia.com/gpu"],
        before or {},
    )


def test_a_node_whose_device_plugin_is_away_is_a_pool_node_all_the_same():
    kube = {n: make_kube_node(n).but(gpus={}).obj for n in ("gpu1", "cpu1")}
    found = map_names(
        kube, ["gpu1", "cpu1"], {}, "", {}, ["nvidia.com/gpu"], {}, with_gpus={"gpu1"}
    )
    assert dict(found.slurm_of) == {"gpu1": "gpu1"}
    story = Story("n1")
    story.kube_nodes["n1"] = make_kube_node("n1").but(gpus={})
    story.start()
    view = story.machine.view().nodes["n1"]
    assert (sum(g.count for g in view.total), view.free_total) == (8, 0)


NAMES = {
    "the same name": ([make_kube_node("gpu1")], ["gpu1"], {}, {"gpu1": "gpu1"}),
    "A07: a longer name on one side": (
        [make_kube_node("gpu7.example.internal")],
        ["gpu7"],
        {},
        {"gpu7.example.internal": "gpu7"},
    ),
    "A22: upper case and a domain on the other": (
        [make_kube_node("gpu7")],
        ["GPU7.cluster"],
        {},
        {"gpu7": "GPU7.cluster"},
    ),
    "A16: one name is the beginning of another": (
        [make_kube_node("gpu-1"), make_kube_node("gpu-10"), make_kube_node("gpu-100")],
        ["gpu-1", "gpu-10"],
        {},
        {"gpu-1": "gpu-1", "gpu-10": "gpu-10"},
    ),
    "C15: padding tells two nodes apart": ([make_kube_node("n02")], ["n2"], {}, {}),
    "a configured pair": (
        [make_kube_node("ip-10-0-0-7")],
        ["gpu7"],
        {"pairs": {"ip-10-0-0-7": "gpu7"}},
        {"ip-10-0-0-7": "gpu7"},
    ),
    "a label": (
        [make_kube_node("ip-10-0-0-7").but(labels={"slurm": "gpu7"})],
        ["gpu7"],
        {"label": "slurm"},
        {"ip-10-0-0-7": "gpu7"},
    ),
    "two Slurm nodes of the same short name fit nobody": (
        [make_kube_node("gpu7")],
        ["gpu7.a", "gpu7.b"],
        {},
        {},
    ),
    "a node without GPUs is outside": ([make_kube_node("gpu1").gpus(0)], ["gpu1"], {}, {}),
    "E03: a node whose GPUs have gone stays in the pool": (
        [make_kube_node("gpu1").gpus(0)],
        ["gpu1"],
        {"before": {"gpu1": "gpu1"}},
        {"gpu1": "gpu1"},
    ),
    "a node outside the selector is outside": (
        [make_kube_node("gpu1")],
        ["gpu1"],
        {"selector": {"pool": "yes"}},
        {},
    ),
    "a pair that was configured later replaces a guess": (
        [make_kube_node("gpu1")],
        ["gpu1", "gpu9"],
        {"pairs": {"gpu1": "gpu9"}, "before": {"gpu1": "gpu1"}},
        {"gpu1": "gpu9"},
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_name(name):
    kube, slurm, more, expected = NAMES[name]
    found = names(kube, slurm, **more)
    assert {k: v for k, v in found.slurm_of.items() if k not in found.problems} == expected


def test_a_short_name_that_two_slurm_nodes_have_blocks_the_node_until_somebody_says_which():
    story = Story("gpu7.a", "gpu7.b")
    story.kube_nodes = {"gpu7": make_kube_node("gpu7")}
    story.start()
    assert "short name" in story.machine.view().nodes["gpu7"].blocked
    assert names([make_kube_node("gpu7")], ["gpu7.a"]).slurm_of == {"gpu7": "gpu7.a"}


def test_status_lists_gpu_nodes_that_no_slurm_node_is_called_like():
    story = Story("n1")
    story.kube_nodes["ip-10-0-0-7"] = make_kube_node("ip-10-0-0-7")
    story.kube_nodes["plain"] = make_kube_node("plain").gpus(0)
    story.start()
    assert explain.status(story.machine.state)["gpuNodesOutside"] == ["ip-10-0-0-7"]


def test_a_selected_node_that_slurm_does_not_know_is_a_problem():
    node = make_kube_node("gpu1").but(labels={"pool": "yes"})
    found = names([node], ["gpu2"], selector={"pool": "yes"})
    assert found.problems == {"gpu1": "unknown to Slurm"}


# Answers for people.


def test_explain_tells_each_class_of_nodes(story):
    pod = make_pod("a").gpus(6)
    story.see(pod)
    story.slurm(make_job(1).on("n1", "0-3"))
    story.nodes["n2"].state("IDLE+DRAIN")
    story.poll()
    answer = explain.explain(story.machine.state, "default", "a")
    assert answer["waits"]["nodes"].keys() == {"gpu_busy", "slurm_state"}
    assert answer["claim"] is None
    assert explain.explain(story.machine.state, "default", "b") is None


def test_who_tells_each_gpu(story):
    pod = make_pod("a").gpus(2)
    story.see(pod)
    story.run(pod, 10, "n1", "0-1").slurm(make_job(1).on("n1", "7")).poll()
    rows = explain.who(story.machine.state, "n1")["gpus"]
    assert [r["pod"] for r in rows[:3]] == ["default/a", "default/a", None]
    assert (rows[7]["user"], rows[7]["jobId"]) == ("alice", 1)


def test_status_and_dump_are_made_at_any_time(story):
    assert explain.status(Story("n1").machine.state)["synced"] is False
    pod = make_pod("a")
    story.see(pod)
    story.run(pod, 10, "n1", "0").see(pod.over())
    status = explain.status(story.machine.state)
    assert (status["claims"]["ending"], status["gpus"]["claim"]) == (1, 1)
    dump = json.loads(explain.dump(story.machine.state, list(story.machine.story)))
    assert any("ClaimAsked uid-a" in line for line in dump["story"])


def test_time_never_runs_backwards_in_the_machine(story):
    story.tick(at=100)
    story.tick(at=50)
    assert story.machine.state.now == T0 + 100


def test_the_story_is_bounded(story):
    for index in range(500):
        story.see(make_pod(f"p{index}"))
    assert len(story.machine.story) == 200
