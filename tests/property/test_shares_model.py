"""Pods come and go in any order: never do they hold more of a group than its ceiling."""

from __future__ import annotations

import random  # noqa: TID251 - seeded: each story can be told again

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.pool.share import NodeGroup, Side
from tests.support.builders import Story, make_job, make_pod, make_settings

NODES = tuple(f"n{i}" for i in range(1, 5))
GROUPS = (
    NodeGroup(name="a", nodes="n[1-2]", kubernetes=Side(ceiling=5)),
    NodeGroup(name="b", nodes="n[3-4]", slurm=Side(floor="60%")),
)
MOST = {"a": 5, "b": 7}


def held(story):
    """GPUs that were asked of Slurm and not given back, by group, counted by the test itself."""
    found = {"a": 0, "b": 0}
    for entry in story.machine.state.book.values():
        found["a" if entry.slurm_node in ("n1", "n2") else "b"] += entry.gpus.total
    for ending in story.machine.state.ending.values():
        found["a" if ending.slurm_node in ("n1", "n2") else "b"] += ending.gpus.total
    return found


@pytest.mark.parametrize("seed", range(10))
def test_no_order_of_events_breaks_a_ceiling(seed):
    luck = random.Random(seed)
    story = Story(*NODES, settings=make_settings(groups=GROUPS)).start()
    pods, job_id, granted = {}, 100, 0
    for turn in range(250):
        match luck.randrange(7):
            case 0 | 1:
                gates = ("slurmbridge.dev/claim",) if luck.random() < 0.4 else ()
                pod = make_pod(f"p{turn}").gpus(luck.choice((1, 1, 2, 4))).but(gates=gates)
                pods[pod.obj.uid] = pod
                story.see(pod)
                if not gates:
                    story.ask(pod, luck.choice(NODES))
            case 2 | 3:
                for order in {a.uid: a for a in story.of(act.Allocate)}.values():
                    uid, node = order.uid, order.request.slurm_node
                    count = order.request.ask.gpu.count
                    taken = {i for j in story.jobs.values() for i in _on(j, node)}
                    free = [i for i in range(8) if i not in taken][:count]
                    if order.uid not in story.machine.state.book:
                        continue  # readings have shown that it was not made
                    if len(free) < count or luck.random() < 0.2:
                        story.handle(ev.AllocateRefused(uid, "busy", "no"))
                        continue
                    job_id += 1
                    granted += 1
                    story.grant(pods[uid], job_id, node, ",".join(map(str, free)))
                story.forget()
            case 4:
                running = [u for u, e in story.machine.state.book.items() if e.claim is not None]
                if running:
                    uid = luck.choice(running)
                    story.gone(pods[uid]) if luck.random() < 0.3 else story.see(pods[uid].over())
            case 5:
                for ending in list(story.machine.state.ending.values()):
                    story.slurm(without=(ending.job_id,))
                story.pass_time(luck.choice((1, 1, 2, 40)))
            case 6:
                node = luck.choice(NODES)
                job = make_job(9_000 + turn).on(node, "7")
                if 7 not in {i for j in story.jobs.values() for i in _on(j, node)}:
                    story.slurm(job).poll()
        now = held(story)
        assert all(now[g] <= MOST[g] for g in MOST), (turn, now)
        counted = {n: c.pods for n, c in story.machine.state.shares.groups.items()}
        story.machine.view()
        assert all(counted[g] <= MOST[g] for g in MOST), (turn, counted)
    assert granted > 3


def _on(job, node):
    record = getattr(job, "obj", job)
    use = (record.gpus or {}).get(node)
    return () if use is None else use.indices or ()
