"""One real control plane for this folder; each test works in a namespace of its own."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from slurmbridge.clock import SystemClock
from slurmbridge.kube.access import Access
from slurmbridge.kube.session import KubeSession
from tests.support.fault_proxy import FaultProxy
from tests.support.kube import KubeCluster


@pytest.fixture(scope="package")
def kube() -> Iterator[KubeCluster]:
    with KubeCluster() as started:
        yield started


@pytest.fixture
def namespace(kube: KubeCluster) -> str:
    name = f"t-{uuid.uuid4().hex[:8]}"
    kube.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    return name


@pytest.fixture
async def session(kube: KubeCluster) -> AsyncIterator[KubeSession]:
    """As the administrator, with verified TLS."""
    access = Access.from_kubeconfig(str(kube.kubeconfig), SystemClock())
    async with KubeSession(access) as entered:
        yield entered


@pytest.fixture
async def proxy(kube: KubeCluster) -> AsyncIterator[FaultProxy]:
    async with FaultProxy(kube.url, kube.ca_crt) as started:
        yield started


@pytest.fixture
async def proxied(
    kube: KubeCluster, proxy: FaultProxy, tmp_path: Path
) -> AsyncIterator[KubeSession]:
    """As the administrator, through the proxy."""
    path = tmp_path / "proxied"
    path.write_text(proxy.kubeconfig(kube.token))
    async with KubeSession(Access.from_kubeconfig(str(path), SystemClock())) as entered:
        yield entered


@pytest.fixture
async def open_session(tmp_path: Path) -> AsyncIterator[Any]:
    """Opens more sessions: `await open_session(kubeconfig_text_or_path)`."""
    async with AsyncExitStack() as stack:

        async def enter(kubeconfig: str | Path, **how: Any) -> KubeSession:
            if isinstance(kubeconfig, str):
                path = tmp_path / f"{uuid.uuid4().hex}.kubeconfig"
                path.write_text(kubeconfig)
                kubeconfig = path
            access = Access.from_kubeconfig(str(kubeconfig), SystemClock())
            return await stack.enter_async_context(KubeSession(access, **how))

        yield enter
