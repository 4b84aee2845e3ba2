"""PodResources.List of this node's kubelet: who has which devices, as the kubelet says."""

from __future__ import annotations

import asyncio
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
        end = self._clock.monotonic() + deadline_s
        while True:
            left = end - self._clock.monotonic()
            try:
                answer = await self._call("List", pb.ListPodResourcesRequest())(
                    timeout=max(left, 0.001)
                )
                return self._read(answer)
            except grpc.aio.AioRpcError as error:
                code = error.code()
                if code is grpc.StatusCode.RESOURCE_EXHAUSTED and left > PAUSE_S:
                    await self._clock.sleep(PAUSE_S)
                    continue
                kind = PeerTimeout if code is grpc.StatusCode.DEADLINE_EXCEEDED else PeerUnavailable
                raise kind(PEER, "PodResources.List", f"{code.name}: {error.details()}") from error
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise PeerUnavailable(PEER, "PodResources.List", "connection closed") from error

    async def close(self) -> None:
        """Close the connection; the next question opens a new one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _call(self, name: str, request: Any) -> Any:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._socket}", options=_OPTIONS)
        method = self._channel.unary_unary(
            f"/v1.PodResourcesLister/{name}",
            pb.ListPodResourcesRequest.SerializeToString,
            pb.ListPodResourcesResponse.FromString,
        )
        return lambda timeout: method(request, timeout=timeout)

    def _read(self, answer: pb.ListPodResourcesResponse) -> Listing:
        found = []
        for pod in answer.pod_resources:
            devices: dict[str, frozenset[str]] = {}
            for container in pod.containers:
                ids = frozenset(
                    uuid
                    for entry in container.devices
                    if entry.resource_name == self._resource
                    for uuid in entry.device_ids
                )
                if ids:
                    devices[container.name] = ids
            found.append(Listed(pod.namespace, pod.name, devices))
        return found
