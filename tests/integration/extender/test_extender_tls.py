"""The extender's port with TLS: who may come, and certificates that change under it."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys

import aiohttp
import pytest
from aiohttp import web

from extender.tls import TlsFiles, server_context
from slurmbridge.pool.errors import ConfigError
from tests.support.link import Certificates


@pytest.fixture
async def serve():
    runners = []

    async def start(context):
        async def hello(_):
            return web.Response(text="hello")

        app = web.Application()
        app.router.add_get("/", hello)
        runner = web.AppRunner(app)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        return runner.addresses[0][1]

    yield start
    for runner in runners:
        await runner.cleanup()


def files_in(folder, tls, client_ca=None):
    """Copies under fixed names, as a mounted Secret has them."""
    folder.mkdir(exist_ok=True)
    for source, name in ((tls.cert, "tls.crt"), (tls.key, "tls.key"), (client_ca, "ca.crt")):
        if source is not None:
            fresh = folder / f"{name}.new"
            shutil.copy(source, fresh)
            fresh.rename(folder / name)
    ca = str(folder / "ca.crt") if client_ca is not None else ""
    return TlsFiles(str(folder / "tls.crt"), str(folder / "tls.key"), ca)


async def get(port, trusted, shown=None):
    """What a client sees that trusts one CA and shows one certificate; None: it is refused."""
    context = ssl.create_default_context(cafile=str(trusted.ca))
    if shown is not None:
        context.load_cert_chain(shown.cert, shown.key)
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(f"https://127.0.0.1:{port}/", ssl=context) as reply:
                return await reply.text()
        except (aiohttp.ClientError, ssl.SSLError, ConnectionError):
            return None


async def test_only_certificates_of_the_clients_authority_may_come(serve, tmp_path):
    ours, theirs, strangers = (Certificates(tmp_path / n, n) for n in ("us", "sched", "x"))
    server = ours.issue("extender", "IP:127.0.0.1")
    port = await serve(server_context(files_in(tmp_path / "mount", server, theirs.ca)))
    assert "hello" == await get(port, ours, theirs.issue("scheduler"))
    assert None is await get(port, ours)
    assert None is await get(port, ours, strangers.issue("scheduler"))
    assert None is await get(port, strangers, theirs.issue("scheduler"))


async def test_without_a_client_authority_anyone_may_come(serve, tmp_path):
    ours = Certificates(tmp_path / "us")
    port = await serve(
        server_context(files_in(tmp_path / "mount", ours.issue("e", "IP:127.0.0.1")))
    )
    assert "hello" == await get(port, ours)


async def test_new_certificates_and_authorities_hold_from_the_next_handshake(serve, tmp_path):
    old, new = Certificates(tmp_path / "old", "old"), Certificates(tmp_path / "new", "new")
    mount = tmp_path / "mount"
    port = await serve(
        server_context(files_in(mount, old.issue("extender", "IP:127.0.0.1"), old.ca))
    )
    assert "hello" == await get(port, old, old.issue("scheduler"))
    files_in(mount, new.issue("extender", "IP:127.0.0.1"), new.ca)
    assert "hello" == await get(port, new, new.issue("scheduler"))
    assert None is await get(port, old, new.issue("scheduler")), "the old certificate is gone"
    assert None is await get(port, new, old.issue("scheduler")), "the old authority is gone"


async def test_new_files_that_do_not_fit_together_are_not_taken(serve, tmp_path):
    old, new = Certificates(tmp_path / "old", "old"), Certificates(tmp_path / "new", "new")
    mount = tmp_path / "mount"
    port = await serve(
        server_context(files_in(mount, old.issue("extender", "IP:127.0.0.1"), old.ca))
    )
    shutil.copy(new.issue("extender", "IP:127.0.0.1").key, mount / "tls.key")
    assert "hello" == await get(port, old, old.issue("scheduler"))
    (mount / "tls.key").unlink()
    assert "hello" == await get(port, old, old.issue("scheduler"))
    files_in(mount, new.issue("extender", "IP:127.0.0.1"), new.ca)
    assert "hello" == await get(port, new, new.issue("scheduler"))


def test_files_that_cannot_be_used_at_the_start_are_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError):
        server_context(TlsFiles("/nowhere", "/nowhere"))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--listen", "0.0.0.0:0"], "--listen"),
        (["--listen", "127.0.0.1"], "--listen"),
        (["--listen", "unix:/tmp/x"], "--listen"),
        (["--admin-listen", "x:y:z"], "--admin-listen"),
        (["--tls-cert", "/nowhere"], "--tls-cert"),
        (["--tls-client-ca", "/nowhere"], "--tls-client-ca"),
        (["--bridge-tls-ca", "/nowhere"], "--bridge-tls-cert"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_plain_text_over_a_network_and_half_a_configuration_are_refused(args, said):
    # A process of its own: gRPC does not outlive the event loop that it met first.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "extender", "run", "--bridge", "127.0.0.1:1"),
            *("--kubeconfig", "/nowhere", *args),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 2 == done.returncode
    assert f"slurmbridge-extender: {said}: " in done.stderr
