"""The answers to filter, prioritize and preempt: pure functions of (pod, names, situation).

kube-scheduler asks the same more than once, with one node or with all, in what-if cycles that lead
to nothing, and never says what came of it (KEP-4671, PodGroup cycle). So nothing is booked here:
the same pod, names and situation give the same answer, and asking changes nothing.

The situation is the view of the bridge less what binds under way take (`extender.inflight`). These
are facts too, only younger than the view: kube-scheduler has asked this process to bind a pod, and
a claim is being made or has been granted that the view does not show yet. A filter call neither
adds to them nor takes from them; they begin with a bind call and end with its refusal, with the
view that holds the claim, or with their time.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from enum import StrEnum
from typing import Final

import msgspec
import numpy as np

from slurmbridge.pool import keys
from slurmbridge.pool.claim import Ask
from slurmbridge.pool.index import Ints
from slurmbridge.pool.policy import Policy, Refusal, resolve
from slurmbridge.pool.reason import texts_for
from slurmbridge.pool.record import PodRecord
from slurmbridge.pool.verdict import PASSES, REASONS, Reason, ViewIndex, judge, rank, score

TEXT_CHARS: Final = 200
"""Longest text for a pod; a condition of 5,000 nodes holds it once."""


class Freshness(StrEnum):
    """How far the view may be believed.

    FRESH: as if it were now. STALE: for what can only be refused or is claimed already. BLIND: not.
    """

    FRESH = "fresh"
    STALE = "stale"
    BLIND = "blind"


def freshness_of(
    age_s: float | None, interval_s: float, stale_s: float, blind_s: float
) -> Freshness:
    """How far a view is to be believed.

    Args:
        age_s: its age in seconds, None: there is no view.
        interval_s: poll interval of the bridge; two of them are a normal age.
        stale_s, blind_s: limits of the site.

    """
    if age_s is None:
        return Freshness.BLIND
    fresh_s = max(stale_s, 2 * interval_s)
    if age_s <= fresh_s:
        return Freshness.FRESH
    return Freshness.STALE if age_s <= max(blind_s, fresh_s) else Freshness.BLIND


class Situation(msgspec.Struct, frozen=True, eq=False):
    """What is known at the moment of a request.

    index: compiled view less the binds under way; None: there has never been a view.
    policy: None: not known either.
    now: Unix seconds by the clock of the bridge, so that plans are not moved by a clock of ours.
    outside: names that a fresh view has shown not to be nodes of the pool.
    pinned: node where this process has got a claim for the pod, "" for none.
    is_led: a leading bridge streams to us: it will wake whomever we refuse, so that a pod may be
        refused for the age of the view too. Without it only an error brings the pod back.
    topology: int32[N] for `rank`, how little a pod breaks above its node; None: not known.
    """

    index: ViewIndex | None
    policy: Policy | None
    freshness: Freshness
    now: float
    outside: Container[str]
    pinned: str = ""
    is_led: bool = False
    topology: Ints | None = None


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer to filter. Exactly one of the first four says something.

    all: every node passes, untouched.
    passed: positions in the request of the nodes that pass.
    refused: why, by node; only when no node passes.
    error: nothing could be decided.
    reasons: how many nodes each reason kept out.
    outside: positions of the nodes that the view does not hold.
    """

    all: bool = False
    passed: Sequence[int] = ()
    refused: Mapping[str, str] = {}
    error: str = ""
    reasons: Mapping[Reason, int] = {}
    outside: Sequence[int] = ()


UNTOUCHED: Final = Answer(all=True)


def choose(pod: PodRecord, names: Sequence[str], there: Situation) -> Answer:
    """The nodes that a pod may go to: few and good ones, or none and why.

    Of the pool's nodes at most `Policy.candidates` pass, the best by `rank`: kube-scheduler then
    scores 16 nodes and not 5,000. Nodes outside the pool are none of our business and all pass. A
    node that is left out of the answer counts as refused for good in kube-scheduler, so only when
    none passes are the reasons spelt out.

    Cost: O(names).
    """
    index, policy = there.index, there.policy
    if policy is None:
        # Which resources are the pool's is not known, so that any pod may be one of ours.
        return _blind(names)
    if not wants_gpus(pod):
        return UNTOUCHED
    if index is None:
        return _blind(names)
    if there.freshness is Freshness.BLIND:
        if all(name in there.outside for name in names):
            return UNTOUCHED
        return _refuse(names, Reason.SLURM_SILENT) if there.is_led else _blind(names)
    rows = index.rows(names, len(names))
    is_pool = rows >= 0
    ours = np.flatnonzero(is_pool)
    others = np.flatnonzero(~is_pool)
    if there.freshness is not Freshness.FRESH:
        # The others may have come since, to the pool: nobody would make or cover a claim there now.
        is_outside = [names[position] in there.outside for position in others.tolist()]
        others = others[np.array(is_outside, dtype=bool)]
    new = len(names) - len(ours) - len(others)
    if not len(ours) and not new:
        return Answer(all=True, outside=others.tolist())
    home = _home(pod, index, there.pinned)
    if home:
        at = [position for position in ours.tolist() if names[position] == home]
        left = {Reason.CLAIMED_ELSEWHERE: len(ours) - len(at)}
        outside = others.tolist()
        if at or outside:
            return Answer(passed=sorted(at + outside), reasons=left, outside=outside)
        return _refuse(names, Reason.CLAIMED_ELSEWHERE)
    ask = _ask(pod, policy)
    if isinstance(ask, Refusal):
        if len(others):
            outside = others.tolist()
            return Answer(passed=outside, reasons={_reason(ask): len(ours)}, outside=outside)
        return _refuse(names, _reason(ask), ask.text)
    rows = rows[ours]
    horizon = policy.plan_horizon_minutes
    codes = judge(ask, pod.uid, index, rows, there.now, horizon_minutes=horizon)
    fits = np.flatnonzero(codes == PASSES)
    if there.freshness is not Freshness.FRESH and len(fits) + new:
        return _wait(names, others.tolist(), len(fits) + new, there)
    counts = np.bincount(codes, minlength=len(REASONS)).tolist()
    reasons = {r: n for r, n in zip(REASONS, counts, strict=True) if r is not None and n}
    if not len(fits) and not len(others):
        texts = map(texts_for(ask.reservation).__getitem__, codes.tolist())
        return Answer(refused=dict(zip(names, texts, strict=True)), reasons=reasons)
    if len(fits) > policy.candidates:
        ranks = rank(
            ask,
            pod.uid,
            index,
            rows[fits],
            there.now,
            horizon_minutes=horizon,
            topology=there.topology,
        )
        fits = fits[np.argpartition(-ranks, policy.candidates)[: policy.candidates]]
    passed = np.sort(np.concatenate((ours[fits], others)))
    return Answer(passed=passed.tolist(), reasons=reasons, outside=others.tolist())


def grade(pod: PodRecord, names: Sequence[str], there: Situation) -> list[int]:
    """Scores for prioritize, 0..10 by name; 0 for whatever is not ours to say.

    Never fails: a score is a wish, and kube-scheduler goes on without it.
    """
    scores = [0] * len(names)
    index, policy = there.index, there.policy
    if index is None or policy is None or not wants_gpus(pod):
        return scores
    if there.freshness is Freshness.BLIND:
        return scores
    home = _home(pod, index, there.pinned)
    if home:
        return [10 if name == home else 0 for name in names]
    ask = _ask(pod, policy)
    if isinstance(ask, Refusal):
        return scores
    rows = index.rows(names, len(names))
    ours = np.flatnonzero(rows >= 0)
    horizon = policy.plan_horizon_minutes
    codes = judge(ask, pod.uid, index, rows[ours], there.now, horizon_minutes=horizon)
    fits = ours[codes == PASSES]
    found = score(
        ask,
        pod.uid,
        index,
        rows[fits],
        there.now,
        horizon_minutes=horizon,
        topology=there.topology,
    )
    for position, value in zip(fits.tolist(), found.tolist(), strict=True):
        scores[position] = value
    return scores


def spare(pod: PodRecord, names: Sequence[str], there: Situation) -> list[str]:
    """The nodes of a preemption on which evicting pods could help the pod at all.

    kube-scheduler's dry run does not know Slurm: without this it would evict pods from a node that
    is drained, planned or full of Slurm jobs, for nothing. Not knowing means: spare them.
    """
    index, policy = there.index, there.policy
    if index is None or policy is None:
        return []
    if not wants_gpus(pod):
        return list(names)
    if there.freshness is not Freshness.FRESH:
        return [name for name in names if name in there.outside]
    home = _home(pod, index, there.pinned)
    ask = _ask(pod, policy)
    rows = index.rows(names, len(names))
    if home or isinstance(ask, Refusal):
        return [name for name, row in zip(names, rows.tolist(), strict=True) if row < 0]
    ours = np.flatnonzero(rows >= 0)
    horizon = policy.plan_horizon_minutes
    codes = judge(
        ask, pod.uid, index, rows[ours], there.now, horizon_minutes=horizon, evicting=True
    )
    drop = set(ours[codes != PASSES].tolist())
    return [name for position, name in enumerate(names) if position not in drop]


def wants_gpus(pod: PodRecord) -> bool:
    """Whether a pod names a pool GPU, readable or not. Others are none of our business."""
    return pod.gpu is not None or bool(pod.fault)


def _blind(names: Sequence[str]) -> Answer:
    return Answer(error=Reason.BLIND.text, reasons={Reason.BLIND: len(names)})


def _wait(names: Sequence[str], others: Sequence[int], fits: int, there: Situation) -> Answer:
    """Nodes would do, but the view is old: those of others pass, or none now."""
    if not there.is_led:
        return Answer(error=Reason.STALE.text, reasons={Reason.STALE: fits})
    if others:
        return Answer(passed=others, reasons={Reason.SLURM_SILENT: fits})
    return _refuse(names, Reason.SLURM_SILENT)


def _home(pod: PodRecord, index: ViewIndex, pinned: str) -> str:
    """The only node that a pod may go to because its claim is there; "" when it has none."""
    held = index.held.get(pod.uid)
    return pinned if held is None else held.kube_node


def _ask(pod: PodRecord, policy: Policy) -> Ask | Refusal:
    ask = resolve(pod, policy)
    if isinstance(ask, Ask) and pod.annotations.get(keys.GROUP):
        # A member of a group goes where the group's plan puts it, and there is none yet.
        return Refusal(Reason.NO_PLAN, "")
    return ask


def _reason(refusal: Refusal) -> Reason:
    """The class of a refusal; a word of a policy that we do not know is about the request."""
    known = refusal.reason in Reason.__members__.values()
    return Reason(refusal.reason) if known else Reason.REQUEST


def _refuse(names: Sequence[str], reason: Reason, text: str = "") -> Answer:
    told = f"{reason.text}: {text}"[:TEXT_CHARS] if text else reason.text
    return Answer(refused=dict.fromkeys(names, told), reasons={reason: len(names)})
