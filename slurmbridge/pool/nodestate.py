"""Node and job states of Slurm, in every spelling, and whether a node may get new pods.

Spellings (Slurm 21.08 to 26.05): `scontrol` prints `MIXED+DRAIN+PLANNED`, sinfo one word with a
suffix letter (`mixed-`, `drained*`), JSON `"idle"` with a separate flag list (v0.0.37/38) or one
list (`["IDLE", "DRAIN"]`, v0.0.39 on). All become `NodeState` with Slurm's long names.

The rule for use is a list of what is allowed, not of what is forbidden: a flag that a later Slurm
invents makes the node unusable until somebody has read what it means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.record import JobState, NodeState

NODE_BASES: Final = frozenset(
    {"ALLOCATED", "DOWN", "ERROR", "FUTURE", "IDLE", "INVALID", "MIXED", "UNKNOWN"}
)
"""Base states of a node (slurm.h, enum node_states)."""

USABLE_BASES: Final = frozenset({"IDLE", "MIXED", "ALLOCATED"})
"""Bases of a node that runs. ALLOCATED means all CPUs: whether GPUs are free is accounting."""

HARMLESS_FLAGS: Final = frozenset({"CLOUD", "DYNAMIC_NORM", "PLANNED", "RESERVED"})
"""Flags with which a node takes new jobs.

CLOUD and DYNAMIC_NORM tell where the node comes from. PLANNED and RESERVED are judged by what they
stand for: the backfill plan and the reservations, which the caller knows in full.
"""

_SUFFIXES: Final = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}

_WORDS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    # sinfo's summary words, long and short. Where the word hides the base, it is UNKNOWN.
    "ALLOC": ("ALLOCATED", ()),
    "MIX": ("MIXED", ()),
    "FUTR": ("FUTURE", ()),
    "UNK": ("UNKNOWN", ()),
    "ERR": ("ERROR", ()),
    "COMP": ("UNKNOWN", ("COMPLETING",)),
    "COMPLETING": ("UNKNOWN", ("COMPLETING",)),
    "DRAINED": ("IDLE", ("DRAIN",)),
    "DRAIN": ("IDLE", ("DRAIN",)),
    "DRNG": ("ALLOCATED", ("DRAIN",)),
    "DRAINING": ("ALLOCATED", ("DRAIN",)),
    "FAIL": ("IDLE", ("FAIL",)),
    "FAILG": ("ALLOCATED", ("FAIL",)),
    "FAILING": ("ALLOCATED", ("FAIL",)),
    "MAINT": ("UNKNOWN", ("MAINTENANCE",)),
    "RESV": ("IDLE", ("RESERVED",)),
    "PLND": ("IDLE", ("PLANNED",)),
    "PLANNED": ("IDLE", ("PLANNED",)),
    "RESERVED": ("IDLE", ("RESERVED",)),
    "INVAL": ("UNKNOWN", ("INVALID_REG",)),
    "BLOCK": ("IDLE", ("BLOCKED",)),
    "BLOCKED": ("IDLE", ("BLOCKED",)),
    "POW_DN": ("UNKNOWN", ("POWERED_DOWN",)),
    "POW_UP": ("UNKNOWN", ("POWERING_UP",)),
    "BOOT": ("UNKNOWN", ("REBOOT_ISSUED",)),
}

_FLAG_ALIASES: Final = {
    "NO_RESPOND": "NOT_RESPONDING",
    "MAINT": "MAINTENANCE",
    "DRAINED": "DRAIN",
    "DRAINING": "DRAIN",
    "COMP": "COMPLETING",
    "RESV": "RESERVED",
    "PLND": "PLANNED",
    "INVAL": "INVALID_REG",
    "REBOOT": "REBOOT_REQUESTED",
}

MAX_WORDS: Final = 64
"""Most words of one state: Slurm has about 30 flags."""

JOB_BASES: Final = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PENDING",
        "PREEMPTED",
        "RUNNING",
        "SUSPENDED",
        "TIMEOUT",
    }
)
"""Base states of a job (slurm.h, enum job_states)."""

_JOB_FLAG_BASE: Final = {
    # squeue prints one word only, and a flag hides the base: what the base must have been.
    "COMPLETING": "UNKNOWN",
    "CONFIGURING": "RUNNING",
    "EXPEDITING": "PENDING",
    "POWER_UP_NODE": "RUNNING",
    "REQUEUED": "UNKNOWN",
    "REQUEUE_FED": "PENDING",
    "REQUEUE_HOLD": "PENDING",
    "RESIZING": "RUNNING",
    "RESV_DEL_HOLD": "PENDING",
    "SIGNALING": "RUNNING",
    "SPECIAL_EXIT": "PENDING",
    "STAGE_OUT": "UNKNOWN",
    "STOPPED": "RUNNING",
}

_JOB_SHORT: Final = {
    "BF": "BOOT_FAIL",
    "CA": "CANCELLED",
    "CD": "COMPLETED",
    "CF": "CONFIGURING",
    "CG": "COMPLETING",
    "DL": "DEADLINE",
    "F": "FAILED",
    "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY",
    "PD": "PENDING",
    "PR": "PREEMPTED",
    "R": "RUNNING",
    "RD": "RESV_DEL_HOLD",
    "RF": "REQUEUE_FED",
    "RH": "REQUEUE_HOLD",
    "RQ": "REQUEUED",
    "RS": "RESIZING",
    "RV": "REVOKED",
    "S": "SUSPENDED",
    "SE": "SPECIAL_EXIT",
    "SI": "SIGNALING",
    "SO": "STAGE_OUT",
    "ST": "STOPPED",
    "TO": "TIMEOUT",
}


def parse_node_state(state: str | Sequence[str], flags: Sequence[str] = ()) -> NodeState:
    """Read a node's state.

    Args:
        state: `IDLE+CLOUD`, `mix-`, `drained*`, or a JSON list. `alloc+` (sinfo: some of its jobs
            are completing) gets the flag COMPLETING.
        flags: JSON `state_flags` of v0.0.37/38.

    Returns:
        Words that are not known stay as they are: a first word as base, later ones as flags.

    Raises:
        ParseError: nothing there, two different bases, or words that are no state at all.

    """
    if isinstance(state, str):
        text, plus = state.strip(), ""
        if text.endswith("+"):
            text, plus = text[:-1], "COMPLETING"
        words = [*text.split("+"), *([plus] if plus else [])]
    else:
        text, words = "+".join(state), list(state)
    words = [*words, *flags]
    if not text or len(words) > MAX_WORDS:
        raise ParseError(text, "not a node state")
    base = ""
    found: set[str] = set()
    for word in words:
        name = word.strip().upper()
        while name and name[-1] in _SUFFIXES:
            found.add(_SUFFIXES[name[-1]])
            name = name[:-1]
        _check_word(name, text)
        if name in NODE_BASES:
            if base and base != name:
                raise ParseError(text, f"two base states of a node: {base} and {name}")
            base = name
        else:
            found.add(name)
    if not base and isinstance(state, str):
        first = words[0].strip().upper().rstrip("".join(_SUFFIXES))
        found.discard(first)
        base, implied = _WORDS.get(first, (first, ()))
        found.update(implied)
    return NodeState(base or "UNKNOWN", frozenset(_FLAG_ALIASES.get(f, f) for f in found))


def why_not_usable(state: NodeState) -> str | None:
    """Say why no new pod may go to a node in this state, or None when its state allows it.

    Short, stable, for people: the base and the flags at fault, in alphabetical order. Not judged
    here: free GPUs, the plan (PLANNED) and reservations (RESERVED).

    A COMPLETING node is refused as a whole, not only the GPUs of the job that ends: Slurm itself
    gives nothing on it to an immediate claim ("Requested nodes are busy") nor to a queued job
    until the Epilog is over (measured, 22.05.8 and 26.05.5).
    """
    faults = sorted(state.flags - HARMLESS_FLAGS)
    if state.base not in USABLE_BASES:
        faults.insert(0, state.base)
    return "+".join(faults) or None


def parse_job_state(state: str | Sequence[str]) -> JobState:
    """Read a job's state: `RUNNING`, squeue's `CG`, or a JSON list (`["COMPLETING", "FAILED"]`).

    Where only a flag is told (squeue prints COMPLETING alone), the base is what it must have been,
    or UNKNOWN, which holds resources.

    Raises:
        ParseError: nothing there, two different bases, or words that are no state at all.

    """
    words = [state] if isinstance(state, str) else list(state)
    text = "+".join(words)
    if not text or len(words) > MAX_WORDS:
        raise ParseError(text, "not a job state")
    base = ""
    flags: set[str] = set()
    for word in words:
        for piece in word.strip().upper().split("+"):
            name = _JOB_SHORT.get(piece, piece)
            _check_word(name, text)
            if name in JOB_BASES:
                if base and base != name:
                    raise ParseError(text, f"two base states of a job: {base} and {name}")
                base = name
            else:
                flags.add(name)
    if not base and len(flags) == 1:
        (only,) = flags
        if only not in _JOB_FLAG_BASE:  # REVOKED, LAUNCH_FAILED, or a word of a later Slurm
            return JobState(only)
        base = _JOB_FLAG_BASE[only]
    return JobState(base or "UNKNOWN", frozenset(flags))


def _check_word(word: str, text: str) -> None:
    if not word or len(word) > 64 or not word.replace("_", "").isalnum() or not word.isascii():
        raise ParseError(text, f"not a state: {word[:64]!r}")
