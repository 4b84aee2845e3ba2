"""Pods that wait behind the gate, by what they ask for: equal asks cost one look at the pool.

A bucket holds pods that the same nodes suit. While none of them does, the bucket is full, and its
pods cost nothing: no look, no write, however many they are.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from slurmbridge.pool.claim import Ask
from slurmbridge.pool.nodefit import NodeFit
from slurmbridge.pool.record import PodRecord, SlurmJob
from slurmbridge.topology.generation import Labels, Sources
from slurmbridge.topology.graph import Topology
from slurmbridge.topology.index import TopologyIndex

ABOUT_ASK = frozenset(
    {"account", "qos", "partition", "limit", "reservation", "time_limit", "defer", "priority"}
)
"""Refusals that another node does not cure (`slurmbridge.slurm.refusal`)."""
LOOKS_A_TICK = 100_000
"""Nodes that are looked at in one tick, by all gangs together: a tenth of a second, about."""


class Like(NamedTuple):
    """What decides which nodes suit a pod. fit: what it says of nodes."""

    ask: Ask
    fit: NodeFit


Turn = tuple[int, float, str]
"""Order of pods: priority (negative: highest first), then age, then UID."""


@dataclass(slots=True)
class Bucket:
    """Pods of one kind.

    turns: in order. full: no node is left for them. reason: class and text of what keeps them out,
    since `reason_since`.
    untold: pods that have not been told the reason; told_at: when a reason was last given out.
    """

    like: Like
    turns: list[Turn] = field(default_factory=list)
    full: bool = False
    reason: str = ""
    reason_since: float = 0.0
    told: str = ""
    told_at: float = float("-inf")
    untold: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class Adopted:
    """A claim of a gang that was found in Slurm, not asked for by this leader.

    uid: of the claim. since, moment: when it was found, and `State.moment` then. quiet_since: since
    when all of its nodes can tell what runs on them. clear_at: since when nothing of a pod that is
    not known can be left in it. told_kept: that it is kept was told.
    """

    uid: str
    since: float
    moment: int
    quiet_since: float
    clear_at: float | None = None
    told_kept: bool = False


class Asker(NamedTuple):
    """Somebody who asks to bind a member of a gang, and waits for the others since then."""

    uid: str
    kube_node: str
    since: float


class Pause(NamedTuple):
    """Not before `until`; the next one is twice as long. text: what Slurm said."""

    until: float
    length: float
    text: str = ""


def pause_after(last: Pause | None, now: float, first: float, longest: float) -> Pause:
    """The next pause: `first`, or twice the last one, up to `longest`, if that is not long over."""
    length = first
    if last is not None and now - last.until < last.length:
        length = min(2 * max(last.length, first), longest)
    return Pause(now + length, length)


@dataclass(slots=True)
class Ticket:
    """The place of a gang in Slurm's queue: one job for all members, perhaps only asked for yet.

    uid: of the gang's claim. ref: `namespace/name` of the gang. job_id 0: asked for since `since`,
    not answered yet. reason, starts: what Slurm said last of why it waits and when it will start.
    running: the job as it was seen to run. missing_at: when a look last found no such job.
    suspect: a reading did not show it, and no look has told yet.
    left_at: since when the gang is not complete any more. untold_at: since when the job runs and
    Slurm does not tell its GPUs. now: GPUs by Slurm node of a claim that is to be had at once; {}:
    it waits in the queue. seats: the Slurm nodes of such a claim that are meant for its members.
    asked_until: until then what was asked of Slurm may be under way still. Of a claim at once: our
    asking for it, and what is not as it was asked for is ended. Of a place that was found: an
    earlier leader's ending of it.
    """

    uid: str
    ref: str
    since: float
    job_id: int = 0
    boot: float = 0.0
    reason: str = ""
    starts: float | None = None
    running: SlurmJob | None = None
    missing_at: float | None = None
    suspect: bool = False
    left_at: float | None = None
    untold_at: float | None = None
    now: Mapping[str, int] = field(default_factory=dict)
    seats: Mapping[str, str] = field(default_factory=dict)
    asked_until: float = 0.0


@dataclass(slots=True)
class Cancel:
    """Somebody has ended a gang's place in Slurm's queue: the pods that it had then are to go.

    confirmed: a person has said that this is real. evicted: when each was last asked to go, by UID.
    """

    why: str
    since: float
    pods: frozenset[str]
    confirmed: bool = False
    evicted: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class GangState:
    """A group that is planned as a whole.

    members: UIDs of its pods behind our gate, and of those that were. size: None: not known yet,
    last looked for at `asked_at`, `looks` times in all. made: when its object was made. since: when
    the first member came; complete_at: when the last.
    rolling: an attempt failed, what it holds is given back. after: not tried again before.
    text: what it waits for. level, domain, spread, shorts: of its place, how many domains of the
    levels below are used, and why it is not lower.
    told: members that were told the text. seats: the node that was last meant for each rank.
    uid: of its claim, where it has one for all. cancelled: its place in Slurm's queue was ended.
    short: why it was put into Slurm's queue.
    refusals: so many attempts were refused in a row. denied: what Slurm said of them, where trying
    again is of no use. settled_at: last look.
    is_short: in Slurm's queue no longer time is asked for than it is renewed by.
    room_since: since when there is room in another domain than the one that it waits for.
    in_order: its pods never wait all at once, and are told to go in parts.
    useless_at: when kube-scheduler could not use the node of the first of them.
    round: `Waiting.round` when it was laid last. together: UID of the first member that was let go.
    ended: so many that started together with those who wait have run to their end, when it was
    looked at last and was not complete without them.
    """

    key: str
    since: float
    uid: str
    members: set[str] = field(default_factory=set)
    size: int | None = None
    made: float | None = None
    asked_at: float = float("-inf")
    looks: int = 0
    complete_at: float | None = None
    rolling: bool = False
    pause: Pause | None = None
    text: str = ""
    text_since: float = 0.0
    level: str = ""
    domain: str = ""
    spread: dict[str, int] = field(default_factory=dict)
    shorts: tuple[str, ...] = ()
    told: str = ""
    attempts: int = 0
    seats: dict[str, str] = field(default_factory=dict)
    cancelled: Cancel | None = None
    short: str = ""
    refusals: int = 0
    denied: str = ""
    is_short: bool = False
    settled_at: float = float("-inf")
    useless_at: float = float("-inf")
    room_since: float | None = None
    round: int = -1
    together: str = ""
    in_order: bool = False
    ended: int = 0


@dataclass(slots=True)
class Waiting:
    """All of them, and what the planner remembers of them.

    consider: pods that something has happened to since they were last sorted in. of: the bucket
    and turn of each pod. faults: pods that can be planned nowhere, and what they were told.
    lifted: pods whose gate we took off in this term and that are not bound yet. excluded: nodes
    that kube-scheduler could not use for a pod, with the time until which they are left out.
    gangs: groups by key, gang_of: the key of each member, gangs_due: those that something has
    happened to. others: members that ask for no pool GPU, by key: they are counted, and otherwise
    none of ours. plain: pods without pool GPUs that stand behind our gate.
    looks: nodes that suit a kind of pods, best last, until something has changed for the better; it
    outlives the bucket, so that pods that come one by one share it. topology: the generation in
    use, made of `topology_of`; due: that may have changed since; asked: since when the next one is
    being built; told: what Slurm says (topology_text) and the site's own file (topology_file, path
    and text) have been read. places: the generation for the nodes of the view by the names
    `places_of`. looked_through: labels of nodes, and which of them (by these keys) are in use.
    asking: pods with an allocation, or the taking off of their gate, under way. grew: some node has
    more room than when the buckets were looked at. nodes_after, asks_after: what Slurm has refused,
    not asked for again before. tickets: places in Slurm's queue by UID of the gang's claim.
    adopted: claims of gangs that were found, by job id. gang_uids: key of each group by the UID of
    its claim. gangs_later: those that have to wait for the next tick; looks_left: nodes that gangs
    may look at before that; round: see `turn`. size_looks: a second's beginning, and how many sizes
    of groups were asked for in it. askers: who waits to bind members of gangs, by op. bindable:
    members that somebody may bind, and until when, whatever has become of their claims.
    """

    buckets: dict[Like, Bucket] = field(default_factory=dict)
    of: dict[str, tuple[Like, Turn]] = field(default_factory=dict)
    consider: set[str] = field(default_factory=set)
    faults: dict[str, str] = field(default_factory=dict)
    lifted: set[str] = field(default_factory=set)
    excluded: dict[str, dict[str, float]] = field(default_factory=dict)
    asking: set[str] = field(default_factory=set)
    looks: dict[Like, list[str]] = field(default_factory=dict)
    grew: bool = True
    looked_at: float = float("-inf")
    nodes_after: dict[str, Pause] = field(default_factory=dict)
    asks_after: dict[Ask, Pause] = field(default_factory=dict)
    gangs: dict[str, GangState] = field(default_factory=dict)
    gang_of: dict[str, str] = field(default_factory=dict)
    gangs_due: set[str] = field(default_factory=set)
    others: dict[str, set[str]] = field(default_factory=dict)
    plain: dict[str, PodRecord] = field(default_factory=dict)
    tickets: dict[str, Ticket] = field(default_factory=dict)
    adopted: dict[int, Adopted] = field(default_factory=dict)
    gang_uids: dict[str, str] = field(default_factory=dict)
    size_looks: tuple[float, int] = (float("-inf"), 0)
    gangs_later: set[str] = field(default_factory=set)
    looks_left: int = LOOKS_A_TICK
    round: int = 0
    askers: dict[int, Asker] = field(default_factory=dict)
    bindable: dict[str, float] = field(default_factory=dict)
    topology: Topology | None = None
    topology_of: Sources | None = None
    topology_due: bool = True
    topology_asked: float | None = None
    topology_told: bool = False
    places: TopologyIndex | None = None
    places_of: tuple[str, ...] = ()
    looked_through: dict[str, tuple[Mapping[str, str], frozenset[str], Labels]] = field(
        default_factory=dict
    )
    topology_text: str = ""
    topology_file: tuple[str, str] | None = None

    def put(self, pod: PodRecord, like: Like) -> None:
        """Sort a pod in, at its turn."""
        turn = (-pod.priority, pod.created, pod.uid)
        if self.of.get(pod.uid) == (like, turn):
            return
        self.remove(pod.uid)
        bucket = self.buckets.get(like)
        if bucket is None:
            bucket = self.buckets[like] = Bucket(like)
        insort(bucket.turns, turn)
        bucket.untold[pod.uid] = None
        self.of[pod.uid] = (like, turn)

    def remove(self, uid: str) -> None:
        """Take a pod out; one that is not in is no error."""
        found = self.of.pop(uid, None)
        if found is None:
            return
        like, turn = found
        bucket = self.buckets[like]
        del bucket.turns[bisect_left(bucket.turns, turn)]
        bucket.untold.pop(uid, None)
        if not bucket.turns:
            del self.buckets[like]

    def forget(self, uid: str) -> None:
        """The pod is bound or gone."""
        self.remove(uid)
        self.consider.discard(uid)
        self.faults.pop(uid, None)
        self.lifted.discard(uid)
        self.excluded.pop(uid, None)
        self.bindable.pop(uid, None)
        if (key := self.gang_of.get(uid)) is not None:
            self.gangs_due.add(key)

    def add_gang(self, gang: GangState) -> None:
        """A group has its first member."""
        self.gangs[gang.key] = gang
        self.gang_uids[gang.uid] = gang.key

    def drop_gang(self, gang: GangState) -> None:
        """A group has no member left."""
        self.gangs.pop(gang.key, None)
        self.gang_uids.pop(gang.uid, None)

    def gang_with(self, uid: str) -> GangState | None:
        """The group whose claim has this UID."""
        return self.gangs.get(self.gang_uids.get(uid, ""))

    def refused(self, ask: Ask, now: float) -> str:
        """What Slurm said when it refused an ask that is not tried again yet; "": nothing."""
        pause = self.asks_after.get(ask)
        return "" if pause is None or now >= pause.until else pause.text

    def look_anew(self) -> None:
        """Look at the whole pool again for every bucket."""
        self.grew = False
        self.looks.clear()
        for bucket in self.buckets.values():
            bucket.full = False

    @property
    def has_turn(self) -> bool:
        """Whether a pod waits that may fit."""
        return any(not bucket.full for bucket in self.buckets.values())
