"""PodResources of this node's kubelet: who has which devices, and which there are, as it says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

import grpc
import grpc.aio

from slurmbridge.clock import Clock
from slurmbridge.node._gen import podresources_pb2 as pb
from slurmbridge.node.identity import Listed
from slurmbridge.pool.errors import PeerTimeout, PeerUnavailable

PEER: Final = "kubelet"
PAUSE_S: Final = 0.02
"""The kubelet takes 100 calls a second, 10 at once, and refuses the rest."""
Listing = list[Listed]
_QUESTIONS: Final[dict[str, tuple[Any, Any]]] = {
    "List": (pb.ListPodResourcesRequest, pb.ListPodResourcesResponse),
    "GetAllocatableResources": (
        pb.AllocatableResourcesRequest,
        pb.AllocatableResourcesResponse,
    ),
}
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    # A kubelet that restarts is back in seconds: look again soon.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
)


class PodResources:
    """A client of the kubelet's pod-resources socket.

    Args:
        socket: path of the socket.
        resource: extended resource whose devices count.
        clock: for deadlines.

    """

    def __init__(self, socket: str, resource: str, clock: Clock) -> None:
        self._socket = socket
        self._resource = resource
        self._clock = clock
        self._channel: grpc.aio.Channel | None = None

    async def list(self, deadline_s: float = 1.0) -> list[Listed]:
        """All active pods with the devices of our resource; 1 ms, more under load.

        Raises:
            PeerTimeout: no answer in time.
            PeerUnavailable: the kubelet is not there.

        """
        return self._read(await self._ask("List", deadline_s))

    async def allocatable(self, deadline_s: float = 1.0) -> frozenset[str]:
        """The healthy device ids of our resource that the kubelet has. Raises as `list`."""
        return self._ids((await self._ask("GetAllocatableResources", deadline_s)).devices)

    async def _ask(self, name: str, deadline_s: float) -> Any:
        op = f"PodResources.{name}"
        end = self._clock.monotonic() + deadline_s
        while True:
            left = end - self._clock.monotonic()
            try:
                return await self._call(name)(timeout=max(left, 0.001))
            except grpc.aio.AioRpcError as error:
                code = error.code()
                if code is grpc.StatusCode.RESOURCE_EXHAUSTED and left > PAUSE_S:
                    await self._clock.sleep(PAUSE_S)
                    continue
                kind = PeerTimeout if code is grpc.StatusCode.DEADLINE_EXCEEDED else PeerUnavailable
                raise kind(PEER, op, f"{code.name}: {error.details()}") from error
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise PeerUnavailable(PEER, op, "connection closed") from error

    async def close(self) -> None:
        """Close the connection; the next question opens a new one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _call(self, name: str) -> Any:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS)
        question, answer = _QUESTIONS[name]
        method = self._channel.unary_unary(
            f"/v1.PodResourcesLister/{name}", question.SerializeToString, answer.FromString
        )
        return lambda timeout: method(question(), timeout=timeout)

    def _ids(self, devices: Iterable[pb.ContainerDevices]) -> frozenset[str]:
        return frozenset(
            uuid
            for entry in devices
            if entry.resource_name == self._resource
            for uuid in entry.device_ids
        )

    def _read(self, answer: pb.ListPodResourcesResponse) -> Listing:
        found = []
        for pod in answer.pod_resources:
            devices: dict[str, frozenset[str]] = {}
            for container in pod.containers:
                ids = self._ids(container.devices)
                if ids:
                    devices[container.name] = ids
            found.append(Listed(pod.namespace, pod.name, devices))
        return found
