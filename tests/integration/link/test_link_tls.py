"""Mutual TLS with certificates made by openssl at test time."""

import asyncio
import os
import subprocess
import time
from pathlib import Path

import grpc
import grpc.aio
import pytest

from slurmbridge.link._gen import pool_pb2 as pb
from slurmbridge.link.server import SERVICE
from slurmbridge.link.tls import Tls
from slurmbridge.pool.errors import ConfigError
from tests.support.link import Certificates, bridges, client_of, until
from tests.support.pool_view import make_node

NAME = "slurmbridge.slurmbridge.svc"


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def server_tls(ours):
    return ours.issue("server", f"DNS:{NAME}", "IP:127.0.0.1")


@pytest.fixture(scope="module")
def client_tls(ours):
    return ours.issue("extender", "DNS:extender.slurmbridge.svc")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("theirs"))


async def never_connects(client, bridge):
    """After several tries of the client there is no stream."""
    await until(lambda: bridge.server.watchers == 0)
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        assert client.leader == ""
        assert bridge.server.watchers == 0
        await asyncio.sleep(0.05)


async def test_both_sides_with_certificates_of_the_same_ca_connect(server_tls, client_tls):
    async with bridges(tls=server_tls) as (bridge,):
        bridge.lead()
        for how in ({}, {"server_name": NAME}):
            async with client_of(bridge.address, tls=client_tls, **how) as client:
                await until(lambda c=client: c.view)


async def test_a_client_of_another_ca_is_refused(server_tls, theirs, ours):
    stranger = theirs.issue("stranger")
    trusting = Tls(cert=stranger.cert, key=stranger.key, ca=str(ours.ca))
    async with bridges(tls=server_tls) as (bridge,):
        bridge.lead()
        async with client_of(bridge.address, tls=trusting) as client:
            await never_connects(client, bridge)


async def test_a_server_of_another_ca_is_refused(client_tls, theirs, ours):
    false = theirs.issue("false", f"DNS:{NAME}", "IP:127.0.0.1")
    async with bridges(tls=Tls(cert=false.cert, key=false.key, ca=str(ours.ca))) as (bridge,):
        bridge.lead()
        async with client_of(bridge.address, tls=client_tls) as client:
            await never_connects(client, bridge)


async def test_a_server_with_another_name_is_refused(server_tls, client_tls):
    async with bridges(tls=server_tls) as (bridge,):
        bridge.lead()
        async with client_of(bridge.address, tls=client_tls, server_name="other.svc") as client:
            await never_connects(client, bridge)


async def test_a_client_in_plain_text_is_refused(server_tls):
    async with bridges(tls=server_tls) as (bridge,):
        bridge.lead()
        async with client_of(bridge.address) as client:
            await never_connects(client, bridge)


async def test_a_client_without_a_certificate_is_refused(server_tls, ours):
    credentials = grpc.ssl_channel_credentials(ours.ca.read_bytes())
    async with (
        bridges(tls=server_tls) as (bridge,),
        grpc.aio.secure_channel(bridge.address, credentials) as channel,
    ):
        bridge.lead()
        call = channel.unary_unary(f"/{SERVICE}/Query", pb.QueryRequest.SerializeToString)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(pb.QueryRequest(name="status"), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert bridge.questions == []


async def test_only_named_clients_are_let_in_when_names_are_asked_for(server_tls, client_tls, ours):
    other = ours.issue("kubelet", "DNS:kubelet.other.svc")
    async with bridges(tls=server_tls, clients=("*.slurmbridge.svc",)) as (bridge,):
        bridge.lead()
        async with client_of(bridge.address, tls=client_tls) as client:
            await until(lambda: client.view)
        async with client_of(bridge.address, tls=other) as client:
            await never_connects(client, bridge)


async def test_the_leader_behind_a_hint_is_checked_by_the_name_of_the_service(ours, client_tls):
    named = ours.issue("named", f"DNS:{NAME}")
    async with bridges(2, tls=named) as (follower, leader):
        follower.server.set_leader(False, leader.address)
        leader.lead()
        async with client_of(follower.address, tls=client_tls, server_name=NAME) as client:
            await until(lambda: client.view)
            assert client.leader == leader.address


def serial_shown(address, tls):
    """Serial number of the certificate that the server shows now."""
    host, port = address.split(":")
    shown = subprocess.run(
        ["openssl", "s_client", "-connect", f"{host}:{port}", "-CAfile", tls.ca,
         "-cert", tls.cert, "-key", tls.key, "-alpn", "h2"],
        check=False, input=b"", capture_output=True, timeout=10,
    )  # fmt: skip
    pem = shown.stdout[shown.stdout.index(b"-----BEGIN") :].split(b"-----END CERTIFICATE-----")[0]
    text = (pem + b"-----END CERTIFICATE-----\n").decode()
    return subprocess.run(
        ["openssl", "x509", "-noout", "-serial"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


async def in_thread(function, *args):
    return await asyncio.to_thread(function, *args)


async def test_new_files_are_used_for_new_connections_and_old_streams_stay(
    ours, client_tls, tmp_path
):
    tls = ours.issue("server", f"DNS:{NAME}", "IP:127.0.0.1", into=tmp_path)
    async with bridges(tls=tls) as (bridge,):
        bridge.lead()
        async with client_of(bridge.address, tls=client_tls) as client:
            await until(lambda: client.view)
            first = await in_thread(serial_shown, bridge.address, client_tls)
            ours.issue("server", f"DNS:{NAME}", "IP:127.0.0.1", into=tmp_path)
            second = await in_thread(serial_shown, bridge.address, client_tls)
            assert first != second
            bridge.publish(make_node("z"))
            await until(lambda: client.generation == 2)
            assert client.stats.streams == 1


async def test_files_that_do_not_fit_together_are_not_taken(ours, client_tls, tmp_path):
    tls = ours.issue("server", f"DNS:{NAME}", "IP:127.0.0.1", into=tmp_path)
    async with bridges(tls=tls) as (bridge,):
        bridge.lead()
        first = await in_thread(serial_shown, bridge.address, client_tls)
        good_key = (tmp_path / "tls.key").read_bytes()
        for harm in (
            lambda: (tmp_path / "tls.key").write_bytes(b"nonsense"),
            lambda: (tmp_path / "tls.key").write_bytes(Path(client_tls.key).read_bytes()),
            lambda: os.remove(tmp_path / "tls.key"),
        ):
            harm()
            assert await in_thread(serial_shown, bridge.address, client_tls) == first
        (tmp_path / "tls.key").write_bytes(good_key)
        async with client_of(bridge.address, tls=client_tls) as client:
            await until(lambda: client.view)


async def test_a_client_uses_new_files_when_it_connects_again(ours, theirs, server_tls, tmp_path):
    stranger = theirs.issue("extender", into=tmp_path)
    tls = Tls(cert=stranger.cert, key=stranger.key, ca=str(ours.ca))
    async with bridges(tls=server_tls) as (bridge,):
        bridge.lead()
        async with client_of(bridge.address, tls=tls) as client:
            await never_connects(client, bridge)
            ours.issue("extender", into=tmp_path)
            await until(lambda: client.view)


async def test_files_that_cannot_be_used_stop_the_start(ours, server_tls, client_tls, tmp_path):
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN NONSENSE-----\n")
    locked = tmp_path / "locked.key"
    subprocess.run(
        ["openssl", "ec", "-in", server_tls.key, "-aes256", "-passout", "pass:x", "-out", str(locked)],
        check=True, capture_output=True,
    )  # fmt: skip
    for tls in (
        Tls(cert="/nonexistent/tls.crt", key=server_tls.key, ca=server_tls.ca),
        Tls(cert=server_tls.cert, key=client_tls.key, ca=server_tls.ca),
        Tls(cert=server_tls.cert, key=server_tls.key, ca=str(broken)),
        Tls(cert=server_tls.cert, key=str(locked), ca=server_tls.ca),
    ):
        with pytest.raises(ConfigError, match=r"\$\.link\.tls"):
            async with bridges(tls=tls):
                pass
