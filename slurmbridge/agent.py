"""The node agent as a process: wires device plugin, look, gate, audit and link.

Everything runs on one event loop; what blocks runs in threads. The agent holds nothing that it
cannot find again: claims are in the pods' annotations, devices in the kubelet, and its book is a
file. It never frees anything: it only says what is left on the node.
"""

from __future__ import annotations

import asyncio
import json
import os
import random  # noqa: TID251 - jitter of the adapters; passed in from here
import signal
import socket
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry

from slurmbridge.admin import AdminServer, Checks
from slurmbridge.clock import Clock, SystemClock
from slurmbridge.config import Config
from slurmbridge.kube.access import Access
from slurmbridge.kube.events import EventTeller, Subject
from slurmbridge.kube.reflector import Added, Change, Deleted, Modified, Reflector
from slurmbridge.kube.reflector import Listed as ListedPods
from slurmbridge.kube.session import KubeSession, resource_path
from slurmbridge.link.node_client import NodeClient
from slurmbridge.link.tls import Tls
from slurmbridge.log import get_logger
from slurmbridge.node import audit
from slurmbridge.node.alarms import Alarms
from slurmbridge.node.book import Book
from slurmbridge.node.device import DeviceMap
from slurmbridge.node.gate import Gate
from slurmbridge.node.identity import PodFacts, init_served, is_for
from slurmbridge.node.inventory import FileInventory, Inventory, read_map, stamp_of
from slurmbridge.node.kubelet import Registration
from slurmbridge.node.listing import PodResources
from slurmbridge.node.look import NodeLook, Sample, is_listed
from slurmbridge.node.mapkeeper import MapKeeper
from slurmbridge.node.metrics import NodeCollector, NodeFigures
from slurmbridge.node.native import CHECK_S, NativeJobs
from slurmbridge.node.nvml import NvmlInventory
from slurmbridge.node.plugin import DevicePlugin, Response
from slurmbridge.node.podfacts import read_facts
from slurmbridge.node.tell import CLOSED, REASONS, pod_of
from slurmbridge.pool.claim import read_comment
from slurmbridge.pool.errors import (
    ConfigError,
    PeerError,
    PeerRejected,
    PeerTimeout,
    Problem,
    SlurmBridgeError,
)
from slurmbridge.pool.noderecord import (
    NodeFinding,
    NodeGpu,
    NodeOrders,
    NodePod,
    NodeReport,
)
from slurmbridge.slurm.command import SlurmCommand
from slurmbridge.slurm.details import JobDetails
from slurmbridge.slurm.slurmdstart import slurmd_start

_log = get_logger(__name__)

GIVEN_S: Final = 5.0
"""A pod is not forgotten so soon after it was given devices, whatever the look says."""
FETCH_S: Final = 2.0
VERIFY_S: Final = 10.0
STUCK_S: Final = 60.0
LEAVE_LEAST_S: Final = 1.5
"""How long the plugin is served after SIGTERM at least: the bridge hears of it within a second."""
LEAVE_MOST_S: Final = 55.0
"""And at most (100 pods at once took 12 to 40 s on two busy cores); less than the DaemonSet's
terminationGracePeriodSeconds."""
SWITCH_S: Final = 0.0005
"""How long a thread that looks at processes may keep the loop from its turn (Python's own is ten
times that, for each look): a kubelet that is back admits its pods at once, and fails those whose
plugin is not registered yet."""


class NodePods:
    """The pods of this node by the API server: a watch, and a GET where it is behind."""

    def __init__(self, session: KubeSession, node: str, resource: str, clock: Clock) -> None:
        self._session = session
        self._resource = resource
        self._pods: dict[str, PodFacts] = {}
        self.reflector: Reflector[PodFacts] = Reflector(
            session,
            "/api/v1/pods",
            self._decode,
            clock=clock,
            uniform=random.random,
            selection={"fieldSelector": f"spec.nodeName={node}"},
            report=lambda error: _log.warning("pods cannot be watched", error=str(error)),
        )

    def known(self) -> Collection[PodFacts]:
        """All that the watch has brought."""
        return list(self._pods.values())

    async def fetch(self, namespace: str, name: str) -> PodFacts | None:
        """One pod as it is now; None: there is none. Raises PeerError."""
        path = resource_path("api", "v1", "namespaces", namespace, "pods", name)
        try:
            body = await self._session.request("GET", path, deadline_s=FETCH_S)
        except PeerRejected as error:
            if error.reason == "notfound":
                return None
            raise
        pod = self._decode(body)
        self._pods[pod.uid] = pod
        return pod

    async def take(self, change: Change[PodFacts]) -> None:
        """A change of the watch."""
        match change:
            case ListedPods(items):
                self._pods = {pod.uid: pod for pod in items}
            case Added(pod) | Modified(pod):
                self._pods[pod.uid] = pod
            case Deleted(pod):
                self._pods.pop(pod.uid, None)

    def _decode(self, body: bytes) -> PodFacts:
        return read_facts(body, self._resource)


class Agent:
    """One run of the agent.

    Args:
        config: the configuration.
        clock: the clock.

    Raises:
        ConfigError: what only the start can find out.

    """

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        self._node = config.node
        self._clock = clock
        node = config.node
        self.name = node.name or os.environ.get("NODE_NAME", "") or socket.gethostname()
        self.slurm_name = node.slurm_name or self.name
        run = Path(node.run)
        run.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._inventory: Inventory = (
            NvmlInventory() if node.devices == "nvml" else FileInventory(node.devices)
        )
        self.book = Book(str(run / "node.json"))
        self._lister = PodResources(
            f"{node.kubelet}/pod-resources/kubelet.sock", node.resource, clock
        )
        hooks = {"cgroup_root": node.cgroup_root, "monitors": [*node.monitors, "slurmbridge"]}
        command = SlurmCommand(config.slurm.conf, config.slurm.commands, concurrency=2)
        self._map = MapKeeper(
            lambda: read_map(self._inventory, node.gres_conf, self.slurm_name),
            lambda: stamp_of(node.gres_conf),
            self.book,
            lambda: slurmd_start(command, self.slurm_name),
            clock,
        )
        self.look = NodeLook(
            hooks, lambda: self._devices, self._inventory, self._lister, self.book, clock.monotonic
        )
        self._jobs = JobDetails(command)
        self._native = NativeJobs(self.book, self._jobs, self.slurm_name)
        self._sample = Sample(float("-inf"))
        self._look_s = 0.0
        self._given: dict[str, float] = {}
        self._absent: dict[str, int] = {}
        self._orders = NodeOrders()
        self._findings: tuple[NodeFinding, ...] = ()
        self._since: dict[tuple[str, str], float] = {}
        self._alarms = Alarms()
        self._closed: frozenset[int] = frozenset()
        self._report: NodeReport | None = None
        self._turned = clock.monotonic()
        self._client: NodeClient | None = None
        self._woken = asyncio.Event()
        self._leaving = False

    @property
    def _devices(self) -> DeviceMap:
        return self._map.devices

    async def run(self) -> None:
        """Run until SIGTERM or SIGINT.

        Raises:
            ConfigError: what only the start can find out.

        """
        config, node = self._config, self._node
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stop.set)
        access = Access.choose(config.kube.kubeconfig, self._clock)
        async with KubeSession(access, connections=8) as session:
            self._events = EventTeller(
                session, "slurmbridge-node", self.name, clock=self._clock, uniform=random.random
            )
            self._pods = NodePods(session, self.name, node.resource, self._clock)
            self._plugin = DevicePlugin(
                devices=lambda: self._devices,
                healthy=self._healthy,
                pods=self._pods,
                lister=self._lister,
                book=self.book,
                verify=self._verify,
                busy=self.look.busy,
                response=Response(styles=node.response, cdi_kind=node.cdi_kind),
                kind=self._config.policy.resources.get(node.resource, ""),
                clock=self._clock,
            )
            self._registration = Registration(
                f"{node.kubelet}/device-plugins",
                node.resource,
                f"{random.getrandbits(32):08x}",
                self._plugin.serve,
                lambda: self._plugin.listed,
                self._has_devices,
                self._clock,
                self._woken.set,
            )
            self._plugin.on_stream = self._registration.heard
            self._gate = Gate(
                f"{node.run}/node.sock",
                self.look,
                self.book,
                self._pods,
                self._verify,
                self._alarm,
                self._clock.monotonic,
            )
            await self._refresh_map()
            await self._gate.start()
            self._write_hooks()
            registry = CollectorRegistry()
            registry.register(NodeCollector(self._figures))
            admin = AdminServer(
                live=self._live, ready=self._ready, snapshot=self._snapshot, registry=registry
            )
            host, _, port = node.listen.rpartition(":")
            await admin.start(host, int(port))
            parts = [
                self._registration.run(),
                self._pods.reflector.run(self._take),
                self._look_on(),
                self._check_native(),
                self._events.run(),
            ]
            if node.bridge:
                self._client = self._link()
                parts.append(self._client.run())
            _log.info("agent runs", node=self.name, gpus=len(self._devices.gpus))
            tasks = [asyncio.ensure_future(part) for part in parts]
            ended = asyncio.ensure_future(stop.wait())
            try:
                done, _ = await asyncio.wait([ended, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in done - {ended}:
                    task.result()
                await self._drain()
            finally:
                for task in [ended, *tasks]:
                    task.cancel()
                await asyncio.gather(ended, *tasks, return_exceptions=True)
                await self._plugin.stop()
                self._registration.clean()
                await self._gate.stop()
                await self._lister.close()
                await admin.stop()

    async def _take(self, change: Change[PodFacts]) -> None:
        await self._pods.take(change)
        if isinstance(change, ListedPods):
            self._woken.set()  # the bridge waits for it

    async def _drain(self) -> None:
        """Leave without losing a pod: say that we go, and serve those that are on their way.

        A pod that the kubelet admits without a plugin fails for good. The bridge binds none here
        once it has heard; those bound before are admitted within a second.
        """
        self._leaving = True
        self._woken.set()
        began = self._clock.monotonic()
        _log.info("agent leaves: serves the pods that are bound already")
        while (away := self._clock.monotonic() - began) < LEAVE_MOST_S:
            waiting = [
                pod.ref
                for pod in self._pods.known()
                if pod.wants and pod.job_id and not pod.is_over and not pod.deleting
                if pod.uid not in self.book.pods
            ]
            if away > LEAVE_LEAST_S and not waiting:
                return
            await self._clock.sleep(0.1)

    # What the parts ask.

    def _healthy(self) -> list[str]:
        """UUIDs that may be given to pods."""
        closed = self._closed | set(self._orders.closed)
        return [gpu.uuid for gpu in self._devices.gpus if gpu.index not in closed]

    async def _has_devices(self) -> bool:
        """Whether the kubelet has all GPUs that we offer it."""
        return set(self._plugin.offered) <= await self._lister.allocatable()

    async def _verify(self, pod: PodFacts) -> str:
        """Whether slurmctld runs the pod's claim here: asked once a container start."""
        job_id = pod.job_id or 0
        try:
            async with asyncio.timeout(VERIFY_S):
                job = await self._jobs.job(job_id)
        except TimeoutError as error:
            text = f"no answer in {VERIFY_S:g} s"
            raise PeerTimeout("slurmctld", f"show job {job_id}", text) from error
        if job is None:
            return f"slurmctld knows no job {job_id}"
        claim = read_comment(job.comment)
        if claim is None or claim.cluster != self._config.policy.cluster:
            return f"job {job_id} is no claim of this cluster"
        if not is_for(claim, pod):
            return f"job {job_id} is the claim of another {claim.kind}"
        if job.user_id not in self._node.owner_uids:
            return f"job {job_id} is of user {job.user_id}, not of the bridge"
        if job.state.base != "RUNNING" or "COMPLETING" in job.state.flags:
            return f"job {job_id} is {job.state.base}"
        use = (job.gpus or {}).get(self.slurm_name)
        if use is None:
            return f"job {job_id} holds no GPUs on {self.slurm_name}"
        if use.indices is None:
            # Never so of GPUs that the agent has numbers of (gres.conf with File=).
            return f"slurmctld does not say which GPUs job {job_id} holds on {self.slurm_name}"
        if not set(pod.indices or ()) <= set(use.indices):
            return f"job {job_id} holds other GPUs on {self.slurm_name}"
        return ""

    def _alarm(self, job_id: int, gpus: tuple[int, ...], text: str) -> None:
        _log.error("ALARM", job=job_id, text=text)
        book = list(self.book.pods.values())
        now, since = self._clock.monotonic(), self._clock.steady()
        self._tell(self._alarms.raise_for(job_id, gpus, text, book, now, since))
        self._woken.set()

    def _link(self) -> NodeClient:
        files = self._node.tls

        def take(orders: NodeOrders) -> None:
            changed = orders.closed != self._orders.closed
            self._orders = orders
            if changed:
                self._plugin.changed()

        def lost() -> None:
            # Pods are bound and end meanwhile: what a bridge said once is no ledger any more.
            self._orders = msgspec.structs.replace(self._orders, owners=())

        return NodeClient(
            self._node.bridge,
            self.name,
            clock=self._clock,
            rng=random.random,
            tls=None if files is None else Tls(cert=files.cert, key=files.key, ca=files.client_ca),
            insecure=self._config.link.insecure,
            server_name=self._node.bridge_name,
            on_orders=take,
            on_lost=lost,
        )

    # The look.

    async def _look_on(self) -> None:
        """Look at the node, again and again, or at once when something has changed."""
        while True:
            self._woken.clear()
            try:
                await self._refresh_map()
                await self._look_once()
            except (SlurmBridgeError, OSError) as error:
                _log.warning("look failed", error=str(error))
            self._turned = self._clock.monotonic()
            try:
                async with asyncio.timeout(self._node.look_s):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def _check_native(self) -> None:
        """Native jobs by slurmctld, now and then."""
        while True:
            await self._clock.sleep(CHECK_S)
            alive = {user.job for user in self._sample.users}
            try:
                await self._native.check(self._orders.owners, alive)
            except OSError as error:
                _log.warning("the book cannot be written", error=str(error))

    async def _refresh_map(self) -> None:
        if await self._map.refresh():
            self._plugin.changed()
            if self._devices.fault:
                why = f"takes no pods: {self._devices.fault}"
                self._events.tell(self._subject, CLOSED, why, warning=True)

    @property
    def _subject(self) -> Subject:
        # A kubelet's events name their node so too, and `kubectl describe node` shows both ways.
        return Subject("Node", self.name, self.name)

    def _tell(self, finding: NodeFinding) -> None:
        """Log a finding, and write it under the node, and its pod, for `kubectl describe`."""
        _log.warning("finding", kind=finding.kind, text=finding.text)
        subjects = [self._subject]
        pod = pod_of(finding, self._pods.known())
        if pod is not None:
            subjects.append(Subject("Pod", pod.name, pod.uid, pod.namespace))
        for subject in subjects:
            self._events.tell(subject, REASONS[finding.kind], finding.text, warning=True)

    async def _look_once(self) -> None:
        after = 0 if self._client is None else self._client.acked
        sample = await self.look.sample()
        self._look_s = self._clock.monotonic() - sample.began
        self._sample = sample
        self._adopt(sample)
        await self._forget(sample)
        self._alarms.prune(self.book.pods, self._clock.monotonic())
        found = audit.find(
            audit.Facts(
                devices=self._devices,
                sample=sample,
                pods=self._pods.known(),
                book=list(self.book.pods.values()),
                native=list(self.book.native.values()),
                owners=self._orders.owners,
            )
        )
        told, self._since = audit.settle(self._clock.steady(), found, self._since)
        for finding in told:
            if finding not in self._findings:
                self._tell(finding)
        self._findings = tuple(told)
        closed = audit.closed_by(told, self._devices, self._node.quarantine)
        if closed != self._closed:
            self._closed = closed
            self._plugin.changed()
        report = self._make_report(sample)
        if self._client is not None:
            self._client.tell(report, sample.began, after, now=report != self._report)
        self._report = report

    def _adopt(self, sample: Sample) -> None:
        """Take pods into the book that have devices by the kubelet (after a lost book)."""
        if self._devices.fault:
            return  # nobody can say which GPUs these devices are
        by_ref = {pod.ref: pod for pod in self._pods.known() if not pod.is_over}
        for one in sample.listing or ():
            pod = by_ref.get(f"{one.namespace}/{one.name}")
            if pod is None or pod.uid in self.book.pods:
                continue
            # Else it would seem to wait for these as long as it lives, beside each new pod.
            served = init_served(pod, one, runs=pod.uid in sample.processes)
            if one.all_devices or served:
                indices = self._devices.indices(one.all_devices)
                self.book.adopt(pod.uid, pod.ref, pod.job_id or 0, indices, served)
                for container, ids in one.devices.items():
                    self.book.give(pod.uid, pod.ref, pod.job_id or 0, container, ids, indices)

    async def _forget(self, sample: Sample) -> None:
        """Drop pods from the book of which two looks in a row have seen nothing."""
        if not sample.is_whole:
            return
        now = self._clock.monotonic()
        for uid, entry in list(self.book.pods.items()):
            self._given.setdefault(f"{uid}/{entry.number}", now)
            if uid in sample.processes or is_listed(entry.ref, entry.grants, sample.listing or ()):
                self._absent.pop(uid, None)
                continue
            self._absent[uid] = self._absent.get(uid, 0) + 1
            young = now - self._given[f"{uid}/{entry.number}"] < GIVEN_S
            if self._absent[uid] >= 2 and not young and not await self.look.left([uid]):
                self.book.drop([uid])
        alive = {f"{e.uid}/{e.number}" for e in self.book.pods.values()}
        self._given = {k: v for k, v in self._given.items() if k in alive}
        self._absent = {k: v for k, v in self._absent.items() if k in self.book.pods}

    def _make_report(self, sample: Sample) -> NodeReport:
        closed = self._closed | set(self._orders.closed)
        refs = {pod.uid: pod for pod in self._pods.known()}
        pods: dict[str, NodePod] = {}
        for uid, entry in self.book.pods.items():
            pods[uid] = NodePod(
                uid=uid,
                ref=entry.ref,
                job_id=entry.job_id,
                gpus=tuple(sorted(entry.gpus)),
                processes=len(sample.processes.get(uid, ())),
                listed=is_listed(entry.ref, entry.grants, sample.listing or ()),
            )
        for uid, pids in sample.processes.items():
            pod = refs.get(uid)
            # Pods of a claim that the book does not know, and pods that nobody knows any more.
            if uid not in pods and (pod is None or pod.wants):
                pods[uid] = NodePod(
                    uid=uid,
                    ref="" if pod is None else pod.ref,
                    job_id=0 if pod is None else pod.job_id or 0,
                    processes=len(pids),
                )
        return NodeReport(
            slurm_node=self.slurm_name,
            # Without the pods nobody knows whose devices the kubelet asks for.
            registered=(
                self._registration.registered
                and self._pods.reflector.lists > 0
                and not self._devices.fault
                and not self._leaving
            ),
            is_whole=sample.is_whole,
            fault=self._devices.fault,
            gpus=tuple(
                NodeGpu(
                    index=g.index,
                    uuid=g.uuid,
                    minor=g.minor,
                    type=g.type,
                    fault="quarantine" if g.index in closed else "",
                    numa=g.numa,
                )
                for g in self._devices.gpus
            ),
            pods=tuple(sorted(pods.values(), key=lambda p: p.uid)),
            native=tuple(sorted(self.book.native)),
            held=tuple(sorted(self._gate.held)),
            findings=(*self._findings, *self._alarms.findings),
        )

    # What people ask.

    def _write_hooks(self) -> None:
        """The hooks' configuration, for sites that let the agent write it."""
        path = Path(self._node.run) / "hooks.json"
        part = path.with_name(f".hooks.{os.getpid()}")
        part.write_text(json.dumps(hooks_conf(self._config), indent=1), encoding="utf-8")
        part.replace(path)

    def _live(self) -> Checks:
        age = self._clock.monotonic() - self._turned
        return {"look": "" if age < STUCK_S else f"no look for {age:.0f} s"}

    def _ready(self) -> Checks:
        return {
            "registered": ""
            if self._registration.registered
            else "not registered with the kubelet",
            "map": self._devices.fault,
            "pods": "" if self._pods.reflector.lists else "pods are not listed yet",
        }

    def _snapshot(self) -> bytes:
        body = {
            "report": msgspec.to_builtins(self._report) if self._report else None,
            "held": {str(k): v for k, v in self._gate.held.items()},
            "plugin": self._plugin.counts,
            "hooks": self._gate.counts,
            "registrations": self._registration.count,
            "registerSeconds": self._registration.last_s,
            "lookSeconds": self._look_s,
            "faults": list(self._sample.faults),
        }
        return msgspec.json.encode(body)

    def _figures(self) -> NodeFigures:
        return NodeFigures(
            devices=self._devices,
            # Of those in the book only who still has a process, or was admitted a moment ago.
            pods=tuple(e for e in self.book.pods.values() if not self._absent.get(e.uid)),
            native=tuple(self.book.native.values()),
            usage=dict(self._sample.usage),
            findings=(*self._findings, *self._alarms.findings),
            registered=self._registration.registered,
            registrations=self._registration.count,
            register_s=self._registration.last_s,
            held=len(self._gate.held),
            look_age_s=self._clock.monotonic() - self._sample.began,
            look_s=self._look_s,
            link_up=self._client is not None and self._client.connected,
            plugin=dict(self._plugin.counts),
            hooks=dict(self._gate.counts),
        )


def hooks_conf(config: Config) -> dict[str, Any]:
    """hooks.json: what `slurm_script.DEFAULTS` has, as this node is configured."""
    node = config.node
    return {
        "socket": f"{node.run}/node.sock",
        "state": f"{node.run}/node.json",
        "cluster": config.policy.cluster,
        "owner_uids": list(node.owner_uids),
        "cgroup_root": node.cgroup_root,
        "monitors": list(node.monitors),
        **msgspec.structs.asdict(node.hooks),
    }


async def run(config: Config) -> None:
    """Run the agent until it is told to stop.

    Raises:
        ConfigError: the configuration cannot be used here.

    """
    sys.setswitchinterval(SWITCH_S)
    try:
        agent = Agent(config, SystemClock())
    except OSError as error:
        raise ConfigError([Problem("$.node", str(error))]) from error
    try:
        await agent.run()
    except PeerError as error:
        _log.error("agent ends", error=str(error))
        raise
