"""Why slurmctld refused something about a claim: its error texts, names and numbers, in our words.

Salloc, sbatch and scontrol print the text, slurmrestd gives text and number; some tools log the
name. Source: `slurm_strerror` of 22.05.8 and slurm_errno.h of 22.05 to 26.05; the ones marked
"tried" were provoked on a real 22.05.8. The words are stable: metrics carry them, and they decide
whether a pod waits, is queued or is told that it will never run.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final


class RefusalReason(StrEnum):
    """What a refusal means to whoever asked.

    BUSY: no room on the node now, or the node is completing: slurmctld says the same of both, and
        a node on which one job's Epilog runs takes no other job meanwhile (tried).
    PRIORITY: a pending job stands before an immediate claim.
    TOO_LARGE: the node can never hold it: more than it has, or no such GRES type.
    NODE: node unknown, down, drained, or reserved for others.
    STARTING: slurmctld has just started and its nodes have not answered yet; gone in seconds.
    PARTITION: unknown, closed, or its limits and access rules forbid the claim.
    LIMIT: an association, QOS or job count limit. TIME_LIMIT: longer than allowed.
    DEFER: the site schedules in cycles only (`SchedulerParameters=defer`): queue instead.
    COMPLETING: the job is ending already. FRAGMENTED: `CompleteWait` while jobs complete.
    INDICES: claims were to be had, but none on exactly the GPUs asked for.
    IDENTITY: no such job, or it is not the claim that was meant.
    """

    BUSY = "busy"
    PRIORITY = "priority"
    TOO_LARGE = "too_large"
    NODE = "node"
    ACCOUNT = "account"
    QOS = "qos"
    PARTITION = "partition"
    LIMIT = "limit"
    RESERVATION = "reservation"
    TIME_LIMIT = "time_limit"
    DEFER = "defer"
    COMPLETING = "completing"
    STARTING = "starting"
    FRAGMENTED = "fragmented"
    INDICES = "indices"
    IDENTITY = "identity"
    OTHER = "other"


_R = RefusalReason
# Number, name, a part of the text that is the same in all versions ("": known by number and name).
_KNOWN: Final[tuple[tuple[RefusalReason, tuple[tuple[int, str, str], ...]], ...]] = (
    (
        _R.BUSY,
        (
            (2016, "ESLURM_NODES_BUSY", "requested nodes are busy"),  # tried
            (2078, "ESLURM_CAN_NOT_START_IMMEDIATELY", "job can not start immediately"),
            (2134, "ESLURM_INSUFFICIENT_GRES", "insufficient gres available"),
            (2179, "ESLURM_PREEMPTION_REQUIRED", ""),
        ),
    ),
    (_R.PRIORITY, ((2013, "ESLURM_NOT_TOP_PRIORITY", "insufficient priority"),)),  # tried
    (
        _R.TOO_LARGE,
        (
            (2005, "ESLURM_TOO_MANY_REQUESTED_CPUS", "more processors requested than permitted"),
            # Tried: too many GPUs, CPUs or MiB, no such type, node not in the partition.
            (2014, "ESLURM_REQUESTED_NODE_CONFIG_UNAVAILABLE", "requested node configuration is"),
            (2044, "ESLURM_INVALID_TASK_MEMORY", "memory required by task is not available"),
            (2069, "ESLURM_INVALID_CPU_COUNT", "cpu count specification invalid"),
            (2072, "ESLURM_INVALID_GRES", "invalid generic resource (gres)"),
            (2119, "ESLURM_INVALID_GRES_TYPE", "invalid gres specification"),
            (2178, "ESLURM_REQUESTED_TOPO_CONFIG_UNAVAILABLE", ""),
        ),
    ),
    (
        _R.NODE,
        (
            (2018, "ESLURM_INVALID_NODE_NAME", "invalid node name specified"),  # tried
            (2028, "ESLURM_INVALID_NODE_STATE", "invalid node state specified"),
            # Tried: down, drained, reserved now or before the claim would end.
            (2068, "ESLURM_NODE_NOT_AVAIL", "required node not available"),
        ),
    ),
    (
        _R.ACCOUNT,
        (
            (2010, "ESLURM_USER_ID_MISSING", "invalid user id"),
            (2045, "ESLURM_INVALID_ACCOUNT", "invalid account or account/partition"),
        ),
    ),
    (_R.QOS, ((2066, "ESLURM_INVALID_QOS", "invalid qos specification"),)),
    (
        _R.PARTITION,
        (
            (2000, "ESLURM_INVALID_PARTITION_NAME", "invalid partition name specified"),  # tried
            (2001, "ESLURM_DEFAULT_PARTITION_NOT_SET", "no partition specified or system default"),
            # Tried: RootOnly, AllocNodes and ReqResv of a partition.
            (2002, "ESLURM_ACCESS_DENIED", "access/permission denied"),
            (2003, "ESLURM_JOB_MISSING_REQUIRED_PARTITION_GROUP", "group not permitted to use"),
            (2004, "ESLURM_REQUESTED_NODES_NOT_IN_PARTITION", "nodes not in this partition"),
            # Tried: AllowAccounts, MaxTime, MaxMemPerNode, MinNodes and MaxNodes of a partition.
            (2015, "ESLURM_REQUESTED_PART_CONFIG_UNAVAILABLE", "requested partition configuration"),
            (2070, "ESLURM_PARTITION_NOT_AVAIL", "required partition not available"),  # tried
            (2101, "ESLURM_PARTITION_DOWN", "partition in down state"),  # tried
            (2130, "ESLURM_PARTITION_ASSOC", "multiple partition job request not supported"),
        ),
    ),
    (
        _R.LIMIT,
        (
            (2007, "ESLURM_MAX_JOB_COUNT", "unable to create job record"),
            (2050, "ESLURM_ACCOUNTING_POLICY", "job violates accounting/qos policy"),
            (2074, "ESLURM_QOS_THRES", "breached requested qos usage threshold"),
        ),
    ),
    (
        _R.RESERVATION,
        (
            # We ask for no dependency: said of a reservation that has not begun yet (tried).
            (2038, "ESLURM_DEPENDENCY", "job dependency problem"),
            (2052, "ESLURM_RESERVATION_ACCESS", "access denied to requested reservation"),  # tried
            (2053, "ESLURM_RESERVATION_INVALID", "requested reservation is invalid"),  # tried
            (2055, "ESLURM_RESERVATION_BUSY", "requested reservation is in use"),
            (2056, "ESLURM_RESERVATION_NOT_USABLE", "requested reservation not usable"),
            (2118, "ESLURM_RESERVATION_MAINT", "due to maintenance reservation"),
        ),
    ),
    (
        _R.TIME_LIMIT,
        (
            (2051, "ESLURM_INVALID_TIME_LIMIT", "requested time limit is invalid"),
            (8000, "ESLURM_MISSING_TIME_LIMIT", "time limit specification required"),
        ),
    ),
    (_R.DEFER, ((2125, "ESLURM_DEFER", "scheduling attempts deferred"),)),  # tried
    (
        _R.COMPLETING,
        (
            (2020, "ESLURM_TRANSITION_STATE_NO_UPDATE", "job can not be altered now"),
            (2021, "ESLURM_ALREADY_DONE", "already completing or completed"),
        ),
    ),
    (_R.FRAGMENTED, ((2035, "ESLURM_FRAGMENTATION", "resources too fragmented"),)),
    (
        _R.IDENTITY,
        (
            (2017, "ESLURM_INVALID_JOB_ID", "invalid job id specified"),  # tried
            (2084, "ESLURM_JOB_FINISHED", "job has already finished"),
            (0, "", "no active jobs match"),  # tried: scancel's filters left nobody
        ),
    ),
)
_BY_CODE: Final = {code: reason for reason, rows in _KNOWN for code, _, _ in rows if code}
_BY_NAME: Final = {name: reason for reason, rows in _KNOWN for _, name, _ in rows if name}
_BY_TEXT: Final = tuple((text, reason) for reason, rows in _KNOWN for _, _, text in rows if text)
_NAME_RE: Final = re.compile(r"\bESLURM_[A-Z_]+\b")


def reason_of(text: str) -> RefusalReason:
    """The word for the text of a refusal: stderr of a command, or an error of slurmrestd.

    Salloc prints hints after the verdict ("Memory specification can not be satisfied") and scancel
    one line per job, so the first line with a known text counts.
    """
    for line in text.splitlines():
        for name in _NAME_RE.findall(line):
            if name in _BY_NAME:
                return _BY_NAME[name]
        low = line.lower()
        for known, reason in _BY_TEXT:
            if known in low:
                return reason
    return RefusalReason.OTHER


def reason_of_code(code: int) -> RefusalReason:
    """The word for an error number (`error_number` of slurmrestd)."""
    return _BY_CODE.get(code, RefusalReason.OTHER)
