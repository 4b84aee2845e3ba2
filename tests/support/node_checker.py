"""Looks at the nodes from outside: slurmctld, PodResources, containers' environment and devices.

Shares no reading code with the product. A sample asks twice what the processes are, before and
after the rest, and counts an owner only when it was there both times: what changes while it looks
is no finding.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import grpc

from slurmbridge.node._gen import podresources_pb2 as pb
from tests.support.cadence import Cadence
from tests.support.node_pool import RESOURCE, indices

if TYPE_CHECKING:
    from tests.support.node_pool import NodePool

POD = re.compile(r"/pod([0-9a-f-]{36})/")
JOB = re.compile(r"JobId=(\d+) .*?JobState=(\S+)")
USE = re.compile(r"Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=gpu\S*?\(IDX:([0-9,-]+)\)")


@dataclass(frozen=True)
class PodSeen:
    """A pod by its processes: what their environment and device nodes say."""

    uid: str
    visible: frozenset[str]
    devices: frozenset[int]


@dataclass
class NodeChecker:
    """Samples every `every_s` between `__enter__` and `__exit__`.

    wrong: pods with other devices than their claim's. overlaps: GPUs with two owners.
    claims: uid -> (node, indices), kept for pods that have ended too. tables: answers of kubelets.
    A look that fails ends the samples, and is raised at the exit.
    """

    pool: NodePool
    every_s: float = 0.1
    samples: int = 0
    wrong: list[str] = field(default_factory=list)
    overlaps: list[str] = field(default_factory=list)
    pods_seen: set[str] = field(default_factory=set)
    tables: int = 0
    cost_s: float = 0.0

    def __post_init__(self) -> None:
        self._claims: dict[str, tuple[str, frozenset[int]]] = {}
        self._stop = threading.Event()
        self._broken: Exception | None = None
        self._channels = {
            name: grpc.insecure_channel(f"unix:{node.pod_resources}")
            for name, node in self.pool.node.items()
        }

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(20)
        for channel in self._channels.values():
            channel.close()
        if self._broken is not None:
            raise RuntimeError("the checker could not look any more") from self._broken

    def _run(self) -> None:
        cadence = Cadence(self.every_s)
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self.sample()
            except subprocess.TimeoutExpired:
                pass  # slurmctld does not answer: no sample
            except Exception as error:
                self._broken = error
                return
            self.cost_s += time.monotonic() - began
            self._stop.wait(cadence.pause_s())

    def sample(self) -> None:
        """One look at everything."""
        for claim in list(self.pool.claims.values()):
            self._claims[claim.uid] = (claim.node, frozenset(claim.gpus))
        before = {name: self._pods(name) for name in self.pool.names}
        text = self.pool.slurm.run("scontrol", "show", "job", "-d", "-o", check=False)
        listed = {name: self._list(name) for name in self.pool.names}
        after = {name: self._pods(name) for name in self.pool.names}
        native = self._native(text)
        for name in self.pool.names:
            stood = {uid: pod for uid, pod in before[name].items() if uid in after[name]}
            self._check(name, stood, native, listed[name])
        self.samples += 1

    def _check(
        self,
        node: str,
        pods: dict[str, PodSeen],
        native: dict[tuple[str, int], set[str]],
        listed: list[tuple[str, frozenset[str]]],
    ) -> None:
        owners: dict[int, set[str]] = {}
        for uid, pod in pods.items():
            self.pods_seen.add(uid)
            held = pod.devices | {int(u.rpartition("-")[2]) for u in pod.visible}
            for index in held:
                owners.setdefault(index, set()).add(f"pod {uid}")
            claim = self._claims.get(uid)
            if held and (claim is None or claim[0] != node or held != claim[1]):
                self.wrong.append(f"{node}: pod {uid} has {sorted(held)}, claim {claim}")
        by_name = {c.name: c for c in list(self.pool.claims.values())}
        for name, devices in listed:
            claim = by_name.get(name)
            held = {int(u.rpartition("-")[2]) for u in devices}
            if claim is not None and held and not held <= set(claim.gpus):
                self.wrong.append(f"{node}: kubelet gives {sorted(held)} to {name}: {claim.gpus}")
        for (where, index), jobs in native.items():
            if where == node:
                owners.setdefault(index, set()).update(jobs)
        for index, names in owners.items():
            if len(names) > 1:
                self.overlaps.append(f"{node} GPU {index}: {sorted(names)}")

    def _pods(self, node: str) -> dict[str, PodSeen]:
        """Pods with a process that was given GPUs, by UID."""
        root = self.pool.node[node].cgroup_root.strip("/")
        base = Path("/sys/fs/cgroup")
        top = (base if (base / "cgroup.controllers").exists() else base / "pids") / root
        found: dict[str, PodSeen] = {}
        for folder, _, files in os.walk(top):
            match = POD.search(folder + "/")
            if match is None or "cgroup.procs" not in files:
                continue
            with contextlib.suppress(OSError):
                for pid in (Path(folder) / "cgroup.procs").read_text().split():
                    seen = self._process(match[1], pid)
                    if seen is not None:
                        found[match[1]] = seen
        return found

    @staticmethod
    def _process(uid: str, pid: str) -> PodSeen | None:
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            names = os.listdir(Path("/proc", pid, "root", "dev"))
        except OSError:
            return None
        visible = [e.partition(b"=")[2].decode() for e in environ if e.startswith(b"NVIDIA_VIS")]
        if not visible:
            return None
        devices = {int(n.removeprefix("nvidia")) for n in names if re.fullmatch(r"nvidia\d+", n)}
        return PodSeen(uid, frozenset(visible[0].split(",")), frozenset(devices))

    @staticmethod
    def _native(text: str) -> dict[tuple[str, int], set[str]]:
        """(node, index) -> running native jobs."""
        found: dict[tuple[str, int], set[str]] = {}
        for line in text.splitlines():
            match = JOB.match(line)
            if match is None or match[2] != "RUNNING" or "JobName=slurmbridge-" in line:
                continue
            for node, text_indices in USE.findall(line):
                for index in indices(text_indices):
                    found.setdefault((node, index), set()).add(f"job {match[1]}")
        return found

    def _list(self, node: str) -> list[tuple[str, frozenset[str]]]:
        listed = self._listed(self._ask(node))
        self.tables += bool(listed)
        return listed

    def _ask(self, node: str) -> grpc.CallFuture[pb.ListPodResourcesResponse]:
        """Ask a kubelet for its table, without waiting."""
        call = self._channels[node].unary_unary(
            "/v1.PodResourcesLister/List",
            pb.ListPodResourcesRequest.SerializeToString,
            pb.ListPodResourcesResponse.FromString,
        )
        return call.future(pb.ListPodResourcesRequest(), timeout=1)

    @staticmethod
    def _listed(
        asked: grpc.CallFuture[pb.ListPodResourcesResponse],
    ) -> list[tuple[str, frozenset[str]]]:
        try:
            answer = asked.result()
        except grpc.RpcError:
            return []
        return [
            (
                pod.name,
                frozenset(
                    device
                    for container in pod.containers
                    for entry in container.devices
                    if entry.resource_name == RESOURCE
                    for device in entry.device_ids
                ),
            )
            for pod in answer.pod_resources
        ]
