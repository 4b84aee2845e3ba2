"""The faulty wires between the product and its two peers: an HTTP proxy and a TCP proxy.

Both run in one thread with a loop of its own, so that a blocking test can use them. The API server
is behind `FaultProxy`; slurmctld's protocol is no HTTP, so its wire is a plain TCP proxy that can
delay, cut, garble, refuse or swallow connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random  # noqa: TID251 - seeded
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support.fault_proxy import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Coroutine

CHUNK = 65536


@dataclass
class SlurmWire:
    """A TCP proxy before slurmctld. `mode` is what happens to connections from now on.

    mode: pass, refuse, mute (taken, and nothing answers), delay (`seconds` before anything is
    passed), cut (half of the answer), garble (some bytes of the answer are others).
    """

    upstream: int
    luck: random.Random
    mode: str = "pass"
    seconds: float = 0.0
    port: int = 0
    connections: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            await self._carry(reader, writer, self.mode)
        except (OSError, asyncio.CancelledError):
            pass  # the other side has gone, or the test ends
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mode: str
    ) -> None:
        if mode == "refuse":
            return
        if mode == "mute":
            await asyncio.sleep(60)
            return
        if mode == "delay":
            await asyncio.sleep(self.seconds)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        try:
            asks = asyncio.create_task(self._pipe(reader, up_writer, "pass"))
            try:
                await self._pipe(up_reader, writer, mode)
            finally:
                asks.cancel()
        finally:
            up_writer.transport.abort()

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mode: str
    ) -> None:
        while data := await reader.read(CHUNK):
            if mode == "cut":
                writer.write(data[: len(data) // 2])
                await writer.drain()
                return
            writer.write(_garbled(data, self.luck) if mode == "garble" else data)
            await writer.drain()
        with contextlib.suppress(OSError):
            if writer.can_write_eof():
                writer.write_eof()
            await asyncio.sleep(0.2)


def _garbled(data: bytes, luck: random.Random) -> bytes:
    spoiled = bytearray(data)
    for _ in range(1 + len(spoiled) // 400):
        spoiled[luck.randrange(len(spoiled))] = luck.randrange(256)
    return bytes(spoiled)


class Wires:
    """Both proxies; a context manager. `api` and `slurm` may be told what to do at any time."""

    def __init__(self, api_url: str, ca_crt: Path, slurm_port: int, seed: int) -> None:
        self.api = FaultProxy(api_url, ca_crt)
        self.slurm = SlurmWire(slurm_port, random.Random(seed))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self.do(self.api.__aenter__())
        self.do(self.slurm.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.api.unmute()
        self.do(self.slurm.stop())
        self.do(self.api.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the thread of the proxies."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def call(self, function: Any, *args: Any) -> None:
        """Call a plain function there."""

        async def work() -> None:
            function(*args)

        self.do(work())

    def lead_kubeconfig(self, path: Path) -> None:
        """Let a kubeconfig of the cluster lead to the proxy; its token stays."""
        user = json.loads(path.read_text())["users"][0]["user"]
        path.write_text(self.api.kubeconfig(user["token"]))

    def lead_slurm_conf(self, path: Path) -> Path:
        """A copy of slurm.conf for clients that go through the proxy."""
        lines = path.read_text().splitlines()
        kept = [line for line in lines if not line.startswith("SlurmctldPort=")]
        copy = path.with_name("slurm.proxied.conf")
        copy.write_text("\n".join([f"SlurmctldPort={self.slurm.port}", *kept]) + "\n")
        copy.chmod(0o644)
        return copy
