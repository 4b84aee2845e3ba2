"""Pods bound per second at 5,000 nodes: stock, idle extender, reactive, planned, with waiters.

One run, one machine, one cluster: real etcd, API server, kube-scheduler and slurmctld; no kubelets.
The pods of a phase are made before it begins; its rate is taken from the first to the last Binding.

    stock      kube-scheduler alone, as it comes: it looks at a tenth of 5,000 nodes for each pod
    allnodes   alone, looking at all nodes, as our manifests have it (percentageOfNodesToScore)
    null       all nodes, with an extender that answers all names (bench/null_extender.py)
    reactive   all nodes, our extender and bridge: a real Slurm claim for each pod, made in bind
    sampled    the same, looking at a tenth of the nodes
    planned    gated pods: a real claim for each, nomination, gate off, bind
    waiters    planned, with as many gated pods more that fit nowhere

The Slurm nodes are real to slurmctld: each was registered by a real slurmd, started in batches and
ended again, but for the first, to which the pings of slurmctld to all others are passed on. A claim
has no process and asks nothing of a slurmd; only its end would, and no claim ends here.

    python bench/planned.py [--nodes N] [--pods N]

Each line tells the CPU time per pod and process; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slurmbridge.pool import keys  # noqa: E402
from slurmbridge.pool.raw import RawMeta, RawPod  # noqa: E402
from tests.support.cluster import Cluster  # noqa: E402
from tests.support.kube_objects import pod  # noqa: E402
from tests.support.product import Product  # noqa: E402
from tests.support.slurm import SlurmCluster, SlurmConfig  # noqa: E402

BATCH = 250
ALL_NODES = {"profiles": [{"schedulerName": "default-scheduler", "percentageOfNodesToScore": 100}]}
PODS = "/api/v1/namespaces/default/pods"


class Pings:
    """Passes what slurmctld says to an ended slurmd on to the first one, which lives."""

    def __init__(self) -> None:
        self.first = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def answer_for(self, port: int) -> None:
        for _ in range(50):
            start = asyncio.start_server(self._pass_on, "127.0.0.1", port)
            try:
                asyncio.run_coroutine_threadsafe(start, self._loop).result()
            except OSError:
                time.sleep(0.02)
            else:
                return
        raise RuntimeError(f"port {port} stays taken")

    async def _pass_on(self, reader: Any, writer: Any) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.first)
        await asyncio.gather(self._copy(reader, to_writer), self._copy(to_reader, writer))

    async def _copy(self, reader: Any, writer: Any) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        finally:
            writer.close()


pings = Pings()


class ThinSlurm(SlurmCluster):
    """Many nodes: each registered by its slurmd, which is ended then."""

    def start_slurmd(self, node: str) -> None:
        pings.first = self._places.first_node_port
        super().start_slurmd(node)
        self._batch = [*getattr(self, "_batch", []), node]
        if len(self._batch) >= BATCH or node == self.node_names[-1]:
            self._wait_for("a batch of nodes", self._is_registered, 120, "slurmctld")
            for name in self._batch:
                if name != self.node_names[0]:
                    self.kill9_slurmd(name)
                    pings.answer_for(self._places.first_node_port + self.node_names.index(name))
            self._batch = []

    def _is_registered(self) -> bool:
        names = f"--nodes={','.join(self._batch)}"
        text = self.run("sinfo", "-h", "-N", "-o", "%T", names, check=False)
        time.sleep(0.2)
        return text.split().count("idle") >= len(self._batch)


class Event(msgspec.Struct):
    """A watch event."""

    type: str
    object: RawPod


class PodList(msgspec.Struct):
    """A list of pods."""

    metadata: RawMeta
    items: list[RawPod]


async def bindings(
    cluster: Cluster, prefix: str, count: int, begin: Any, on_first: Any, limit_s: float
) -> list:
    """Times at which the pods of a phase were bound, after `begin` has been called.

    on_first: called at the first Binding, so that nothing that is done once counts as a pod's.
    """
    decoder = msgspec.json.Decoder(Event)
    seen: dict[str, float] = {}
    end = time.monotonic() + limit_s
    begun: asyncio.Task[Any] | None = None

    def take(body: RawPod) -> None:
        if body.spec.node_name and body.metadata.name.startswith(prefix):
            if not seen:
                on_first()
            seen.setdefault(body.metadata.name, time.monotonic())

    async with cluster.kube.session() as session, asyncio.timeout(limit_s):
        while len(seen) < count and time.monotonic() < end:
            async with session.get(PODS) as answer:
                found = msgspec.json.decode(await answer.read(), type=PodList)
            for body in found.items:
                take(body)
            params = {"watch": "1", "resourceVersion": found.metadata.resource_version}
            async with session.get(PODS, params=params, timeout=None) as stream:
                if begun is None:
                    begun = asyncio.create_task(asyncio.to_thread(begin))
                rest = b""
                while len(seen) < count and (chunk := await stream.content.readany()):
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        take(decoder.decode(line).object)
        if begun is not None:
            await begun
    return sorted(seen.values())


def measure(cluster: Cluster, prefix: str, count: int, begin: Any) -> float:
    before: dict[str, float] = {}
    was = requests_of(cluster)
    times = asyncio.run(
        bindings(cluster, prefix, count, begin, lambda: before.update(cpu_of_all()), 600)
    )
    seconds = times[-1] - times[0]
    rate = (len(times) - 1) / seconds
    asked = {k: v - was.get(k, 0) for k, v in requests_of(cluster).items() if v > was.get(k, 0)}
    top = {k: round(v / count, 2) for k, v in sorted(asked.items(), key=lambda i: -i[1])[:7]}
    used = {k: round(1000 * (v - before.get(k, 0.0)) / count, 2) for k, v in cpu_of_all().items()}
    used = {k: v for k, v in sorted(used.items(), key=lambda i: -i[1]) if v >= 0.2}
    print(f"{prefix:10} {rate:7.1f} pods/s   CPU ms/pod: {used}\n           {top}", flush=True)
    return rate


def requests_of(cluster: Cluster) -> dict[str, float]:
    """Requests to the API server so far, by verb and resource."""
    found: dict[str, float] = {}
    for line in cluster.kube.kubectl("get", "--raw", "/metrics").splitlines():
        if line.startswith("apiserver_request_total{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            name = f"{labels['verb']} {labels['resource']}/{labels['subresource']}".rstrip("/")
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


def cpu_of_all() -> dict[str, float]:
    """CPU seconds of this process and those below it by kind, ended children of each included."""
    tick = os.sysconf("SC_CLK_TCK")
    seen: dict[int, tuple[list[str], str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
            line = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        seen[int(path.parent.name)] = text.rpartition(")")[2].split(), line
    found: dict[str, float] = {}
    for pid, (fields, line) in seen.items():
        above = pid
        while above in seen and above != os.getpid():
            above = int(seen[above][0][1])
        if above != os.getpid():
            continue  # another cluster on this machine
        words = ("kube-scheduler", "kube-apiserver", " etcd", "slurmctld", "munged",
                 "null_extender", "slurmbridge run", "extender run", "bench/planned")  # fmt: skip
        for word in words:
            if word in line:
                own = sum(int(f) for f in fields[11:13]) / tick
                children = sum(int(f) for f in fields[13:15]) / tick
                found[word.strip()] = found.get(word.strip(), 0.0) + own
                if word == "slurmbridge run":
                    found["Slurm tools"] = found.get("Slurm tools", 0.0) + children
                break
    return found


def make(cluster: Cluster, prefix: str, count: int, **fields: Any) -> None:
    bodies = [pod(f"{prefix}{i}", **{"gpus": 1} | fields) for i in range(count)]
    cluster.kube.api.create_all(bodies)


def all_are_told(cluster: Cluster, prefix: str) -> bool:
    """Whether all waiting pods say why: each is written to once, and not while we measure."""
    found = [p for p in cluster.kube.api.items(PODS) if p["metadata"]["name"].startswith(prefix)]
    return all(keys.REASON in p["metadata"].get("annotations", {}) for p in found)


def all_nodes_are_told(cluster: Cluster) -> bool:
    """Whether every node says what we write on it: once for a new pool, not while we measure."""
    return all(
        keys.POOL in node["metadata"].get("annotations", {})
        and any(c["type"] == keys.SLURM_READY for c in node["status"].get("conditions", ()))
        for node in cluster.kube.api.items("/api/v1/nodes")
    )


def delete(cluster: Cluster) -> None:
    names = [p["metadata"]["name"] for p in cluster.kube.api.items(PODS)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: cluster.kube.api.delete(f"{PODS}/{n}", grace_s=0), names))


def run(nodes: int, pods: int) -> dict[str, Any]:
    config = SlurmConfig(nodes=nodes, extra=("SlurmdTimeout=0",))
    cluster = Cluster(config, scheduler=False, hollow=False)
    cluster.slurm = ThinSlurm(config)
    cluster.checker = type(cluster.checker)(cluster.slurm, cluster.kube)
    with cluster:
        print(f"{nodes} nodes are up", flush=True)
        kube = cluster.kube

        def phase(prefix: str, profile: dict[str, Any], *extenders: dict[str, Any]) -> float:
            """The rate of one scheduler; its pods were there before it."""
            make(cluster, prefix, pods)
            begin = lambda: kube.start_scheduler(profile, extenders=extenders)  # noqa: E731
            rate = measure(cluster, prefix, pods, begin)
            kube.kill9_scheduler()
            return rate

        stock = phase("stock", {})
        delete(cluster)
        all_nodes = phase("allnodes", ALL_NODES)
        delete(cluster)
        with subprocess.Popen(
            [sys.executable, str(ROOT / "bench/null_extender.py"), "0"], stdout=subprocess.PIPE
        ) as null:
            assert null.stdout is not None
            port = int(null.stdout.readline())
            extender = {
                "urlPrefix": f"http://127.0.0.1:{port}",
                "filterVerb": "filter",
                "prioritizeVerb": "prioritize",
                "weight": 1,
                "nodeCacheCapable": True,
                "httpTimeout": "30s",
            }
            try:
                null_rate = phase("null", ALL_NODES, extender)
            finally:
                null.kill()
        delete(cluster)
        with Product(cluster, start_scheduler=False) as product:
            while not all_nodes_are_told(cluster):
                time.sleep(2)
            ours = product.scheduler_config()
            assert ours["profiles"] == ALL_NODES["profiles"]
            reactive = phase("reactive", ours)
            sampled = phase(
                "sampled", ours | {"profiles": [{"schedulerName": "default-scheduler"}]}
            )
            kube.start_scheduler(ours)
            product.kill9_bridge()
            make(cluster, "planned", pods, gates=[keys.GATE])
            planned = measure(cluster, "planned", pods, product.start_bridge)
            product.kill9_bridge()
            # Asks of 16 GPUs: no node has them.
            make(cluster, "never", pods, gpus=16, gates=[keys.GATE])
            product.start_bridge()
            while not all_are_told(cluster, "never"):
                time.sleep(1)
            product.kill9_bridge()
            make(cluster, "waiters", pods, gates=[keys.GATE])
            waiters = measure(cluster, "waiters", pods, product.start_bridge)
            sample = cluster.checker.sample()
    return {
        "nodes": nodes,
        "pods": pods,
        "cores": os.cpu_count(),
        "stock_pods_per_s": round(stock, 1),
        "stock_all_nodes_pods_per_s": round(all_nodes, 1),
        "null_pods_per_s": round(null_rate, 1),
        "reactive_pods_per_s": round(reactive, 1),
        "reactive_sampled_pods_per_s": round(sampled, 1),
        "planned_pods_per_s": round(planned, 1),
        "planned_with_waiters_pods_per_s": round(waiters, 1),
        "ratio_reactive": round(reactive / stock, 2),
        "ratio_planned": round(planned / stock, 2),
        "ratio_reactive_all_nodes": round(reactive / all_nodes, 2),
        "ratio_planned_all_nodes": round(planned / all_nodes, 2),
        "ratio_with_waiters": round(waiters / planned, 2),
        "violations": len(sample.violations),
        "claims": sample.claims_running,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pods", type=int, default=1000)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.nodes, arguments.pods)))
