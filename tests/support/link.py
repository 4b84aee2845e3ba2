"""Both ends of the link for tests: a bridge that answers as told, certificates, waiting.

Run as a script it is a bridge of its own process, to be killed or stopped:
`python -m tests.support.link ADDRESS TERM NODES`; it prints its address, then publishes a new
generation ten times a second.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

from slurmbridge import log
from slurmbridge.clock import SystemClock
from slurmbridge.link.client import LinkClient
from slurmbridge.link.message import ClaimGrant
from slurmbridge.link.server import LinkServer
from slurmbridge.link.tls import Tls
from slurmbridge.pool.errors import PeerRejected
from slurmbridge.pool.policy import Policy
from tests.support.pool_view import make_node, make_view

ROOT = Path(__file__).parents[2]
POLICY = Policy(cluster="prod")
CLOCK = SystemClock()


class Bridge:
    """A `LinkServer` with handlers that record and answer as told."""

    def __init__(self, address="127.0.0.1:0", **how):
        self.claims = []
        self.releases = []
        self.questions = []
        self.grant = ClaimGrant(job_id=4711, gpus="0-3,6", generation=8)
        self.on_claim = None
        self.server = LinkServer(
            address,
            on_claim=self._claim,
            on_release_unbound=self._release,
            queries=self._query,
            **{"clock": CLOCK} | how,
        )
        self.term = ""
        self.view = None

    @property
    def address(self):
        return self.server.address

    def lead(self, term="t1", *nodes, policy=POLICY):
        """Lead, and publish a view of this term."""
        self.server.set_leader(True, self.address, term=term)
        self.term = term
        self.publish(*(nodes or (make_node("a"), make_node("b"), make_node("c"))), policy=policy)

    def publish(self, *nodes, generation=None, policy=POLICY, **fields):
        same_term = self.view is not None and self.view.term == self.term
        generation = generation or (self.view.generation + 1 if same_term else 1)
        fields = {"as_of": CLOCK.wall(), "term": self.term} | fields
        self.view = make_view(*nodes, generation=generation, **fields)
        self.server.publish(self.view, policy)
        return self.view

    async def _claim(self, ask, deadline_s):
        self.claims.append((ask, deadline_s))
        if ask.name == "slow":
            await asyncio.sleep(30)
        if self.on_claim is not None:
            return await self.on_claim(ask)
        return self.grant

    async def _release(self, ask, deadline_s):
        self.releases.append(ask)

    async def _query(self, name, args, deadline_s):
        self.questions.append((name, args))
        if name == "nope":
            raise PeerRejected("bridge", "Query", "no such question", "unknown")
        return b'{"name": "%s"}' % name.encode()


@asynccontextmanager
async def bridges(count=1, **how):
    """Some bridges that listen; none of them leads."""
    made = [Bridge(**how) for _ in range(count)]
    try:
        for bridge in made:
            await bridge.server.start()
        yield made
    finally:
        for bridge in made:
            await bridge.server.stop()
            await bridge.server.stop()


@asynccontextmanager
async def client_of(*addresses, run=True, **how):
    """A client that runs."""
    client = LinkClient(list(addresses), **{"clock": CLOCK, "rng": lambda: 0.4} | how)
    task = asyncio.create_task(client.run()) if run else None
    try:
        yield client
    finally:
        await client.close()
        await client.close()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)


async def until(condition, timeout_s=10.0):
    """Wait until a condition holds; its value."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, "did not come true in time"
        await asyncio.sleep(0.005)
    return value


class Certificates:
    """A certificate authority in a folder, made by openssl."""

    def __init__(self, folder, name="ca"):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = folder / f"{name}.crt"
        self._key = folder / f"{name}.key"
        self._openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-days", "2", "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.ca,
        )  # fmt: skip

    def issue(self, name, *alternative, into=None, organisation=""):
        """Files of a certificate for a common name and alternative names (`DNS:x`, `IP:x`)."""
        subject = f"/CN={name}" + (f"/O={organisation}" if organisation else "")
        into = into or self.folder / name
        into.mkdir(exist_ok=True)
        request, names = into / "request.csr", into / "names.ext"
        self._openssl(
            "req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-subj", subject, "-keyout", into / "tls.key", "-out", request,
        )  # fmt: skip
        names.write_text(f"subjectAltName={','.join(alternative)}\n" if alternative else "")
        self._openssl(
            "x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key, "-CAcreateserial",
            "-days", "2", "-extfile", names, "-out", into / "tls.crt",
        )  # fmt: skip
        return Tls(cert=str(into / "tls.crt"), key=str(into / "tls.key"), ca=str(self.ca))

    @staticmethod
    def _openssl(*args):
        subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True, timeout=30)


class BridgeProcess:
    """A bridge in a process of its own."""

    def __init__(self, address="127.0.0.1:0", term="t1", nodes=3):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.link", address, term, str(nodes)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._process.stdout.readline().strip()
        assert self.address, "the bridge did not start"

    def signal(self, number):
        self._process.send_signal(number)

    def stop(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


async def _serve(address, term, nodes):
    log.configure("warning")
    bridge = Bridge(address)
    await bridge.server.start()
    names = [f"gpu-{number:05d}" for number in range(nodes)]
    bridge.lead(term, *(make_node(name) for name in names))
    print(bridge.address, flush=True)
    free = 0
    while True:
        await asyncio.sleep(0.1)
        free = (free + 1) % 9
        bridge.publish(make_node(names[0], free=free), *(make_node(name) for name in names[1:]))


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
