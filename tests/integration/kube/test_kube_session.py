"""Requests and streams against a real API server, and through a proxy that makes faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from slurmbridge.clock import SystemClock
from slurmbridge.kube import access as access_module
from slurmbridge.kube import session as session_module
from slurmbridge.kube.access import Access
from slurmbridge.kube.session import MERGE_PATCH, KubeSession, resource_path
from slurmbridge.pool.errors import (
    Conflict,
    PeerProtocolError,
    PeerRejected,
    PeerTimeout,
    PeerUnavailable,
)
from tests.support.fault_proxy import Answer, Cut, Delay, FaultProxy, LoseAnswer, Silence
from tests.support.kube import KubeCluster
from tests.support.kube_objects import pod

pytestmark = pytest.mark.kube

PODS = "/api/v1/pods"


def config_maps(namespace: str, *name: str) -> str:
    return resource_path("api", "v1", "namespaces", namespace, "configmaps", *name)


# Who we are


async def test_the_server_sees_the_token_of_a_service_account(
    kube: KubeCluster, namespace: str, open_session: Any
) -> None:
    session = await open_session(kube.kubeconfig_for_service_account(namespace, "bridge"))
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    path = resource_path("apis", "authentication.k8s.io", "v1", "selfsubjectreviews")
    seen = json.loads(await session.request("POST", path, body))
    assert seen["status"]["userInfo"]["username"] == f"system:serviceaccount:{namespace}:bridge"


async def test_what_the_account_may_not_do_is_forbidden(
    kube: KubeCluster, namespace: str, open_session: Any
) -> None:
    session = await open_session(kube.kubeconfig_for_service_account(namespace, "bridge"))
    with pytest.raises(PeerRejected, match="cannot list") as caught:
        await session.request("GET", PODS)
    assert caught.value.reason == "forbidden"


async def test_every_request_and_watch_carries_the_header(
    proxied: KubeSession, proxy: FaultProxy, namespace: str, kube: KubeCluster
) -> None:
    await proxied.request("GET", PODS)
    await proxied.request("POST", config_maps(namespace), {"metadata": {"name": "a"}})
    async with contextlib.aclosing(
        proxied.stream(PODS, {"watch": "true", "timeoutSeconds": "1"})
    ) as lines:
        async for _ in lines:
            pass
    assert [s.headers["Authorization"] for s in proxy.seen] == [f"Bearer {kube.token}"] * 3


async def test_a_token_that_was_rotated_before_the_minute_is_over_costs_no_error(
    kube: KubeCluster,
    proxy: FaultProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access_module, "RELOAD_S", 0.0)
    token = tmp_path / "token"
    token.write_text("an-old-token")
    text = json.loads(proxy.kubeconfig(""))
    text["users"][0]["user"] = {"tokenFile": str(token)}
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(text))
    async with KubeSession(Access.from_kubeconfig(str(path), SystemClock())) as session:
        with pytest.raises(PeerRejected) as caught:
            await session.request("GET", PODS)
        assert caught.value.reason == "auth"
        token.write_text(kube.token + "\n")
        await asyncio.gather(*(session.request("GET", PODS) for _ in range(8)))
        lines = session.stream(PODS, {"watch": "true", "timeoutSeconds": "1"})
        async with contextlib.aclosing(lines):
            await anext(lines, None)


async def test_a_server_that_our_authority_did_not_sign_is_not_spoken_to(
    kube: KubeCluster, tmp_path: Path
) -> None:
    text = json.loads(kube.kubeconfig.read_text())
    for cluster in text["clusters"]:
        cluster["cluster"].pop("certificate-authority", None)
        cluster["cluster"].pop("certificate-authority-data", None)
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(text))
    async with KubeSession(Access.from_kubeconfig(str(path), SystemClock())) as session:
        with pytest.raises(PeerUnavailable, match=r"(?i)certificate"):
            await session.request("GET", PODS)


# What the answers mean


async def test_a_pod_that_is_not_there_is_not_found_and_a_resource_is_not_served(
    session: KubeSession, namespace: str
) -> None:
    for path, reason in {
        resource_path("api", "v1", "namespaces", namespace, "pods", "nope"): "notfound",
        "/api/v1/nonsense": "unserved",
        "/apis/no.such.group/v1/things": "unserved",
    }.items():
        with pytest.raises(PeerRejected) as caught:
            await session.request("GET", path)
        assert caught.value.reason == reason, path


async def test_conflicts_have_their_own_error(session: KubeSession, namespace: str) -> None:
    path = config_maps(namespace)
    await session.request("POST", path, {"metadata": {"name": "a"}})
    with pytest.raises(Conflict) as caught:
        await session.request("POST", path, {"metadata": {"name": "a"}})
    assert caught.value.reason == "exists"
    body = {"metadata": {"name": "a", "resourceVersion": "1"}, "data": {"k": "v"}}
    with pytest.raises(Conflict) as caught:
        await session.request("PUT", f"{path}/a", body)
    assert caught.value.reason == "conflict"


async def test_annotations_beyond_what_kubernetes_takes_are_invalid(
    session: KubeSession, namespace: str
) -> None:
    path = config_maps(namespace)
    await session.request("POST", path, {"metadata": {"name": "a"}})
    body = {"metadata": {"annotations": {"slurmbridge.dev/pool": "x" * 300_000}}}
    with pytest.raises(PeerRejected, match="annotations") as caught:
        await session.request("PATCH", f"{path}/a", body, content_type=MERGE_PATCH)
    assert caught.value.reason == "invalid"


async def test_an_overloaded_server_says_how_long_to_wait(
    proxied: KubeSession, proxy: FaultProxy
) -> None:
    proxy.add(Answer(429, b"busy", {"Retry-After": "7"}))
    with pytest.raises(PeerUnavailable) as caught:
        await proxied.request("GET", PODS)
    assert caught.value.retry_after_s == 7.0


async def test_a_redirect_is_not_followed(proxied: KubeSession, proxy: FaultProxy) -> None:
    proxy.add(Answer(307, b"", {"Location": "http://127.0.0.1:9/elsewhere"}))
    with pytest.raises(PeerProtocolError):
        await proxied.request("GET", PODS)


# When nothing comes


async def test_a_silent_server_ends_by_the_deadline(
    proxied: KubeSession, proxy: FaultProxy
) -> None:
    proxy.add(Silence(), times=2)
    patient = asyncio.create_task(proxied.request("GET", PODS))
    with pytest.raises(PeerTimeout):
        await proxied.request("GET", PODS, deadline_s=0.5)
    assert not patient.done()
    patient.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await patient


async def test_a_server_that_stops_in_the_middle_of_an_answer_ends_by_the_deadline(
    proxied: KubeSession, proxy: FaultProxy, namespace: str
) -> None:
    await proxied.request(
        "POST", config_maps(namespace), {"metadata": {"name": "a"}, "data": {"k": "v\n" * 99}}
    )
    proxy.add(Cut(torn=True))
    with pytest.raises(PeerUnavailable):
        await proxied.request("GET", config_maps(namespace, "a"), deadline_s=1.0)


async def test_an_answer_that_is_lost_is_no_answer(
    proxied: KubeSession, proxy: FaultProxy, namespace: str
) -> None:
    proxy.add(LoseAnswer())
    with pytest.raises(PeerUnavailable):
        await proxied.request("POST", config_maps(namespace), {"metadata": {"name": "a"}})
    assert b'"a"' in await proxied.request("GET", config_maps(namespace, "a"))


async def test_nobody_at_the_address_is_no_answer(
    proxy: FaultProxy, kube: KubeCluster, open_session: Any
) -> None:
    text = proxy.kubeconfig(kube.token).replace(str(proxy.port), "1")
    session = await open_session(text)
    with pytest.raises(PeerUnavailable):
        await session.request("GET", PODS)


async def test_waiting_for_a_free_connection_counts_against_the_deadline(
    proxy: FaultProxy, kube: KubeCluster, open_session: Any
) -> None:
    session = await open_session(proxy.kubeconfig(kube.token), connections=1)
    proxy.add(Delay(2.0))
    slow = asyncio.create_task(session.request("GET", PODS))
    await asyncio.sleep(0.1)
    with pytest.raises(PeerUnavailable):
        await session.request("GET", PODS, deadline_s=0.3)
    await slow


async def test_cancelling_gives_the_connection_back(
    proxy: FaultProxy, kube: KubeCluster, open_session: Any
) -> None:
    session = await open_session(proxy.kubeconfig(kube.token), connections=1)
    rule = proxy.add(Silence(), times=3)
    for count in range(1, 4):
        task = asyncio.create_task(session.request("GET", PODS))
        while rule.used < count:
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await session.request("GET", PODS, deadline_s=2.0)


# Streams


async def collect(session: KubeSession, path: str, **how: Any) -> list[bytes]:
    params = {"watch": "true", "timeoutSeconds": "2"}
    return [line async for line in session.stream(path, params, **how)]


async def test_lines_above_four_mebibytes_are_read(session: KubeSession, namespace: str) -> None:
    # A control character is one byte in etcd and six in JSON.
    part = "\u0001" * 150_000
    path = config_maps(namespace)
    await session.request("POST", path, {"metadata": {"name": "a"}})
    for key in "klmnop":
        body = {"data": {key: part}}
        await session.request("PATCH", f"{path}/a", body, content_type=MERGE_PATCH)
    (line,) = await collect(session, path)
    assert len(line) > 5 << 20
    assert json.loads(line)["object"]["data"] == dict.fromkeys("klmnop", part)


async def test_a_line_beyond_the_bound_is_refused(
    session: KubeSession, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "MAX_LINE_BYTES", 100_000)
    body = {"metadata": {"name": "a"}, "data": {"k": "x" * 200_000}}
    await session.request("POST", config_maps(namespace), body)
    with pytest.raises(PeerProtocolError, match="line above"):
        await collect(session, config_maps(namespace))


async def test_a_torn_line_is_never_handed_out(
    kube: KubeCluster, proxied: KubeSession, proxy: FaultProxy, namespace: str
) -> None:
    for name in ("a", "b"):
        kube.api.create(pod(name, namespace=namespace))
    for abort in (True, False):
        proxy.add(Cut(after_lines=1, torn=True, abort=abort))
        lines = []
        with pytest.raises(PeerUnavailable):
            async for line in proxied.stream(
                resource_path("api", "v1", "namespaces", namespace, "pods"),
                {"watch": "true", "timeoutSeconds": "5"},
            ):
                lines.append(json.loads(line))
        assert len(lines) == 1


async def test_a_silent_watch_ends_by_its_idle_limit(
    proxied: KubeSession, proxy: FaultProxy
) -> None:
    proxy.mute()
    async with asyncio.timeout(30):
        with pytest.raises(PeerTimeout):
            await collect(proxied, PODS, idle_s=0.5)


async def test_a_watch_that_goes_silent_later_ends_by_its_idle_limit(
    kube: KubeCluster, proxied: KubeSession, proxy: FaultProxy, namespace: str
) -> None:
    kube.api.create(pod("a", namespace=namespace))
    proxy.add(Silence(after_lines=1))
    path = resource_path("api", "v1", "namespaces", namespace, "pods")
    lines = []
    with pytest.raises(PeerTimeout):
        async for line in proxied.stream(path, {"watch": "true"}, idle_s=0.5):
            lines.append(line)
    assert len(lines) == 1


async def test_a_watch_lives_no_longer_than_its_total_limit(
    proxied: KubeSession,
) -> None:
    async with asyncio.timeout(30):
        with pytest.raises(PeerTimeout):
            async for _ in proxied.stream(PODS, {"watch": "true"}, idle_s=60, total_s=0.5):
                pass


async def test_a_refused_watch_says_why(proxied: KubeSession, proxy: FaultProxy) -> None:
    proxy.add(Answer(503, b"", {"Retry-After": "2"}))
    with pytest.raises(PeerUnavailable) as caught:
        await collect(proxied, PODS)
    assert caught.value.retry_after_s == 2.0


async def test_a_dead_api_server_is_noticed_and_the_session_lives_on(
    kube: KubeCluster, session: KubeSession
) -> None:
    watch = asyncio.create_task(collect(session, PODS))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(kube.kill9_api)
    with pytest.raises(PeerUnavailable):
        await watch
    with pytest.raises(PeerUnavailable):
        await session.request("GET", PODS)
    await asyncio.to_thread(kube.start_api)
    await session.request("GET", PODS)
