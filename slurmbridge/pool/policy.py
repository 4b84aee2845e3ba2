"""Policy: what the site allows and prefers; how a pod's wishes become an `Ask`.

The structs are a part of the configuration file (docs/config.md); `resolve` is pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Final, Literal

import msgspec

from slurmbridge.pool import keys
from slurmbridge.pool.claim import Ask
from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.record import GpuRequest, PodRecord, SlurmJob

OPTION_RE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:+-]{0,127}")
"""What may become the value of a Slurm option: no space, no comma, no leading dash, no shell."""

_GO_RE: Final = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,7})m)?(?:(\d{1,9})s)?", re.ASCII)
_SLURM_RE: Final = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):(\d{1,2}):(\d{1,2})", re.ASCII)


class Granularity(StrEnum):
    """How finely a node is shared: see docs/annotations.md for what each promises."""

    NODE = "node"
    GPU = "gpu"


class IdentityRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which Slurm identity the pods of some namespaces may use.

    namespaces: shell-style patterns of namespaces (`team-*`).
    service_accounts: shell-style patterns of the pods' service accounts.
    accounts, qos, partitions: what a pod may use; the first is the default, its annotation may name
        another. An empty list: Slurm's default (partition: that of the policy), no choice.
    reservations: what a pod's annotation may name; there is no default.
    """

    namespaces: tuple[str, ...]
    service_accounts: tuple[str, ...] = ("*",)
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    reservations: tuple[str, ...] = ()


Minutes = Annotated[int, msgspec.Meta(ge=1, le=525600)]


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The rules that bridge and extender share; streamed with the view.

    cluster: id of this Kubernetes cluster in Slurm's job names; never change it while pods run.
    granularity: how finely a node is shared; docs/annotations.md says what each promises.
    resources: Kubernetes extended resource to Slurm GRES type; an empty type is any type.
    partition: where claims go by default; it must preempt nobody.
    default_minutes: time limit of the claim of a pod that says no duration; renewed while it lives.
    max_minutes: longest duration that a pod may ask for.
    plan_horizon_minutes: a pod without a duration counts as endless against plans and
        reservations that begin within this time; later ones are not held against it.
    grace_minutes: added to a pod's duration and its terminationGracePeriodSeconds, for its start.
    identities: first match counts; no match and a non-empty list: refused.
    candidates: how many nodes filter answers with at most.
    stray: what becomes of a pod with pool GPUs that was bound without us: give it a claim, only
        report it, or evict it. Where no claim can be given, `cover` reports.
    """

    cluster: str
    granularity: Granularity = Granularity.NODE
    resources: Mapping[str, str] = msgspec.field(default_factory=lambda: {"nvidia.com/gpu": ""})
    partition: str = ""
    default_minutes: Minutes = 60
    max_minutes: Minutes = 43200
    plan_horizon_minutes: Minutes = 1440
    grace_minutes: Annotated[int, msgspec.Meta(ge=0, le=1440)] = 1
    identities: tuple[IdentityRule, ...] = ()
    candidates: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 16
    stray: Literal["cover", "report", "evict"] = "cover"


class Refusal(msgspec.Struct, frozen=True):
    """Why a pod cannot be served anywhere as it is written. reason: word for metrics."""

    reason: str
    text: str


def parse_wish(text: str) -> int:
    """Seconds of a duration annotation: `90m`, `1h30m`, `45s`, `1-12:00:00`, `02:00:00`.

    Raises:
        ParseError: any other form, or zero.

    """
    stripped = text.strip()
    seconds = 0
    if stripped and (match := _GO_RE.fullmatch(stripped)):
        hours, minutes, secs = (int(g or 0) for g in match.groups())
        seconds = hours * 3600 + minutes * 60 + secs
    elif match := _SLURM_RE.fullmatch(stripped):
        days, hours, minutes, secs = (int(g or 0) for g in match.groups())
        seconds = days * 86400 + hours * 3600 + minutes * 60 + secs
    if seconds <= 0:
        raise ParseError(text, "expected a duration such as 90m, 1h30m, 45s or 1-12:00:00")
    return seconds


def resolve(pod: PodRecord, policy: Policy) -> Ask | Refusal:
    """What to ask of Slurm for a pod, or why not.

    Args:
        pod: a pod with a pool GPU request or a fault in it.
        policy: the site's rules.

    """
    if pod.fault:
        return Refusal("request", pod.fault)
    if pod.gpu is None:
        return Refusal("request", "the pod asks for no pool GPU")
    rule = _rule(pod, policy)
    if isinstance(rule, Refusal):
        return rule
    choice: dict[str, str] = {}
    for key, word, allowed, has_default in (
        (keys.ACCOUNT, "account", rule.accounts, True),
        (keys.QOS, "qos", rule.qos, True),
        (keys.PARTITION, "partition", rule.partitions, True),
        (keys.RESERVATION, "reservation", rule.reservations, False),
    ):
        wish = pod.annotations.get(key, "")
        if not wish:
            choice[word] = allowed[0] if allowed and has_default else ""
        elif not OPTION_RE.fullmatch(wish):
            return Refusal("annotation", f"annotation {key} is not a Slurm name")
        elif wish not in allowed:
            text = f"namespace {pod.namespace} may not use Slurm {word} {wish}"
            return Refusal("identity", text)
        else:
            choice[word] = wish
    mode = pod.annotations.get(keys.MODE, "immediate")
    if mode not in ("immediate", "queued"):
        return Refusal("annotation", f"annotation {keys.MODE} must be immediate or queued")
    try:
        seconds = _own_end_s(pod)
    except ParseError as error:
        return Refusal("annotation", f"annotation {keys.DURATION}: {error.text}")
    if seconds is not None and -(-seconds // 60) > policy.max_minutes:
        return Refusal("duration", f"longer than the {policy.max_minutes} minutes allowed")
    return Ask(
        gpu=pod.gpu,
        cpus=pod.cpus,
        memory_mib=pod.memory_mib,
        minutes=_minutes(pod, policy, seconds),
        rolling=seconds is None,
        account=choice["account"],
        partition=choice["partition"] or policy.partition,
        qos=choice["qos"],
        reservation=choice["reservation"],
        exclusive_user=policy.granularity is Granularity.NODE,
        mode=mode,
    )


def honour(pod: PodRecord, policy: Policy, job: SlurmJob | None = None) -> Ask:
    """What to ask of Slurm for a pod that has been let in, though policy refuses it by now.

    Args:
        pod: a pod with a pool GPU request; without one it gets what its claim holds.
        policy: the site's rules as they are now.
        job: the claim that it has, whose identity it keeps.

    """
    try:
        seconds = _own_end_s(pod)
    except ParseError:
        seconds = None  # as one that names no end
    held = 0 if job is None or job.gpus is None else sum(u.total for u in job.gpus.values())
    return Ask(
        gpu=pod.gpu or GpuRequest(held),
        cpus=pod.cpus,
        memory_mib=pod.memory_mib,
        minutes=_minutes(pod, policy, seconds),
        rolling=seconds is None,
        account="" if job is None else job.account,
        partition=policy.partition if job is None else job.partition,
        qos="" if job is None else job.qos,
        reservation="" if job is None else job.reservation,
        exclusive_user=policy.granularity is Granularity.NODE,
    )


def _own_end_s(pod: PodRecord) -> int | None:
    """Seconds after which a pod ends by its own word; None: it names no end.

    Raises:
        ParseError: its annotation is no duration.

    """
    duration = pod.annotations.get(keys.DURATION)
    seconds = None if duration is None else parse_wish(duration)
    if pod.active_deadline_s is not None and pod.active_deadline_s > 0:
        seconds = min(seconds or pod.active_deadline_s, pod.active_deadline_s)
    return seconds


def _minutes(pod: PodRecord, policy: Policy, seconds: int | None) -> int:
    """What a claim has to last: the pod's time, and then the grace in which it is stopped."""
    if seconds is None:
        return policy.default_minutes
    return -(-(seconds + pod.grace_s) // 60) + policy.grace_minutes


def _rule(pod: PodRecord, policy: Policy) -> IdentityRule | Refusal:
    if not policy.identities:
        return IdentityRule(namespaces=("*",))
    for rule in policy.identities:
        if any(fnmatchcase(pod.namespace, p) for p in rule.namespaces) and any(
            fnmatchcase(pod.service_account, p) for p in rule.service_accounts
        ):
            return rule
    return Refusal("identity", f"no identity rule covers namespace {pod.namespace}")
