"""The command lines that make, end and change claims: pure, one function each.

Every value goes into an argv element of its own as `--option=value`, and is checked before: names
against `OPTION_RE`, numbers against their range. Nothing from a pod can become an option, a list,
or a shell's business. Options are those of salloc, sbatch, scancel and scontrol 22.05 to 26.05.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from slurmbridge.pool.claim import (
    TOP_PRIORITY,
    Ask,
    ClaimRequest,
    GroupRequest,
    write_comment,
)
from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.policy import OPTION_RE

PLACEHOLDER_SCRIPT: Final = "#!/bin/sh\nexec sleep 2147483647\n"
"""What a placeholder runs. `exec`: scancel's SIGTERM ends it at once (35 ms on 22.05). A number
rather than `infinity`, which not every sleep knows; Slurm's time limit ends it long before."""

MAX_CPUS: Final = 65_536
MAX_MEMORY_MIB: Final = 1 << 30
MAX_MINUTES: Final = 527_040
MAX_GPUS: Final = 1024
MAX_MEMBERS: Final = 10_000
_SBATCH: Final = (
    "sbatch",
    "--parsable",
    "--no-requeue",
    "--export=ALL",
    "--input=/dev/null",
    "--output=/dev/null",
    "--error=/dev/null",
)
_HOSTS_RE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,\[\]-]{0,100000}")
_SWITCHES_RE: Final = re.compile(r"\d{1,4}(@\d{1,6}:\d{2})?")
_FEATURES_RE: Final = re.compile(r"\[[A-Za-z0-9_.|-]{1,4000}\]")
_GRES_TYPE_RE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_GRANTED_RE: Final = re.compile(r"^salloc: Granted job allocation (\d{1,10})\b", re.MULTILINE)
_SUBMITTED_RE: Final = re.compile(r"^(\d{1,10})(?:;\S+)?$", re.MULTILINE)


def allocate_argv(request: ClaimRequest, comment: str = "", others: str = "") -> list[str]:
    """An immediate claim: granted or refused at once, no process on the node.

    Args:
        request: whose claim, where, how much.
        comment: instead of the comment that makes it the claim of `request.id`.
        others: nodes that slurmctld need not look at, as `slurm.others` writes them.

    Raises:
        ParseError: a value is not fit to be an option's value.

    """
    exclude = [f"--exclude={others}"] if others else []
    return ["salloc", "--no-shell", "--immediate", *_options(request, comment), *exclude]


def placeholder_argv(request: ClaimRequest, comment: str = "") -> list[str]:
    """A queued claim: a batch job that sleeps; `PLACEHOLDER_SCRIPT` goes to its stdin.

    `--export=ALL` hands on the environment of sbatch as it is (ours is bare): NONE and NIL make
    slurmd run the user's login shell on the node first.

    Raises:
        ParseError: a value is not fit to be an option's value.

    """
    return [*_SBATCH, *_options(request, comment)]


def group_argv(request: GroupRequest) -> list[str]:
    """A queued claim for a whole gang, at the priority that Slurm gives it; script as above.

    A task for each member, with its CPUs, GPUs and memory: Slurm lays tasks on nodes as it finds
    room, so a node may get the GPUs of one member or of several (tried on 22.05.8:
    `--ntasks=7 --gpus-per-task=2` on nodes with 5 free GPUs each gave 4+4+4+2). Memory by GPU,
    since `--mem` would be the same on every node.

    Raises:
        ParseError: a value is not fit to be an option's value.

    """
    return [*_SBATCH, *_group_options(request)]


def group_now_argv(request: GroupRequest) -> list[str]:
    """An immediate claim for a whole gang on given nodes: granted or refused at once, as a whole.

    Raises:
        ParseError: a value is not fit to be an option's value, or the members cannot be divided
            among the nodes.

    """
    each, rest = divmod(request.members, max(1, len(request.nodes)))
    if rest or not each:
        raise ParseError(str(request.members), f"members for {len(request.nodes)} nodes")
    nodes = ",".join(_name("node", name) for name in request.nodes)
    options = [
        f"--nodelist={nodes}",
        f"--nodes={len(request.nodes)}",
        f"--ntasks-per-node={each}",
        f"--priority={TOP_PRIORITY}",
    ]
    return ["salloc", "--no-shell", "--immediate", *_group_options(request), *options]


def _group_options(request: GroupRequest) -> list[str]:
    ask = request.ask
    gpus = _number("gpus", ask.gpu.count, 1, MAX_GPUS)
    memory = _number("memory", max(1, -(-ask.memory_mib // gpus)), 1, MAX_MEMORY_MIB)
    options = [
        f"--job-name={_name('job name', request.id.job_name)}",
        f"--comment={write_comment(request.id, request.ref)}",
        f"--ntasks={_number('members', request.members, 1, MAX_MEMBERS)}",
        f"--cpus-per-task={_number('cpus', max(1, ask.cpus), 1, MAX_CPUS)}",
        f"--gpus-per-task={_gres_type(ask.gpu.type)}{gpus}",
        f"--mem-per-gpu={memory}M",
    ]
    if request.exclude:
        options.append(f"--exclude={_text('exclude', request.exclude, _HOSTS_RE)}")
    if request.switches:
        options.append(f"--switches={_text('switches', request.switches, _SWITCHES_RE)}")
        # Without the number of nodes 22.05.8 waits for the switches in vain while nodes of two of
        # them are free, though one would do (tried).
        least = _number("nodes", request.least, 1, request.members)
        options.append(f"--nodes={least}-{request.members}")
    if request.constraint:
        options.append(f"--constraint={_text('constraint', request.constraint, _FEATURES_RE)}")
    return options + _common(ask)


def cancel_argv(job_name: str, owner_uid: int, job_ids: Sequence[int]) -> list[str]:
    """End claims by id; a job of another name or user under one of the ids is left alone.

    Raises:
        ParseError: the name is not fit to be an option's value.

    """
    name = _name("job name", job_name)
    ids = [str(job_id) for job_id in job_ids]
    return ["scancel", f"--name={name}", f"--user={owner_uid}", *ids]


def limit_argv(job_id: int, minutes: int) -> list[str]:
    """Set the time limit of a job, counted from its start; longer needs root or SlurmUser.

    TimeLimit and not EndTime: on 22.05 an EndTime after an unlimited TimeLimit leaves a limit of
    eight thousand years in the record.

    Raises:
        ParseError: minutes out of range.

    """
    limit = _number("minutes", minutes, 1, MAX_MINUTES)
    return ["scontrol", "update", f"JobId={job_id}", f"TimeLimit={limit}"]


def comment_argv(job_id: int, comment: str) -> list[str]:
    """Give a job another comment (`write_comment`): a filler becomes a claim."""
    return ["scontrol", "update", f"JobId={job_id}", f"Comment={comment}"]


def granted_id(stderr: str) -> int | None:
    """The job id in salloc's stderr, None when it does not name one."""
    match = _GRANTED_RE.search(stderr)
    return None if match is None else int(match[1])


def submitted_id(stdout: str) -> int | None:
    """The job id in the stdout of `sbatch --parsable` (`123` or `123;cluster`), else None."""
    match = _SUBMITTED_RE.search(stdout)
    return None if match is None else int(match[1])


def _options(request: ClaimRequest, comment: str) -> list[str]:
    ask = request.ask
    gpus = _number("gpus", ask.gpu.count, 1, MAX_GPUS)
    # Zero CPUs: Slurm's least is 1. Zero memory: `--mem=0` would be *all* of the node's, and no
    # --mem at all may be (DefMemPerNode), so the least that can be asked.
    cpus = _number("cpus", max(1, ask.cpus), 1, MAX_CPUS)
    memory = _number("memory", max(1, ask.memory_mib), 1, MAX_MEMORY_MIB)
    options = [
        f"--job-name={_name('job name', request.id.job_name)}",
        f"--comment={comment or write_comment(request.id, request.ref)}",
        f"--nodelist={_name('node', request.slurm_node)}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={cpus}",
        f"--mem={memory}M",
        f"--gres=gpu:{_gres_type(ask.gpu.type)}{gpus}",
        f"--priority={TOP_PRIORITY}",
    ]
    return options + _common(ask)


def _common(ask: Ask) -> list[str]:
    """What claims of pods and of gangs have in common."""
    options = [
        # The kubelet picks the pod's cores: that cores near a GPU are taken must refuse nothing.
        "--gres-flags=disable-binding",
        f"--time={_number('minutes', ask.minutes, 1, MAX_MINUTES)}",
        "--chdir=/",
    ]
    options += [
        f"--{option}={_name(option, value)}"
        for option, value in (
            ("partition", ask.partition),
            ("account", ask.account),
            ("qos", ask.qos),
            ("reservation", ask.reservation),
        )
        if value
    ]
    if ask.exclusive_user:
        options.append("--exclusive=user")
    return options


def _gres_type(text: str) -> str:
    if not text:
        return ""
    if not _GRES_TYPE_RE.fullmatch(text):
        raise ParseError(text, "GPU type is not a Slurm GRES type")
    return f"{text}:"


def _text(what: str, value: str, form: re.Pattern[str]) -> str:
    if not form.fullmatch(value):
        raise ParseError(value, f"{what} is not of Slurm's form")
    return value


def _name(what: str, value: str) -> str:
    if not OPTION_RE.fullmatch(value):
        raise ParseError(value, f"{what} is not a Slurm name")
    return value


def _number(what: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise ParseError(str(value), f"{what} must be from {low} to {high}")
    return value
