"""Reads `scontrol show job -d`: which GPUs of which node a job holds, by index.

scontrol prints free text of users (JobName, Account, Comment, WorkDir, ...) in the midst of its
fields, line breaks included, so a record can hold forged fields and whole forged records. Two
readers live with that in two ways:

- `read_held` is told the job's id, exact name, account and nodes by the listing that cannot be
  forged (`slurm.queue`), and reads only what stands right behind that name and that account. What
  a user can still make doubtful is his own record, and then the answer is "unknown".
- `read_jobs` reads a listing on its own (a file, a support bundle). Where a record has two
  readings the job gets no GPUs to itself but holds, unknown, on all nodes that either names.

Order of the fields, 22.05 to 26.05: JobId [ArrayJobId ArrayTaskId] [HetJobId HetJobOffset] JobName
[SLUID] [HetJobIdSet] UserId ... JobState ... NodeList ... CoreSpec [JOB_GRES]
{Nodes CPU_IDs Mem GRES} MinCPUsNode ... WorkDir ... Comment ...
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, tzinfo
from typing import Final, NamedTuple

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.gres import parse_job_gres, tres_gpus
from slurmbridge.pool.hostlist import expand
from slurmbridge.pool.nodestate import parse_job_state
from slurmbridge.pool.record import GpuUse, JobState, SlurmJob
from slurmbridge.pool.slurmtime import parse_time
from slurmbridge.slurm.queue import count_tasks, gpus_wanted

NO_JOBS: Final = "No jobs in the system"

NO_USER: Final = -1
"""user_id where scontrol gives a name without a number: nobody's."""

MOST_DIGITS: Final = 18
_HEAD = re.compile(
    r"^JobId=(?P<id>[0-9]{1,10})"
    r"(?: ArrayJobId=[0-9]+ ArrayTaskId=(?P<task>\S+)(?: ArrayTaskThrottle=[0-9]+)?)?"
    r"(?: HetJobId=[0-9]+ HetJobOffset=[0-9]+)?"
    r" JobName=",
    re.MULTILINE,
)
_AFTER_NAME = re.compile(
    r"\s+(?:SLUID=\S+\s+)?(?:HetJobIdSet=\S+\s+)?UserId=(?P<user>[^\s()]+)"
    r"(?:\((?P<uid>[0-9]{1,10})\))?\s+GroupId="
)
_ACCOUNT = re.compile(r"\S+\s+MCS_label=\S+\s+Priority=[0-9]+\s+Nice=-?[0-9]+\s+Account=")
_QOS = re.compile(r"\s+QOS=")
_GROUP: Final = r"\s+Nodes=(\S+) CPU_IDs=\S* (?:Mem=[0-9]* )?GRES(?:_IDX)?=(\S*)"
_GROUPS = re.compile(_GROUP)
_RUN = re.compile(f"(?:{_GROUP})+")
_JOB_GRES = re.compile(r"\sJOB_GRES=(\S*)")
_PER: Final = {
    "tres-per-job": "TresPerJob",
    "tres-per-node": "TresPerNode",
    "tres-per-socket": "TresPerSocket",
    "tres-per-task": "TresPerTask",
}
_TRES_PER = re.compile(r"\sTresPer(?:Job|Node|Socket|Task)=(\S*)")
_ZONE_END = re.compile(r"\sMinCPUsNode=|\sFeatures=|\sCommand=")
# What follows differs by version and request (StdErr, GresEnforceBind, Power, TresPerNode, ...):
# the first word that looks like a field ends it.
_COMMENT = re.compile(r"\sComment=(.*?)\s*(?=\s[A-Z][A-Za-z]*[=:]|\Z)", re.DOTALL)
_UNSET: Final = frozenset({"", "(null)", "N/A", "n/a"})


class Held(NamedTuple):
    """What a job holds. gpus None: not known (see `SlurmJob.gpus`). state, nodes: as told here."""

    state: JobState
    nodes: tuple[str, ...]
    gpus: Mapping[str, GpuUse] | None


_DOUBT: Final = Held(JobState("UNKNOWN"), (), None)


def read_held(text: str, jobs: Mapping[int, SlurmJob]) -> dict[int, Mapping[str, GpuUse] | None]:
    """Find what some jobs hold, in the output of `scontrol -o -d show job`.

    Args:
        text: records of these jobs, and maybe of others.
        jobs: job id -> the job as read from a listing that cannot be forged.

    Returns:
        job id -> its `SlurmJob.gpus`. Jobs without a record in the text are left out (they are
        over, or the answer was an error: the caller knows). None where the record has two readings,
        names other nodes (the job has moved on since), where slurmctld has cleared the details
        (COMPLETING), or where they can't be read.

    Cost:
        O(text).

    """
    found: dict[int, list[Held]] = {}
    for head in _HEAD.finditer(text):
        job = jobs.get(int(head["id"]))
        start = None if job is None else _behind_account(text, head.end(), job)
        if job is not None and start is not None:
            held = _held(_Body(text, start))
            # The leader of a het job brings its components along: the same record twice is one.
            if held not in found.setdefault(job.id, []):
                found[job.id].append(held)
    return {
        job_id: held[0].gpus if len(held) == 1 and _agrees(held[0], jobs[job_id]) else None
        for job_id, held in found.items()
    }


def _agrees(held: Held, job: SlurmJob) -> bool:
    """Whether both listings speak of the same run of the job."""
    return held.state.holds_resources and set(held.nodes) == set(job.nodes)


def _behind_account(text: str, at: int, job: SlurmJob) -> int | None:
    """Give the place behind the name and the account of a job, None where they stand not so."""
    for name in (job.name,) if job.name else _UNSET:
        after = _AFTER_NAME.match(text, at + len(name)) if text.startswith(name, at) else None
        account = None if after is None else _ACCOUNT.match(text, after.end())
        if account is None:
            continue
        for word in (job.account,) if job.account else _UNSET:
            end = account.end() + len(word)
            if text.startswith(word, account.end()) and _QOS.match(text, end):
                return end
    return None


def read_jobs(text: str, tz: tzinfo = UTC) -> list[SlurmJob]:
    """Read `scontrol show job -d`, with or without `-o`; `No jobs in the system` is [].

    Only for listings that come without a `slurm.queue` listing beside them: a user can make the
    record of a job of his own doubtful. A doubtful job holds (state UNKNOWN, `gpus` None) on every
    node that any reading of it names, and carries no comment, so that it is nobody's claim.

    Raises:
        ParseError: not a listing of jobs, or a record is cut or not told from its neighbours.

    """
    if text.strip() == NO_JOBS:
        return []
    heads = list(_HEAD.finditer(text))
    before = text[: heads[0].start()] if heads else text
    if before.strip() or not heads:
        raise ParseError(before.strip() or text, "expected JobId=")
    jobs: list[SlurmJob] = []
    seen: set[int] = set()
    for head, end in zip(heads, [*(h.start() for h in heads[1:]), len(text)], strict=True):
        job = _read_job(head, text[head.end() : end], tz)
        if job.id in seen:
            raise ParseError(head.group(), "job is listed twice")
        seen.add(job.id)
        jobs.append(job)
    return jobs


def _read_job(head: re.Match[str], record: str, tz: tzinfo) -> SlurmJob:
    starts = list(_AFTER_NAME.finditer(record))
    if not starts:
        raise ParseError(head.group() + record, "job without UserId (cut output?)")
    body = _Body(record, starts[0].start())
    job_id = int(head["id"])
    if len(starts) > 1 or body.is_doubtful:
        nodes = _all_nodes(record)
        return SlurmJob(
            id=job_id,
            name=record[: starts[0].start()],
            comment="",
            user_id=int(starts[0]["uid"] or NO_USER),
            account="",
            partition="",
            qos="",
            state=JobState("UNKNOWN"),
            nodes=nodes,
            gpus=None if nodes else {},
        )
    held = _held(body)
    waits = held.state.base == "PENDING"
    num_nodes = body.number("NumNodes")
    comments = _COMMENT.findall(record)
    return SlurmJob(
        id=job_id,
        name=record[: starts[0].start()],
        comment=_text(comments[0]) if len(comments) == 1 else "",
        user_id=int(starts[0]["uid"] or NO_USER),
        user=starts[0]["user"],
        account=_text(body.need("Account")),
        partition=_text(body.need("Partition")),
        qos=_text(body.need("QOS")),
        state=held.state,
        nodes=tuple(expand(body.need("NodeList"))),
        gpus=held.gpus,
        start=parse_time(body.need("StartTime"), tz),
        end=parse_time(body.need("EndTime"), tz, late=True),
        submitted=parse_time(body.get("SubmitTime"), tz),
        restarts=body.number("Restarts"),
        planned_nodes=tuple(expand(body.get("SchedNodeList"))) if waits else (),
        num_nodes=num_nodes,
        gpus_wanted=gpus_wanted(body.asked, num_nodes) if waits else None,
        tasks=count_tasks(head["task"] or "") if waits else 1,
        reservation=_text(_first(r"\sReservation=(\S*)", record)),
        reason=_text(body.get("Reason")),
        priority=body.number("Priority"),
        preempted_at=parse_time(body.get("PreemptTime"), tz),
    )


class _Body:
    """The fields of a record between its name and what its user wrote at the end.

    is_doubtful: one of the fields that decide stands there twice (an account may hold a text).
    """

    _DECIDE: Final = ("JobState", "NodeList", "StartTime", "Restarts", "Partition")

    def __init__(self, text: str, start: int) -> None:
        end = _ZONE_END.search(text, start)
        following = _HEAD.search(text, start)
        stop = len(text) if following is None else following.start()
        self.record = text[start:stop]
        self.zone = text[start : min(stop, end.start()) if end else stop]
        values: dict[str, list[str]] = {}
        for word in self.zone.split():
            key, equals, value = word.partition("=")
            if equals:
                values.setdefault(key, []).append(value)
        self._values = values
        self.is_doubtful = any(len(values.get(key, ())) > 1 for key in self._DECIDE)

    def get(self, key: str) -> str:
        return self._values.get(key, [""])[0]

    def asked(self, what: str) -> str:
        """Give what was asked for, by squeue's name for it."""
        if what == "NumTasks":
            return self.get("NumTasks")
        if what == "tres-alloc":
            return self.get("ReqTRES") or self.get("TRES")
        return _first(rf"\s{_PER[what]}=(\S*)", self.record)

    def number(self, key: str) -> int:
        """Give a number, the lower end of a range (`4-8`), 0 where there is none."""
        text = self.get(key).partition("-")[0]
        if text and not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
            raise ParseError(f"{key}={text}", "not a number")
        return int(text or 0)

    def need(self, key: str) -> str:
        if key not in self._values:
            raise ParseError(self.zone, f"job without {key} (cut output?)")
        return self._values[key][0]


def _held(body: _Body) -> Held:
    """Tell what the job of one body holds; whatever is in doubt is None."""
    if body.is_doubtful:
        return _DOUBT
    try:
        state = parse_job_state(body.get("JobState"))
        nodes = tuple(expand(body.get("NodeList")))
    except ParseError:
        return _DOUBT
    if not state.holds_resources or not nodes:
        return Held(state, nodes, {})
    try:
        gpus = _groups(body)
    except ParseError:
        gpus = None
    if gpus is None or gpus.keys() != set(nodes):
        return Held(state, nodes, None)
    held = {name: use for name, use in gpus.items() if use.total or use.shared}
    if not held and _had_gpus(body):  # COMPLETING: slurmctld prints `GRES=` with nothing behind it
        return Held(state, nodes, None)
    return Held(state, nodes, held)


def _groups(body: _Body) -> dict[str, GpuUse] | None:
    """Read the `Nodes= CPU_IDs= Mem= GRES=` groups; None without them (no `-d`) or in doubt."""
    runs = list(_RUN.finditer(body.zone))
    if len(runs) != 1:
        return None
    uses: dict[str, GpuUse] = {}
    for group in _GROUPS.finditer(runs[0].group()):
        use = parse_job_gres(group.group(2))
        for name in expand(group.group(1)):
            if name in uses:
                return None
            uses[name] = use
    return uses


def _had_gpus(body: _Body) -> bool:
    """Whether the job was ever given GPUs, by anything that its record still says."""
    asked = [_first(_JOB_GRES.pattern, body.zone), body.get("TRES"), body.get("AllocTRES")]
    asked.extend(_TRES_PER.findall(body.record))
    try:
        return any(_mentions_gpus(text) for text in asked)
    except ParseError:
        return True


def _mentions_gpus(text: str) -> bool:
    if text in _UNSET:
        return False
    return tres_gpus(text) > 0 or "shard" in text or "mps" in text


def _all_nodes(record: str) -> tuple[str, ...]:
    """Name every node that any reading of a doubtful record may hold."""
    names: dict[str, None] = {}
    for found in re.finditer(r"\b(?:NodeList|Nodes|BatchHost)=(\S+)", record):
        try:
            names.update(dict.fromkeys(expand(found.group(1))))
        except ParseError:
            continue
    return tuple(names)


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return "" if found is None else found.group(1)


def _text(text: str) -> str:
    return "" if text in _UNSET else text
