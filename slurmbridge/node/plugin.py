"""The device plugin: the kubelet's questions, answered with the devices of the pod's claim.

GetPreferredAllocation and Allocate stop the whole kubelet while they run (measured: 15 s in one
held up every other pod): nothing is waited for there beyond one PodResources.List and, where the
watch is behind, one GET for each pod that it lacks, all at once. PreStartContainer holds up its own
pod only: there the claim is verified with slurmctld, and the GPUs' idleness is waited for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import grpc
import grpc.aio
import msgspec

from slurmbridge.clock import Clock
from slurmbridge.log import get_logger
from slurmbridge.node._gen import deviceplugin_pb2 as pb
from slurmbridge.node.book import Book
from slurmbridge.node.device import DeviceMap, Gpu
from slurmbridge.node.identity import (
    Listed,
    PodFacts,
    Veto,
    admitted_pod,
    check_devices,
    is_served,
    owner_of,
    prefer,
    unknown_names,
)
from slurmbridge.pool.errors import PeerError, PeerTimeout

_log = get_logger(__name__)
_Context = grpc.aio.ServicerContext[Any, Any]

SERVICE: Final = "v1beta1.DevicePlugin"
PRESTART_S: Final = 25.0
"""The kubelet gives up after 30 s, and tries again later."""
IDLE_LOOK_S: Final = 0.1
STOP_S: Final = 0.2
LIST_S: Final = 1.0
FETCH_S: Final = 3.0
"""For all pods together that the watch has not brought: the kubelet stands still meanwhile."""
MOST_FETCHED: Final = 128
"""As many pods as a node has by the kubelet's default (110), and some more."""

Style = Literal["env", "cdi", "devices"]


class Response(msgspec.Struct, frozen=True):
    """How containers are told of their devices.

    styles: `env`: NVIDIA_VISIBLE_DEVICES by UUID; `cdi`: CDI device names; `devices`: the device
    files themselves. cdi_kind: vendor and class of CDI names. also: device files that every
    container with GPUs gets, where they exist (style `devices`).
    """

    styles: tuple[Style, ...] = ("env",)
    cdi_kind: str = "nvidia.com/gpu"
    also: tuple[str, ...] = (
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
        "/dev/nvidia-modeset",
    )


class Pods(Protocol):
    """What the API server says of the pods of this node."""

    def known(self) -> Collection[PodFacts]:
        """All that the watch has brought."""

    async def fetch(self, namespace: str, name: str) -> PodFacts | None:
        """One pod as it is now; None: there is none. Raises PeerError."""


class Lister(Protocol):
    """PodResources."""

    async def list(self, deadline_s: float = LIST_S) -> list[Listed]:
        """See `slurmbridge.node.listing.PodResources.list`."""


Verify = Callable[[PodFacts], Awaitable[str]]
"""Whether slurmctld runs the pod's claim on this node with its GPUs: "" or why not (for people).
Raises PeerUnavailable when nobody can say."""
Busy = Callable[[str, Collection[int]], Awaitable[str]]
"""What other pod or process still uses GPUs (own pod UID, indices); "" when nothing does."""


@dataclass
class _Served:
    """One socket. streams: of kubelets that listen -> its number, 0: not sent the devices yet."""

    server: grpc.aio.Server
    streams: dict[asyncio.Event, int] = field(default_factory=dict)
    ended: bool = False

    def wake(self) -> None:
        for stream in self.streams:
            stream.set()

    async def end(self) -> None:
        self.ended = True
        self.wake()
        await self.server.stop(STOP_S)


class DevicePlugin:
    """The plugin; `serve` gives it a (new) socket.

    Args:
        devices: the map as it is now.
        healthy: UUIDs that may be given out now.
        pods: pods of the API server.
        lister: PodResources.
        book: who was given what.
        verify, busy: see above.
        response: how containers are told.
        kind: GRES type of the GPUs that this resource offers, "" for all.
        clock: for deadlines.

    Attributes:
        on_stream: called when `listed` may have changed.

    """

    def __init__(
        self,
        *,
        devices: Callable[[], DeviceMap],
        healthy: Callable[[], Collection[str]],
        pods: Pods,
        lister: Lister,
        book: Book,
        verify: Verify,
        busy: Busy,
        response: Response,
        clock: Clock,
        kind: str = "",
        prestart_s: float = PRESTART_S,
    ) -> None:
        self._devices = devices
        self._healthy = healthy
        self._pods = pods
        self._lister = lister
        self._book = book
        self._verify = verify
        self._busy = busy
        self._response = response
        self._clock = clock
        self._kind = kind
        self._prestart_s = prestart_s
        self.on_stream: Callable[[], None] = lambda: None
        self._served: _Served | None = None
        self._streams = 0
        self._ending: set[asyncio.Task[None]] = set()
        self.counts: dict[str, int] = {}

    @property
    def listed(self) -> int:
        """Number of the stream by which a kubelet has the devices of the newest socket, 0: none.

        Streams are counted over all sockets: another number is another stream.
        """
        return 0 if self._served is None else max(self._served.streams.values(), default=0)

    @property
    def offered(self) -> list[str]:
        """UUIDs that pods of this resource may be given now."""
        healthy = set(self._healthy())
        return [gpu.uuid for gpu in self._gpus() if gpu.uuid in healthy]

    async def serve(self, path: str) -> None:
        """Listen on a socket; the one before is closed, but nobody waits for that."""
        served = _Served(grpc.aio.server())
        served.server.add_generic_rpc_handlers((self._handlers(served),))
        before = os.umask(0o177)
        try:
            served.server.add_insecure_port(f"unix:{path}")
        finally:
            os.umask(before)
        await served.server.start()
        old, self._served = self._served, served
        if old is not None:
            task = asyncio.ensure_future(old.end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def stop(self) -> None:
        """Close the socket; may be called twice."""
        served, self._served = self._served, None
        if served is not None:
            await served.end()
        await asyncio.gather(*self._ending)

    def changed(self) -> None:
        """Devices or their health have changed: tell the kubelet."""
        if self._served is not None:
            self._served.wake()

    # The kubelet's questions.

    async def _options(self, _request: pb.Empty, _context: _Context) -> pb.DevicePluginOptions:
        return pb.DevicePluginOptions(
            pre_start_required=True, get_preferred_allocation_available=True
        )

    async def _watch(
        self, served: _Served, _request: pb.Empty, _context: _Context
    ) -> AsyncIterator[pb.ListAndWatchResponse]:
        wake = asyncio.Event()
        served.streams[wake] = 0
        try:
            while not served.ended:
                wake.clear()
                healthy = set(self.offered)
                yield pb.ListAndWatchResponse(
                    devices=[
                        pb.Device(ID=g.uuid, health="Healthy" if g.uuid in healthy else "Unhealthy")
                        for g in self._gpus()
                    ]
                )
                # Only now it has been handed to the kubelet.
                if not served.streams[wake]:
                    self._streams += 1
                    served.streams[wake] = self._streams
                    self.on_stream()
                await wake.wait()
        finally:
            del served.streams[wake]
            self.on_stream()

    async def _preferred(
        self, request: pb.PreferredAllocationRequest, context: _Context
    ) -> pb.PreferredAllocationResponse:
        answers = []
        for one in request.container_requests:
            must = list(one.must_include_deviceIDs)
            pod = await self._admitted(must)
            chosen: list[str] | Veto = (
                pod
                if isinstance(pod, Veto)
                else prefer(
                    pod,
                    one.allocation_size,
                    set(one.available_deviceIDs) | set(must),
                    must,
                    self._devices(),
                )
            )
            if isinstance(chosen, Veto):
                await self._refuse(context, "GetPreferredAllocation", chosen)
            else:
                answers.append(pb.ContainerPreferredAllocationResponse(deviceIDs=chosen))
        self._count("preferred")
        return pb.PreferredAllocationResponse(container_responses=answers)

    async def _allocate(
        self, request: pb.AllocateRequest, context: _Context
    ) -> pb.AllocateResponse:
        answers = []
        for one in request.container_requests:
            ids = list(one.devices_ids)
            pod = await self._admitted(ids)
            veto = pod if isinstance(pod, Veto) else check_devices(pod, ids, self._devices())
            if isinstance(pod, Veto) or veto is not None:
                await self._refuse(context, "Allocate", veto or Veto("", ""))
                continue
            try:
                self._give(pod, ids)
            except OSError as error:
                text = f"pod {pod.ref}: the agent cannot write its book: {error}"
                await self._refuse(context, "Allocate", Veto("book", text))
            answers.append(self._answer(ids))
        self._count("allocated")
        return pb.AllocateResponse(container_responses=answers)

    async def _prestart(
        self, request: pb.PreStartContainerRequest, context: _Context
    ) -> pb.PreStartContainerResponse:
        ids = frozenset(request.devices_ids)
        end = self._clock.monotonic() + self._prestart_s
        try:
            pod = await self._owner(ids)
            veto = pod if isinstance(pod, Veto) else check_devices(pod, ids, self._devices())
            if isinstance(pod, Veto) or veto is not None:
                await self._refuse(context, "PreStartContainer", veto or Veto("", ""))
                return pb.PreStartContainerResponse()
            why = await self._verify(pod)
            if why:
                text = f"pod {pod.ref}: claim {pod.job_id} does not cover it any more: {why}"
                await self._refuse(context, "PreStartContainer", Veto("claim_over", text))
            indices = self._devices().indices(ids)
            while why := await self._busy(pod.uid, indices):
                if self._clock.monotonic() >= end:
                    text = f"pod {pod.ref}: its GPUs are still in use: {why}"
                    await self._refuse(context, "PreStartContainer", Veto("busy", text))
                self._count("waited")
                await self._clock.sleep(IDLE_LOOK_S)
            if self._clock.monotonic() - end > -self._prestart_s + 1.0:
                # It took a while: the claim may have ended meanwhile.
                why = await self._verify(pod)
                if why:
                    text = f"pod {pod.ref}: claim {pod.job_id} has ended: {why}"
                    await self._refuse(context, "PreStartContainer", Veto("claim_over", text))
            # A job that ended while no agent was here would else lift the end's check for contexts.
            self._book.free_of_jobs(indices)
        except (PeerError, OSError) as error:
            await self._refuse(context, "PreStartContainer", Veto("unknown", str(error)))
        self._count("started")
        return pb.PreStartContainerResponse()

    # Inside.

    def _gpus(self) -> list[Gpu]:
        return [gpu for gpu in self._devices().gpus if self._kind in ("", gpu.type)]

    async def _admitted(self, ids: Collection[str]) -> PodFacts | Veto:
        devices = self._devices()
        if devices.fault:
            return Veto("closed", f"this node takes no pods: {devices.fault}")
        try:
            listing = await self._lister.list()
            pods = list(self._pods.known())
            served = self._book.served
            pod = admitted_pod(pods, listing, served, ids, devices)
            if isinstance(pod, Veto) or pod.job_id is None or is_served(pod, served):
                # The watch may be behind the kubelet's: ask for what it has not brought. So too
                # where the only pod that seems to wait has all it wants: it may be another's turn.
                names = unknown_names(pods, listing)
                if not isinstance(pod, Veto):
                    names.append((pod.namespace, pod.name))
                fresh = {p.uid: p for p in await self._fetch(names) if p is not None}
                pods = [*(p for p in pods if p.uid not in fresh), *fresh.values()]
                pod = admitted_pod(pods, listing, served, ids, devices)
        except PeerError as error:
            return Veto("unknown", f"slurmbridge agent: {error}")
        return pod

    async def _fetch(self, names: list[tuple[str, str]]) -> list[PodFacts | None]:
        """Pods as they are now, all at once. Raises PeerError."""
        asked = names[:MOST_FETCHED]
        try:
            async with asyncio.timeout(FETCH_S):
                return await asyncio.gather(*(self._pods.fetch(*name) for name in asked))
        except TimeoutError as error:
            text = f"no answer in {FETCH_S:g} s"
            raise PeerTimeout("kubernetes", f"get {len(asked)} pods", text) from error

    async def _owner(self, ids: frozenset[str]) -> PodFacts | Veto:
        """The pod of which a container with these devices is about to start, read anew."""
        listed = owner_of(ids, await self._lister.list())
        entry = self._book.newest_with(ids)
        if listed is not None:
            namespace, name = listed.namespace, listed.name
        elif entry is not None:
            namespace, _, name = entry.ref.partition("/")
        else:
            return Veto("nobody", "no pod is known to have these GPUs")
        pod = await self._pods.fetch(namespace, name)
        if pod is None:
            return Veto("gone", f"pod {namespace}/{name} does not exist any more")
        if entry is not None and entry.uid != pod.uid and listed is None:
            return Veto("gone", f"pod {namespace}/{name} was replaced")
        return pod

    def _give(self, pod: PodFacts, ids: Collection[str]) -> None:
        served = {name for uid, name in self._book.served if uid == pod.uid}
        waiting = [w for w in pod.wants if w.container not in served]
        same = [w for w in waiting if w.gpus == len(ids)] or waiting or list(pod.wants)
        self._book.give(
            pod.uid, pod.ref, pod.job_id or 0, same[0].container, ids, self._devices().indices(ids)
        )

    def _answer(self, ids: Collection[str]) -> pb.ContainerAllocateResponse:
        gpus = sorted((self._devices().by_uuid[uuid] for uuid in ids), key=lambda g: g.index)
        answer = pb.ContainerAllocateResponse()
        styles = self._response.styles
        if "env" in styles:
            answer.envs["NVIDIA_VISIBLE_DEVICES"] = ",".join(g.uuid for g in gpus)
        if "cdi" in styles:
            for gpu in gpus:
                answer.cdi_devices.add(name=f"{self._response.cdi_kind}={gpu.uuid}")
        if "devices" in styles:
            for gpu in gpus:
                for path in gpu.files or (gpu.path,):
                    # The files of a MIG device lie in a folder of their own, and share the GPU's.
                    inside = path if gpu.files else f"/dev/{Path(path).name}"
                    if all(inside != known.container_path for known in answer.devices):
                        answer.devices.add(container_path=inside, host_path=path, permissions="rw")
            for path in self._response.also:
                if Path(path).exists():
                    answer.devices.add(container_path=path, host_path=path, permissions="rw")
        return answer

    async def _refuse(self, context: _Context, op: str, veto: Veto) -> None:
        self._count(f"refused_{veto.code}")
        _log.warning("refused", op=op, code=veto.code, text=veto.text)
        unknown = veto.code in ("unknown", "busy")
        code = grpc.StatusCode.UNAVAILABLE if unknown else grpc.StatusCode.FAILED_PRECONDITION
        await context.abort(code, f"slurmbridge: {veto.text}"[:1000])

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _handlers(self, served: _Served) -> grpc.GenericRpcHandler:
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "GetDevicePluginOptions": unary(
                    self._options, pb.Empty.FromString, pb.DevicePluginOptions.SerializeToString
                ),
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                    partial(self._watch, served),
                    pb.Empty.FromString,
                    pb.ListAndWatchResponse.SerializeToString,
                ),
                "GetPreferredAllocation": unary(
                    self._preferred,
                    pb.PreferredAllocationRequest.FromString,
                    pb.PreferredAllocationResponse.SerializeToString,
                ),
                "Allocate": unary(
                    self._allocate,
                    pb.AllocateRequest.FromString,
                    pb.AllocateResponse.SerializeToString,
                ),
                "PreStartContainer": unary(
                    self._prestart,
                    pb.PreStartContainerRequest.FromString,
                    pb.PreStartContainerResponse.SerializeToString,
                ),
            },
        )
