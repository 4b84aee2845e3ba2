"""Registration with the kubelet: known to hold only while the kubelet has our devices.

A kubelet that starts deletes the sockets in its plugin folder and makes its own anew, with a new
inode. Whoever registers late loses pods: a pod bound meanwhile fails for good (measured).

The kubelet's "yes" to Register is only a part of it: it then opens a ListAndWatch stream, takes our
devices from it (on a busy machine 100 ms later), and has them only as long as it stands. So the
kubelet itself is asked for its devices (PodResources) once a stream has been served. A kubelet may
also end a stream that it has just opened: in older ones the late end of a dead agent's stream takes
down the connection of its successor. So without a stream we register again. A second Register under
one socket name while connected makes the kubelet refuse that name until it starts again (`already
connected`), so each registration of each process has a name of its own.

A kubelet that has just started counts the devices of pods that ended meanwhile as taken, until it
has the API server's list of pods (`requested number of devices unavailable`, seen): we do not say
that we are registered before it has had the time to fetch that list and to take it in.
Source: pkg/kubelet/cm/devicemanager (UpdateAllocatedDevices), pkg/kubelet/kubelet.go (syncLoop).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from slurmbridge.clock import Clock
from slurmbridge.log import get_logger
from slurmbridge.node._gen import deviceplugin_pb2 as pb
from slurmbridge.node.foldersight import FolderSight
from slurmbridge.pool.errors import PeerUnavailable

_log = get_logger(__name__)

LOOK_S: Final = 0.05
"""Pause between two looks at kubelet.sock where nothing tells of changes; one stat each."""
LISTEN_S: Final = 3.0
"""How long the kubelet may take from its yes to our devices (3 to 150 ms were seen)."""
UNHEARD_S: Final = 0.25
"""Least pause added after a yes without a stream."""
FIRST_PAUSE_S: Final = 0.002
LONGEST_PAUSE_S: Final = 5.0
"""Between two tries with the same kubelet: doubled each time. Its socket stands a moment before it
is listened to."""
STEADY_S: Final = 10.0
"""A stream that has stood so long is no part of a row of failures any more."""
REGISTER_S: Final = 5.0
SETTLE_S: Final = 5.0
"""A kubelet's main loop sleeps no longer at its start, and asks for its pods 1 to 2 s after it."""
API_VERSION: Final = "v1beta1"
KUBELET: Final = "kubelet.sock"
_Inode = tuple[int, int]


class Registration:
    """Keeps a plugin registered.

    Args:
        folder: the kubelet's plugin folder.
        resource: extended resource to register.
        run: a word that no other process of ours has used here.
        serve: makes the plugin listen on a new socket (its path is given) and ends the old one.
        listed: number of the stream of a kubelet that listens on the newest socket, 0: none does.
        has_devices: whether the kubelet says that it has all our healthy devices. Raises
            PeerUnavailable.
        clock: for pauses.
        changed: called when `registered` has changed.

    Attributes:
        count: registrations so far. last_s: seconds from the kubelet's return to the last one.

    """

    def __init__(
        self,
        folder: str,
        resource: str,
        run: str,
        serve: Callable[[str], Awaitable[None]],
        listed: Callable[[], int],
        has_devices: Callable[[], Awaitable[bool]],
        clock: Clock,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = Path(folder)
        self._resource = resource
        self._run = run
        self._serve = serve
        self._listed = listed
        self._has_devices = has_devices
        self._confirmed = 0
        self._settled_at = 0.0
        self._clock = clock
        self._changed = changed
        self._sight = FolderSight(folder)
        self._endpoint = ""
        self._taken: _Inode | None = None
        self._tried: _Inode | None = None
        self._pause_s = FIRST_PAUSE_S
        self._next = 0.0
        self._listed_at: float | None = None
        self._told = False
        self._warned = ""
        self.count = 0
        self.last_s = 0.0

    @property
    def registered(self) -> bool:
        """Whether the running kubelet has taken us and our devices, and pods may come."""
        return (
            self._taken is not None
            and 0 < self._listed() == self._confirmed
            and self._clock.monotonic() >= self._settled_at
        )

    async def run(self) -> None:
        """Watch and register, for ever."""
        with self._sight as sight:
            while True:
                await self.step()
                due_s = self._next - self._clock.monotonic()
                await sight.wait(self._clock, due_s if 0.0 < due_s < LOOK_S else LOOK_S)

    def heard(self) -> None:
        """A kubelet has begun to listen, or has ended that: to be called by the plugin."""
        self._tell()
        self._sight.wake()

    async def step(self) -> None:
        """Look once, and register where that is due."""
        now = self._clock.monotonic()
        seen = self._inode(self._folder / KUBELET)
        if seen != self._tried:
            # Another kubelet: it is asked at once, whatever the one before has said.
            self._taken, self._tried = None, seen
            self._pause_s, self._next = FIRST_PAUSE_S, now
            if seen is not None:
                age_s = max(0.0, self._clock.wall() - seen[1] / 1e9)
                self._settled_at = now + max(0.0, SETTLE_S - age_s)
        if stream := self._listed():
            self._listed_at = self._listed_at or now
            if now - self._listed_at > STEADY_S:
                self._pause_s = FIRST_PAUSE_S
            if stream != self._confirmed:
                await self._confirm(stream, now - self._listed_at)
        elif self._listed_at is not None:
            self._listed_at = None
            self._taken = None
            self._next = now + self._longer_pause()
        mine = bool(self._endpoint) and (self._folder / self._endpoint).exists()
        holds = self._taken is not None and self._listed() and mine
        if seen is not None and now >= self._next and not holds:
            if self._taken is not None and mine:
                self._warn("the kubelet has taken us and does not listen to our devices")
                self._pause_s = max(self._pause_s, UNHEARD_S)
            await self._register(seen, now)
        self._tell()

    def clean(self) -> None:
        """Remove our socket."""
        if self._endpoint:
            with contextlib.suppress(OSError):
                (self._folder / self._endpoint).unlink()

    async def _confirm(self, stream: int, waited_s: float) -> None:
        try:
            if await self._has_devices():
                self._confirmed = stream
            elif waited_s > LISTEN_S:
                self._warn("the kubelet listens to us and does not have all our devices")
        except PeerUnavailable as error:
            if waited_s > LISTEN_S:
                self._warn(f"the kubelet does not say which devices it has: {error}")

    async def _register(self, seen: _Inode, found: float) -> None:
        """Register once. Then the kubelet has `LISTEN_S` to open its stream."""
        self._taken = None
        self._tell()
        if await self._ask():
            self._taken = seen
            now = self._clock.monotonic()
            self.last_s = now - found
            self._next = now + LISTEN_S + self._longer_pause()
        else:
            self._next = self._clock.monotonic() + self._longer_pause()

    async def _ask(self) -> bool:
        self.count += 1
        self._sweep()
        endpoint = f"slurmbridge-{self._run}-{self.count}.sock"
        await self._serve(str(self._folder / endpoint))
        self._endpoint, self._listed_at = endpoint, None
        request = pb.RegisterRequest(
            version=API_VERSION,
            endpoint=endpoint,
            resource_name=self._resource,
            options=pb.DevicePluginOptions(
                pre_start_required=True, get_preferred_allocation_available=True
            ),
        )
        channel = grpc.aio.insecure_channel(
            f"unix:{self._folder / KUBELET}",
            options=(("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)),
        )
        try:
            call = channel.unary_unary(
                f"/{API_VERSION}.Registration/Register",
                pb.RegisterRequest.SerializeToString,
                pb.Empty.FromString,
            )
            await call(request, timeout=REGISTER_S)
        except grpc.aio.AioRpcError as error:
            self._warn(f"the kubelet did not take us: {error.code().name}: {error.details()}")
            return False
        finally:
            await channel.close()
        self._warned = ""
        _log.info("registered with the kubelet", endpoint=endpoint, resource=self._resource)
        return True

    def _longer_pause(self) -> float:
        pause = self._pause_s
        self._pause_s = min(2 * pause, LONGEST_PAUSE_S)
        return pause

    def _warn(self, why: str) -> None:
        """Say it once, not at each try."""
        if why != self._warned:
            self._warned = why
            _log.warning("not registered", why=why)

    def _sweep(self) -> None:
        """Remove sockets that dead agents of ours have left."""
        for path in self._folder.glob("slurmbridge-*.sock"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _tell(self) -> None:
        if self.registered != self._told:
            self._told = self.registered
            self._changed()

    @staticmethod
    def _inode(path: Path) -> _Inode | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_ctime_ns
