"""One chaos run from an empty cluster to an empty cluster."""

from __future__ import annotations

import contextlib
import logging
import random  # noqa: TID251 - seeded
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmbridge.pool import keys
from tests.support.altered import CLOCK
from tests.support.chaos.devices import Devices
from tests.support.chaos.faults import Faults
from tests.support.chaos.ground import HollowGround, RealGround
from tests.support.chaos.judge import Causes, Judge
from tests.support.chaos.load import LOST, REACTIVE, Load, path_of
from tests.support.chaos.wires import Wires
from tests.support.product import Product

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.support.chaos.ground import Ground

ROOT = Path(__file__).parents[3]
REAL_NODES = 2
TELL_S = 15.0
GANGS = "gangs"
"""Where `_claims` puts those of whole gangs."""
SETTLE_S = 360.0
"""After the last fault: every pod is bound, and claims and pods are one to one."""
EMPTY_S = 180.0
"""After the last pod: the claim of one deleted by force is kept for 30 s, and looks take time."""


@dataclass(frozen=True)
class Plan:
    """minutes: of load and faults. seed: of the load's and the faults' luck.

    hollow: so many hollow nodes without agents; 0: two real ones with agents. All have 8 GPUs.
    """

    minutes: float
    seed: int = 1
    hollow: int = 0


@dataclass
class Report:
    """What a run has found. leaked: claims that were left; stuck: pods that were not bound."""

    minutes: float
    seed: int
    operations: Counter[str]
    faults: Counter[str]
    judge: Judge
    devices: Devices | None = None
    leaked: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether every promise was kept."""
        judge = self.judge
        return not (
            self.double_owned or judge.bare or judge.wrong_evictions or self.leaked or self.stuck
        )

    @property
    def double_owned(self) -> list[str]:
        """GPUs with two owners, by Slurm and Kubernetes or by the nodes themselves."""
        seen = [] if self.devices is None else self.devices.overlaps_found()
        return self.judge.double_owned + seen

    def as_json(self) -> dict[str, Any]:
        """The last line of a run."""
        judge = self.judge
        return {
            "minutes": round(self.minutes, 1),
            "seed": self.seed,
            "operations": sum(self.operations.values()) + sum(self.faults.values()),
            "faults": dict(sorted(self.faults.items())),
            "load": dict(sorted(self.operations.items())),
            "pods_bound": judge.seen_bound,
            "samples": judge.samples,
            "unread": judge.unread,
            "evictions": dict(judge.evictions),
            "lost_races": len(judge.races),
            "longest_race_s": round(max(judge.races.values(), default=0.0), 1),
            "stuck_pods": len(self.stuck),
            "bare_pods": len(judge.bare),
            "device_samples": 0 if self.devices is None else self.devices.samples,
            "pods_on_devices": 0 if self.devices is None else len(self.devices.checked),
            "jobs_on_devices": 0 if self.devices is None else len(self.devices.native_seen),
            "double_owned": len(self.double_owned),
            "leaked_claims": len(self.leaked),
            "wrong_evictions": len(judge.wrong_evictions),
        }


def run(plan: Plan) -> Report:
    """Load and faults for the time of the plan, then quiet, then nothing more."""
    server = logging.getLogger("aiohttp.server")
    level = server.level
    server.setLevel(logging.CRITICAL)
    try:
        return _run(plan)
    finally:
        server.setLevel(level)


def _run(plan: Plan) -> Report:
    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    what = f"{plan.hollow} hollow nodes" if plan.hollow else f"{REAL_NODES} real nodes"
    tell(f"seed {plan.seed}: starting {what} of 8 GPUs")
    causes = Causes()
    with contextlib.ExitStack() as stack:
        ground: Ground = stack.enter_context(
            HollowGround(plan.hollow) if plan.hollow else RealGround(REAL_NODES)
        )
        kube, slurm = ground.kube, ground.slurm
        wires = stack.enter_context(Wires(kube.url, kube.ca_crt, slurm.port, plan.seed))
        clocks = kube.dir / "clocks"
        clocks.mkdir()
        _open_namespaces(ground)
        product = Product(
            ground,
            policy={"cluster": ground.cluster_id},
            sections=ground.sections,
            bridges=2,
            extenders=2,
            altered=True,
            wires=wires,
            env={CLOCK: f"{clocks}/{{}}"},
        )
        with product:
            ground.join(product, wires, clocks)
            tell("everything is up")
            faults = Faults(product, ground, wires, causes, clocks, random.Random(plan.seed))
            report = _observed(plan, ground, product, faults, causes, tell)
        if not report.is_good:
            _tell_logs(product, ground, tell)
    return report


def _observed(
    plan: Plan,
    ground: Ground,
    product: Product,
    faults: Faults,
    causes: Causes,
    tell: Callable[[str], None],
) -> Report:
    with contextlib.ExitStack() as stack:
        judge = stack.enter_context(Judge(ground.checker, causes))
        load = Load(ground, causes, plan.seed)
        report = Report(0.0, plan.seed, load.done, faults.done, judge)
        if isinstance(ground, RealGround):
            report.devices = stack.enter_context(Devices(ground.pool, judge.told))
        since = time.monotonic()
        with load:
            _trouble(plan, faults, report, tell)
        report.minutes = (time.monotonic() - since) / 60
        tell("no more faults and no more load: everything must settle")
        _heal(faults)
        report.stuck = _settle(ground, faults, tell)
        if report.stuck:
            _tell_state(product)
        tell("deleting every pod: no claim may stay")
        report.leaked = _empty(ground, faults, causes, tell)
        time.sleep(1)
    return report


def _open_namespaces(ground: Ground) -> None:
    """Pods of `default` take the planned way, those of `reactive` the other."""
    kube = ground.kube
    kube.kubectl("apply", "-f", str(ROOT / "manifests/planned/policy.yaml"))
    opted = {"metadata": {"labels": {"slurmbridge.dev/planned": "true"}}}
    kube.api.patch("/api/v1/namespaces/default", opted)
    kube.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": REACTIVE}})


def _trouble(plan: Plan, faults: Faults, report: Report, tell: Callable[[str], None]) -> None:
    end = time.monotonic() + 60 * plan.minutes
    told = time.monotonic()
    while time.monotonic() < end:
        faults.turn()
        time.sleep(0.1)
        if time.monotonic() - told >= TELL_S:
            told = time.monotonic()
            judge = report.judge
            tell(
                f"{sum(report.faults.values())} faults, {judge.seen_bound} pods bound "
                f"({judge.bound} now), evictions {dict(judge.evictions)}, races "
                f"{len(judge.races)}, double owned {len(report.double_owned)}; "
                f"in trouble: {', '.join(f'{f.kind} {t}' for t, f in faults.active.items())}"
            )


def _heal(faults: Faults) -> None:
    end = time.monotonic() + 60
    while faults.active and time.monotonic() < end:
        faults.heal_all()
        time.sleep(0.5)
    if faults.active:
        raise RuntimeError(f"not healed: {faults.active}")


def _settle(ground: Ground, faults: Faults, tell: Callable[[str], None]) -> list[str]:
    """Pods that are not bound, or have not one claim each, though there is room in the end."""
    ground.slurm.run("scancel", "--user=nobody", check=False)
    stuck: list[str] = ["not read"]
    began = time.monotonic()
    while time.monotonic() - began < SETTLE_S:
        time.sleep(1)
        faults.care()
        try:
            stuck = _unsettled(ground)
        except LOST as error:
            stuck = [f"not read: {error}"]
        if not stuck:
            tell(f"settled after {time.monotonic() - began:.0f} s")
            return []
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


def _claims(ground: Ground) -> dict[str, list[int]]:
    """Claims and what a cover has left, by pod UID; read without the product's code."""
    text = ground.slurm.run("squeue", "-h", "-a", "-t", "R,PD,S,CF", "-o", "%A|%j|%k", timeout_s=10)
    found: dict[str, list[int]] = {}
    for line in text.splitlines():
        job, name, comment = line.split("|", 2)
        if name.startswith("slurmbridge"):
            uid = comment.partition(" pod=")[2].partition(" ")[0]
            uid = uid or (GANGS if " group=" in comment else name)
            found.setdefault(uid, []).append(int(job))
    return found


def _empty(
    ground: Ground, faults: Faults, causes: Causes, tell: Callable[[str], None]
) -> list[str]:
    """Delete all pods; claims that are left."""
    for item in ground.kube.api.items("/api/v1/pods"):
        causes.deleted.add(item["metadata"]["uid"])
        ground.kube.api.delete(path_of(item))
    began = time.monotonic()
    left: dict[str, list[int]] = {}
    while time.monotonic() - began < EMPTY_S:
        time.sleep(1)
        faults.care()
        left = _claims(ground)
        if not left:
            tell(f"no claim is left after {time.monotonic() - began:.0f} s")
            return []
    tell(f"LEAKED: {left}")
    return [f"{uid}: {jobs}" for uid, jobs in left.items()]


def _tell_state(product: Product) -> None:
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


def _tell_logs(product: Product, ground: Ground, tell: Callable[[str], None]) -> None:
    logs = {
        f"{part}-{i}": product.log(f"{part}-{i}")
        for part, count in (("bridge", product.bridges), ("extender", product.extenders))
        for i in range(count)
    }
    for name, text in (logs | ground.agent_logs()).items():
        tell(f"end of the log of {name}:")
        print("\n".join(text.splitlines()[-40:]), flush=True)
