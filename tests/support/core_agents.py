"""The node agents of the model world: what they see is true, what they say may be late or lost.

An agent looks at its node and reports what runs there. A report may come late, twice, after a newer
one, or not be whole; the agent may be lost and come back. `told` is what the machine was told last,
to judge what it does by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from slurmbridge.core import event as ev
from slurmbridge.pool.noderecord import NodePod, NodeReport

if TYPE_CHECKING:
    from tests.support.core_world import World

FRESH_S = 5.0


class Told(NamedTuple):
    """What the machine knows of an agent. looked: when the look was."""

    run: int
    sequence: int
    looked: float
    registered: bool


class Look(NamedTuple):
    """A report on its way."""

    node: str
    at: float
    event: ev.AgentReported


@dataclass
class Agents:
    """All agents. acked: the moment of the newest acknowledgement that each one has."""

    runs: dict[str, int] = field(default_factory=dict)
    sequences: dict[str, int] = field(default_factory=dict)
    acked: dict[str, int] = field(default_factory=dict)
    late: list[Look] = field(default_factory=list)
    told: dict[str, Told] = field(default_factory=dict)

    def look(self, world: World, node: str, *, registered: bool, whole: bool) -> Look:
        """What an agent sees now."""
        run = self.runs.setdefault(node, 1)
        self.sequences[node] = self.sequences.get(node, 0) + 1
        pods = tuple(
            NodePod(record.uid, record.ref, gpus=gpus, processes=1)
            for record, gpus in world._running_on(node)
        )
        report = NodeReport(
            node,
            registered=registered,
            is_whole=whole and node not in world.not_ready,
            pods=pods,
        )
        event = ev.AgentReported(
            node=node,
            run=str(run),
            sequence=self.sequences[node],
            age_s=0.0,
            after=self.acked.get(node, 0),
            report=report,
        )
        return Look(node, world.now, event)

    def bring(self, world: World, look: Look, *, ack: bool = True) -> None:
        """A report comes in; `ack`: and the agent hears of it."""
        event = look.event
        old = self.told.get(look.node)
        run = int(event.run)
        if old is None or run != old.run or event.sequence > old.sequence:
            self.told[look.node] = Told(run, event.sequence, look.at, event.report.registered)
        world.hear(event, world.now - look.at)
        if ack and run == self.runs[look.node]:
            self.acked[look.node] = world.machine.state.moment

    def lose(self, world: World, node: str) -> None:
        """The agent ends; what it had sent is gone with its stream."""
        self.late = [look for look in self.late if look.node != node]
        self.runs[node] = self.runs.get(node, 1) + 1
        self.acked.pop(node, None)
        self.told.pop(node, None)
        world.hear(ev.AgentLost(node), 0.0)

    def forget(self) -> None:
        """The bridge is another one: it has acknowledged nothing."""
        self.acked.clear()
        self.told.clear()
        self.late.clear()

    def may_take(self, node: str, now: float) -> bool:
        """Whether the machine may bind a pod to a node, by what it was told."""
        told = self.told.get(node)
        return told is not None and told.registered and now - told.looked <= FRESH_S
