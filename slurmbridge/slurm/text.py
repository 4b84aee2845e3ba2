"""Reads what scontrol prints about nodes, partitions, reservations and the configuration.

Pure: text in, records out. Commands: `scontrol show node -d`, `show partition`,
`show reservation`, `show config`, of Slurm 22.05 to 26.05, with `-o` (one line a record) or
without. Job listings, which hold text of users, are read by `slurm.queue` and `slurm.jobtext`.

A listing is read whole or not at all. Whatever does not start like a record, lacks a field that
every version prints, or names a thing twice is a `ParseError`: never an empty or shorter list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, tzinfo
from typing import Final, TypeVar

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.gres import parse_gres, parse_gres_used
from slurmbridge.pool.hostlist import expand
from slurmbridge.pool.nodestate import parse_node_state
from slurmbridge.pool.record import (
    GpuCount,
    GpuUse,
    NodeState,
    Partition,
    Reservation,
    SlurmConfig,
    SlurmNode,
)
from slurmbridge.pool.slurmtime import parse_duration, parse_time
from slurmbridge.slurm.jobtext import read_jobs
from slurmbridge.slurm.queue import read_queue

__all__ = [
    "read_config",
    "read_jobs",
    "read_nodes",
    "read_partitions",
    "read_queue",
    "read_reservations",
    "read_settings",
]

_T = TypeVar("_T")

NO_RESERVATIONS: Final = "No reservations in the system"

NOTHING: Final = frozenset({"", "(null)", "N/A", "n/a", "None"})
"""How scontrol writes a value that is not set."""

# Text of operators comes last in a node's record, behind all that is read before it.
_NODE_FREE_TEXT = re.compile(r"\s(?:Reason|Comment|Extra)=")
_REASON = re.compile(r"\sReason=(.*?)(?=\s+(?:Comment|Extra|ReservationName)=|\s*\n|\s*\Z)")
_RESERVATION_KEYS: Final = (
    *("StartTime", "EndTime", "Duration", "NodeCnt", "Nodes", "CoreCnt", "Features"),
    *("PartitionName", "Flags", "NodeName", "TRES", "AllowedPartitions", "QOS", "Users", "Groups"),
    *("Accounts", "Licenses", "State", "BurstBuffer", "Watts", "MaxStartDelay", "Comment"),
)
_RESERVATION_SPLIT = re.compile(rf"\s+({'|'.join(_RESERVATION_KEYS)})=")
_AS_OF = re.compile(r"\s*Configuration data as of (\S+)")
_SETTING = re.compile(r"^([A-Za-z_][A-Za-z0-9_\[\]]*) *= ?(.*)$", re.MULTILINE)


def read_nodes(
    text: str, tz: tzinfo = UTC, known: dict[str, SlurmNode] | None = None
) -> dict[str, SlurmNode]:
    """Read `scontrol show node -d`.

    A node whose GRES or state contradict themselves does not spoil the listing: it gets a `fault`,
    and its use is unknown (`gpus_used` None), its state UNKNOWN, or it has no GPUs to give when
    `Gres` itself is at fault.

    Args:
        text: the listing.
        tz: of its times.
        known: the texts of the last listing's nodes and what they said; made those of this one. A
            node whose text is the same is the same record: 5,000 take 40 ms instead of 220.

    Returns:
        node name -> record, in the order of the listing.

    Raises:
        ParseError: not a listing of nodes, a field is missing, a node is listed twice, or empty:
            a cluster without nodes cannot run.

    """
    nodes: dict[str, SlurmNode] = {}
    said: dict[str, SlurmNode] = {}
    before = known or {}
    for record in _records(text, "NodeName"):
        node = said[record] = before.get(record) or _read_node(record, tz)
        if node.name in nodes:
            raise ParseError(node.name, "node is listed twice")
        nodes[node.name] = node
    if known is not None:
        known.clear()
        known.update(said)
    return nodes


def read_partitions(text: str) -> dict[str, Partition]:
    """Read `scontrol show partition`.

    Returns:
        partition name -> record. Nodes of one node set keep the order of the listing.

    Raises:
        ParseError: as for `read_nodes`.

    """
    partitions: dict[str, Partition] = {}
    for record in _records(text, "PartitionName"):
        fields = _Fields(record, record)
        limit = parse_duration(fields.need("MaxTime"))
        name = fields.need("PartitionName")
        if name in partitions:
            raise ParseError(name, "partition is listed twice")
        partitions[name] = Partition(
            name=name,
            state=fields.need("State").upper(),
            nodes=tuple(expand(fields.need("Nodes"))),
            max_time_min=None if limit is None else limit // 60,
            allow_accounts=_allowed(fields.get("AllowAccounts", "ALL")),
            allow_qos=_allowed(fields.get("AllowQos", "ALL")),
            priority_tier=_number(fields.get("PriorityTier", "1"), record),
            preempt_mode=fields.get("PreemptMode", "OFF").upper(),
            exclusive=fields.get("OverSubscribe", "NO").upper() == "EXCLUSIVE",
            hidden=fields.get("Hidden", "NO").upper() == "YES",
            billing_weights=fields.get("TRESBillingWeights", ""),
        )
    return partitions


def read_reservations(
    text: str, tz: tzinfo = UTC, now: float | None = None
) -> tuple[Reservation, ...]:
    """Read `scontrol show reservation`; `No reservations in the system` is ().

    Names may hold spaces, and a name may come twice (other nodes, other times). Times are read so
    that a reservation is never shorter than it may be (`parse_time`, with its `tz` and `now`).

    Raises:
        ParseError: not a listing of reservations, or a field is missing.

    """
    if text.strip() == NO_RESERVATIONS:
        return ()
    return tuple(_read_reservation(r, tz, now) for r in _records(text, "ReservationName"))


def read_settings(text: str) -> dict[str, str]:
    """Read `scontrol show config` as it stands: key -> value, "" for `(null)`."""
    if not text.lstrip().startswith("Configuration data as of"):
        raise ParseError(text, "not the output of scontrol show config")
    return {
        found.group(1): "" if found.group(2) == "(null)" else found.group(2).rstrip()
        for found in _SETTING.finditer(text)
    }


def read_config(text: str, tz: tzinfo = UTC) -> SlurmConfig:
    """Read the part of `scontrol show config` that decides how claims are made.

    Raises:
        ParseError: not its output, or it lacks the cluster's name, version or boot time.

    """
    settings = read_settings(text)
    for key in ("ClusterName", "SLURM_VERSION", "BOOT_TIME", "SelectType"):
        if not settings.get(key):
            raise ParseError(text[-256:], f"scontrol show config lacks {key}")
    boot_time = parse_time(settings["BOOT_TIME"], tz)
    if boot_time is None:
        raise ParseError(settings["BOOT_TIME"], "slurmctld does not say when it started")
    age = re.match(r"([0-9]{1,9})", settings.get("MinJobAge", ""))
    uid = re.search(r"\(([0-9]{1,10})\)$", settings.get("SlurmUser", ""))
    defaults = SlurmConfig(cluster="", version="", boot_time=0.0)
    return SlurmConfig(
        cluster=settings["ClusterName"],
        version=settings["SLURM_VERSION"],
        boot_time=boot_time,
        scheduler_parameters=frozenset(_list(settings.get("SchedulerParameters", ""))),
        preempt_type=settings.get("PreemptType") or defaults.preempt_type,
        preempt_mode=(settings.get("PreemptMode") or defaults.preempt_mode).upper(),
        select_type=settings["SelectType"],
        select_parameters=frozenset(_list(settings.get("SelectTypeParameters", "").upper())),
        priority_type=settings.get("PriorityType") or defaults.priority_type,
        min_job_age_s=int(age.group(1)) if age else defaults.min_job_age_s,
        slurm_user=settings.get("SlurmUser", "").partition("(")[0],
        told_at=_told_at(text, tz),
        slurm_uid=int(uid.group(1)) if uid else None,
        associations="associations" in _list(settings.get("AccountingStorageEnforce", "").lower()),
    )


def _told_at(text: str, tz: tzinfo) -> float:
    """What slurmctld's clock says, from the first line; 0: not readable."""
    said = _AS_OF.match(text)
    try:
        return (parse_time(said.group(1), tz) if said else None) or 0.0
    except ParseError:
        return 0.0


def _read_node(record: str, tz: tzinfo) -> SlurmNode:
    free = _NODE_FREE_TEXT.search(record)
    fields = _Fields(record[: free.start()] if free else record, record)
    # ThreadsPerCore stands behind State: where it is there, State was not cut.
    fields.need("ThreadsPerCore")
    gpus, used, faults = _read_gres(fields.need("Gres"), fields.get("GresUsed", ""))
    words = fields.need("State")
    state = _or(faults, NodeState("UNKNOWN"), lambda: parse_node_state(words))
    reason = _REASON.search(record, free.start()) if free else None
    return SlurmNode(
        name=fields.need("NodeName"),
        state=state,
        cpus_total=_number(fields.get("CPUEfctv", "") or fields.need("CPUTot"), record),
        cpus_used=_number(fields.need("CPUAlloc"), record),
        memory_mib=_number(fields.need("RealMemory"), record),
        memory_used_mib=_number(fields.need("AllocMem"), record),
        gpus=gpus,
        gpus_used=used,
        partitions=_list(fields.get("Partitions", "")),
        reason="" if reason is None or reason.group(1) in NOTHING else reason.group(1),
        address=fields.get("NodeAddr", ""),
        hostname=fields.get("NodeHostName", ""),
        boot_time=parse_time(fields.get("BootTime", ""), tz),
        fault="; ".join(faults),
        features=_list(fields.get("ActiveFeatures", "")),
    )


def _read_gres(total: str, used: str) -> tuple[tuple[GpuCount, ...], GpuUse | None, list[str]]:
    """Read a node's GPUs and their use, so that a contradiction ends as unknown."""
    faults: list[str] = []
    none: tuple[GpuCount, ...] = ()
    gpus = _or(faults, none, lambda: parse_gres(total))
    if not gpus:
        return (), (None if faults else GpuUse()), faults
    use = _or(faults, None, lambda: parse_gres_used(used))
    if use is not None and use.total > sum(gpu.count for gpu in gpus):
        faults.append(f"GresUsed {used[:128]!r} is more than Gres {total[:128]!r}")
        use = None
    return gpus, use, faults


def _or(faults: list[str], default: _T, read: Callable[[], _T]) -> _T:
    """Give what `read` gives, or the default and a fault."""
    try:
        return read()
    except ParseError as error:
        faults.append(str(error))
        return default


def _read_reservation(record: str, tz: tzinfo, now: float | None) -> Reservation:
    head, *rest = _RESERVATION_SPLIT.split(record)
    fields: dict[str, str] = {}
    for key, value in zip(rest[::2], rest[1::2], strict=True):
        fields.setdefault(key, value.strip())
    for key in ("StartTime", "EndTime", "Nodes", "Flags", "State"):
        if key not in fields:
            raise ParseError(record, f"reservation without {key}")
    start = parse_time(fields["StartTime"], tz, now)
    if start is None:
        raise ParseError(record, "reservation without a start")
    return Reservation(
        name=head.partition("=")[2],
        start=start,
        end=parse_time(fields["EndTime"], tz, now, late=True),
        nodes=tuple(expand(fields["Nodes"])),
        flags=frozenset(_list(fields["Flags"].upper())),
        users=_list(fields.get("Users", "")),
        accounts=_list(fields.get("Accounts", "")),
        groups=_list(fields.get("Groups", "")),
        tres="" if fields.get("TRES", "") in NOTHING else fields["TRES"],
        partition="" if fields.get("PartitionName", "") in NOTHING else fields["PartitionName"],
        state=fields["State"].split()[0].upper() if fields["State"] else "",
    )


def _records(text: str, key: str) -> Iterator[str]:
    """Split a listing at the lines that start a record; nothing else may stand before the first."""
    starts = [found.start() for found in re.finditer(rf"^ ?{key}=", text, re.MULTILINE)]
    before = text[: starts[0]] if starts else text
    if before.strip() or not starts:
        raise ParseError(before.strip(), f"not a listing: expected {key}=")
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        yield text[start:end].strip()


class _Fields:
    """`Key=value` words of a record; of a key that comes twice the first counts."""

    def __init__(self, zone: str, record: str) -> None:
        self._record = record
        self._values: dict[str, str] = {}
        for word in zone.split():
            key, equals, value = word.partition("=")
            if equals:
                self._values.setdefault(key, value)

    def get(self, key: str, default: str) -> str:
        return self._values.get(key, default)

    def need(self, key: str) -> str:
        if key not in self._values:
            raise ParseError(self._record, f"record without {key} (cut output?)")
        return self._values[key]


def _list(text: str) -> tuple[str, ...]:
    return () if text in NOTHING else tuple(part for part in text.split(",") if part)


def _allowed(text: str) -> tuple[str, ...] | None:
    return None if text.upper() == "ALL" else _list(text)


def _number(text: str, record: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ParseError(record, f"{text[:32]!r} is not a number")
    return int(text)
