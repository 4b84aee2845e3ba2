"""The extender for tests: in this process beside a bridge that answers as told, or as a process."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from extender.app import Extender, Listen
from slurmbridge.clock import SystemClock
from tests.support.link import CLOCK, bridges, client_of, until

ROOT = Path(__file__).parents[2]


class Served:
    """A running extender, its bridge, and what it has posted."""

    def __init__(self, bridge, link, extender, session):
        self.bridge, self.link, self.extender, self.session = bridge, link, extender, session
        self.posted = []
        self.on_post = None
        self.asks = True

    @property
    def url(self):
        return f"http://127.0.0.1:{self.extender.server.port}"

    @property
    def admin_url(self):
        return f"http://127.0.0.1:{self.extender.admin.port}"

    async def post(self, verb, body):
        """Status and decoded body (text where it is no JSON) of one request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(f"{self.url}/{verb}", data=data) as reply:
            text = await reply.text()
        try:
            return reply.status, json.loads(text)
        except json.JSONDecodeError:
            return reply.status, text

    async def get(self, path):
        async with self.session.get(f"{self.admin_url}{path}") as reply:
            return reply.status, await reply.text()

    async def view(self, *nodes, **how):
        """Publish these nodes and wait until the extender sees them."""
        made = self.bridge.publish(*nodes, **how)
        await until(lambda: self.link.generation == made.generation)


@asynccontextmanager
async def served(*nodes, policy=None, limits=None, bounds=None, link_clock=CLOCK):
    """An extender in this process over a real link; without nodes the bridge has no view yet."""
    async with bridges() as (bridge,), client_of(bridge.address, clock=link_clock) as link:
        clock = SystemClock()

        async def post(bind, annotations, deadline_s):
            here.posted.append((bind, dict(annotations)))
            if here.on_post is not None:
                await here.on_post(bind)

        async def asks_for_gpus(bind, deadline_s):
            return here.asks

        extender = Extender(
            link, post, asks_for_gpus, clock, token="t", limits=limits, bounds=bounds
        )
        await extender.start(Listen("127.0.0.1", 0), Listen("127.0.0.1", 0))
        async with aiohttp.ClientSession() as session:
            here = Served(bridge, link, extender, session)
            if nodes:
                bridge.lead("t1", *nodes, **({"policy": policy} if policy else {}))
                await until(lambda: link.view)
            try:
                yield here
            finally:
                await extender.stop()
                await extender.stop()


class ExtenderProcess:
    """`slurmbridge-extender run` as a process; its log lines are kept."""

    def __init__(self, *args, listen="127.0.0.1:0"):
        self.lines = []
        self._ports = threading.Event()
        self.port = self.admin_port = 0
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "extender", "run", "--listen", listen),
                *("--admin-listen", "127.0.0.1:0", *map(str, args)),
            ],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ports.wait(30)
        if not self.port:
            self.kill()
            raise RuntimeError(f"the extender did not start: {self.lines[-20:]}")

    def _read(self):
        for line in self._process.stderr:
            try:
                said = json.loads(line)
            except json.JSONDecodeError:
                said = {"event": line}
            self.lines.append(said)
            if said.get("event") == "serving":
                self.port, self.admin_port = said["port"], said["admin_port"]
                self._ports.set()
        self._ports.set()

    @property
    def pid(self):
        return self._process.pid

    def events(self, name):
        return [line for line in self.lines if line.get("event") == name]

    def kill(self):
        self._process.kill()
        return self._end()

    def stop(self):
        """SIGTERM; the exit status."""
        self._process.terminate()
        return self._end()

    def _end(self):
        status = self._process.wait(15)
        self._reader.join(5)
        self._process.stderr.close()
        return status

    async def ready(self, session):
        """Wait until it says that it is ready."""

        async def asked():
            async with session.get(f"http://127.0.0.1:{self.admin_port}/readyz") as reply:
                return reply.status == 200

        async with asyncio.timeout(20):
            while not await asked():
                await asyncio.sleep(0.02)


def pod_body(gpus="1", uid="u1", resource="nvidia.com/gpu", **more):
    """A v1.Pod as kube-scheduler sends it; gpus: the quantity as JSON carries it."""
    container = {"name": "m", "resources": {"limits": {resource: gpus}, "requests": {"cpu": "1"}}}
    return {
        "metadata": {"name": f"pod-{uid}", "namespace": "team-a", "uid": uid}
        | more.pop("metadata", {}),
        "spec": {"containers": [container]} | more.pop("spec", {}),
        "status": {"phase": "Pending"},
    }


def choice(names, gpus="1", **how):
    """Body of filter and prioritize."""
    return {"Pod": pod_body(gpus, **how), "Nodes": None, "NodeNames": list(names)}


def bind_body(uid="u1", node="a"):
    """Body of bind."""
    return {"PodName": f"pod-{uid}", "PodNamespace": "team-a", "PodUID": uid, "Node": node}
