"""Registration with the kubelet: seen to be back within milliseconds, registered once each time.

A kubelet that starts deletes the sockets in its plugin folder and makes its own anew, with a new
inode. Whoever registers late loses pods: a pod bound meanwhile fails for good (measured). A second
Register under one socket name while connected makes the kubelet refuse that name until it starts
again, so each registration has a name of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from slurmbridge.clock import Clock
from slurmbridge.log import get_logger
from slurmbridge.node._gen import deviceplugin_pb2 as pb

_log = get_logger(__name__)

LOOK_S: Final = 0.02
"""Pause between two looks at kubelet.sock; one stat each."""
REGISTER_S: Final = 5.0
API_VERSION: Final = "v1beta1"
KUBELET: Final = "kubelet.sock"


class Registration:
    """Keeps a plugin registered.

    Args:
        folder: the kubelet's plugin folder.
        resource: extended resource to register.
        serve: makes the plugin listen on a new socket (its path is given) and ends the old one.
        clock: for pauses.

    Attributes:
        registered: the running kubelet has taken our registration.
        count: registrations so far. last_s: seconds from the kubelet's return to the last one.

    """

    def __init__(
        self,
        folder: str,
        resource: str,
        serve: Callable[[str], Awaitable[None]],
        clock: Clock,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = Path(folder)
        self._resource = resource
        self._serve = serve
        self._clock = clock
        self._changed = changed
        self._endpoint = ""
        self.registered = False
        self.count = 0
        self.last_s = 0.0

    async def run(self) -> None:
        """Watch and register, for ever."""
        known: tuple[int, int] | None = None
        while True:
            seen = self._inode(self._folder / KUBELET)
            mine = not self._endpoint or (self._folder / self._endpoint).exists()
            if seen is None or seen != known or not mine:
                self._set(registered=False)
                known = None
                if seen is not None:
                    found = self._clock.monotonic()
                    if await self._register():
                        known = seen
                        self.last_s = self._clock.monotonic() - found
                        self._set(registered=True)
            await self._clock.sleep(LOOK_S)

    def clean(self) -> None:
        """Remove our socket."""
        if self._endpoint:
            with contextlib.suppress(OSError):
                (self._folder / self._endpoint).unlink()

    async def _register(self) -> bool:
        self.count += 1
        self._sweep()
        endpoint = f"slurmbridge-{os.getpid()}-{self.count}.sock"
        await self._serve(str(self._folder / endpoint))
        self._endpoint = endpoint
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
            _log.warning("the kubelet did not take us", code=error.code().name, why=error.details())
            return False
        finally:
            await channel.close()
        _log.info("registered with the kubelet", endpoint=endpoint, resource=self._resource)
        return True

    def _sweep(self) -> None:
        """Remove sockets that dead agents of ours have left."""
        for path in self._folder.glob("slurmbridge-*.sock"):
            with contextlib.suppress(OSError):
                path.unlink()

    def _set(self, *, registered: bool) -> None:
        if registered != self.registered:
            self.registered = registered
            self._changed()

    @staticmethod
    def _inode(path: Path) -> tuple[int, int] | None:
        try:
            found = path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_ctime_ns
