"""The job listing that users cannot forge: squeue with a separator that is new at every call.

Job names, comments and accounts are free text of users, line breaks and any separator included
(tried on 22.05.8, 24.11.5 and 26.05.5: a name may hold a whole forged record of another job). So
the fields are parted by a mark that is drawn at random for each call, handed to squeue as the
suffix of each field: no text that was written before the call can hold it.

`squeue -O FIELD:0SUFFIX` prints a field uncut, then the suffix, in all these versions. The header
line is kept: it proves that squeue knew every field and reached slurmctld, so that a header alone
is an empty queue, and an empty output is a fault.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from datetime import UTC, tzinfo
from typing import Final

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.gres import tres_gpus
from slurmbridge.pool.hostlist import expand
from slurmbridge.pool.nodestate import parse_job_state
from slurmbridge.pool.record import SlurmJob
from slurmbridge.pool.slurmtime import parse_time

FIELDS: Final = (
    "JobID",
    "State",
    "NodeList",
    "StartTime",
    "RestartCnt",
    "ArrayTaskID",
    "NumNodes",
    "NumTasks",
    "EndTime",
    "SubmitTime",
    "SchedNodes",
    "PreemptTime",
    "PriorityLong",
    "Partition",
    "QOS",
    "Reservation",
    "Reason",
    "UserID",
    "UserName",
    "tres-alloc",
    "tres-per-job",
    "tres-per-node",
    "tres-per-socket",
    "tres-per-task",
    "Account",
    "Name",
    "Comment",
)
"""Fields in the order of a row. None of them changes while nothing happens to the job, so that a
row that is the same as in the last reading need not be decoded again."""

MARK_LETTERS: Final = 12
"""Length of a mark: 52^12 marks, and a guess can be tried once per reading."""

_MARK = re.compile(rf"[A-Za-z]{{{MARK_LETTERS}}}\Z")
_UNSET: Final = frozenset({"", "(null)", "N/A", "n/a"})
_NO_TASKS: Final = "4294967294"
_TASKS = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?(?::([0-9]{1,10}))?\Z")

Row = tuple[str, ...]
"""Texts of `FIELDS` of one job."""


def make_mark(pick: Callable[[str], str]) -> str:
    """Make a mark. pick: a random choice of one character (`secrets.choice`)."""
    return "".join(pick(string.ascii_letters) for _ in range(MARK_LETTERS))


def queue_argv(mark: str, *filters: str) -> list[str]:
    """Give the command line of the listing: jobs of all states, hidden partitions too.

    Args:
        mark: of this call alone (`make_mark`).
        filters: `--jobs=12`, `--name=slurmbridge-a`.

    """
    if _MARK.match(mark) is None:
        raise ParseError(mark, "not a mark")
    fields = ",".join(f"{name}:0{mark}" for name in FIELDS)
    return ["squeue", "--all", "--states=all", "--noconvert", *filters, f"--Format={fields}"]


def read_rows(text: str, mark: str) -> list[Row]:
    r"""Split the output of `queue_argv`.

    Raises:
        ParseError: no header, a field that this squeue does not know, or a row cut in the middle.

    """
    cells = text.split(mark)
    width = len(FIELDS)
    header, rest = cells[:width], cells[width:]
    if len(header) < width or header[0].strip() != "JOBID":
        raise ParseError(text, "not a listing of squeue (no header)")
    missing = [FIELDS[at] for at, cell in enumerate(header) if not cell.strip()]
    if missing:
        raise ParseError(", ".join(missing), "squeue does not know these fields")
    # After the last mark of a row comes its line break, before the first field of the next.
    if len(rest) % width != 1 or rest[-1] != "\n":
        raise ParseError(text[-256:], "listing of squeue ends within a row")
    rows: list[Row] = []
    for at in range(0, len(rest) - 1, width):
        first = rest[at]
        if not first.startswith("\n"):
            raise ParseError(first, "listing of squeue: row does not start on a line of its own")
        rows.append((first[1:], *rest[at + 1 : at + width]))
    return rows


def read_row(row: Row, tz: tzinfo = UTC) -> SlurmJob:
    """Read one job.

    `gpus` is {} for a job that holds nothing and None for one that does: squeue does not tell
    indices, nor GPUs that come without being asked for (`--exclusive`); see `slurm.jobtext`.
    A waiting array is one record with `tasks`.

    Raises:
        ParseError: a field that matters cannot be read.

    """
    field = dict(zip(FIELDS, row, strict=True))
    state = parse_job_state(field["State"])
    waits = state.base == "PENDING"
    nodes = () if waits and not state.holds_resources else tuple(expand(field["NodeList"]))
    num_nodes = _number(field["NumNodes"], field)
    return SlurmJob(
        id=_number(field["JobID"], field),
        name=_text(field["Name"]),
        comment=_text(field["Comment"]),
        user_id=_number(field["UserID"], field),
        user=field["UserName"],
        account=_text(field["Account"]),
        partition=_text(field["Partition"]),
        qos=_text(field["QOS"]),
        state=state,
        nodes=nodes,
        gpus=None if state.holds_resources and nodes else {},
        start=parse_time(field["StartTime"], tz),
        end=parse_time(field["EndTime"], tz, late=True),
        submitted=parse_time(field["SubmitTime"], tz),
        restarts=_number(field["RestartCnt"], field),
        planned_nodes=tuple(expand(field["SchedNodes"])) if waits else (),
        num_nodes=num_nodes,
        gpus_wanted=gpus_wanted(field.__getitem__, num_nodes) if waits else None,
        reservation=_text(field["Reservation"]),
        reason=_text(field["Reason"]),
        priority=_number(field["PriorityLong"], field),
        preempted_at=parse_time(field["PreemptTime"], tz),
        tasks=count_tasks(field["ArrayTaskID"]) if waits else 1,
    )


def read_queue(text: str, mark: str, tz: tzinfo = UTC) -> list[SlurmJob]:
    """Read a whole listing: `read_rows`, then `read_row` for each.

    Raises:
        ParseError: the listing, or any job in it, cannot be read.

    """
    return [read_row(row, tz) for row in read_rows(text, mark)]


def count_tasks(text: str) -> int:
    """Count the tasks of an array expression: `0-9999%50` is 10,000, `1,3,5-9:2` is 5.

    A list that Slurm has cut (`...`) counts as far as it goes; anything else is one task.
    """
    if text in _UNSET:
        return 1
    count = 0
    for part in text.partition("%")[0].split(","):
        found = _TASKS.match(part)
        if found is not None:
            first, last, step = (int(g) if g else None for g in found.groups())
            if first is not None:
                count += 1 if last is None else max(0, last - first) // (step or 1) + 1
    return max(1, count)


def gpus_wanted(asked: Callable[[str], str], num_nodes: int) -> int | None:
    """Count the GPUs of one task of a waiting job, over all its nodes.

    The request decides, in whichever way it was made; the TRES of the job can lag behind it
    (`TresPerJob=gres/gpu:4` beside `ReqTRES=gres/gpu=1` is real). How many sockets a job will
    get, only Slurm knows.

    Args:
        asked: gives the text of `tres-per-job`, `-node`, `-socket`, `-task`, `tres-alloc` (for a
            waiting job: the TRES asked) and `NumTasks`; "" where not set.
        num_nodes: nodes asked for.

    """
    try:
        if per_job := tres_gpus(asked("tres-per-job")):
            return per_job
        if per_node := tres_gpus(asked("tres-per-node")):
            return per_node * max(1, num_nodes)
        if per_task := tres_gpus(asked("tres-per-task")):
            tasks = asked("NumTasks")
            known = tasks.isdigit() and tasks not in (_NO_TASKS, "0")
            return per_task * int(tasks) if known else None
        if tres_gpus(asked("tres-per-socket")):
            return None
        return tres_gpus(asked("tres-alloc"))
    except ParseError:
        return None


def _text(text: str) -> str:
    return "" if text in _UNSET else text


def _number(text: str, field: dict[str, str]) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 19:
        raise ParseError(text, f"job {field['JobID'][:20]}: not a number")
    return int(text)
