"""The judge of a chaos run: what the checker sees every 200 ms, put into stories and counted.

It knows what the run itself did (crashes of slurmctld, claims cancelled by hand, nodes taken down,
pods deleted) and holds everything else against the product:

- *double owned*: two running jobs of Slurm, or two pods, have one GPU; or a job has a GPU of a live
  pod whose claim nobody took away: neither a crash of slurmctld nor we.
- *bare*: a pod runs without a claim for more than a second, and nobody took it away.
- *wrong eviction*: a pod was deleted by the product, though its claim was there all the time.
- *lost race*: a crash of slurmctld or a cancelled claim gave a pod's GPU to another job before the
  pod was gone. That is Slurm's to do, and the product's to end: it is told with how long it lasted.

What a busy machine makes late (slurmctld saves its state, and forgets more) is put down to it by the
stalls that were measured; who owns a GPU is not.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tests.support.cadence import Cadence
from tests.support.chaos.stalls import Stalls
from tests.support.checker import (
    CLAIM,
    FINAL,
    HOLDING,
    UnreadError,
    indices,
    job_of,
    judge,
    read_pods,
)

if TYPE_CHECKING:
    from tests.support.checker import Checker, Job, Pod

OURS = frozenset({"shared-index", "foreign-claim"})
"""Kinds of violations that no crash and no scancel explains."""
YOUNG_S = 15.0
"""A crash of slurmctld forgets claims of its last 5 s; a busy machine saves later."""
LEAST_PAUSE_S = 0.02
"""Between two looks, however late they are: the machine is the product's too."""
LONG_KEPT_S = 15.0
"""A pod that stays for so long after its claim was lost is told of."""
REASON = "slurmbridge.dev/reason"


@dataclass
class Causes:
    """What the run did itself, by the clock of `time.monotonic`."""

    crashes: list[float] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    taken_down: dict[str, float] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)


class Told(NamedTuple):
    """What the API server says of a bound pod."""

    name: str
    node: str
    gpus: frozenset[int]


@dataclass
class PodStory:
    """What was seen of one bound pod. good, lost: when its claim last ran, and first did not."""

    name: str
    node: str
    since: float
    gpus: frozenset[int] = frozenset()
    claims: dict[int, float] = field(default_factory=dict)
    good: float = 0.0
    lost: float | None = None
    taken: float | None = None
    evicted: bool = False


@dataclass
class Judge:
    """Watches from `__enter__` to `__exit__`; the counters may be read at any time."""

    checker: Checker
    causes: Causes
    stalls: Stalls = field(default_factory=Stalls)
    interval_s: float = 0.2
    samples: int = 0
    unread: int = 0
    bound: int = 0
    seen_bound: int = 0
    double_owned: list[str] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)
    wrong_evictions: list[str] = field(default_factory=list)
    evictions: Counter[str] = field(default_factory=Counter)
    races: dict[str, float] = field(default_factory=dict)
    longest_kept_s: float = 0.0
    pods: dict[str, PodStory] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="judge", daemon=True)
        self._told: set[tuple[str, str]] = set()
        self._nodes: dict[int, frozenset[str]] = {}
        self._fault: Exception | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        if self._fault is not None:
            raise self._fault  # it has seen nothing since

    def _run(self) -> None:
        cadence = Cadence(self.interval_s)
        while not self._end.wait(max(LEAST_PAUSE_S, cadence.pause_s())):
            try:
                self.look()
            except UnreadError:
                self.unread += 1
            except Exception as error:
                self._fault = error
                return

    def look(self) -> None:
        """One sample.

        Raises:
            UnreadError: one side gave no answer.

        """
        reading = self.checker.read()
        now = time.monotonic()
        before, after = (read_pods(items, lambda n: n) for items in (reading.before, reading.after))
        sample = judge(before, reading.jobs, after, reading.totals)
        self.samples += 1
        self.bound = sample.bound
        jobs = {job.id: job for job in reading.jobs}
        # Of a job that completes Slurm tells the nodes only whose Epilogs have not ended.
        self._nodes |= {job.id: job.nodes for job in jobs.values() if job.state == "RUNNING"}
        holders = _holders(reading.jobs)
        for (node, index), found in holders.items():
            # One that completes has lost its GPUs by Slurm's word; who lives on them is seen below.
            running = sorted(job.id for job in found if job.state in ("RUNNING", "SUSPENDED"))
            if len(running) > 1:
                self._tell("double-owned", f"{node}/{index}", f"jobs {running}")
        steady = set(after)
        for pod in before:
            if pod in steady and pod.node in reading.totals:
                self._follow(pod, jobs, holders, now)
        for violation in sample.violations:
            is_shared = violation.kind == "shared-claim" and self._is_shared(
                violation.subject, after
            )
            if violation.kind in OURS or is_shared:
                self._tell(violation.kind, violation.subject, violation.text)
        raw = {item["metadata"]["uid"]: item for item in reading.after}
        for uid, story in self.pods.items():
            item = raw.get(uid)
            if item is None or story.evicted:
                continue
            if _is_deleted(item):
                self._judge_deletion(uid, story, item, now)
            elif story.lost is not None and item["status"].get("phase") not in FINAL:
                self._note_kept(story, item, now)

    def _follow(
        self, pod: Pod, jobs: dict[int, Job], holders: dict[tuple[str, int], list[Job]], now: float
    ) -> None:
        story = self.pods.get(pod.uid)
        if story is None:
            story = self.pods[pod.uid] = PodStory(pod.name, pod.node, now)
            story.gpus = indices(pod.gpus)
            self.seen_bound += 1
        job_id = int(pod.claim.partition("/")[0] or 0) if pod.claim.endswith(pod.uid) else 0
        story.claims.setdefault(job_id, now)
        job = jobs.get(job_id)
        runs = job is not None and job.state == "RUNNING" and (job.group or job.pod == pod.uid)
        is_here = job is not None and (pod.node in job.nodes or pod.node in job.gpus)
        if runs and not is_here and self.cause_of_loss(story) != "forgotten":
            # Else the pod was asked for a second time, and slurmctld gave the id a second time.
            self._tell("wrong-node", pod.name, f"on {pod.node}, job {job_id} on {set(job.nodes)}")
        if runs and is_here:
            story.good, story.lost = now, None
        elif story.lost is None:
            story.lost = now
        elif now - story.lost > 1 and not self.cause_of_loss(story):
            state = "not here" if job is None or not is_here else job.state
            self._tell("no-claim", pod.name, f"on {pod.node}, job {job_id} is {state}", self.bare)
        for index in indices(pod.gpus):
            for other in holders.get((pod.node, index), ()):
                # A gang's members share its claim; that no two have one GPU is looked at above.
                if other.pod == pod.uid or (other.group and other.id == job_id):
                    continue
                where = f"{pod.name} on {pod.node}/{index}"
                if story.lost is not None and self.cause_of_loss(story):
                    story.taken = story.taken or now
                    self.races[where] = max(self.races.get(where, 0.0), now - story.taken)
                else:
                    self._tell("taken", where, f"job {other.id} {other.state} has it")

    def _is_shared(self, subject: str, pods: list[Pod]) -> bool:
        """Whether two pods name one job that slurmctld had not forgotten, and given a second time."""
        named = [self.pods.get(pod.uid) for pod in pods if f"job {job_of(pod)}" == subject]
        kept = [s for s in named if s is not None and self.cause_of_loss(s) != "forgotten"]
        return len(kept) > 1

    def _note_kept(self, story: PodStory, item: dict[str, Any], now: float) -> None:
        """A pod that has lost its claim, and that nobody has told to go yet."""
        kept = now - (story.lost or now)
        self.longest_kept_s = max(self.longest_kept_s, kept)
        if kept > LONG_KEPT_S and ("kept", story.name) not in self._told:
            self._told.add(("kept", story.name))
            notes = item["metadata"].get("annotations")
            print(f"[judge] {story.name} stays without its claim: {notes}, {item['status']}")

    def told(self, uid: str) -> Told | None:
        """What was read of a pod; None: nothing yet."""
        story = self.pods.get(uid)
        return None if story is None else Told(story.name, story.node, story.gpus)

    @property
    def excused(self) -> int:
        """Pods that the run itself may have taken the claim from: of these less is demanded."""
        return sum(bool(self.cause_of_loss(story)) for story in self.pods.values())

    def cause_of_loss(self, story: PodStory) -> str:
        """What the run did that took a pod's claim away; "" for nothing."""
        if self.causes.cancelled & story.claims.keys():
            return "scancel"
        # With one node of a gang's claim Slurm ends all of it.
        nodes = {story.node}.union(*(self._nodes.get(job_id, ()) for job_id in story.claims))
        if any(self.causes.taken_down.get(n, -inf) >= story.since - YOUNG_S for n in nodes):
            return "node down"
        # A crash may be seen before the claim that it forgot: nothing is read while it lasts.
        begun = (story.since, *story.claims.values())
        if any(self._is_young(b, crash) for crash in self.causes.crashes for b in begun):
            return "forgotten"
        return ""

    def _is_young(self, begun: float, crash: float) -> bool:
        """Whether a crash of slurmctld may have forgotten a claim that was first seen then."""
        if begun <= crash:
            return crash - begun < YOUNG_S + self.stalls.between(begun, crash)
        return begun - crash < 2 * YOUNG_S + self.stalls.between(crash, begun)

    def _judge_deletion(self, uid: str, story: PodStory, item: dict[str, Any], now: float) -> None:
        story.evicted = True
        if uid in self.causes.deleted:
            return
        why = item["metadata"].get("annotations", {}).get(REASON, "")
        cause = self.cause_of_loss(story)
        if cause == "forgotten" and story.taken is None:
            cause = "forgotten, and not seen taken"
        self.evictions[cause or "unexplained"] += 1
        if not cause:
            lost = "never" if story.lost is None else f"{now - story.lost:.1f} s ago"
            text = f"{story.name} on {story.node}, claim lost {lost}: {why!r}"
            self.wrong_evictions.append(text)
            print(f"[judge] WRONG EVICTION {text}", flush=True)

    def _tell(self, kind: str, subject: str, text: str, into: list[str] | None = None) -> None:
        if (kind, subject) not in self._told:
            self._told.add((kind, subject))
            (self.double_owned if into is None else into).append(f"{kind} {subject}: {text}")
            print(f"[judge] {kind.upper()} {subject}: {text}", flush=True)


def _holders(jobs: list[Job]) -> dict[tuple[str, int], list[Job]]:
    found: dict[tuple[str, int], list[Job]] = {}
    for job in jobs:
        if job.state in HOLDING:
            for node, (_, held) in job.gpus.items():
                for index in held:
                    found.setdefault((node, index), []).append(job)
    return found


def _is_deleted(item: dict[str, Any]) -> bool:
    return bool(item["metadata"].get("deletionTimestamp")) and CLAIM in item["metadata"].get(
        "annotations", {}
    )
