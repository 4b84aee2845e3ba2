"""What the node agents say: where pods may go, and when a claim is given back."""

from __future__ import annotations

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import agents, explain
from slurmbridge.core import event as ev
from slurmbridge.pool.noderecord import NodeFinding, NodeGpu, NodePod, NodeReport
from slurmbridge.pool.policy import Granularity
from tests.support.builders import (
    Story,
    make_claim_job,
    make_job,
    make_kube_node,
    make_node,
    make_pod,
    make_policy,
    make_settings,
    none,
    only,
    plain,
)


class AgentStory(Story):
    """A story in which agents are needed; n1 has a live one unless a test says otherwise."""

    def __init__(self, *nodes, **how):
        super().__init__(*nodes, settings=make_settings(agents_required=True, **how))
        self._sequence = 0

    def hear(self, node="n1", *pods, after=None, age_s=0.0, run="r1", sequence=None, **how):
        """A report; after: None: of a look that began now."""
        self._sequence += 1
        report = NodeReport(
            **{"slurm_node": node, "registered": True, "is_whole": True} | how,
            pods=tuple(NodePod(plain(p).uid, plain(p).ref, processes=1) for p in pods),
        )
        return self.handle(
            ev.AgentReported(
                node=node,
                run=run,
                sequence=self._sequence if sequence is None else sequence,
                age_s=age_s,
                after=self.moment if after is None else after,
                report=report,
            )
        )

    @property
    def moment(self):
        return self.machine.state.moment

    def blocked(self, node):
        return not self.machine.view().nodes[node].agent


@pytest.fixture
def pod():
    return make_pod("a").gpus(2)


@pytest.fixture
def story(pod):
    story = AgentStory("n1", "n2").start(pod)
    story.hear()
    story.run(pod, 10, "n1", "0-1").forget()
    story.hear("n1", pod)
    return story


# Where pods may go.


def test_a_node_takes_pods_only_while_its_agent_is_registered_and_fresh(pod):
    story = AgentStory("n1").start(pod)
    assert story.blocked("n1")
    assert only(story.ask(pod, "n1"), act.Reply).reason == "no_agent"
    story.hear(registered=False)
    assert story.blocked("n1")
    story.hear(fault="gres.conf does not fit")
    assert story.blocked("n1")
    story.hear()
    assert not story.blocked("n1")
    assert only(story.ask(pod, "n1"), act.Allocate)


def test_an_agent_that_falls_silent_takes_no_more_pods(pod):
    story = AgentStory("n1").start(pod)
    story.hear()
    story.now += 4
    story.tick()
    assert not story.blocked("n1")
    story.now += 4
    story.tick()
    assert story.blocked("n1")


def test_a_report_of_an_old_look_makes_nobody_fresh(pod):
    story = AgentStory("n1").start(pod)
    story.hear(age_s=30.0)
    assert story.blocked("n1")


def test_an_agent_that_is_lost_takes_no_more_pods_at_once(pod):
    story = AgentStory("n1").start(pod)
    story.hear()
    story.handle(ev.AgentLost("n1"))
    assert story.blocked("n1")
    story.hear(run="r2", sequence=1)
    assert not story.blocked("n1")


def test_an_agent_of_another_slurm_node_opens_none(pod):
    story = AgentStory("n1", "n2").start(pod)
    story.hear("n1", slurm_node="n2")
    assert story.blocked("n1")
    assert story.blocked("n2")


def test_a_report_that_was_overtaken_is_not_taken(pod):
    story = AgentStory("n1").start(pod)
    story.hear(sequence=5, registered=False)
    story.hear(sequence=4)
    assert story.blocked("n1")


def test_a_pod_with_a_claim_is_not_bound_where_the_agent_has_left(pod):
    story = AgentStory("n1").start(pod)
    story.hear()
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.handle(ev.AgentLost("n1"))
    reply = only(story.ask(pod, "n1"), act.Reply)
    assert reply.unavailable
    story.hear(run="r2")
    assert only(story.ask(pod, "n1"), act.Reply).job_id == 10


@pytest.mark.parametrize(
    "settings",
    [
        make_settings(),
        make_settings(make_policy(granularity=Granularity.NODE), agents_required=True),
    ],
)
def test_where_no_agent_is_needed_none_is_missed(pod, settings):
    story = Story("n1", settings=settings).start(pod)
    assert story.machine.view().nodes["n1"].agent
    assert only(story.ask(pod, "n1"), act.Allocate)


# When a claim is given back.


def test_a_pod_that_is_over_keeps_its_claim_until_the_agent_says_that_nothing_is_left(story, pod):
    assert none(story.see(pod.over()), act.End)
    assert story.phase(pod) == "lingering"
    assert none(story.hear("n1", pod) + story.pass_time(600), act.End)
    assert story.free("n1") == 6
    assert only(story.hear("n1"), act.End).job_id == 10


def test_a_look_that_began_before_the_end_was_known_proves_nothing(story, pod):
    before = story.moment
    story.see(pod.over())
    assert none(story.hear("n1", after=before), act.End)
    assert none(story.hear("n1", after=0), act.End)
    assert only(story.hear("n1"), act.End)


def test_a_report_that_is_not_whole_proves_nothing(story, pod):
    story.see(pod.over())
    assert none(story.hear("n1", is_whole=False), act.End)
    assert only(story.hear("n1"), act.End)


def test_a_pod_deleted_by_force_is_released_by_word_and_never_by_time(story, pod):
    story.gone(pod.on("n1", 10, "0-1"))
    assert none(story.pass_time(1000), act.End)
    assert only(story.hear("n1"), act.End).job_id == 10


def test_with_a_live_agents_word_nobody_waits_for_the_longest_time(story, pod):
    story.gone(pod.on("n1", 10, "0-1"))
    assert none(story.hear("n1", pod), act.End)
    story.now += 3.2
    assert only(story.hear("n1"), act.End).job_id == 10


def test_a_lost_agent_frees_nothing_until_it_is_back(story, pod):
    story.handle(ev.AgentLost("n1"))
    story.gone(pod.on("n1", 10, "0-1"))
    assert none(story.pass_time(600), act.End)
    kept = [t for t in story.of(act.Tell) if t.reason == "ClaimKept"]
    assert len(kept) == 1
    assert "silent" in kept[0].message
    assert none(story.hear("n1", run="r2", sequence=1, after=0), act.End)
    assert only(story.hear("n1", run="r2", sequence=2), act.End)


def test_a_pod_that_was_never_bound_needs_no_agents_word(pod):
    story = AgentStory("n1").start(pod)
    story.hear()
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    assert only(story.see(pod.deleting()), act.End)


@pytest.mark.parametrize("fence", ["deleted", "rebooted", "out of service"])
def test_a_fenced_node_gives_its_claims_back(pod, fence):
    story = AgentStory("n1", "n2")
    story.kube_nodes["n1"] = make_kube_node("n1").but(boot_id="boot-1")
    story.start(pod)
    story.hear()
    story.run(pod, 10, "n1", "0-1").forget()
    story.handle(ev.AgentLost("n1"))
    story.gone(pod.on("n1", 10, "0-1"))
    assert none(story.pass_time(100), act.End)
    node = plain(story.kube_nodes["n1"])
    if fence == "deleted":
        story.handle(ev.NodeGone(node))
        assert none(story.pass_time(29), act.End)
        story.now += 2
    elif fence == "rebooted":
        story.handle(ev.NodeChanged(plain(make_kube_node("n1").but(boot_id="boot-2"))))
    else:
        gone = make_kube_node("n1").but(boot_id="boot-1", fenced=True)
        story.handle(ev.NodeChanged(plain(gone)))
    assert only(story.tick(), act.End).job_id == 10


def test_a_fence_that_a_live_agent_contradicts_is_not_believed(story, pod):
    story.gone(pod.on("n1", 10, "0-1"))
    story.handle(ev.NodeGone(plain(story.kube_nodes["n1"])))
    assert none(story.hear("n1", pod) + story.tick(), act.End)
    assert only(story.hear("n1") + story.tick(), act.End)


# A bridge that has just started knows of no agent.


def test_after_a_restart_a_pod_that_is_over_keeps_its_claim_until_an_agent_has_spoken(story, pod):
    over = pod.on("n1", 10, "0-1").over()
    story.again(over).forget()
    assert none(story.pass_time(300), act.End)
    assert story.free("n1") == 6
    assert none(story.hear("n1", pod, after=0), act.End)
    assert only(story.hear("n1"), act.End).job_id == 10


def test_after_a_restart_a_claim_without_a_pod_is_kept_until_an_agent_has_spoken(story, pod):
    story.again().forget()
    story.pass_time(10)
    story.handle(ev.PodLooked(plain(pod).uid, None))
    assert none(story.pass_time(300), act.End)
    story.hear("n1")
    assert only(story.pass_time(1), act.End).job_id == 10


# With granularity node, or `rules.agents: optional`: today's rule, and an agent's word if there is
# one.


def test_where_agents_are_optional_a_live_ones_word_counts(pod):
    story = AgentStory("n1").start(pod)
    story.machine.reload(make_settings())
    story.run(pod, 10, "n1", "0-1").forget()
    story.hear("n1", pod)
    story.see(pod.over())
    assert none(story.hear("n1", pod), act.End)
    assert only(story.hear("n1"), act.End)


def test_where_agents_are_optional_a_lost_one_is_not_waited_for(pod):
    story = AgentStory("n1").start(pod)
    story.machine.reload(make_settings())
    story.run(pod, 10, "n1", "0-1").forget()
    story.hear("n1", pod)
    story.see(pod.over())
    story.handle(ev.AgentLost("n1"))
    assert only(story.tick(), act.End).job_id == 10


def test_a_claim_that_waits_for_its_agent_is_renewed_and_covered_again(story, pod):
    story.gone(pod.on("n1", 10, "0-1"))
    story.boot += 100
    story.slurm(without=(10,)).poll(at=20)
    assert only(story.of(act.LookJob), act.LookJob)
    story.handle(ev.JobLooked(plain(pod).uid, 10, None))
    assert only(story.of(act.Cover), act.Cover).indices == (0, 1)
    assert story.free("n1") == 0


# What agents and people are told.


def test_an_agent_is_told_who_owns_each_gpu_and_only_what_changed(story, pod):
    story.machine.view()
    orders = agents.orders(story.machine.state, "n1")
    assert [o.kind for o in orders.owners[:3]] == ["claim", "claim", "free"]
    assert orders.owners[0].pod_uid == plain(pod).uid
    story.hear("n1", pod)
    assert agents.orders(story.machine.state, "n1") is orders
    story.hear("n1", pod, run="r2", sequence=1)
    assert agents.orders(story.machine.state, "n1") is not orders


def test_people_are_told_what_the_agents_say(story, pod):
    finding = NodeFinding("loose_pod", "pod d/a", "can reach GPUs past its claim")
    story.hear("n1", pod, findings=(finding,))
    status = explain.status(story.machine.state)["agents"]
    assert status == {
        "needed": True,
        "ready": 1,
        "closed": 0,
        "silent": 0,
        "absent": 1,
        "findings": {"loose_pod": 1},
    }
    about = explain.who(story.machine.state, "n1")["agent"]
    assert about["ready"]
    assert about["findings"] == [{"kind": "loose_pod", "text": "can reach GPUs past its claim"}]
    assert explain.who(story.machine.state, "n2")["blocked"] == "no agent has reported"
    story.gone(pod.on("n1", 10, "0-1"))
    assert explain.who(story.machine.state, "n1")["gpus"][0]["state"] == "claim"


# Which Kubernetes node is meant is not always known: then none of them is taken for a deleted one.


class TwoNodes:
    """n1 is a node of the pool with a claim; then comes a second Kubernetes node that is n1."""

    def __init__(self, story):
        self.story = story
        self.twin = make_kube_node("n1.other")

    def come(self):
        return self.story.handle(ev.NodeChanged(plain(self.twin)))

    def go(self):
        return self.story.handle(ev.NodeGone(plain(self.twin)))


def test_a_claim_without_a_pod_is_kept_while_two_nodes_may_have_it(story, pod):
    twins = TwoNodes(story)
    story.kube_nodes["n1.other"] = twins.twin
    story.again().forget()
    story.pass_time(10)
    story.handle(ev.PodLooked(plain(pod).uid, None))
    story.hear("n1")
    assert none(story.pass_time(300), act.End), "the other one has not said that nothing is left"
    kept = [t for t in story.of(act.Tell) if t.reason == "ClaimKept"]
    assert {t.name for t in kept} == {"n1", "n1.other"}
    twins.go()
    story.hear("n1")
    assert only(story.pass_time(1), act.End).job_id == 10


def test_where_no_agent_tells_a_claim_without_a_pod_waits_for_every_node_that_may_have_it(pod):
    story = Story("n1").start(pod)
    story.run(pod, 10, "n1", "0-1")
    story.kube_nodes["n1.other"] = make_kube_node("n1.other").not_ready()
    story.again().forget()
    story.pass_time(10)
    story.handle(ev.PodLooked(plain(pod).uid, None))
    assert none(story.pass_time(300), act.End)
    story.handle(ev.NodeChanged(plain(make_kube_node("n1.other"))))
    assert none(story.pass_time(20), act.End), "its kubelet has just begun to stop what is left"
    assert {end.job_id for end in story.pass_time(20) if isinstance(end, act.End)} == {10}


def test_the_claim_of_a_pod_on_one_of_two_nodes_outlives_a_restart(story, pod):
    twins = TwoNodes(story)
    bound = pod.on("n1", 10, "0-1")
    story.kube_nodes["n1.other"] = twins.twin
    story.again(bound).forget()
    assert none(story.pass_time(300), act.End)
    assert story.blocked("n1") or story.machine.view().nodes["n1"].blocked
    twins.go()
    story.pass_time(2)
    assert story.phase(pod) == "bound"
    assert story.free("n1") == 6
    assert none(story.actions, act.End, act.Evict)


def test_a_claim_of_a_pod_that_is_elsewhere_is_still_ended_after_a_restart(story, pod):
    story.kube_nodes["cpu"] = make_kube_node("cpu").gpus(0)
    pod.but(annotations={}).on("cpu")
    assert none(story.forget().again(pod).actions, act.End), "something may be left in it there"
    story.hear()
    assert only(story.pass_time(1), act.End).job_id == 10


def test_a_node_of_which_slurm_knows_several_is_no_deleted_one(pod):
    how = {"names": (("big", "big[1-2]"),)}
    story = AgentStory("big", **how)
    story.nodes = {name: make_node(name) for name in ("big1", "big2")}
    story.slurm(make_claim_job(10, pod, "big1", "0-1")).start().forget()
    story.pass_time(10)
    story.handle(ev.PodLooked(plain(pod).uid, None))
    assert none(story.pass_time(300), act.End)
    story.hear("big", slurm_node="big1")
    assert only(story.pass_time(1), act.End).job_id == 10


def test_a_gangs_claim_is_not_clear_while_two_nodes_may_have_it(story):
    job = make_claim_job(11, make_pod("b"), "n2", "0-1").obj
    story.hear("n2")
    state = story.machine.state
    assert agents.are_clear(state, job.gpus, since=1)
    other = make_kube_node("n2.other")
    story.handle(ev.NodeChanged(plain(other)))
    assert not agents.are_clear(state, job.gpus, since=1)
    story.hear("n2.other", slurm_node="n2")
    assert agents.are_clear(state, job.gpus, since=1)
    story.handle(ev.NodeGone(plain(other)))
    story.handle(ev.NodeGone(plain(story.kube_nodes["n2"])))
    assert agents.are_clear(state, job.gpus, since=1), "both are deleted"


def test_a_pod_without_a_claim_is_charged_as_soon_as_its_node_is_known_for_certain(pod):
    story = Story("n1")
    story.kube_nodes["n1.other"] = make_kube_node("n1.other")
    story.start(pod.on("n1")).forget()
    assert story.machine.view().nodes["n1"].blocked
    story.handle(ev.NodeGone(plain(story.kube_nodes.pop("n1.other"))))
    assert story.free("n1") == 0, "nothing is free beside a pod of which Slurm knows nothing"


def test_a_claim_that_a_pod_may_still_be_bound_with_outlives_a_restart_beside_a_second_node(pod):
    story = Story("n1").start(pod)
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.kube_nodes["n1.other"] = make_kube_node("n1.other")
    story.forget().again(pod)
    story.pass_time(3)
    story.bind(pod, 10, "n1", "0-1")
    story.handle(ev.NodeGone(plain(story.kube_nodes.pop("n1.other"))))
    story.pass_time(2)
    assert none(story.actions, act.End)
    assert story.phase(pod) == "bound"


def test_what_is_left_of_a_pod_that_is_over_is_charged_once_its_node_is_known(story, pod):
    over = pod.on("n1", 10, "0-1").over()
    story.slurm(without=(10,))
    story.kube_nodes["n1.other"] = make_kube_node("n1.other")
    story.again(over)
    story.handle(ev.NodeGone(plain(story.kube_nodes.pop("n1.other"))))
    assert story.phase(pod) == "lingering"
    assert story.free("n1") == 0
    story.hear("n1")
    assert story.free("n1") == 8


# Faulty GPUs: Slurm chooses, so a node is closed while it might choose one.


def gpus(*faulty):
    return tuple(
        NodeGpu(i, f"u{i}", i, fault="quarantine" if i in faulty else "") for i in range(8)
    )


def test_a_node_with_a_free_faulty_gpu_takes_no_pods_and_says_which(pod):
    story = AgentStory("n1").start(pod)
    story.hear(gpus=gpus(3))
    assert story.machine.view().nodes["n1"].blocked == "gpu_fault"
    assert only(story.ask(pod, "n1"), act.Reply).reason == "gpu_fault"
    told = explain.who(story.machine.state, "n1")
    assert told["blocked"].startswith("GPU 3 takes no pods (quarantine)")
    assert told["agent"]["why"] == told["blocked"]
    assert explain.status(story.machine.state)["agents"]["closed"] == 1
    story.hear(gpus=gpus())
    assert only(story.ask(pod, "n1"), act.Allocate)


def test_a_faulty_gpu_that_somebody_has_closes_no_node_until_it_is_free(pod):
    story = AgentStory("n1").start(pod)
    story.slurm(make_job(7).on("n1", "3"))
    story.nodes["n1"].used("3")
    story.poll()
    story.hear(gpus=gpus(3))
    assert not story.machine.view().nodes["n1"].blocked
    story.slurm(without=(7,)).nodes["n1"].used("")
    story.now += 1
    story.poll()
    story.hear(gpus=gpus(3))
    assert story.machine.view().nodes["n1"].blocked == "gpu_fault"


def test_a_claim_that_got_a_faulty_gpu_all_the_same_is_given_back(pod):
    story = AgentStory("n1").start(pod)
    story.hear(gpus=gpus())
    story.ask(pod, "n1")
    story.hear(gpus=gpus(1))
    done = story.grant(pod, 10, "n1", "0-1")
    assert only(done, act.Reply).reason == "gpu_fault"
    assert only(done, act.End).job_id == 10


def test_a_held_claim_whose_gpu_becomes_faulty_is_not_bound(pod):
    story = AgentStory("n1").start(pod)
    story.hear(gpus=gpus())
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.hear(gpus=gpus(1))
    done = story.ask(pod, "n1")
    assert only(done, act.Reply).unavailable
    assert only(done, act.End).job_id == 10


def test_a_claim_on_good_gpus_is_bound_though_its_node_takes_no_new_ones(pod):
    story = AgentStory("n1").start(pod)
    story.hear(gpus=gpus())
    story.ask(pod, "n1")
    story.grant(pod, 10, "n1", "0-1")
    story.hear(gpus=gpus(5))
    assert only(story.ask(pod, "n1"), act.Reply).job_id == 10


def test_a_silent_agent_of_a_deleted_node_is_forgotten_and_a_live_one_is_not(story):
    story.hear("n2")
    story.handle(ev.NodeGone(plain(story.kube_nodes["n1"])))
    story.tick()
    assert "n1" in story.machine.state.agents
    story.pass_time(70)
    assert set(story.machine.state.agents) == {"n2"}, "its node is there: what it said still counts"
