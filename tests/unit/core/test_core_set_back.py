"""The API server is set back to an older state: bound pods are unbound again, deleted ones are back."""

from __future__ import annotations

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.pool import keys
from tests.support.builders import Story, make_claim_job, make_pod, none, only, plain


def before(pod):
    """The pod as it was before it was bound."""
    return make_pod("a").gpus(2)


def listed(story, *pods):
    return story.handle(ev.PodsListed(tuple(plain(pod) for pod in pods)))


def test_a_bound_pod_that_is_unbound_again_keeps_its_claim_for_what_may_run_on(story, pod):
    listed(story, before(pod))
    assert story.phase(pod) == "bound", "a list alone moves nothing"
    assert only(story.pass_time(1), act.LookPod).uid == "uid-a"
    story.handle(ev.PodLooked("uid-a", before(pod).obj))
    assert story.phase(pod) == "lingering"
    assert story.free("n1") == 6
    assert none(story.pass_time(29), act.End)
    assert only(story.pass_time(2), act.End).job_id == 10


def test_it_gets_no_second_claim_before_the_first_has_gone(story, pod):
    listed(story, before(pod))
    story.pass_time(1)
    story.handle(ev.PodLooked("uid-a", before(pod).obj))
    assert only(story.ask(before(pod), "n1"), act.Reply).reason == "ending"
    assert only(story.ask(before(pod), "n2"), act.Reply).reason == "claimed_elsewhere"
    story.pass_time(32)
    assert only(story.ask(before(pod), "n2"), act.Allocate).request.slurm_node == "n2"


def test_a_look_that_shows_it_bound_settles_a_list_that_was_old(story, pod):
    listed(story, before(pod))
    story.pass_time(1)
    assert none(story.handle(ev.PodLooked("uid-a", pod.obj)), act.End)
    assert story.phase(pod) == "bound"
    assert none(story.pass_time(60), act.LookPod)


def test_a_watch_that_shows_it_bound_after_both_were_old_gives_it_back_its_claim(story, pod):
    listed(story, before(pod))
    story.pass_time(1)
    story.handle(ev.PodLooked("uid-a", before(pod).obj))
    story.see(pod)
    assert story.phase(pod) == "bound"
    assert none(story.pass_time(60), act.End)


def test_news_of_the_unbound_pod_do_not_call_the_look_off(story, pod):
    listed(story, before(pod))
    story.see(before(pod).but(annotations={"x": "y"}))
    assert only(story.pass_time(1), act.LookPod).uid == "uid-a"


def test_many_that_are_unbound_at_once_open_the_breaker_and_nothing_is_given_back():
    pods = [make_pod(f"p{i}").gpus(1) for i in range(16)]
    story = Story("n1", "n2").start(*pods)
    for i, pod in enumerate(pods):
        story.run(pod, 10 + i, f"n{1 + i // 8}", str(i % 8))
    unbound = [make_pod(f"p{i}").gpus(1) for i in range(16)]
    story.forget()
    listed(story, *unbound)
    assert story.machine.state.breaker_since is not None
    story.pass_time(1)
    for pod in unbound:
        story.handle(ev.PodLooked(pod.obj.uid, pod.obj))
    assert none(story.pass_time(120), act.End)
    assert {story.phase(pod) for pod in pods} == {"bound"}
    story.handle(ev.BreakerAnswered(confirm=True))
    for pod in unbound:
        story.handle(ev.PodLooked(pod.obj.uid, pod.obj))
    ended = {a.job_id for a in story.pass_time(35) if isinstance(a, act.End)}
    assert ended == set(range(10, 26))


def test_an_unbound_pod_that_is_then_deleted_may_still_run(story, pod):
    story.handle(ev.PodGone(before(pod).obj))
    assert story.phase(pod) == "lingering"
    assert none(story.actions, act.End)


def test_a_deleted_pod_that_is_back_lives_in_its_claim_as_before(story, pod):
    story.gone(pod)
    assert story.phase(pod) == "lingering"
    listed(story, pod)
    assert story.phase(pod) == "bound"


def test_a_pod_that_was_over_and_runs_again_is_charged_and_covered(story, pod):
    running = plain(pod)
    story.see(pod.over())
    story.slurm(without=(10,)).pass_time(2)
    assert story.phase(pod) == ""
    story.forget()
    story.handle(ev.PodsListed((running,)))
    story.pass_time(1)
    story.handle(ev.PodLooked("uid-a", running))
    assert story.free("n1") == 0, "nothing is let on its node before it is covered"
    assert only(story.pass_time(2), act.Cover).indices == (0, 1)


def test_a_pod_that_was_being_deleted_and_is_not_any_more_can_be_evicted_again(story, pod):
    running = plain(pod)
    story.see(pod.but(deleting_since=story.now))
    story.handle(ev.PodsListed((running,)))
    story.pass_time(1)
    story.handle(ev.PodLooked("uid-a", running))
    assert story.machine.state.pods["uid-a"].deleting_since is None
    job = make_claim_job(10, pod, "n1", "0-1").state("CANCELLED")
    story.slurm(job)
    story.now += 1
    story.poll()
    story.handle(ev.JobLooked("uid-a", 10, job.obj))
    assert only(story.pass_time(1), act.Evict).uid == "uid-a"


def test_a_new_leader_keeps_a_claim_in_which_an_unbound_pod_may_have_run(pod):
    """Nobody has bound the pod within its time; it may have been bound before, and run on."""
    story = Story("n1").slurm(make_claim_job(10, pod, "n1", "0-1")).start(pod)
    assert story.phase(pod) == "held"
    story.kube_nodes["n1"].but(ready=False)
    story.handle(ev.NodeChanged(plain(story.kube_nodes["n1"])))
    story.pass_time(62)
    story.handle(ev.PodLooked("uid-a", pod.obj))
    assert none(story.pass_time(60), act.End), "its node cannot tell"
    story.kube_nodes["n1"].but(ready=True)
    story.handle(ev.NodeChanged(plain(story.kube_nodes["n1"])))
    assert {a.job_id for a in story.pass_time(35) if isinstance(a, act.End)} == {10}


def test_a_pod_is_claimed_anew_beside_a_claim_that_is_kept_for_what_may_run(pod):
    story = Story("n1", "n2").slurm(make_claim_job(10, pod, "n1", "0-1")).start(pod)
    story.pass_time(62)
    story.handle(ev.PodLooked("uid-a", pod.obj))
    story.kube_nodes["n1"].but(ready=False)
    story.ask(pod, "n2")
    story.grant(pod, 11, "n2", "0-1")
    story.slurm(make_claim_job(11, pod, "n2", "0-1"))
    assert {a.job_id for a in story.pass_time(5) if isinstance(a, act.End)} <= {10}
    assert story.entry(pod).job_id == 11


def test_a_pod_behind_two_gates_again_is_let_go_in_its_claim_once_the_other_is_off():
    """Its claim is of the time before; nobody plans behind another's gate."""
    pod = make_pod("a").gpus(2).but(gates=("example.org/quota", keys.GATE))
    story = Story("n1").slurm(make_claim_job(10, pod, "n1", "0-1")).start(pod)
    assert story.phase(pod) == "held"
    assert none(story.pass_time(3), act.Lift)
    lifted = only(story.see(pod.but(gates=(keys.GATE,))), act.Lift)
    assert (lifted.kube_node, lifted.gate) == ("n1", keys.GATE)
    assert none(story.pass_time(3), act.Lift)


def test_a_look_that_is_older_than_a_list_does_not_contradict_it(story, pod):
    listed(story)
    assert only(story.pass_time(1), act.LookPod).uid == "uid-a"
    story.now += 1
    listed(story)
    story.handle(ev.PodLooked("uid-a", pod.obj))
    assert only(story.pass_time(10), act.LookPod).uid == "uid-a"
    story.handle(ev.PodLooked("uid-a", None))
    assert story.phase(pod) == "lingering"
