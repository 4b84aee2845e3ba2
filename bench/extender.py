"""Filter and prioritize at 5,000 nodes: one real extender process against a do-nothing one.

`slurmbridge-extender run` follows a bridge's link in this process (a synthetic view of 5,000 nodes,
a new generation ten times a second, ten nodes changed in each) and is asked over keep-alive HTTP as
kube-scheduler asks: filter with all names, prioritize with what filter left. The do-nothing
extender is asked the same in turns with it, prioritize too with what *its* filter left: all names,
as kube-scheduler would.

    python bench/extender.py [--nodes N] [--pairs N] [--connections N]

Last line of the output: one JSON object. *_ms are of a filter + prioritize pair as the client sees
it; server_* of the same pair by the extender's own histogram (upper bounds); req_per_s counts HTTP
requests of all connections together (filter and prioritize each one), refused_p99_ms is a filter
that refuses all nodes, each with its reason; cpu_ms is processor time of the server per pair, which
other work on the machine changes least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slurmbridge.pool.policy import Policy  # noqa: E402
from tests.support.extender import ExtenderProcess, pod_body  # noqa: E402
from tests.support.link import CLOCK, bridges  # noqa: E402
from tests.support.pool_view import make_node, window  # noqa: E402

POLICY = Policy("bench")
KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "x",
    "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
    "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "x", "user": {"token": "none"}}],
}


def name_of(i: int) -> str:
    return f"gpu-node-{i:05d}.pool.example.internal"


def node_of(i: int, turn: int) -> Any:
    """A pool as it is: a third full, a third partly used, some drained, planned, reserved."""
    free = 0 if i % 3 == 0 else (i + turn) % 9
    return make_node(
        name_of(i),
        kind="a100",
        free=min(free, 8),
        claimed=2 if free < 8 and i % 2 else 0,
        native_jobs=int(i % 5 == 0),
        blocked="DRAIN" if i % 50 == 7 else "",
        plan_start=CLOCK.wall() + 3600 if i % 40 == 3 else None,
        windows=(window(1440, 1500, now=CLOCK.wall()),) if i % 10 == 1 else (),
    )


class Target:
    """One server, and how long it took to answer."""

    def __init__(self, port: int, pid: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._stat = Path(f"/proc/{pid}/stat")
        self.pairs: list[float] = []
        self.refused: list[float] = []

    def cpu_s(self) -> float:
        fields = self._stat.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def ask(self, session: aiohttp.ClientSession, verb: str, body: bytes) -> Any:
        async with session.post(f"{self.url}/{verb}", data=body) as reply:
            answer = await reply.read()
            assert reply.status == 200, answer
        return answer

    async def pair(self, session: aiohttp.ClientSession, body: bytes, tail: bytes) -> None:
        """filter, then prioritize with the names that are left."""
        began = time.perf_counter()
        answer = await self.ask(session, "filter", body)
        names = names_of(answer)
        assert names
        left = b'{"Pod":' + tail + b',"Nodes":null,"NodeNames":' + msgspec.json.encode(names) + b"}"
        scores = await self.ask(session, "prioritize", left)
        self.pairs.append(time.perf_counter() - began)
        assert scores.startswith(b"[{")


class Left(msgspec.Struct):
    """The names of a filter answer."""

    NodeNames: list[str] | None


def names_of(answer: bytes) -> list[str]:
    return msgspec.json.decode(answer, type=Left).NodeNames or []


def pods(count: int, gpus: str = "2") -> list[bytes]:
    """Pods, each with some of what the API server adds (env, volumes, tolerations)."""
    made = []
    for i in range(count):
        pod = pod_body(gpus, uid=f"00000000-0000-4000-8000-{i:012d}")
        pod["spec"]["containers"][0] |= {
            "image": "registry.example/train:1.2.3",
            "env": [{"name": f"VARIABLE_{k}", "value": "x" * 40} for k in range(20)],
            "volumeMounts": [{"name": "data", "mountPath": "/data"}] * 5,
        }
        pod["spec"]["tolerations"] = [{"key": "gpu", "operator": "Exists"}] * 4
        pod["spec"]["activeDeadlineSeconds"] = 1800
        made.append(msgspec.json.encode(pod))
    return made


def milliseconds(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


async def server_side(admin_port: int) -> dict[str, float]:
    """Upper bounds of p50 and p99 of each verb from the extender's histogram, milliseconds."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{admin_port}/metrics") as reply,
    ):
        text = await reply.text()
    found: dict[str, float] = {}
    pattern = r'request_seconds_bucket\{le="(\S+?)",verb="%s"\} (\S+)'
    for verb in ("filter", "prioritize"):
        buckets = [(float(a), float(b)) for a, b in re.findall(pattern % verb, text)]
        total = buckets[-1][1]
        for share in (0.5, 0.99):
            bound = next(le for le, count in buckets if count >= share * total)
            found[f"server_{verb}_p{int(100 * share)}_ms"] = round(1000 * bound, 2)
    rss = re.search(r"^process_resident_memory_bytes (\S+)", text, re.MULTILINE)
    if rss:
        found["rss_mib"] = round(float(rss[1]) / 2**20, 1)
    return found


async def throughput(target: Target, bodies: list[bytes], tails: list[bytes], many: int) -> float:
    """HTTP requests a second over `many` connections."""
    queue = list(zip(bodies, tails, strict=True))
    began = time.perf_counter()

    async def worker() -> None:
        async with aiohttp.ClientSession() as session:
            while queue:
                await target.pair(session, *queue.pop())

    count = 2 * len(queue)
    await asyncio.gather(*(worker() for _ in range(many)))
    return round(count / (time.perf_counter() - began), 1)


async def drive(extender: Target, null: Target, options: argparse.Namespace) -> dict[str, float]:
    names = msgspec.json.encode([name_of(i) for i in range(options.nodes)])

    def bodies(tails: list[bytes]) -> list[bytes]:
        return [b'{"Pod":' + t + b',"Nodes":null,"NodeNames":' + names + b"}" for t in tails]

    tails = pods(options.pairs)
    all_bodies = bodies(tails)
    hopeless = bodies(pods(50, "9"))
    async with aiohttp.ClientSession() as one, aiohttp.ClientSession() as two:
        for body, tail in list(zip(all_bodies, tails, strict=True))[:20]:
            await extender.pair(one, body, tail)
            await null.pair(two, body, tail)
        extender.pairs.clear()
        null.pairs.clear()
        for body, tail in zip(all_bodies, tails, strict=True):
            await extender.pair(one, body, tail)
            await null.pair(two, body, tail)
            await asyncio.sleep(0)
        for body in hopeless:
            began = time.perf_counter()
            answer = await extender.ask(one, "filter", body)
            extender.refused.append(time.perf_counter() - began)
            assert answer.count(b'":"slurmbridge: ') == options.nodes
    result = {
        "p50_ms": milliseconds(extender.pairs, 0.5),
        "p99_ms": milliseconds(extender.pairs, 0.99),
        "null_p50_ms": milliseconds(null.pairs, 0.5),
        "null_p99_ms": milliseconds(null.pairs, 0.99),
        "refused_p50_ms": milliseconds(extender.refused, 0.5),
        "refused_p99_ms": milliseconds(extender.refused, 0.99),
    }
    for prefix, target in (("", extender), ("null_", null)):
        before = target.cpu_s()
        rate = await throughput(target, all_bodies, tails, options.connections)
        result[f"{prefix}req_per_s"] = rate
        result[f"{prefix}cpu_ms"] = round(1000 * (target.cpu_s() - before) / len(tails), 2)
    return result


async def main(options: argparse.Namespace) -> dict[str, float]:
    async with bridges() as (bridge,):
        nodes = [node_of(i, 0) for i in range(options.nodes)]
        bridge.lead("bench", *nodes, policy=POLICY)

        async def change() -> None:
            turn = 0
            while True:
                await asyncio.sleep(0.1)
                turn += 1
                for k in range(10):
                    i = (turn * 10 + k) % options.nodes
                    nodes[i] = node_of(i, turn)
                bridge.publish(*nodes, policy=POLICY)

        with tempfile.TemporaryDirectory() as folder:
            kubeconfig = Path(folder) / "kubeconfig"
            kubeconfig.write_text(json.dumps(KUBECONFIG))
            process = await asyncio.to_thread(
                ExtenderProcess,
                *("--bridge", bridge.address, "--kubeconfig", kubeconfig),
            )
            null = subprocess.Popen(
                [sys.executable, str(ROOT / "bench" / "null_extender.py"), "0"],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert null.stdout is not None
            null_port = int(await asyncio.to_thread(null.stdout.readline))
            changing = asyncio.create_task(change())
            try:
                async with aiohttp.ClientSession() as session:
                    await process.ready(session)
                result = await drive(
                    Target(process.port, process.pid),
                    Target(null_port, null.pid),
                    options,
                )
                return result | await server_side(process.admin_port)
            finally:
                changing.cancel()
                null.kill()
                null.wait()
                null.stdout.close()
                await asyncio.to_thread(process.stop)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=4)
    print(json.dumps(asyncio.run(main(parser.parse_args()))))
