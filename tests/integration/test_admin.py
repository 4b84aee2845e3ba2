import asyncio
import json

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter

from slurmbridge.admin import AdminServer, Page
from slurmbridge.pool.errors import ConfigError


@pytest.fixture
async def serve():
    servers = []

    async def start(**how):
        how = {
            "live": dict,
            "ready": dict,
            "snapshot": lambda: b"{}",
            "registry": CollectorRegistry(),
        } | how
        host = how.pop("host", "127.0.0.1")
        server = AdminServer(**how)
        await server.start(host, 0)
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.stop()
        await server.stop()


async def get(server, path):
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{server.port}{path}") as reply,
    ):
        return reply.status, await reply.text(), reply.headers


async def test_health_tells_each_check_and_fails_when_one_does(serve):
    state = {"loop": "", "view": "no view yet"}
    server = await serve(live=lambda: {"loop": ""}, ready=lambda: state)
    assert (await get(server, "/livez"))[:2] == (200, "[+]loop ok\nok\n")
    assert (await get(server, "/readyz"))[:2] == (503, "[+]loop ok\n[-]view: no view yet\nfailed\n")
    state["view"] = ""
    assert (await get(server, "/readyz"))[0] == 200


async def test_a_check_that_raises_is_a_failure(serve):
    def broken():
        raise KeyError("bug")

    server = await serve(live=broken)
    status, text, _ = await get(server, "/livez")
    assert (status, text) == (500, "failed; see the log\n")


async def test_metrics_are_prometheus_text(serve):
    registry = CollectorRegistry()
    Counter("claims", "Claims granted.", registry=registry).inc(3)
    server = await serve(registry=registry)
    status, text, headers = await get(server, "/metrics")
    assert status == 200
    assert "claims_total 3.0" in text
    assert headers["Content-Type"].startswith(("text/plain", "application/openmetrics-text"))


async def test_the_snapshot_is_json_made_at_once_or_later(serve):
    async def later():
        await asyncio.sleep(0)
        return b'{"generation": 5}'

    for maker in (lambda: b'{"generation": 5}', later):
        server = await serve(snapshot=maker)
        status, text, headers = await get(server, "/debug/snapshot")
        assert (status, json.loads(text)) == (200, {"generation": 5})
        assert headers["Content-Type"].startswith("application/json")
        assert headers["Cache-Control"] == "no-store"


async def test_only_one_snapshot_is_made_at_a_time(serve):
    asked, gate = asyncio.Event(), asyncio.Event()

    async def slow():
        asked.set()
        await gate.wait()
        return b"{}"

    server = await serve(snapshot=slow)
    first = asyncio.create_task(get(server, "/debug/snapshot"))
    await asked.wait()
    status, text, _ = await get(server, "/debug/snapshot")
    gate.set()
    assert (status, text) == (503, "being made for someone else\n")
    assert (await first)[0] == 200


async def test_debug_pages_are_for_this_host_only_unless_opened(serve, monkeypatch):
    monkeypatch.setattr("slurmbridge.admin._is_local", lambda _: False)
    closed = await serve(
        pages={"/pool": lambda: Page(b"<p>", "text/html"), "/debug/x": lambda: Page(b"1")}
    )
    assert (await get(closed, "/debug/snapshot"))[0] == 403
    assert (await get(closed, "/debug/x"))[0] == 403
    assert (await get(closed, "/pool"))[:2] == (200, "<p>")
    opened = await serve(debug_remote=True)
    assert (await get(opened, "/debug/snapshot"))[0] == 200


async def test_unknown_paths_and_methods_are_refused(serve):
    server = await serve()
    assert (await get(server, "/nope"))[0] == 404
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{server.port}/livez") as reply,
    ):
        assert reply.status == 405


async def test_a_taken_port_is_a_configuration_error(serve):
    server = await serve()
    other = AdminServer(live=dict, ready=dict, snapshot=lambda: b"{}", registry=CollectorRegistry())
    with pytest.raises(ConfigError, match=str(server.port)):
        await other.start("127.0.0.1", server.port)
