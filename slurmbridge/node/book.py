"""What the agent remembers of pods that were given GPUs, until nothing of them is left.

The kubelet forgets a force-deleted pod while its processes live on; the book does not. It is
written to a file before a device is given, so that neither a restart of the agent nor an Epilog
that runs without it loses the knowledge. The file lives in /run: after a reboot no process is left.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from slurmbridge.log import get_logger
from slurmbridge.node.device import Gpu
from slurmbridge.node.loaded import Loaded
from slurmbridge.pool.errors import UNREADABLE

_log = get_logger(__name__)


class BookEntry(msgspec.Struct):
    """One pod with GPUs. gpus: Slurm indices given so far; served: its containers served.

    grants: the device sets given, in order. gone: since when (monotonic) nothing of it was seen.
    """

    uid: str
    ref: str
    job_id: int
    gpus: set[int] = msgspec.field(default_factory=set)
    served: set[str] = msgspec.field(default_factory=set)
    grants: list[frozenset[str]] = msgspec.field(default_factory=list)
    number: int = 0


class NativeJob(msgspec.Struct, frozen=True):
    """A native job that has passed our Prolog on this node."""

    job_id: int
    user: str
    account: str
    partition: str
    gpus: tuple[int, ...]


class _FileGpu(msgspec.Struct, frozen=True):
    index: int
    uuid: str
    path: str
    minor: int = -1


class _File(msgspec.Struct, frozen=True):
    version: Literal[1]
    gpus: tuple[_FileGpu, ...] = ()
    pods: tuple[BookEntry, ...] = ()
    native: tuple[NativeJob, ...] = ()
    loaded: Loaded | None = None


class Book:
    """Pods with GPUs and native jobs on this node, and the order of its GPUs in slurmd.

    Args:
        path: of the file; its folder must exist.

    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._number = 0
        self.gpus: tuple[Gpu, ...] = ()
        self.loaded: Loaded | None = None
        self.pods: dict[str, BookEntry] = {}
        self.native: dict[int, NativeJob] = {}
        self._load()

    @property
    def served(self) -> set[tuple[str, str]]:
        """(pod UID, container) that have been given devices."""
        return {(e.uid, name) for e in self.pods.values() for name in e.served}

    def give(
        self,
        uid: str,
        ref: str,
        job_id: int,
        container: str,
        grant: Iterable[str],
        gpus: Iterable[int],
    ) -> None:
        """Note that a container is given devices; on disk when this returns.

        Raises:
            OSError: it cannot be written: the devices must not be given.

        """
        entry = self.pods.setdefault(uid, BookEntry(uid, ref, job_id))
        self._number += 1
        entry.job_id = job_id
        entry.number = self._number
        entry.gpus |= set(gpus)
        entry.served.add(container)
        entry.grants.append(frozenset(grant))
        self.save()

    def adopt(
        self,
        uid: str,
        ref: str,
        job_id: int,
        gpus: Collection[int],
        served: Collection[str] = (),
    ) -> None:
        """Note a pod that has GPUs without our doing in this run (an agent without its file)."""
        entry = self.pods.get(uid)
        if entry is not None and entry.job_id == job_id and set(gpus) <= entry.gpus:
            return
        entry = self.pods.setdefault(uid, BookEntry(uid, ref, job_id))
        entry.job_id = job_id
        entry.gpus |= set(gpus)
        entry.served |= set(served)
        self.save()

    def drop(self, uids: Iterable[str]) -> None:
        """Forget pods of which nothing is left."""
        dropped = [uid for uid in uids if self.pods.pop(uid, None) is not None]
        if dropped:
            self.save()

    def started(self, job: NativeJob) -> None:
        """Note a native job that may start."""
        self.native[job.job_id] = job
        self.save()

    def ended(self, job_id: int) -> None:
        """Forget a native job."""
        if self.native.pop(job_id, None) is not None:
            self.save()

    def free_of_jobs(self, indices: Collection[int]) -> None:
        """Forget native jobs with any of these GPUs: they are a pod's, by slurmctld's own word."""
        over = [job.job_id for job in self.native.values() if set(indices) & set(job.gpus)]
        for job_id in over:
            _log.info("a native job is over, its GPUs are a pod's", job=job_id)
            del self.native[job_id]
        if over:
            self.save()

    def newest_with(self, grant: frozenset[str]) -> BookEntry | None:
        """The pod that was given exactly these devices last."""
        found = [e for e in self.pods.values() if grant in e.grants]
        return max(found, key=lambda e: e.number, default=None)

    def save(self) -> None:
        """Write the file: whole, or not at all."""
        body = {
            "version": 1,
            "gpus": [
                msgspec.structs.asdict(_FileGpu(g.index, g.uuid, g.path, g.minor))
                for g in self.gpus
            ],
            "pods": [
                {
                    "uid": e.uid,
                    "ref": e.ref,
                    "job_id": e.job_id,
                    "gpus": sorted(e.gpus),
                    "served": sorted(e.served),
                    "grants": [sorted(g) for g in e.grants[-8:]],
                    "number": e.number,
                }
                for e in self.pods.values()
            ],
            "native": [msgspec.to_builtins(job) for job in self.native.values()],
            "loaded": msgspec.to_builtins(self.loaded),
        }
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        part.write_text(json.dumps(body), encoding="utf-8")
        part.replace(self._path)

    def _load(self) -> None:
        try:
            body = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            return
        except (OSError, *UNREADABLE) as error:
            _log.warning("book cannot be read; made anew from what is here", error=str(error))
            return
        # The last good map: it counts while the present one has a fault.
        self.gpus = tuple(Gpu(g.index, g.uuid, g.minor, g.path) for g in body.gpus)
        self.pods = {entry.uid: entry for entry in body.pods}
        self.native = {job.job_id: job for job in body.native}
        self._number = max((entry.number for entry in body.pods), default=0)
        self.loaded = body.loaded
