"""Two sides that change at any moment, and the promises about nodes: whose drain is whose.

The model of Slurm takes orders as the adapter gives them: a look at the node and then the order.
Operators act in between all the time; orders come late or never; the bridge is killed.
"""

from __future__ import annotations

import random  # noqa: TID251 - seeded: each story can be told again

import pytest

from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.core.nodewatch import most_silent
from slurmbridge.core.settings import NodeSync
from slurmbridge.pool.drain import NOT_READY, may_drain, may_resume, our_reason
from tests.support.builders import CLUSTER, Story, make_settings, plain

NODES = tuple(f"n{i}" for i in range(8))
SYNC = NodeSync(not_ready_s=20, resume_s=5, share=0.25, at_least=1)
DEADLINE_S = 10
OURS, THEIRS = "ours", "theirs"


class World:
    """owner: whose drain is on each Slurm node, known by who did it and not by its reason."""

    def __init__(self, luck: random.Random) -> None:
        self.luck = luck
        self.story = Story(*NODES, settings=make_settings(node_sync=SYNC)).start()
        self.owner: dict[str, str] = {}
        self.orders: list[tuple[float, act.DrainNode | act.ResumeNode]] = []

    def take(self, actions: list[act.Action]) -> None:
        for a in actions:
            if isinstance(a, act.DrainNode):
                kube = plain(self.story.kube_nodes[a.slurm_node])
                # No echo: what Slurm does or an operator does there is never the cause.
                assert kube.unschedulable or not kube.ready, a
                if a.reason.endswith(NOT_READY):
                    self._check_budget()
            if isinstance(a, (act.DrainNode, act.ResumeNode)):
                self.orders.append((self.story.now, a))
            if isinstance(a, act.ShowNode):
                node = self.story.kube_nodes[a.name]
                node.but(slurm_ready=(a.status, a.reason, a.message))
                self.take(self.story.handle(ev.NodeChanged(node.obj)))

    def _check_budget(self) -> None:
        drained = [
            n
            for n in NODES
            if self.owner.get(n) == OURS
            and our_reason(plain(self.story.nodes[n]), CLUSTER) == NOT_READY
            and not plain(self.story.kube_nodes[n]).ready
            and not plain(self.story.kube_nodes[n]).unschedulable
        ]
        # One order that was carried out late, when its cause had gone, may be on top.
        assert len(drained) <= most_silent(SYNC, len(NODES)), drained

    # What happens.

    def carry_out(self) -> None:
        if not self.orders:
            return
        asked, order = self.orders.pop(self.luck.randrange(len(self.orders)))
        # Lost on the way, or given up: each of its two steps has a deadline of 5 s.
        if self.luck.random() < 0.2 or self.story.now - asked > DEADLINE_S:
            return
        name = order.slurm_node
        node = self.story.nodes[name]
        if isinstance(order, act.DrainNode):
            if may_drain(node.obj):
                assert name not in self.owner
                self.owner[name] = OURS
                node.state("IDLE+DRAIN").but(reason=f"{order.reason} [root@now]")
        elif may_resume(node.obj, CLUSTER):
            assert self.owner[name] == OURS, f"{name}: another's drain was taken back"
            del self.owner[name]
            left = "DOWN" if node.obj.state.base == "DOWN" else "IDLE"
            node.state(left).but(reason="")

    def operator(self) -> None:
        name = self.luck.choice(NODES)
        node = self.story.nodes[name]
        match self.luck.randrange(6):
            case 0 | 1:
                node.state("IDLE+DRAIN").but(reason="bad dimm [alice@now]")
                self.owner[name] = THEIRS
            case 2:
                node.state("IDLE").but(reason="")
                self.owner.pop(name, None)
            case 3:
                node.state("DOWN").but(reason="dead [alice@now]")
                self.owner[name] = THEIRS
            case 4 if self.owner.get(name) == OURS:
                # A reboot, or a health check, adds to the reason: it is not ours any more.
                node.but(reason=node.obj.reason + " : Reboot ASAP")
                self.owner[name] = THEIRS
            case 5:
                # Another cluster's bridge.
                if may_drain(node.obj):
                    text = f"slurmbridge: cluster red: node {name} is cordoned [root@now]"
                    node.state("IDLE+DRAIN").but(reason=text)
                    self.owner[name] = THEIRS

    def kubernetes(self) -> None:
        name = self.luck.choice(NODES)
        node = self.story.kube_nodes[name]
        match self.luck.randrange(5):
            case 0:
                node.but(unschedulable=not node.obj.unschedulable)
            case 1 | 2:
                ready = not node.obj.ready
                node.but(ready=ready, ready_changed=self.story.now)
            case 3:
                self.take(self.story.handle(ev.NodeGone(node.obj)))
        self.take(self.story.handle(ev.NodeChanged(node.obj)))

    def outage(self) -> None:
        """All kubelets fall silent, one after the other."""
        for name in NODES:
            node = self.story.kube_nodes[name].but(ready=False, ready_changed=self.story.now)
            self.take(self.story.handle(ev.NodeChanged(node.obj)))
            self.wait(1)

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.story.now += 1
            if self.luck.random() < 0.8:
                self.take(self.story.poll())
            self.take(self.story.tick())

    def kill(self) -> None:
        self.orders.clear()
        self.take(self.story.again().poll())

    def settle(self) -> None:
        """No more bad luck; every node is well in Kubernetes."""
        for node in self.story.kube_nodes.values():
            node.but(ready=True, unschedulable=False)
            self.take(self.story.handle(ev.NodeChanged(node.obj)))
        self.luck.random = lambda: 0.5
        theirs = {n for n, who in self.owner.items() if who == THEIRS}
        for _ in range(2200):
            self.wait(1)
            while self.orders:
                self.carry_out()
        assert self.owner == dict.fromkeys(theirs, THEIRS)
        for name in theirs:
            assert our_reason(plain(self.story.nodes[name]), CLUSTER) == ""


@pytest.mark.parametrize("seed", range(12))
def test_no_drain_of_another_is_touched_none_echoes_and_none_of_ours_stays(seed):
    luck = random.Random(seed)
    world = World(luck)
    for _ in range(400):
        step = luck.choice(
            (world.carry_out, world.carry_out, world.operator, world.kubernetes, world.kill)
            if luck.random() < 0.6
            else (lambda: world.wait(luck.choice((1, 1, 3, 12, 25))),)
        )
        if luck.random() < 0.01:
            world.outage()
        step()
    world.settle()


def test_a_cordon_is_carried_over_whatever_happened_before():
    world = World(random.Random(99))
    for _ in range(100):
        world.kubernetes()
        world.operator()
        world.wait(2)
    for name in NODES:
        node = world.story.kube_nodes[name].but(ready=True, unschedulable=True)
        world.take(world.story.handle(ev.NodeChanged(node.obj)))
    for _ in range(100):
        world.wait(1)
        while world.orders:
            world.carry_out()
    for name in NODES:
        state = plain(world.story.nodes[name]).state
        assert "DRAIN" in state.flags or state.base == "DOWN", name
