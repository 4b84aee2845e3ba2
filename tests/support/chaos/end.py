"""The end of a chaos run: no more faults, everything settles, every pod goes, and no claim stays.

How long that takes is the machine's to say: on a busy one slurmctld is read seldom, and pods come
one after the other. So the limits are for the time in which nothing went on, without what the machine
itself has lost meanwhile (stalls.py).
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from typing import TYPE_CHECKING, Any

from slurmbridge.pool import keys
from tests.support.chaos.load import LOST, path_of
from tests.support.checker import HOLDING, read_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.support.chaos.faults import Faults
    from tests.support.chaos.ground import Ground
    from tests.support.chaos.judge import Causes
    from tests.support.chaos.stalls import Stalls
    from tests.support.product import Product

WHATS = ("node", "job")
USED = re.compile(r"GresUsed=gpu:\w+:(\d+)")
LIVE = "R,PD,S,CF"
GANGS = "gangs"
"""Where `_claims` puts those of whole gangs."""
HEAL_S = 60.0
SETTLE_S = 240.0
"""After the last fault: every pod is bound, and claims and pods are one to one."""
BOOK_S = 20.0
"""GPUs that no job has, and that slurmctld counts as used for so long, stay so until a person acts."""
EMPTY_S = 180.0
"""After the last pod: the claim of one deleted by force is kept for 30 s, and looks take time."""


class Limit:
    """A time in which fewer things must be left than ever before."""

    def __init__(self, limit_s: float, stalls: Stalls) -> None:
        self._limit_s, self._stalls = limit_s, stalls
        self.began = self._since = time.monotonic()
        self._fewest: int | None = None

    def is_over(self) -> bool:
        """Whether nothing went on for so long."""
        return self._stalls.is_over(self._since, self._limit_s)

    def see(self, left: int) -> None:
        """So many are left."""
        if self._fewest is None or left < self._fewest:
            self._fewest, self._since = left, time.monotonic()

    @property
    def lasted_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self.began


class Book:
    """slurmctld's own count of used GPUs, which it gets wrong for good in some of its crashes.

    Nothing is placed on what it counts, by Slurm itself neither, and the product counts it as used.
    A person who sees that lets it count anew (docs/failure-modes.md).
    """

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._wrong_since: float | None = None

    def mend(self) -> bool:
        """Look, and let slurmctld count anew where that is due; whether it was."""
        slurm = self._ground.slurm
        read = [slurm.run("scontrol", "show", what, "-d", "-o", timeout_s=10) for what in WHATS]
        used = sum(int(count) for count in USED.findall(read[0]))
        jobs = [job for job in read_jobs(read[1]) if job.state in HOLDING]
        # What is ending, or runs without numbers, has GPUs of which Slurm does not tell.
        is_clear = all(job.state == "RUNNING" and job.gpus for job in jobs)
        if not is_clear or used <= sum(count for j in jobs for count, _ in j.gpus.values()):
            self._wrong_since = None
            return False
        if self._wrong_since is None:
            self._wrong_since = time.monotonic()
        if time.monotonic() - self._wrong_since < BOOK_S:
            return False
        slurm.run("scontrol", "reconfigure", timeout_s=30)
        self._wrong_since = None
        return True


def heal(faults: Faults, stalls: Stalls) -> None:
    """Undo all faults."""
    limit = Limit(HEAL_S, stalls)
    while faults.active and not limit.is_over():
        faults.heal_all()
        time.sleep(0.5)
    if faults.active:
        raise RuntimeError(f"not healed: {faults.active}")


def settle(
    ground: Ground, faults: Faults, stalls: Stalls, tell: Callable[[str], None]
) -> list[str]:
    """Pods that are not bound or not started, or have not one claim each, though there is room."""
    with contextlib.suppress(*LOST):
        ground.slurm.run("scancel", "--user=nobody", check=False)
    stuck: list[str] = ["not read"]
    limit, book = Limit(SETTLE_S, stalls), Book(ground)
    while not limit.is_over():
        time.sleep(1)
        faults.care()
        with contextlib.suppress(*LOST):
            if book.mend():
                faults.done["Slurm's count of GPUs mended by hand"] += 1
                tell("slurmctld counted GPUs that no job has: scontrol reconfigure")
        try:
            stuck = _unsettled(ground)
        except LOST as error:
            stuck = [f"not read: {error}"]
            continue
        if not stuck:
            tell(f"settled after {limit.lasted_s:.0f} s")
            return []
        limit.see(len(stuck))
    tell(f"NOT SETTLED: {stuck}")
    return stuck


def _unsettled(ground: Ground) -> list[str]:
    claims = _claims(ground)
    found = []
    pods = {p["metadata"]["uid"]: p for p in ground.kube.api.items("/api/v1/pods")}
    for uid, item in pods.items():
        name = item["metadata"]["name"]
        if item["status"].get("phase") in ("Succeeded", "Failed"):
            continue
        if not item["spec"].get("nodeName"):
            if name.startswith("g") and _is_partial(item, pods.values()):
                continue  # the API server did not take all of the gang
            found.append(f"{name} is not bound")
        elif len(claims.get(uid, ())) != 1 and not _has_share(item, claims):
            found.append(f"{name} on {item['spec']['nodeName']} has claims {claims.get(uid)}")
        elif item["status"].get("phase") == "Pending":
            found.append(f"{name} on {item['spec']['nodeName']} has not started")
    return found


def _is_partial(item: dict[str, Any], items: Iterable[dict[str, Any]]) -> bool:
    """Whether a member's gang is not all there."""
    gang = item["metadata"]["name"].partition("-")[0]
    size = int(item["metadata"]["annotations"][keys.GROUP_SIZE])
    return sum(i["metadata"]["name"].startswith(f"{gang}-") for i in items) < size


def _has_share(item: dict[str, Any], claims: dict[str, list[int]]) -> bool:
    """Whether a pod says that it has a share of a gang's claim, which is there."""
    job = item["metadata"].get("annotations", {}).get(keys.CLAIM, "").partition("/")[0]
    return job.isdigit() and int(job) in claims.get(GANGS, ())


def _claims(ground: Ground, states: str = LIVE) -> dict[str, list[int]]:
    """Claims and what a cover has left, by pod UID; read without the product's code."""
    text = ground.slurm.run("squeue", "-h", "-a", "-t", states, "-o", "%A|%j|%k", timeout_s=10)
    found: dict[str, list[int]] = {}
    for line in text.splitlines():
        job, name, comment = line.split("|", 2)
        if name.startswith("slurmbridge"):
            uid = comment.partition(" pod=")[2].partition(" ")[0]
            uid = uid or (GANGS if " group=" in comment else name)
            found.setdefault(uid, []).append(int(job))
    return found


def empty(
    ground: Ground, faults: Faults, causes: Causes, stalls: Stalls, tell: Callable[[str], None]
) -> list[str]:
    """Delete all pods; claims that are left."""
    limit = Limit(EMPTY_S, stalls)
    left: dict[str, list[int]] = {"not read": []}
    while not limit.is_over():
        time.sleep(1)
        try:
            for item in ground.kube.api.items("/api/v1/pods"):
                causes.deleted.add(item["metadata"]["uid"])
                if not item["metadata"].get("deletionTimestamp"):
                    ground.kube.api.delete(path_of(item))
            faults.care()
            left = _claims(ground, f"{LIVE},CG")  # with what an Epilog still holds
        except LOST:
            continue  # too busy to answer; not read is not gone
        if not left:
            tell(f"no claim is left after {limit.lasted_s:.0f} s")
            return []
        limit.see(len(left))
    tell(f"LEAKED: {left}")
    return [f"{uid}: {jobs}" for uid, jobs in left.items()]


def tell_state(product: Product) -> None:
    """What both sides and the bridge say of a pool that does not settle."""
    slurm = product.cluster.slurm
    for argv in (
        ("sinfo", "-N", "-O", "NodeList,StateLong,GresUsed,Reason"),
        ("squeue", "-a", "-o", "%A %j %T %R %b %N %p %k"),
    ):
        print(slurm.run(*argv, check=False, timeout_s=10), flush=True)
    for item in product.cluster.kube.api.items("/api/v1/pods"):
        meta, limits = item["metadata"], item["spec"]["containers"][0]["resources"]["limits"]
        if item["status"].get("phase") not in ("Succeeded", "Failed"):
            notes = {k: v for k, v in meta.get("annotations", {}).items() if "slurmb" in k}
            print(meta["name"], item["spec"].get("nodeName"), limits, notes, flush=True)
    for name in product.cluster.slurm.node_names:
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            print(name, product.cli("who", name), flush=True)
    with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
        print(product.cli("status"), flush=True)
