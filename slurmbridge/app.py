"""The bridge as a process: wires the adapters to the core.

One replica leads (Lease); the others keep the link open, to say who leads. The leader runs the
poller of slurmctld, two reflectors (pods, nodes), a ticker, and one loop that feeds all events to
the machine and publishes the view. Each term starts from nothing but what both sides tell.
"""

from __future__ import annotations

import asyncio
import os
import random  # noqa: TID251 - jitter of the adapters; passed in from here
import signal
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from slurmbridge.admin import AdminServer, Checks
from slurmbridge.carry import Carrier
from slurmbridge.clock import Clock, SystemClock
from slurmbridge.config import Config, changed_sections, check_reload, load
from slurmbridge.core import action as act
from slurmbridge.core import agents, explain
from slurmbridge.core import event as ev
from slurmbridge.core.aside import Aside
from slurmbridge.core.machine import Machine
from slurmbridge.kube.access import Access
from slurmbridge.kube.cluster import ClusterPin
from slurmbridge.kube.events import EventTeller
from slurmbridge.kube.lease import LeaderLease
from slurmbridge.kube.reflector import Added, Change, Deleted, Listed, Modified, Reflector
from slurmbridge.kube.session import KubeSession
from slurmbridge.link.freshness import make_term
from slurmbridge.link.message import ClaimAsk, ClaimGrant, NodeSaid, ReleaseAsk
from slurmbridge.link.node_server import NODES, NodeService
from slurmbridge.link.server import LinkServer
from slurmbridge.link.tls import Tls
from slurmbridge.log import get_logger
from slurmbridge.metrics import Metrics, PoolCollector
from slurmbridge.pool.claim import ClaimId
from slurmbridge.pool.errors import (
    UNREADABLE,
    ConfigError,
    CoreFault,
    PeerError,
    PeerRejected,
    PeerTimeout,
    PeerUnavailable,
)
from slurmbridge.pool.noderecord import NodeOrders
from slurmbridge.pool.podspec import read_node, read_pod
from slurmbridge.pool.raw import RawNode, RawPod
from slurmbridge.pool.record import KubeNode, PodRecord, SlurmSnapshot
from slurmbridge.slurm.claims import SlurmClaims
from slurmbridge.slurm.command import SlurmCommand
from slurmbridge.slurm.drains import NodeDrains
from slurmbridge.slurm.others import Others
from slurmbridge.slurm.poller import Pace, Poller
from slurmbridge.slurm.reader import SlurmReader

_log = get_logger(__name__)

TICK_S: Final = 0.5
CAMPAIGN_S: Final = 0.5
RELOAD_S: Final = 5.0
SWEEP_S: Final = 60.0
MOST_TOPOLOGY: Final = 16 << 20
"""Longest topology file that is looked at."""
LOOK_S: Final = 10.0
QUEUE_LOOK_S: Final = 0.25
"""Between two looks at the claims that wait in Slurm's queue: some 10 ms each, for 64 of them."""
MOST_EVENTS: Final = 200_000
BATCH: Final = 500
"""Events that are handled before the view is published and other tasks get a turn."""
PUBLISH_S: Final = 0.02
"""Shortest time between two views: one costs some 1.5 ms at 5,000 nodes in the bridge, and 0.5 in
each extender, and at 50 pods a second 120 would be due. A change after a pause goes out at once."""
STUCK_S: Final = 30.0
"""The loop has not turned for so long: the kubelet should restart us."""
_R = TypeVar("_R", PodRecord, KubeNode)
SERVICE_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Bridge:
    """One process of the bridge.

    Args:
        config: the configuration.
        path: its file, looked at every few seconds; "" for none.
        clock: the clock.

    """

    def __init__(self, config: Config, path: str, clock: Clock) -> None:
        self._config = config
        self._path = path
        self._clock = clock
        self._registry = CollectorRegistry()
        self.metrics = Metrics(self._registry)
        self._events: asyncio.Queue[ev.Event] = asyncio.Queue(MOST_EVENTS)
        self._machine: Machine | None = None
        self._waiting: dict[int, asyncio.Future[tuple[act.Reply, int]]] = {}
        self._next_op = 0
        self._turned = clock.monotonic()
        # A container that is restarted in its pod is the same holder, and leads again at once.
        self._name = f"{socket.gethostname()}_{os.environ.get('POD_UID') or uuid.uuid4().hex[:8]}"
        self._link: LinkServer | None = None
        self._pin: ClusterPin | None = None
        self._moment = 1
        self._leader = ""
        self._terms = 0
        self._aside: tuple[Aside, ...] = ()
        self._registry.register(PoolCollector(lambda: self._machine, self._events.qsize))

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises:
            ConfigError: what only the start can find out.

        """
        config = self._config
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stop.set)
        tls = config.link.tls
        service = NodeService(
            on_report=self._on_report,
            on_lost=self._on_agent_lost,
            orders=self._orders,
            leads=lambda: self._link.follows if self._link is not None else None,
            moment=lambda: self._moment,
            has_tls=tls is not None,
            organisation=NODES if config.link.node_ca else "",
        )
        self._link = LinkServer(
            config.link.listen,
            on_claim=self._on_claim,
            on_release_unbound=self._on_release,
            queries=self._on_query,
            clock=self._clock,
            tls=None
            if tls is None
            else Tls(tls.cert, tls.key, tls.client_ca, also_ca=config.link.node_ca),
            insecure=config.link.insecure,
            clients=config.link.clients,
            services=(service.handlers,),
        )
        admin = AdminServer(
            live=self._live, ready=self._ready, snapshot=self._snapshot, registry=self._registry
        )
        host, _, port = config.admin.listen.rpartition(":")
        access = Access.choose(config.kube.kubeconfig, self._clock)
        async with KubeSession(access) as session:
            self._pin = ClusterPin(session, config.kube.cluster_uid)
            await self._link.start()
            await admin.start(host.strip("[]"), int(port))
            lease = LeaderLease(
                session,
                config.kube.lease.namespace or _own_namespace(),
                config.kube.lease.name,
                self._identity(),
                clock=self._clock,
                uniform=random.random,
                duration_s=config.kube.lease.duration_s,
                renew_s=config.kube.lease.renew_s,
            )
            tasks = {
                asyncio.create_task(self._campaign(lease, session)),
                asyncio.create_task(self._name_leader(lease)),
                asyncio.create_task(stop.wait()),
            }
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._link.stop()
                await admin.stop()
            for task in done:
                task.result()

    async def _campaign(self, lease: LeaderLease, session: KubeSession) -> None:
        """Lead whenever we can. Each term begins with nothing but what both sides tell.

        A lost Lease is no reason to end: after a restart of the API server both replicas have lost
        it, and for a moment RBAC forbids everything. Bugs do end the process, but for those of the
        core that come up with one object: that is set aside, and the next term begins at once.
        """

        async def work(transitions: int) -> None:
            while True:
                self._terms += 1
                term = make_term(lease.created, transitions, self._terms, self._name)
                try:
                    await self._lead(session, term)
                except* CoreFault as faults:
                    _log.warning("the core is started anew", error=str(faults.exceptions[0]))
                await self._clock.sleep(CAMPAIGN_S)

        while True:
            try:
                await lease.lead(work)
            except PeerError as error:
                _log.error("not leading", error=str(error))
            await self._clock.sleep(CAMPAIGN_S * (1 + random.random()))  # noqa: S311 - jitter

    async def _name_leader(self, lease: LeaderLease) -> None:
        """While another replica leads, tell our clients where it is."""
        while True:
            if self._link is not None and self._machine is None:
                self._leader = lease.holder.partition("@")[2]
                self._link.set_leader(False, self._leader)
            await self._clock.sleep(TICK_S)

    def _identity(self) -> str:
        """Who we are in the Lease, with the address that clients are to use."""
        if self._config.link.advertise:
            address = self._config.link.advertise
        else:
            port = self._link.address.rpartition(":")[2] if self._link is not None else ""
            host = self._config.link.listen.rpartition(":")[0]
            ip = os.environ.get("POD_IP", "")
            if ":" in ip:
                ip = f"[{ip}]"
            address = f"{ip or host or '127.0.0.1'}:{port}"
        return f"{self._name}@{address}"

    async def _lead(self, session: KubeSession, term: str) -> None:
        """Lead until cancelled; term: name of this leadership."""
        config = self._config
        assert self._link is not None and self._pin is not None  # noqa: S101, PT018 - set in `run`
        machine = Machine(config.settings(), term=term, moment=self._moment, aside=self._aside)
        while not self._events.empty():
            self._events.get_nowait()  # of an earlier term
        # Slurm keeps the environment of whoever submits: ours is nobody's business.
        command = SlurmCommand(
            config.slurm.conf,
            config.slurm.commands,
            concurrency=config.slurm.concurrency,
            environ={"PATH": os.environ.get("PATH", os.defpath)},
        )
        reader = SlurmReader(command, clock=self._clock, timeout_s=config.slurm.poll.timeout_s)
        events = EventTeller(
            session, "slurmbridge", socket.gethostname(), clock=self._clock, uniform=random.random
        )
        claims = SlurmClaims(
            command,
            reader,
            machine.state.settings.owner_uid,
            clock=self._clock,
            boot_time=lambda: _boot_time(machine),
            others=_OthersNow(machine).but,
        )
        carrier = Carrier(
            claims,
            reader,
            NodeDrains(command),
            session,
            self._pin,
            events,
            self._emit,
            self._clock,
            self.metrics,
            lambda: dict(machine.state.settings.policy.resources),
            config.slurm.claim_timeout_s,
        )
        poll = config.slurm.poll
        poller = Poller(
            reader.snapshot,
            self._on_snapshot,
            self._on_poll_error,
            pace=Pace(budget=poll.budget, min_s=poll.min_s, max_s=poll.max_s),
            clock=self._clock,
            jitter=random.random,
        )
        outlet = _Outlet()
        self._machine = machine
        self._link.set_leader(True, term=machine.state.term)
        _log.info("leading", term=machine.state.term, cluster=config.policy.cluster)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._handle_events(machine, carrier, poller, outlet))
                group.create_task(self._publish(machine, carrier, outlet))
                group.create_task(poller.run())
                group.create_task(self._reflect_pods(session, machine))
                group.create_task(self._reflect_nodes(session, machine))
                group.create_task(events.run())
                group.create_task(self._tick())
                group.create_task(self._sweep(claims, ClaimId(config.policy.cluster, "").job_name))
                group.create_task(self._watch_config(machine))
                group.create_task(self._read_topology(command, machine))
                group.create_task(self._watch_queue(claims, machine))
        finally:
            self._machine = None
            self._link.set_leader(False)
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(PeerUnavailable("bridge", "claim", "it begins a new term"))
            await carrier.stop()
            command.close()
            _log.info("not leading any more", term=machine.state.term)

    # What comes in.

    def _emit(self, event: ev.Event) -> None:
        """Queue an event. The bound is far beyond any healthy backlog: reaching it is a bug."""
        self._events.put_nowait(event)

    def _on_snapshot(self, snapshot: SlurmSnapshot, interval_s: float) -> None:
        self.metrics.polls.labels("ok").inc()
        self.metrics.poll_cost.observe(snapshot.cost_s)
        self.metrics.poll_wall.observe(snapshot.ended - snapshot.began)
        self._emit(ev.Polled(snapshot, interval_s))

    def _on_poll_error(self, error: PeerError) -> None:
        self.metrics.polls.labels("failed").inc()
        _log.warning("slurmctld not read", error=str(error))
        self._emit(ev.PollFailed(error.text))

    async def _reflect_pods(self, session: KubeSession, machine: Machine) -> None:
        decoder = msgspec.json.Decoder(RawPod)

        def decode(raw: bytes) -> PodRecord:
            return read_pod(decoder.decode(raw), machine.state.settings.policy.resources)

        await self._reflect(
            session, "/api/v1/pods", decode, (ev.PodsListed, ev.PodChanged, ev.PodGone)
        )

    async def _reflect_nodes(self, session: KubeSession, machine: Machine) -> None:
        decoder = msgspec.json.Decoder(RawNode)

        def decode(raw: bytes) -> KubeNode:
            return read_node(decoder.decode(raw), machine.state.settings.policy.resources.keys())

        await self._reflect(
            session, "/api/v1/nodes", decode, (ev.NodesListed, ev.NodeChanged, ev.NodeGone)
        )

    async def _reflect(
        self,
        session: KubeSession,
        path: str,
        decode: Callable[[bytes], _R],
        events: tuple[
            Callable[[tuple[_R, ...]], ev.Event], Callable[[_R], ev.Event], Callable[[_R], ev.Event]
        ],
    ) -> None:
        """Turn what a reflector sees into events: (all listed, one changed, one gone)."""
        listed, changed, gone = events

        async def take(change: Change[_R]) -> None:
            match change:
                case Listed(items=items):
                    self._emit(listed(items))
                case Added(item=item) | Modified(item=item):
                    self._emit(changed(item))
                case Deleted(item=item):
                    self._emit(gone(item))

        await Reflector(
            session,
            path,
            decode,
            clock=self._clock,
            uniform=random.random,
            report=lambda error: _log.warning("watch failed", path=path, error=str(error)),
            check=None if self._pin is None else self._pin.check,
        ).run(take)

    async def _tick(self) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            self._emit(ev.Ticked())

    async def _sweep(self, claims: SlurmClaims, job_name: str) -> None:
        """End what a bridge that died in the midst of a cover has left, now and every minute."""
        while True:
            try:
                ended = await claims.sweep(job_name, SWEEP_S)
            except PeerError as error:
                _log.warning("fillers not swept", error=str(error))
            else:
                if ended:
                    _log.info("fillers swept", count=ended)
            await self._clock.sleep(SWEEP_S)

    async def _read_topology(self, command: SlurmCommand, machine: Machine) -> None:
        """What slurmctld says of its switches or blocks, and the site's own file.

        Both change with a reconfigure only.
        """
        waiting = machine.state.waiting
        while True:
            file = await asyncio.to_thread(_topology_file, self._config.pool.topology_file)
            try:
                result = await command.run(["scontrol", "show", "topology"], timeout_s=LOOK_S)
            except PeerRejected:
                text = ""
            except PeerError as error:
                _log.warning("topology not read", error=str(error))
                text = waiting.topology_text
            else:
                text = result.stdout
            said = text, file
            if not waiting.topology_told or said != (waiting.topology_text, waiting.topology_file):
                self._emit(ev.TopologyRead(text, file))
            await self._clock.sleep(SWEEP_S)

    async def _watch_queue(self, claims: SlurmClaims, machine: Machine) -> None:
        """Learn of grants within half a second: a targeted look at what waits, not a listing."""
        while True:
            await self._clock.sleep(QUEUE_LOOK_S)
            waiting = machine.queued_jobs
            if not waiting:
                continue
            try:
                jobs = await claims.look(list(waiting), LOOK_S)
            except PeerError as error:
                _log.info("queued claims not looked at", error=str(error))
                continue
            for job_id, job in jobs.items():
                if job is not None and job.state.base != "PENDING":
                    self._emit(ev.JobLooked(waiting[job_id], job_id, job))

    async def _handle_events(
        self, machine: Machine, carrier: Carrier, poller: Poller, outlet: _Outlet
    ) -> None:
        """The one loop that feeds the machine."""
        while True:
            event = await self._events.get()
            for _ in range(BATCH):
                outlet.is_fresh |= isinstance(event, ev.Polled)
                for action in self._handle(machine, event):
                    if isinstance(action, act.Reply):
                        self._reply(action, machine.state.generation + 1)
                    elif isinstance(action, act.PollNow):
                        poller.poke()
                    elif isinstance(action, act.Lift):
                        outlet.lifts.append(action)
                    else:
                        carrier.start(action)
                self._moment = machine.state.moment
                if self._events.empty():
                    break
                event = self._events.get_nowait()
            self._turned = self._clock.monotonic()
            outlet.turned.set()
            await asyncio.sleep(0)

    def _handle(self, machine: Machine, event: ev.Event) -> list[act.Action]:
        """One event, on which the whole term may end: but not for one object again and again.

        Raises:
            CoreFault: an object was set aside: begin anew without it.

        """
        now = self._clock.steady()
        try:
            return machine.handle(event, now, self._clock.wall() - now)
        except Exception as error:
            found = machine.blame(error)
            if found is None:
                raise
            self._aside = (*machine.aside, found)
            _log.exception("set aside", kind=found.kind, ref=found.ref, key=found.key)
            raise CoreFault(f"{found.kind} {found.ref} is set aside: {found.error}") from error

    async def _publish(self, machine: Machine, carrier: Carrier, outlet: _Outlet) -> None:
        """Give out views, each with all that has changed since the last."""
        assert self._link is not None  # noqa: S101 - set before the election begins
        while True:
            await outlet.turned.wait()
            outlet.turned.clear()
            if not machine.state.is_synced or not (machine.view_is_due or outlet.is_fresh):
                outlet.lift(carrier)
                continue
            outlet.is_fresh = False
            self._link.publish(machine.view(), machine.state.settings.policy)
            outlet.lift(carrier)
            await self._clock.sleep(PUBLISH_S)

    # What the agents of the nodes say.

    def _on_report(self, said: NodeSaid) -> None:
        self.metrics.reports.inc()
        if self._machine is not None:
            self._emit(
                ev.AgentReported(
                    node=said.node,
                    run=said.run,
                    sequence=said.sequence,
                    age_s=said.age_s,
                    after=said.after,
                    report=said.report,
                )
            )

    def _on_agent_lost(self, node: str) -> None:
        if self._machine is not None:
            self._emit(ev.AgentLost(node))

    def _orders(self, node: str) -> NodeOrders | None:
        return None if self._machine is None else agents.orders(self._machine.state, node)

    # What others ask.

    async def _on_claim(self, ask: ClaimAsk, deadline_s: float) -> ClaimGrant:
        machine = self._machine
        if machine is None:
            raise PeerUnavailable("bridge", "claim", "this replica does not lead")
        began = self._clock.monotonic()
        self._next_op += 1
        op = self._next_op
        future: asyncio.Future[tuple[act.Reply, int]] = asyncio.get_running_loop().create_future()
        self._waiting[op] = future
        asked = ev.ClaimAsked(op, ask.uid, ask.namespace, ask.name, ask.kube_node, ask.cause)
        self._emit(asked)
        try:
            async with asyncio.timeout(deadline_s):
                reply, generation = await future
        except TimeoutError:
            self.metrics.claims.labels("timeout").inc()
            raise PeerTimeout("bridge", "claim", "no decision within the deadline") from None
        finally:
            self._waiting.pop(op, None)
            self.metrics.claim_latency.observe(self._clock.monotonic() - began)
        self.metrics.claims.labels(reply.reason or "granted").inc()
        if reply.unavailable:
            raise PeerUnavailable("bridge", "claim", reply.text)
        if reply.reason:
            raise PeerRejected("slurmctld", "claim", reply.text, reply.reason)
        return ClaimGrant(reply.job_id, reply.gpus, generation)

    def _reply(self, reply: act.Reply, generation: int) -> None:
        """Answer an asker. generation: of the view that will show what was decided."""
        future = self._waiting.get(reply.op)
        if future is not None and not future.done():
            future.set_result((reply, generation))

    async def _on_release(self, ask: ReleaseAsk, deadline_s: float) -> None:
        del deadline_s  # nothing here waits
        self._emit(ev.UnboundReleased(ask.uid, ask.job_id))

    async def _on_query(self, name: str, args: bytes, deadline_s: float) -> bytes:
        del deadline_s  # nothing here waits
        machine = self._machine
        if machine is None:
            raise PeerUnavailable("bridge", name, "this replica does not lead")
        try:
            values = msgspec.json.decode(args or b"{}", type=dict[str, str])
        except UNREADABLE as error:
            raise PeerRejected("bridge", name, f"odd arguments: {error}", "question") from error
        answer: dict[str, Any] | None
        match name:
            case "status":
                answer = explain.status(machine.state)
            case "who":
                answer = explain.who(machine.state, values.get("node", ""))
            case "explain":
                answer = explain.explain(
                    machine.state, values.get("namespace", ""), values.get("name", "")
                )
            case "breaker":
                word = values.get("answer", "")
                if word in ("confirm", "dismiss"):
                    self._emit(ev.BreakerAnswered(word == "confirm"))
                    _log.warning("breaker answered", answer=word)
                answer = explain.breaker(machine.state)
            case _:
                raise PeerRejected("bridge", name, f"no such question: {name}", "question")
        if answer is None:
            raise PeerRejected("bridge", name, "there is no such thing in the pool", "notfound")
        return msgspec.json.encode(answer)

    # Health.

    def _live(self) -> Checks:
        turned = self._clock.monotonic() - self._turned
        stuck = self._machine is not None and turned > STUCK_S
        return {"loop": f"has not turned for {turned:.0f} s" if stuck else ""}

    def _ready(self) -> Checks:
        """A follower is ready once it can say who leads."""
        machine = self._machine
        if machine is None:
            return {"follower": "" if self._leader else "does not know who leads"}
        return {"synced": "" if machine.state.is_synced else "still reading both sides"}

    def _snapshot(self) -> bytes:
        if self._machine is None:
            return b'{"leader": false}'
        return explain.dump(self._machine.state, list(self._machine.story))

    async def _watch_config(self, machine: Machine) -> None:
        """Take a changed file if it is good; keep the old one if not."""
        if not self._path:
            return
        seen = _signature(self._path)
        while True:
            await self._clock.sleep(RELOAD_S)
            now = _signature(self._path)
            if now == seen:
                continue
            seen = now
            try:
                new = load(self._path)
                check_reload(self._config, new)
            except ConfigError as error:
                self.metrics.reloads.labels("bad").inc()
                for problem in error.problems:
                    _log.error("configuration not taken", path=problem.path, text=problem.text)
                continue
            restart = changed_sections(self._config, new)
            self._config = new
            machine.reload(new.settings())
            self._emit(ev.Ticked())
            self.metrics.reloads.labels("ok").inc()
            _log.info("configuration taken", needs_restart=restart)


def _boot_time(machine: Machine) -> float | None:
    snapshot = machine.state.snapshot
    return None if snapshot is None else snapshot.config.boot_time


class _Outlet:
    """What the loop hands to the publisher.

    turned: the loop has handled something. is_fresh: a reading among it. lifts: kube-scheduler is
    sent to a pod only after the extenders have been told of its claim.
    """

    def __init__(self) -> None:
        self.turned = asyncio.Event()
        self.is_fresh = False
        self.lifts: list[act.Lift] = []

    def lift(self, carrier: Carrier) -> None:
        lifts, self.lifts = self.lifts, []
        for action in lifts:
            carrier.start(action)


class _OthersNow:
    """All Slurm nodes but one, by the last reading."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._seen: object = None
        self._others = Others(())

    def but(self, node: str) -> str:
        snapshot = self._machine.state.snapshot
        if snapshot is None or not snapshot.config.may_exclude:
            return ""
        if self._seen is not snapshot:
            self._seen = snapshot
            if not self._others.are(snapshot.nodes.keys()):
                self._others = Others(snapshot.nodes)
        return self._others.but(node)


def _signature(path: str) -> tuple[object, ...]:
    """Changes whenever the file may have: kubelet swaps a ConfigMap by a symlink."""
    try:
        stat = Path(path).stat()
    except OSError as error:
        return (error.errno,)
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size)


def _own_namespace() -> str:
    try:
        return SERVICE_NAMESPACE.read_text(encoding="utf-8").strip()
    except OSError:
        return "default"


async def run(config: Config, path: str) -> None:
    """Run the bridge until it is told to stop."""
    await Bridge(config, path, SystemClock()).run()


def _topology_file(path: str) -> tuple[str, str] | None:
    """Path and text of the site's topology file; None: there is none, or it cannot be read."""
    if not path:
        return None
    try:
        with Path(path).open(errors="replace") as file:
            return path, file.read(MOST_TOPOLOGY)
    except OSError as error:
        _log.warning("topology file not read", path=path, error=str(error))
        return None
