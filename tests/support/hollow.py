"""Hollow kubelets: one process that does for every hollow node what its kubelet would do to pods.

The one fake part of the test cluster, since thousands of kubelets don't run on one machine. It acts
for the nodes that carry the label `hollow.test/kubelet` (taken off: that kubelet is dead and its
pods stay as they are), and only through the API server, as kubelets do:

- a pod bound to the node: status Running with container statuses, at once;
- annotation `hollow.test/run-s`: after so many seconds the pod ends, Succeeded, or Failed when
  `hollow.test/exit-code` is not 0; `activeDeadlineSeconds` ends it as Failed, DeadlineExceeded;
- a pod that is being deleted: its containers stop after `hollow.test/stop-s` seconds (0.2 without
  it), at most the grace period; then the final status, then the delete with grace period 0 and the
  UID as precondition.

Seconds count from when this process saw the pod start; a restart of it begins again. It admits
whatever is bound: no check of capacity, taints or devices.

    python -m tests.support.hollow --kubeconfig FILE [--no-final-status]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import ssl
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from tests.support.kube_api import STRATEGIC
from tests.support.kube_objects import HOLLOW, HOLLOW_READY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

STOP_S = 0.2
AGAIN_S = 0.2
"""Wait before a failed request or a broken watch is tried again."""
METADATA = "application/json;as={};g=meta.k8s.io;v=v1"
FINAL = frozenset({"Succeeded", "Failed"})


class _Camel(msgspec.Struct, frozen=True, rename="camel"):
    pass


class _Meta(_Camel, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: dict[str, str] = {}
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None


class _Container(_Camel, frozen=True):
    name: str
    image: str = ""


class _Spec(_Camel, frozen=True):
    node_name: str = ""
    containers: list[_Container] = []
    active_deadline_seconds: int | None = None


class _Status(_Camel, frozen=True):
    phase: str = "Pending"
    start_time: str | None = None


class _Object(_Camel, frozen=True):
    metadata: _Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


class _Listing(_Camel, frozen=True):
    metadata: _Meta
    items: list[_Object]


class _Event(_Camel, frozen=True):
    type: str
    object: msgspec.Raw


_listing = msgspec.json.Decoder(_Listing)
_event = msgspec.json.Decoder(_Event)
_object = msgspec.json.Decoder(_Object)


class _Pod:
    """One pod on one node, from the first sight of it bound until its object is gone."""

    def __init__(self, seen: _Object) -> None:
        self.seen = seen
        self.deleted = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def path(self) -> str:
        meta = self.seen.metadata
        return f"/api/v1/namespaces/{meta.namespace}/pods/{meta.name}"

    def seconds(self, name: str, default: float) -> float:
        try:
            return float(self.seen.metadata.annotations[f"hollow.test/{name}"])
        except (KeyError, ValueError):
            return default


class HollowKubelets:
    """All hollow kubelets of one cluster; `run` until cancelled."""

    def __init__(
        self, session: aiohttp.ClientSession, *, concurrency: int = 64, final_status: bool = True
    ) -> None:
        """`final_status` False leaves out the status write between stop and delete."""
        self._session = session
        self._slots = asyncio.Semaphore(concurrency)
        self._final_status = final_status
        self._nodes: set[str] = set()
        self._pods: dict[str, _Pod] = {}
        self.synced = asyncio.Event()

    async def run(self) -> None:
        """Watch nodes and pods and act; returns only by cancellation."""
        nodes_listed = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._nodes_loop(nodes_listed))
                await nodes_listed.wait()
                group.create_task(self._pods_loop())
        finally:
            for pod in self._pods.values():
                if pod.task is not None:
                    pod.task.cancel()

    # Nodes

    async def _nodes_loop(self, listed: asyncio.Event) -> None:
        def replace(items: list[_Object]) -> None:
            self._nodes = {item.metadata.name for item in items}
            for pod in self._pods.values():
                self._act_for(pod)
            listed.set()

        def change(kind: str, node: _Object) -> None:
            if kind == "DELETED":
                self._nodes.discard(node.metadata.name)
                for pod in self._pods.values():
                    self._drop_if_dead(pod)
            elif node.metadata.name not in self._nodes:
                self._nodes.add(node.metadata.name)
                for pod in self._pods.values():
                    self._act_for(pod)

        await self._follow("/api/v1/nodes", {"labelSelector": HOLLOW}, replace, change, whole=False)

    def _drop_if_dead(self, pod: _Pod) -> None:
        if pod.task is not None and pod.seen.spec.node_name not in self._nodes:
            pod.task.cancel()
            pod.task = None

    # Pods

    async def _pods_loop(self) -> None:
        def replace(items: list[_Object]) -> None:
            for uid in self._pods.keys() - {item.metadata.uid for item in items}:
                self._forget(uid)
            for item in items:
                self._see(item)
            self.synced.set()

        def change(kind: str, pod: _Object) -> None:
            if kind == "DELETED":
                self._forget(pod.metadata.uid)
            else:
                self._see(pod)

        await self._follow(
            "/api/v1/pods", {"fieldSelector": "spec.nodeName!="}, replace, change, whole=True
        )

    def _see(self, seen: _Object) -> None:
        pod = self._pods.setdefault(seen.metadata.uid, _Pod(seen))
        pod.seen = seen
        if seen.metadata.deletion_timestamp is not None:
            pod.deleted.set()
        self._act_for(pod)

    def _act_for(self, pod: _Pod) -> None:
        if pod.task is None and pod.seen.spec.node_name in self._nodes:
            pod.task = asyncio.create_task(self._live(pod))

    def _forget(self, uid: str) -> None:
        pod = self._pods.pop(uid, None)
        if pod is not None and pod.task is not None:
            pod.task.cancel()

    async def _live(self, pod: _Pod) -> None:
        phase = pod.seen.status.phase
        if phase == "Pending" and not pod.deleted.is_set():
            await self._write(pod, _running(pod))
            phase = "Running"
        if phase == "Running":
            phase = await self._until_end(pod)
        await pod.deleted.wait()
        if phase == "Running":
            grace = pod.seen.metadata.deletion_grace_period_seconds
            stop_s = pod.seconds("stop-s", STOP_S)
            await asyncio.sleep(stop_s if grace is None else min(stop_s, grace))
            if self._final_status:
                # What kubelet writes for containers that ended on SIGTERM.
                await self._write(pod, _ended(pod, "Failed", 143, ""))
        options = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": pod.seen.metadata.uid},
        }
        await self._send(pod, "DELETE", pod.path, options, "application/json")

    async def _until_end(self, pod: _Pod) -> str:
        """Wait until the pod ends by itself or is deleted; its phase then."""
        run_s = pod.seconds("run-s", float("inf"))
        deadline_s = pod.seen.spec.active_deadline_seconds
        wait_s = min(run_s, float("inf") if deadline_s is None else deadline_s)
        try:
            async with asyncio.timeout(None if wait_s == float("inf") else wait_s):
                await pod.deleted.wait()
        except TimeoutError:
            code = int(pod.seconds("exit-code", 0))
            if wait_s < run_s:
                status = _ended(pod, "Failed", 143, "DeadlineExceeded")
            else:
                status = _ended(pod, "Failed" if code else "Succeeded", code, "")
            await self._write(pod, status)
            return str(status["phase"])
        return "Running"

    # Requests

    async def _write(self, pod: _Pod, status: dict[str, Any]) -> None:
        body = {"metadata": {"uid": pod.seen.metadata.uid}, "status": status}
        await self._send(pod, "PATCH", f"{pod.path}/status", body, STRATEGIC)

    async def _send(self, pod: _Pod, method: str, path: str, body: Any, content_type: str) -> None:
        """Until it is done, the pod is gone (404), or its end has been seen and cancels us."""
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with (
                    self._slots,
                    self._session.request(
                        method,
                        path,
                        data=msgspec.json.encode(body),
                        headers={"Content-Type": content_type},
                        timeout=aiohttp.ClientTimeout(total=10),
                    ) as answer,
                ):
                    text = await answer.text()
                    if answer.status < 400 or answer.status == 404:
                        return
                    if answer.status not in {409, 429, 500, 503, 504}:
                        print(f"{method} {path}: {answer.status} {text}", flush=True)
                        return
            await asyncio.sleep(AGAIN_S)

    async def _follow(
        self,
        path: str,
        query: dict[str, str],
        replace: Callable[[list[_Object]], None],
        change: Callable[[str, _Object], None],
        *,
        whole: bool,
    ) -> None:
        """List and watch a collection for ever; `whole` False asks for metadata only."""
        while True:
            try:
                accept = (
                    "application/json" if whole else METADATA.format("PartialObjectMetadataList")
                )
                async with self._session.get(
                    path, params=query, headers={"Accept": accept}
                ) as answer:
                    answer.raise_for_status()
                    listing = _listing.decode(await answer.read())
                replace(listing.items)
                version = listing.metadata.resource_version
                accept = "application/json" if whole else METADATA.format("PartialObjectMetadata")
                async with self._session.get(
                    path,
                    params=query | {"watch": "1", "resourceVersion": version},
                    headers={"Accept": accept},
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
                ) as answer:
                    answer.raise_for_status()
                    async for line in _lines(answer):
                        event = _event.decode(line)
                        if event.type == "ERROR":
                            break
                        change(event.type, _object.decode(event.object))
            except (aiohttp.ClientError, TimeoutError) as error:
                why = getattr(error, "status", "") or type(error).__name__
                print(f"watch of {path}: {why}", flush=True)
            await asyncio.sleep(AGAIN_S)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    pending = b""
    async for chunk in answer.content.iter_any():
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield line


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _conditions(ready: str, reason: str = "") -> list[dict[str, Any]]:
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")
    return [
        {
            "type": kind,
            "status": "True" if kind == "Initialized" else ready,
            "lastTransitionTime": _now(),
            **({"reason": reason} if reason and kind != "Initialized" else {}),
        }
        for kind in kinds
    ]


def _running(pod: _Pod) -> dict[str, Any]:
    now = _now()
    return {
        "phase": "Running",
        "startTime": now,
        "hostIP": "127.0.0.1",
        "podIP": "127.0.0.1",
        "podIPs": [{"ip": "127.0.0.1"}],
        "conditions": _conditions("True"),
        "containerStatuses": [
            {
                **_container(container, pod),
                "ready": True,
                "started": True,
                "state": {"running": {"startedAt": now}},
            }
            for container in pod.seen.spec.containers
        ],
    }


def _ended(pod: _Pod, phase: str, code: int, reason: str) -> dict[str, Any]:
    now = _now()
    terminated = {
        "exitCode": code,
        "reason": "Error" if code else "Completed",
        "startedAt": pod.seen.status.start_time or now,
        "finishedAt": now,
    }
    return {
        "phase": phase,
        **({"reason": reason} if reason else {}),
        "conditions": _conditions("False", "PodCompleted"),
        "containerStatuses": [
            {
                **_container(container, pod),
                "ready": False,
                "started": False,
                "state": {"running": None, "terminated": terminated},
            }
            for container in pod.seen.spec.containers
        ],
    }


def _container(container: _Container, pod: _Pod) -> dict[str, Any]:
    return {
        "name": container.name,
        "image": container.image,
        "imageID": container.image,
        "containerID": f"hollow://{pod.seen.metadata.uid}/{container.name}",
        "restartCount": 0,
    }


async def _main(arguments: argparse.Namespace) -> None:
    config = json.loads(Path(arguments.kubeconfig).read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    ca = base64.b64decode(cluster["certificate-authority-data"]).decode()
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cadata=ca), limit=128)
    async with aiohttp.ClientSession(
        base_url=cluster["server"],
        headers={"Authorization": f"Bearer {user['token']}"},
        connector=connector,
    ) as session:
        kubelets = HollowKubelets(session, final_status=not arguments.no_final_status)
        running = asyncio.create_task(kubelets.run())
        synced = asyncio.create_task(kubelets.synced.wait())
        await asyncio.wait({running, synced}, return_when=asyncio.FIRST_COMPLETED)
        print(HOLLOW_READY, flush=True)
        await running


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.support.hollow")
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--no-final-status", action="store_true")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(parser.parse_args()))
    sys.exit(0)
