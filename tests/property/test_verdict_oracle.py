"""The vectorised verdict against a plain reading of the rules, one node at a time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmbridge.pool.claim import Ask
from slurmbridge.pool.policy import Policy
from slurmbridge.pool.record import GpuCount, GpuRequest
from slurmbridge.pool.verdict import REASONS, Reason, compile_view, judge, judge_one
from slurmbridge.pool.view import HeldClaim, NodeView, Terms, View, Window

NOW = 1_800_000_000.0
KINDS = ("", "a100", "h100")

terms = st.builds(
    Terms,
    flex=st.booleans(),
    magnetic=st.booleans(),
    user=st.sampled_from([True, True, False, None]),
    accounts=st.sampled_from([(), (), ("phys",), ("-phys",), ("chem", "phys")]),
    exact=st.booleans(),
)
moments = st.integers(-200, 200).map(lambda m: NOW + 60.0 * m)
windows = st.builds(
    Window,
    st.sampled_from(["r1", "r2", "r3"]),
    moments,
    st.none() | moments,
    st.just(Terms()) | terms,
    st.sampled_from([0, 0, 0, 2, 4]),
).filter(lambda w: w.end is None or w.end > w.start)
counts = st.dictionaries(st.sampled_from(KINDS), st.integers(0, 8), max_size=3).map(
    lambda d: tuple(GpuCount(k, n) for k, n in d.items())
)
nodes = st.builds(
    NodeView,
    kube_node=st.just(""),
    slurm_node=st.just(""),
    total=counts,
    free=counts,
    cpus_free=st.integers(0, 8),
    memory_free_mib=st.integers(0, 8),
    blocked=st.sampled_from(["", "", "", "", "DRAIN", "ceiling", "unknown to Slurm"]),
    native_jobs=st.sampled_from([0, 0, 0, 2]),
    claimed=st.integers(0, 8),
    plan_start=st.none() | moments,
    windows=st.lists(windows, max_size=3).map(tuple),
    agent=st.sampled_from([True, True, True, False]),
    partitions=st.sampled_from([(), ("a",), ("a", "b")]),
)
asks = st.builds(
    Ask,
    gpu=st.builds(GpuRequest, st.integers(1, 8), st.sampled_from(KINDS)),
    cpus=st.integers(0, 8),
    memory_mib=st.integers(0, 8),
    minutes=st.integers(1, 200),
    rolling=st.booleans(),
    partition=st.sampled_from(["", "", "a", "b", "c"]),
    account=st.sampled_from(["", "phys", "bio"]),
    reservation=st.sampled_from(["", "", "r1", "r2"]),
    exclusive_user=st.booleans(),
)


def count_of(counted, kind):
    return sum(c.count for c in counted if not kind or c.type == kind)


def may_use(w, ask):
    t = w.terms
    if t.user is False:
        return "no"
    answer = "yes" if t.user else "unknown"
    if not t.accounts:
        return answer
    if t.accounts == ("-phys",):
        if ask.account == "phys":
            return "no"
        return answer if ask.account and t.exact else "unknown"
    if not ask.account:
        return "unknown"
    if ask.account in t.accounts:
        return answer
    return "no" if t.exact else "unknown"


def takes(w, ask, now, end):
    """Whether a pod may be in a reservation of its own that is not over."""
    if w.terms.flex:
        return True
    is_renewed = ask.rolling and ask.reservation
    return w.start <= now and (w.end is None or w.end >= end or bool(is_renewed))


def oracle(ask, uid, name, view, horizon_minutes):
    node, now = view.nodes[name], NOW
    held = view.held.get(uid)
    if held is not None:
        return None if held.kube_node == name else Reason.CLAIMED_ELSEWHERE
    if node.blocked:
        known = {"ceiling": Reason.CEILING, "unknown to Slurm": Reason.UNKNOWN_NODE}
        return known.get(node.blocked, Reason.SLURM_STATE)
    if not node.agent:
        return Reason.NO_AGENT
    total = count_of(node.total, ask.gpu.type)
    if ask.gpu.type and total == 0:
        return Reason.GPU_TYPE
    if total < ask.gpu.count:
        return Reason.GPU_TOTAL
    if ask.partition and node.partitions and ask.partition not in node.partitions:
        return Reason.OUTSIDE_PARTITION
    minutes = max(ask.minutes, horizon_minutes) if ask.rolling else ask.minutes
    end = now + 60 * minutes
    left = [w for w in node.windows if w.end is None or w.end > now]
    named = [w for w in left if ask.reservation and w.reservation == ask.reservation]
    if any(may_use(w, ask) == "no" for w in named):
        return Reason.RESERVATION_DENIED
    if ask.reservation and not any(takes(w, ask, now, end) for w in named):
        return Reason.OUTSIDE_RESERVATION
    others = [
        w
        for w in left
        if w not in named
        and w.start < end
        and not (
            not ask.reservation
            and w.terms.magnetic
            and may_use(w, ask) == "yes"
            and not w.cpus
            and takes(w, ask, now, end)
        )
    ]
    if count_of(node.free, ask.gpu.type) < ask.gpu.count:
        return Reason.GPU_BUSY
    if node.cpus_free - sum(w.cpus for w in others) < ask.cpus:
        return Reason.CPU_BUSY
    if node.memory_free_mib < ask.memory_mib:
        return Reason.MEMORY_BUSY
    if ask.exclusive_user and node.native_jobs:
        return Reason.NATIVE_ON_NODE
    if any(not w.cpus for w in others):
        return Reason.RESERVED
    if node.plan_start is not None and node.plan_start < end:
        return Reason.PLANNED
    return None


@settings(max_examples=300, deadline=None)
@given(
    ask=asks,
    pool=st.lists(nodes, min_size=1, max_size=12),
    held_on=st.none() | st.integers(0, 14),
    horizon=st.integers(1, 200),
    data=st.data(),
)
def test_all_nodes_at_once_are_judged_as_one_by_one(ask, pool, held_on, horizon, data):
    names = [f"n{i}" for i in range(len(pool))]
    held = {} if held_on is None else {"me": HeldClaim("me", f"n{held_on}", 1)}
    view = View("t", 1, NOW, 1.0, dict(zip(names, pool, strict=True)), held)
    index = compile_view(view)
    rows = data.draw(st.lists(st.integers(0, len(pool) - 1), max_size=20))
    codes = judge(ask, "me", index, np.array(rows, np.int32), NOW, horizon_minutes=horizon)
    expected = [oracle(ask, "me", names[r], view, horizon) for r in rows]
    assert expected == [REASONS[c] for c in codes]
    if not held:
        policy = Policy("c", plan_horizon_minutes=horizon)
        assert expected == [judge_one(ask, pool[r], policy, NOW) for r in rows]


@settings(max_examples=150, deadline=None)
@given(
    before=st.lists(nodes, min_size=1, max_size=8),
    after=st.lists(nodes, min_size=1, max_size=8),
    ask=asks,
)
def test_an_updated_index_judges_like_a_fresh_one(before, after, ask):
    old = View("t", 1, NOW, 1.0, {f"n{i}": n for i, n in enumerate(before)})
    merged = dict(old.nodes) | {f"n{i}": n for i, n in enumerate(after)}
    new = View("t", 2, NOW, 1.0, merged)
    updated, fresh = compile_view(new, compile_view(old)), compile_view(new)
    rows = np.arange(len(merged), dtype=np.int32)
    assert list(judge(ask, "p", fresh, rows, NOW, horizon_minutes=99)) == list(
        judge(ask, "p", updated, rows, NOW, horizon_minutes=99)
    )
