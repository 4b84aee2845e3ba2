"""One look at the node: cgroups, processes, open device files, the driver, the kubelet.

Blocking parts run in a thread. What could not be asked is said (`is_whole`), never taken for empty.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from slurmbridge.node import slurm_script as script
from slurmbridge.node.book import Book
from slurmbridge.node.device import DeviceMap, named
from slurmbridge.node.identity import Listed
from slurmbridge.node.inventory import Inventory, Usage
from slurmbridge.node.plugin import Lister
from slurmbridge.pool.errors import PeerUnavailable

VISIBLE: Final = b"NVIDIA_VISIBLE_DEVICES="
VISIBLE_S: Final = 5.0
"""Between two looks at all environments: they cost more than the rest, and seldom change."""


class GpuUser(msgspec.Struct, frozen=True):
    """A process that uses a GPU, or whose context outlives it (command "").

    pod: UID of the pod it runs in, "" for none. job: id of its Slurm job where Slurm has cgroups,
    0 for none.
    """

    pid: int
    pod: str
    index: int
    command: str = ""
    job: int = 0


class Sample(msgspec.Struct, frozen=True):
    """What was seen. processes: pod UID -> process ids, for every pod with a cgroup.

    began: monotonic seconds before the first question. listing None: the kubelet did not answer.
    visible: pod UID -> what its processes were started with in NVIDIA_VISIBLE_DEVICES.
    """

    began: float
    processes: Mapping[str, frozenset[int]] = {}
    users: tuple[GpuUser, ...] = ()
    usage: Mapping[str, Usage] = {}
    listing: tuple[Listed, ...] | None = None
    faults: tuple[str, ...] = ()
    visible: Mapping[str, frozenset[str]] = {}

    @property
    def is_whole(self) -> bool:
        """Whether every question was answered."""
        return not self.faults and self.listing is not None


_Seen = tuple[dict[str, frozenset[int]], tuple[GpuUser, ...], dict[str, Usage], str]


class NodeLook:
    """Looks at the node.

    Args:
        conf: as in `slurm_script.DEFAULTS`; cgroup_root and monitors count.
        devices: the map as it is now.
        inventory: the driver.
        lister: the kubelet.
        book: who was given what.
        monotonic: seconds of the clock.

    """

    def __init__(
        self,
        conf: Mapping[str, Any],
        devices: Callable[[], DeviceMap],
        inventory: Inventory,
        lister: Lister,
        book: Book,
        monotonic: Callable[[], float],
    ) -> None:
        self._conf = {**script.DEFAULTS, **conf}
        self._devices = devices
        self._inventory = inventory
        self._lister = lister
        self._book = book
        self._monotonic = monotonic
        self._lock = asyncio.Lock()
        self._seen: _Seen | None = None
        self._seen_began = float("-inf")
        self._visible: dict[str, frozenset[str]] = {}
        self._visible_at = float("-inf")

    async def sample(self) -> Sample:
        """All of it: a few milliseconds, more with many processes."""
        began = self._monotonic()
        listing: tuple[Listed, ...] | None = None
        faults: list[str] = []
        try:
            listing = tuple(await self._lister.list())
        except PeerUnavailable as error:
            faults.append(str(error))
        devices = self._devices()
        groups, users, usage, fault = await self._look_now(devices)
        if fault:
            faults.append(fault)
        return Sample(began, groups, users, usage, listing, tuple(faults), dict(self._visible))

    async def left(self, uids: Collection[str]) -> str:
        """What is left of pods here, listed or running; "" when nothing is.

        The kubelet's list counts too: a pod that was admitted has devices there before it has a
        cgroup. A kubelet that does not answer admits nobody.
        """
        if not uids:
            return ""
        async with self._lock:
            why = await asyncio.to_thread(script.left_of_pods, list(uids), self._conf)
        if why:
            return why
        try:
            listing = await self._lister.list()
        except PeerUnavailable:
            return ""
        for uid in uids:
            entry = self._book.pods.get(uid)
            if entry is not None and is_listed(entry.ref, entry.grants, listing):
                return f"pod {entry.ref} is still admitted by the kubelet"
        return ""

    async def strangers(self, known: Collection[str]) -> str:
        """Why a claim of unknown pods cannot end; "" when every pod here is known."""
        return await asyncio.to_thread(script.strangers, known, self._conf)

    async def contexts(self, indices: Collection[int]) -> str:
        """What outside all pods and jobs has a context on GPUs, by the driver; "" when nothing.

        Such a process has left its pod's cgroup and mounts, or its context outlives it. Raises as
        `users`.
        """
        for user in await self.users(indices) if indices else ():
            if not user.pod and not user.job:
                return f"process {user.pid} of no pod has a context on {named([user.index])}"
        return ""

    async def users(self, indices: Collection[int]) -> list[GpuUser]:
        """Processes that use GPUs now.

        Raises:
            PeerUnavailable: the driver cannot be asked.

        """
        devices = self._devices()
        _, users, _, fault = await self._look_now(devices)
        if fault:
            raise PeerUnavailable("node", "look", fault)
        return [user for user in users if user.index in indices]

    async def busy(self, uid: str, indices: Collection[int]) -> str:
        """What other than pod `uid` still uses GPUs; "" when nothing does. Raises as `users`."""
        wanted = set(indices)
        others = {e.uid for e in self._book.pods.values() if e.uid != uid and e.gpus & wanted}
        why = await self.left(others)
        if why:
            return why
        for user in await self.users(wanted):
            if user.pod != uid:
                whose = f"of pod {user.pod}" if user.pod else "of no pod"
                return f"process {user.pid} ({user.command}) {whose} uses {named([user.index])}"
        return ""

    async def _look_now(self, devices: DeviceMap) -> _Seen:
        """A look that began after this was asked; those who ask meanwhile share one.

        A hundred containers that start together would else look at all processes one by one.
        """
        asked = self._monotonic()
        async with self._lock:
            if self._seen is None or self._seen_began < asked:
                self._seen_began = self._monotonic()
                self._seen = await asyncio.to_thread(self._look, devices)
            return self._seen

    def _look(self, devices: DeviceMap) -> _Seen:
        try:
            return self._look_whole(devices)
        except OSError as error:
            return {}, (), {}, f"cgroups and processes cannot be read: {error}"

    def _look_whole(self, devices: DeviceMap) -> _Seen:
        folders = script.pod_cgroups(self._conf["cgroup_root"])
        groups = {uid: frozenset(script.cgroup_processes(f)) for uid, f in folders.items()}
        pod_of = {pid: uid for uid, pids in groups.items() for pid in pids}
        if (now := self._monotonic()) - self._visible_at >= VISIBLE_S:
            self._visible_at = now
            self._visible = {
                uid: frozenset().union(*map(visible_devices, pids)) for uid, pids in groups.items()
            }
        found: set[tuple[int, int]] = set()
        wanted = {}
        # While the map has a fault, the last good one still tells who uses what.
        gpus = devices.gpus or self._book.gpus
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        for gpu in gpus:
            identity = script.file_identity(gpu.path)
            if identity is None:
                raise FileNotFoundError(errno.ENOENT, "cannot be looked at", gpu.path)
            wanted[identity] = gpu.index
        for pid, indices in script.open_devices(pod_of, wanted).items():
            found |= {(pid, index) for index in indices}
        contexts: set[tuple[int, int]] = set()
        usage: dict[str, Usage] = {}
        fault = ""
        try:
            usage = self._inventory.usage()
        except PeerUnavailable as error:
            fault = str(error)
        for uuid, use in usage.items():
            known = by_uuid.get(uuid)
            if known is not None:
                contexts |= {(pid, known.index) for pid in use.pids}
        users = []
        for pid, index in sorted(found | contexts):
            command = script.command_of(pid)
            pod, job = (pod_of[pid], 0) if pid in pod_of else script.owner_of(pid)
            given = pod in self._book.pods
            if script.is_monitor(pid, command, pod, job, given=given, names=self._conf["monitors"]):
                continue
            # An empty name: it has just ended, which its context may not have.
            if command or (pid, index) in contexts:
                users.append(GpuUser(pid, pod, index, command, job))
        return groups, tuple(users), usage, fault


def is_listed(ref: str, grants: Collection[frozenset[str]], listing: Collection[Listed]) -> bool:
    """Whether the kubelet lists the pod with any device of its grants."""
    ids = frozenset().union(*grants) if grants else frozenset()
    return any(f"{one.namespace}/{one.name}" == ref and (one.all_devices & ids) for one in listing)


def visible_devices(pid: int, proc: str = "/proc") -> frozenset[str]:
    """What a process was started with in NVIDIA_VISIBLE_DEVICES, also by its image; empty: nothing.

    Raises:
        OSError: it cannot be read; one that has ended has nothing.

    """
    try:
        entries = Path(f"{proc}/{pid}/environ").read_bytes().split(b"\0")
    except OSError as error:
        if error.errno in script.ENDED:
            return frozenset()
        raise
    found = [
        e.removeprefix(VISIBLE).decode(errors="replace") for e in entries if e.startswith(VISIBLE)
    ]
    return frozenset(part for text in found for part in text.split(",") if part)
