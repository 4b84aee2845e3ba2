"""One chaos run from an empty cluster to an empty cluster."""

from __future__ import annotations

import contextlib
import logging
import random  # noqa: TID251 - seeded
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmbridge.pool import keys
from tests.support.altered import CLOCK
from tests.support.chaos.faults import Faults
from tests.support.chaos.judge import Causes, Judge
from tests.support.chaos.load import LOST, REACTIVE, Load, path_of
from tests.support.chaos.wires import Wires
from tests.support.cluster import Cluster
from tests.support.product import Product
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).parents[3]
TELL_S = 15.0
GANGS = "gangs"
"""Where `_claims` puts those of whole gangs."""
SETTLE_S = 240.0
"""After the last fault: every pod is bound, and claims and pods are one to one."""
EMPTY_S = 180.0
"""After the last pod: the claim of one deleted by force is kept for 30 s, and looks take time."""


@dataclass(frozen=True)
class Plan:
    """minutes: of load and faults. seed: of the load's and the faults' luck. nodes: of 8 GPUs."""

    minutes: float
    seed: int = 1
    nodes: int = 6


@dataclass
class Report:
    """What a run has found. leaked: claims that were left; stuck: pods that were not bound."""

    minutes: float
    seed: int
    operations: Counter[str]
    faults: Counter[str]
    judge: Judge
    leaked: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether every promise was kept."""
        judge = self.judge
        return not (
            judge.double_owned or judge.bare or judge.wrong_evictions or self.leaked or self.stuck
        )

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
            "double_owned": len(judge.double_owned),
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

    tell(f"seed {plan.seed}: starting {plan.nodes} nodes of 8 GPUs")
    causes = Causes()
    # A slurmd that slurmctld has not reached is looked at again after a third of its time-out.
    config = SlurmConfig(nodes=plan.nodes, gpus_per_node=8, extra=("SlurmdTimeout=45",))
    with (
        Cluster(config, scheduler=False) as cluster,
        Wires(cluster.kube.url, cluster.kube.ca_crt, cluster.slurm.port, plan.seed) as wires,
    ):
        clocks = cluster.kube.dir / "clocks"
        clocks.mkdir()
        _open_namespaces(cluster)
        product = Product(
            cluster,
            bridges=2,
            extenders=2,
            altered=True,
            wires=wires,
            env={CLOCK: f"{clocks}/{{}}"},
        )
        faults = Faults(product, wires, causes, clocks, random.Random(plan.seed))
        with product, Judge(cluster.checker, causes) as judge:
            load = Load(cluster, causes, plan.seed)
            report = Report(0.0, plan.seed, load.done, faults.done, judge)
            since = time.monotonic()
            with load:
                _trouble(plan, faults, report, tell)
            report.minutes = (time.monotonic() - since) / 60
            tell("no more faults and no more load: everything must settle")
            _heal(faults)
            report.stuck = _settle(cluster, tell)
            if report.stuck:
                _tell_state(product)
            tell("deleting every pod: no claim may stay")
            report.leaked = _empty(cluster, causes, tell)
            time.sleep(1)
        if not report.is_good:
            _tell_logs(product, tell)
    return report


def _open_namespaces(cluster: Cluster) -> None:
    """Pods of `default` take the planned way, those of `reactive` the other."""
    kube = cluster.kube
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
                f"{len(judge.races)}, double owned {len(judge.double_owned)}; "
                f"in trouble: {', '.join(f'{f.kind} {t}' for t, f in faults.active.items())}"
            )


def _heal(faults: Faults) -> None:
    end = time.monotonic() + 60
    while faults.active and time.monotonic() < end:
        faults.heal_all()
        time.sleep(0.5)
    if faults.active:
        raise RuntimeError(f"not healed: {faults.active}")


def _settle(cluster: Cluster, tell: Callable[[str], None]) -> list[str]:
    """Pods that are not bound, or have not one claim each, though there is room in the end."""
    cluster.slurm.run("scancel", "--user=nobody", check=False)
    stuck: list[str] = ["not read"]
    began = time.monotonic()
    while time.monotonic() - began < SETTLE_S:
        time.sleep(1)
        try:
            stuck = _unsettled(cluster)
        except LOST as error:
            stuck = [f"not read: {error}"]
        if not stuck:
            tell(f"settled after {time.monotonic() - began:.0f} s")
            return []
    tell(f"NOT SETTLED: {stuck}")
    return stuck


def _unsettled(cluster: Cluster) -> list[str]:
    claims = _claims(cluster)
    found = []
    pods = {p["metadata"]["uid"]: p for p in cluster.kube.api.items("/api/v1/pods")}
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


def _claims(cluster: Cluster) -> dict[str, list[int]]:
    """Claims and what a cover has left, by pod UID; read without the product's code."""
    text = cluster.slurm.run(
        "squeue", "-h", "-a", "-t", "R,PD,S,CF", "-o", "%A|%j|%k", timeout_s=10
    )
    found: dict[str, list[int]] = {}
    for line in text.splitlines():
        job, name, comment = line.split("|", 2)
        if name.startswith("slurmbridge"):
            uid = comment.partition(" pod=")[2].partition(" ")[0]
            uid = uid or (GANGS if " group=" in comment else name)
            found.setdefault(uid, []).append(int(job))
    return found


def _empty(cluster: Cluster, causes: Causes, tell: Callable[[str], None]) -> list[str]:
    """Delete all pods; claims that are left."""
    for item in cluster.kube.api.items("/api/v1/pods"):
        causes.deleted.add(item["metadata"]["uid"])
        cluster.kube.api.delete(path_of(item))
    began = time.monotonic()
    left: dict[str, list[int]] = {}
    while time.monotonic() - began < EMPTY_S:
        time.sleep(1)
        left = _claims(cluster)
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
        with contextlib.suppress(RuntimeError):
            print(name, product.cli("who", name), flush=True)
    with contextlib.suppress(RuntimeError):
        print(product.cli("status"), flush=True)


def _tell_logs(product: Product, tell: Callable[[str], None]) -> None:
    for part, count in (("bridge", product.bridges), ("extender", product.extenders)):
        for i in range(count):
            lines = product.log(f"{part}-{i}").splitlines()
            tell(f"end of the log of {part}-{i}:")
            print("\n".join(lines[-40:]), flush=True)
