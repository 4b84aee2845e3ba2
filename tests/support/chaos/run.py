"""One chaos run from an empty cluster to an empty cluster."""

from __future__ import annotations

import contextlib
import logging
import random  # noqa: TID251 - seeded
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.altered import CLOCK
from tests.support.chaos import end
from tests.support.chaos.devices import Devices
from tests.support.chaos.faults import Faults
from tests.support.chaos.ground import HollowGround, RealGround
from tests.support.chaos.judge import Causes, Judge
from tests.support.chaos.load import LOST, REACTIVE, Load
from tests.support.chaos.stalls import Stalls
from tests.support.chaos.wires import Wires
from tests.support.product import Product

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.chaos.ground import Ground

ROOT = Path(__file__).parents[3]
REAL_NODES = 2
TELL_S = 15.0
MOST_LINES, MOST_CHARS = 60, 400
"""Of each log, when a promise was broken."""
ALL_KINDS_MINUTES = 10
"""A run as long as this does every kind of fault."""


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
    """What a run has found. leaked: claims that were left; stuck: pods that were not bound.

    not_done: kinds of faults that the run had no time for.
    """

    minutes: float
    seed: int
    operations: Counter[str]
    faults: Counter[str]
    judge: Judge
    stalls: Stalls
    devices: Devices | None = None
    not_done: list[str] = field(default_factory=list)
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
            "pods_excused": judge.excused,
            "samples": judge.samples,
            "unread": judge.unread,
            "evictions": dict(judge.evictions),
            "lost_races": len(judge.races),
            "longest_race_s": round(max(judge.races.values(), default=0.0), 1),
            "longest_kept_s": round(judge.longest_kept_s, 1),
            "stalled_s": round(self.stalls.lost_s, 1),
            "longest_stall_s": round(self.stalls.longest_s, 1),
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
            _tell_logs(report, product, ground, tell)
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
        stalls = stack.enter_context(Stalls())
        judge = stack.enter_context(Judge(ground.checker, causes, stalls))
        load = Load(ground, causes, plan.seed)
        report = Report(0.0, plan.seed, load.done, faults.done, judge, stalls)
        if isinstance(ground, RealGround):
            report.devices = stack.enter_context(Devices(ground.pool, judge.told))
        since = time.monotonic()
        with load:
            _trouble(plan, faults, report, tell)
        report.minutes = (time.monotonic() - since) / 60
        report.not_done = faults.not_done
        tell("no more faults and no more load: everything must settle")
        end.heal(faults, stalls)
        report.stuck = end.settle(ground, faults, stalls, tell)
        if report.stuck:
            with contextlib.suppress(*LOST):
                end.tell_state(product)
        tell("deleting every pod: no claim may stay")
        report.leaked = end.empty(ground, faults, causes, stalls, tell)
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
    """So long as planned; on a slow machine half as long again, until every kind was done."""
    began = told = time.monotonic()
    until = began + 60 * plan.minutes
    latest = began + 90 * plan.minutes if plan.minutes >= ALL_KINDS_MINUTES else until
    while time.monotonic() < until or (faults.not_done and time.monotonic() < latest):
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


def _tell_logs(
    report: Report, product: Product, ground: Ground, tell: Callable[[str], None]
) -> None:
    """What every log says of the pods, gangs and jobs of which a promise was broken."""
    about = subjects(report)
    logs = {
        f"{part}-{i}": product.log(f"{part}-{i}")
        for part, count in (("bridge", product.bridges), ("extender", product.extenders))
        for i in range(count)
    }
    logs |= ground.agent_logs()
    for path in sorted(ground.slurm.log_folder.glob("*.log")):
        logs[path.stem] = path.read_text(errors="replace")
    for name, text in logs.items():
        tell(f"log of {name}:")
        lines = [line for line in text.splitlines() if about.search(line)]
        print("\n".join(line[:MOST_CHARS] for line in lines[-MOST_LINES:]), flush=True)


def subjects(report: Report) -> re.Pattern[str]:
    """Matches a line that names a pod, its gang or a job which a finding of a report names."""
    judge = report.judge
    found = [*report.double_owned, *judge.bare, *judge.wrong_evictions]
    text = " ".join(found + report.leaked + report.stuck)
    words = {rf"JobId={job}\b|\"job(_id)?\": ?{job}\b" for job in re.findall(r"job (\d+)", text)}
    for uid, story in judge.pods.items():
        name = story.name.partition("/")[2]
        if uid in text or re.search(rf"\b{name}\b", text):
            words |= {re.escape(uid), rf"\b{name.partition('-')[0]}\b"}
            words |= {rf"JobId={job}\b" for job in story.claims}
    # Those that never had a node are in no story.
    words |= {rf"\b{name}\b" for name in re.findall(r"\b([gp]\d+)(?:-\d+)? is not bound", text)}
    return re.compile("|".join(sorted(words)) or "(?!)")
