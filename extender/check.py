"""`slurmbridge-extender check`: tries what `run` needs, and says what is wrong with it."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from slurmbridge.kube.access import Access
from slurmbridge.kube.session import KubeSession, resource_path
from slurmbridge.link.client import LinkClient
from slurmbridge.pool.errors import UNREADABLE, SlurmBridgeError

RIGHTS: Final = (("create", "pods", "binding"), ("get", "pods", ""))
"""Verb, resource and subresource of everything that the extender does in the API server."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that was tried: what, whether it is well, and what was seen."""

    what: str
    ok: bool
    text: str


class _Review(msgspec.Struct):
    class Status(msgspec.Struct):
        allowed: bool = False
        reason: str = ""

    status: Status


async def check(
    link: LinkClient, has_view: asyncio.Event, access: Access, within_s: float
) -> list[Finding]:
    """Try the bridge and the API server.

    Args:
        link: not running yet.
        has_view: set by its `on_change`.
        access: to the API server.
        within_s: longest time for each.

    """
    return [await _bridge(link, has_view, within_s), *await _api_server(access, within_s)]


async def _bridge(link: LinkClient, has_view: asyncio.Event, within_s: float) -> Finding:
    following = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(within_s):
            await has_view.wait()
        view = link.view
    except TimeoutError:
        view = None
    finally:
        leader, age_s = link.leader, link.age_s() or 0.0
        await link.close()
        await asyncio.gather(following, return_exceptions=True)
    if view is None:
        text = "a leader streams to us but has no view yet" if leader else "no leader found"
        return Finding("bridge", ok=False, text=f"{text} within {within_s:g} s")
    text = (
        f"{leader}, term {view.term}, generation {view.generation}, "
        f"{len(view.nodes)} nodes, {age_s:.1f} s old"
    )
    return Finding("bridge", ok=True, text=text)


async def _api_server(access: Access, within_s: float) -> list[Finding]:
    findings: list[Finding] = []
    try:
        async with KubeSession(access) as session:
            for verb, resource, sub in RIGHTS:
                what = f"API server: {verb} {resource}{'/' if sub else ''}{sub}"
                findings.append(await _right(session, what, (verb, resource, sub), within_s))
    except SlurmBridgeError as error:
        findings.append(Finding("API server", ok=False, text=str(error)))
    return findings


async def _right(
    session: KubeSession, what: str, right: tuple[str, str, str], within_s: float
) -> Finding:
    verb, resource, sub = right
    asked = {"verb": verb, "resource": resource, "subresource": sub}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    path = resource_path("apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews")
    try:
        answer = await session.request("POST", path, body, deadline_s=within_s)
        status = msgspec.json.decode(answer, type=_Review).status
    except (SlurmBridgeError, *UNREADABLE) as error:
        return Finding(what, ok=False, text=str(error))
    allowed = "allowed" if status.allowed else f"not allowed {status.reason}".rstrip()
    return Finding(what, ok=status.allowed, text=allowed)
