"""The faults of a chaos run. Each is done to one target for some seconds, and then healed.

Only one fault at a time is done to a target, so that each can be healed; several targets may be in
trouble at once.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.chaos.bag import Bag
from tests.support.chaos.load import LOST
from tests.support.fault_proxy import Answer, Cut, Delay, Insert, LoseAnswer, status_body
from tests.support.keeper import KeeperError
from tests.support.kube import KubeProblem
from tests.support.node import NodeProblem
from tests.support.slurm import SlurmError

if TYPE_CHECKING:
    import random  # noqa: TID251 - passed in
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.chaos.ground import Ground, Part
    from tests.support.chaos.judge import Causes
    from tests.support.chaos.wires import Wires
    from tests.support.product import Product

AWAY = (*LOST, KeeperError, KubeProblem, NodeProblem)
"""What a fault ends with whose target, or a peer of it, is in trouble already."""
PERSON_S = 10.0
"""So often a person looks at nodes that a hook has drained, and services that ended are restarted."""
API_WAYS = ("delay", "cut", "garble", "404", "500", "lost", "mute", "reset")
SLURM_WAYS = ("delay", "cut", "garble", "refuse", "mute")
SLOW_S = 16.0
"""An answer of slurmctld that was seen at a site (sinfo, under 90 RPCs a second)."""


@dataclass
class Active:
    """A fault that is being done, and how it is undone."""

    kind: str
    target: str
    until: float
    heal: Callable[[], object]


@dataclass
class Faults:
    """Does faults by luck: `turn` heals what is over and perhaps does another.

    Every kind comes round: in ten minutes about five times, faulty wires more often.

    at_once: targets in trouble at a time. pause_s: about so long nothing new is done.
    """

    product: Product
    ground: Ground
    wires: Wires
    causes: Causes
    clocks: Path
    luck: random.Random
    at_once: int = 2
    pause_s: float = 5.0
    done: Counter[str] = field(default_factory=Counter)
    active: dict[str, Active] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._next = time.monotonic() + self.pause_s
        self._next_care = time.monotonic() + PERSON_S
        self._kinds: dict[str, Callable[[str], None]] = {
            "kill bridge": self._kill_bridge,
            "pause bridge": self._pause_bridge,
            "kill extender": self._kill_extender,
            "pause extender": self._pause_extender,
            "kill slurmctld": self._kill_slurmctld,
            "pause slurmctld": self._pause_slurmctld,
            "kill API server": self._kill_api,
            "pause API server": self._pause_api,
            "kill slurmd": self._kill_slurmd,
            "pause slurmd": self._pause_slurmd,
            "faulty wire to API server": self._api_wire,
            "faulty wire to slurmctld": self._slurm_wire,
            "clock step": self._clock,
            "scancel of a claim": self._scancel,
            "node down": self._node_down,
        }
        self._parts = self.ground.parts()
        for kind in sorted({part.kind for part in self._parts}):
            self._kinds[f"kill {kind}"] = self._kill_part
            self._kinds[f"pause {kind}"] = self._pause_part
        ways = 2 * ["faulty wire to API server"] + ["faulty wire to slurmctld"]
        self._next_kind = Bag([*self._kinds, *ways], self.luck)
        self._api_way, self._slurm_way = Bag(API_WAYS, self.luck), Bag(SLURM_WAYS, self.luck)

    @property
    def not_done(self) -> list[str]:
        """Kinds that have not come round yet; those of a wire are counted with what it does."""
        ways = {"API server": API_WAYS, "slurmctld": SLURM_WAYS}
        kinds = [kind for kind in self._kinds if "wire" not in kind]
        kinds += [f"faulty wire to {to}: {way}" for to, all_ in ways.items() for way in all_]
        return [kind for kind in kinds if not self.done[kind]]

    def turn(self) -> None:
        """Heal what is over; perhaps do one fault."""
        now = time.monotonic()
        for fault in [f for f in self.active.values() if now >= f.until]:
            self._heal(fault)
        if now >= self._next_care:
            self._next_care = now + PERSON_S
            self.care()
        if now < self._next or len(self.active) >= self.at_once:
            return
        self._next = now + self.luck.uniform(0.3, 1.7) * self.pause_s
        kind, before = self._next_kind.draw(), self._count()
        self.do(kind)
        if self._count() == before:
            self._next_kind.put_back(kind)

    def do(self, kind: str) -> None:
        """One fault of a kind, if its target is not in trouble already."""
        try:
            self._kinds[kind](kind)
        except AWAY:
            self.done["not done"] += 1

    def _count(self) -> int:
        return self.done.total() - self.done["not done"]

    def care(self) -> None:
        """What is done at every site: services are restarted, nodes that need it are resumed."""
        for part in self._parts:
            if part.target not in self.active and part.poll() is not None:
                with contextlib.suppress(*AWAY):
                    part.start()
                    self.done[f"{part.kind} ended and was restarted"] += 1
        ours = {f"bridge-{i}": self.product.start_bridge for i in range(self.product.bridges)}
        ours |= {
            f"extender-{i}": self.product.start_extender for i in range(self.product.extenders)
        }
        for name, start in ours.items():
            # A bridge whose last term does not end exits, and its Deployment starts it again.
            if name not in self.active and self.ground.kube.poll(name) is not None:
                with contextlib.suppress(*AWAY):
                    start(int(name.rpartition("-")[2]))
                    self.done[f"{name.partition('-')[0]} ended and was restarted"] += 1
        try:
            self._resume()
        except AWAY:
            return

    def _resume(self) -> None:
        """A person takes back what only a person may (docs/node-agent.md)."""
        slurm = self.ground.slurm
        for line in slurm.run("sinfo", "-h", "-N", "-o", "%N|%T|%E", timeout_s=5).splitlines():
            node, state, reason = line.split("|", 2)
            away = any(word in state for word in ("drain", "down"))
            if away and node not in self.active and "Not responding" not in reason:
                if "down" in state:
                    self.causes.taken_down[node] = time.monotonic()
                slurm.run(
                    *("scontrol", "update", f"nodename={node}", "state=resume"),
                    check=False,
                    timeout_s=5,
                )
                print(f"[care] {node} was {state}: {reason}", flush=True)
                self.done["node resumed by hand"] += 1

    def heal_all(self) -> None:
        """No more trouble."""
        for fault in list(self.active.values()):
            self._heal(fault)

    def _heal(self, fault: Active) -> None:
        try:
            fault.heal()
        except AWAY:
            fault.until = time.monotonic() + 1  # its peer is in trouble too: once more, later
            return
        del self.active[fault.target]

    def _begin(
        self, kind: str, target: str, seconds: tuple[float, float], heal: Callable[[], object]
    ) -> None:
        until = time.monotonic() + self.luck.uniform(*seconds)
        self.active[target] = Active(kind, target, until, heal)
        self.done[kind] += 1

    # Processes

    def _kill_bridge(self, kind: str) -> None:
        i = self.luck.randrange(self.product.bridges)
        if (target := f"bridge-{i}") not in self.active:
            self.product.kill9_bridge(i)
            self._begin(kind, target, (0, 8), lambda: self.product.start_bridge(i))

    def _kill_extender(self, kind: str) -> None:
        i = self.luck.randrange(self.product.extenders)
        if (target := f"extender-{i}") not in self.active:
            self.product.kill9_extender(i)
            self._begin(kind, target, (0, 5), lambda: self.product.start_extender(i))

    def _pause_bridge(self, kind: str) -> None:
        self._pause(kind, f"bridge-{self.luck.randrange(self.product.bridges)}")

    def _pause_extender(self, kind: str) -> None:
        self._pause(kind, f"extender-{self.luck.randrange(self.product.extenders)}")

    def _pause(self, kind: str, target: str) -> None:
        """Longer than a Lease lasts, so that whoever wakes up has been replaced meanwhile."""
        if target not in self.active:
            kube = self.ground.kube
            kube.send(target, signal.SIGSTOP)
            self._begin(kind, target, (1, 14), lambda: kube.send(target, signal.SIGCONT))

    def _kill_slurmctld(self, kind: str) -> None:
        slurm = self.ground.slurm
        if "slurmctld" not in self.active:
            self.causes.crashes.append(time.monotonic())
            slurm.kill9_slurmctld()
            self._begin(kind, "slurmctld", (0.2, 6), lambda: slurm.start_slurmctld(wait=False))

    def _pause_slurmctld(self, kind: str) -> None:
        slurm = self.ground.slurm
        if "slurmctld" not in self.active:
            slurm.pause_slurmctld()
            self._begin(kind, "slurmctld", (1, 12), slurm.resume_slurmctld)

    def _kill_api(self, kind: str) -> None:
        kube = self.ground.kube
        if "api" not in self.active:
            kube.kill9_api()
            self._begin(kind, "api", (0.2, 5), lambda: kube.start_api(wait=False))

    def _pause_api(self, kind: str) -> None:
        kube = self.ground.kube
        if "api" not in self.active:
            kube.pause_api()
            self._begin(kind, "api", (1, 8), kube.resume_api)

    def _kill_slurmd(self, kind: str) -> None:
        slurm = self.ground.slurm
        if (node := self.luck.choice(slurm.node_names)) not in self.active:
            slurm.kill9_slurmd(node)
            self._begin(kind, node, (1, 10), lambda: slurm.start_slurmd(node))

    def _pause_slurmd(self, kind: str) -> None:
        slurm = self.ground.slurm
        if (node := self.luck.choice(slurm.node_names)) not in self.active:
            slurm.pause_slurmd(node)
            self._begin(kind, node, (1, 10), lambda: slurm.resume_slurmd(node))

    def _part(self, kind: str) -> Part | None:
        """One of the parts of a kind, None when it is in trouble already."""
        wanted = kind.partition(" ")[2]
        part = self.luck.choice([part for part in self._parts if part.kind == wanted])
        return None if part.target in self.active else part

    def _kill_part(self, kind: str) -> None:
        if (part := self._part(kind)) is not None:
            part.kill()
            self._begin(kind, part.target, (0, 8), part.start)

    def _pause_part(self, kind: str) -> None:
        if (part := self._part(kind)) is not None:
            part.send(signal.SIGSTOP)
            self._begin(kind, part.target, (1, 10), lambda: part.send(signal.SIGCONT))

    # Wires

    def _api_wire(self, kind: str) -> None:
        """Between the product and the API server: delayed, cut, garbled, 404, 500, lost, silent."""
        if "api wire" in self.active:
            return
        proxy, luck = self.wires.api, self.luck
        share = luck.choice((0.05, 0.2, 0.6))
        some = luck.randbytes(64)
        way = self._api_way.draw()
        fault = {
            "delay": Delay(luck.uniform(0.2, 6)),
            "cut": Cut(after_lines=0, torn=True),
            "garble": Insert(some),
            "404": Answer(404, status_body(404, "NotFound")),
            "500": Answer(500, b"upstream connect error"),
            "lost": LoseAnswer(),
        }
        if way == "mute":
            self.wires.call(proxy.mute)
        elif way == "reset":
            self.wires.call(proxy.drop_all)
        else:
            self.wires.call(
                lambda: proxy.add(fault[way], when=lambda _: luck.random() < share, times=1e9)
            )

        def heal() -> None:
            self.wires.call(proxy.clear)
            self.wires.call(proxy.unmute)

        self._begin(f"{kind}: {way}", "api wire", (2, 10), heal)

    def _slurm_wire(self, kind: str) -> None:
        """Between the product and slurmctld: slow (to 16 s), cut, garbled, refused, silent."""
        if "slurm wire" in self.active:
            return
        wire = self.wires.slurm
        wire.seconds = self.luck.choice((0.3, 2.0, SLOW_S))
        wire.mode = self._slurm_way.draw()

        def heal() -> None:
            wire.mode = "pass"

        seconds = (10.0, 20.0) if wire.mode == "delay" else (2.0, 10.0)
        self._begin(f"{kind}: {wire.mode}", "slurm wire", seconds, heal)

    # Clocks, Slurm's own ends

    def _clock(self, kind: str) -> None:
        agents = [
            part.target.removeprefix("agent-") for part in self._parts if part.kind == "agent"
        ]
        who = self.luck.choice([*map(str, range(self.product.bridges)), *agents])
        path = self.clocks / who
        if (target := f"clock-{who}") not in self.active:
            path.write_text(str(self.luck.choice((-86400, -3600, -40, 40, 3600, 86400))))
            self._begin(kind, target, (3, 20), lambda: path.write_text("0"))

    def _scancel(self, kind: str) -> None:
        """Somebody cancels a claim."""
        slurm = self.ground.slurm
        name = f"--name=slurmbridge-{self.ground.cluster_id}"
        argv = ("squeue", "-h", "-t", "R", name, "-o", "%A")
        jobs = slurm.run(*argv, timeout_s=5).split()
        if jobs:
            job = self.luck.choice(jobs)
            self.causes.cancelled.add(int(job))
            slurm.run("scancel", job, timeout_s=5)
            self.done[kind] += 1

    def _node_down(self, kind: str) -> None:
        slurm = self.ground.slurm
        if (node := self.luck.choice(slurm.node_names)) in self.active:
            return
        self.causes.taken_down[node] = time.monotonic()
        update = ("scontrol", "update", f"nodename={node}")
        slurm.run(*update, "state=down", "reason=chaos", timeout_s=5)

        def heal() -> None:
            self.causes.taken_down[node] = time.monotonic()
            # Refused where it has come back by itself, with the registration of its slurmd.
            slurm.run(*update, "state=resume", check=False, timeout_s=5)
            state = slurm.run("sinfo", "-h", "-n", node, "-o", "%T", timeout_s=5)
            if "down" in state or not state:
                raise SlurmError(f"{node} is still {state}")

        self._begin(kind, node, (2, 8), heal)
