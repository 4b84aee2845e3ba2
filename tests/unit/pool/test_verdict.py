import numpy as np
import pytest

from slurmbridge.pool.record import GpuRequest
from slurmbridge.pool.verdict import (
    ABOUT,
    CODES,
    REASONS,
    TEXTS,
    Reason,
    Taken,
    compile_view,
    judge,
    score,
)
from slurmbridge.pool.view import ViewDelta, apply_delta
from tests.support.pool_view import NOW, make_ask, make_node, make_view, window

HORIZON = 1440


def verdicts(ask, *nodes, uid="p1", held=(), **how):
    index = compile_view(make_view(*nodes, held=held))
    rows = np.arange(len(index), dtype=np.int32)
    return [REASONS[c] for c in judge(ask, uid, index, rows, NOW, horizon_minutes=HORIZON, **how)]


def names_by_score(ask, *nodes, uid="p1", **how):
    index = compile_view(make_view(*nodes))
    rows = np.arange(len(index), dtype=np.int32)
    scores = score(ask, uid, index, rows, NOW, horizon_minutes=HORIZON, **how)
    return [index.names[row] for row in np.argsort(-scores, kind="stable")]


IN_AN_HOUR = NOW + 3600

VERDICTS = {
    "an idle node takes a pod": (make_ask(8), make_node(), None),
    "a drained node takes nothing": (make_ask(), make_node(blocked="DRAIN"), Reason.SLURM_STATE),
    "any unknown state takes nothing": (make_ask(), make_node(blocked="?!"), Reason.SLURM_STATE),
    "a node that Slurm does not know": (
        make_ask(),
        make_node(blocked="unknown to Slurm"),
        Reason.UNKNOWN_NODE,
    ),
    "a group at its ceiling": (make_ask(), make_node(blocked="ceiling"), Reason.CEILING),
    "no live agent": (make_ask(), make_node(agent=False), Reason.NO_AGENT),
    "more GPUs than the node has": (make_ask(9), make_node(), Reason.GPU_TOTAL),
    "one GPU too few is free": (make_ask(4), make_node(free=3), Reason.GPU_BUSY),
    "just enough is free": (make_ask(4), make_node(free=4), None),
    "more used than there are": (make_ask(), make_node(free=-2), Reason.GPU_BUSY),
    "a type the pool does not have": (make_ask(1, "h100"), make_node(), Reason.GPU_TYPE),
    "a type only other nodes have": (
        make_ask(1, "h100"),
        make_node(free={"a100": 8, "h100": 0}, total={"a100": 8, "h100": 0}),
        Reason.GPU_TYPE,
    ),
    "a type whose GPUs are in use, others free": (
        make_ask(1, "h100"),
        make_node(free={"a100": 4, "h100": 0}, total={"a100": 4, "h100": 4}),
        Reason.GPU_BUSY,
    ),
    "any type counts all types": (
        make_ask(6),
        make_node(free={"a100": 4, "h100": 2}, total={"a100": 4, "h100": 4}),
        None,
    ),
    "too few CPUs": (make_ask(cpus=65), make_node(), Reason.CPU_BUSY),
    "too little memory": (make_ask(memory_mib=500_001), make_node(), Reason.MEMORY_BUSY),
    "a native job, node by node": (
        make_ask(),
        make_node(free=4, native_jobs=1),
        Reason.NATIVE_ON_NODE,
    ),
    "a native job, GPU by GPU": (
        make_ask(exclusive_user=False),
        make_node(free=4, native_jobs=1),
        None,
    ),
    "it ends on the second of the planned start": (
        make_ask(minutes=60),
        make_node(plan_start=IN_AN_HOUR),
        None,
    ),
    "it ends a second after the planned start": (
        make_ask(minutes=60),
        make_node(plan_start=IN_AN_HOUR - 1),
        Reason.PLANNED,
    ),
    "a plan that is due": (make_ask(minutes=1), make_node(plan_start=NOW), Reason.PLANNED),
    "a rolling pod and a plan within the horizon": (
        make_ask(rolling=True),
        make_node(plan_start=NOW + 60 * HORIZON - 1),
        Reason.PLANNED,
    ),
    "a rolling pod and a plan beyond the horizon": (
        make_ask(rolling=True),
        make_node(plan_start=NOW + 60 * HORIZON),
        None,
    ),
    "a rolling pod whose first claim is longer than the horizon": (
        make_ask(rolling=True, minutes=2 * HORIZON),
        make_node(plan_start=NOW + 90 * HORIZON),
        Reason.PLANNED,
    ),
    "a reservation that runs": (make_ask(), make_node(windows=(window(-5, 5),)), Reason.RESERVED),
    "a reservation without end": (make_ask(), make_node(windows=(window(-5),)), Reason.RESERVED),
    "a reservation that is over": (make_ask(), make_node(windows=(window(-9, 0),)), None),
    "a reservation that begins before it ends": (
        make_ask(minutes=60),
        make_node(windows=(window(59, 99),)),
        Reason.RESERVED,
    ),
    "a reservation that begins as it ends": (
        make_ask(minutes=60),
        make_node(windows=(window(60, 99),)),
        None,
    ),
    "a rolling pod and next week's maintenance": (
        make_ask(rolling=True),
        make_node(windows=(window(7 * 1440, 8 * 1440),)),
        None,
    ),
    "inside its own reservation": (
        make_ask(reservation="mine"),
        make_node(windows=(window(-5, 60, "mine"),)),
        None,
    ),
    "its own reservation ends too early": (
        make_ask(reservation="mine", minutes=61),
        make_node(windows=(window(-5, 60, "mine"),)),
        Reason.OUTSIDE_RESERVATION,
    ),
    "its own reservation ends early but it is rolling": (
        make_ask(reservation="mine", rolling=True),
        make_node(windows=(window(-5, 60, "mine"),)),
        None,
    ),
    "its own reservation has not begun": (
        make_ask(reservation="mine"),
        make_node(windows=(window(5, 600, "mine"),)),
        Reason.OUTSIDE_RESERVATION,
    ),
    "its own reservation is over": (
        make_ask(reservation="mine", rolling=True),
        make_node(windows=(window(-50, 0, "mine"),)),
        Reason.OUTSIDE_RESERVATION,
    ),
    "a node outside its partition": (
        make_ask(partition="kube"),
        make_node(partitions=("main",)),
        Reason.OUTSIDE_PARTITION,
    ),
    "a node in its partition and another": (
        make_ask(partition="kube"),
        make_node(partitions=("kube", "main")),
        None,
    ),
    "a node of which no partition is known": (make_ask(partition="kube"), make_node(), None),
    "no partition asked": (make_ask(), make_node(partitions=("main",)), None),
    "a node outside its reservation": (
        make_ask(reservation="mine"),
        make_node(),
        Reason.OUTSIDE_RESERVATION,
    ),
    "its own reservation, and another that cuts in": (
        make_ask(reservation="mine"),
        make_node(windows=(window(-5, 600, "mine"), window(30, 40, "other"))),
        Reason.RESERVED,
    ),
    "no reservation asked, node in one called nothing": (
        make_ask(),
        make_node(windows=(window(-5, 5, ""),)),
        Reason.RESERVED,
    ),
}


@pytest.mark.parametrize(("ask", "node", "expected"), VERDICTS.values(), ids=VERDICTS.keys())
def test_one_node(ask, node, expected):
    assert [expected] == verdicts(ask, node)


def test_what_cannot_change_by_itself_is_told_first():
    worst = make_node(
        blocked="DOWN", agent=False, free=0, native_jobs=2, plan_start=NOW, windows=(window(-1),)
    )
    assert [Reason.SLURM_STATE] == verdicts(make_ask(), worst)


def test_a_held_claim_opens_its_node_whatever_else_is_said_and_no_other():
    nodes = (make_node("a"), make_node("b", blocked="DRAIN", free=0), make_node("c"))
    held = [("p1", "b", 77)]
    elsewhere = Reason.CLAIMED_ELSEWHERE
    assert [elsewhere, None, elsewhere] == verdicts(make_ask(), *nodes, held=held)
    assert [None, Reason.SLURM_STATE, None] == verdicts(make_ask(), *nodes, uid="p2", held=held)


def test_a_claim_held_on_a_node_that_left_the_pool_opens_nothing():
    assert [Reason.CLAIMED_ELSEWHERE] == verdicts(make_ask(), make_node(), held=[("p1", "zz", 7)])


def test_few_rows_are_judged_like_all_rows():
    nodes = [make_node(f"n{i}", free=i % 9) for i in range(100)]
    index = compile_view(make_view(*nodes))
    every = judge(make_ask(4), "p", index, np.arange(100), NOW, horizon_minutes=HORIZON)
    some = np.array([99, 3, 3, 50], np.int32)
    assert list(every[some]) == list(
        judge(make_ask(4), "p", index, some, NOW, horizon_minutes=HORIZON)
    )


EVICTING = {
    "claims of pods hold the GPUs": (make_ask(8), make_node(free=0, claimed=8), None),
    "native jobs hold too many": (make_ask(8), make_node(free=0, claimed=7), Reason.GPU_BUSY),
    "the plan stands": (make_ask(), make_node(claimed=8, plan_start=NOW), Reason.PLANNED),
    "CPUs may come back with the pods": (make_ask(cpus=99), make_node(claimed=8), None),
}


@pytest.mark.parametrize(("ask", "node", "expected"), EVICTING.values(), ids=EVICTING.keys())
def test_what_eviction_cannot_cure_is_told_when_asked(ask, node, expected):
    assert [expected] == verdicts(ask, node, evicting=True)


def test_every_reason_has_a_code_and_a_short_text_of_its_own():
    assert set(ABOUT) == set(Reason)
    assert len(set(TEXTS)) == len(Reason) + 1
    for reason, code in CODES.items():
        assert REASONS[code] is reason
        assert 0 < code < 128
        assert len(TEXTS[code]) < 80
        assert TEXTS[code].isascii()
        assert not any(c.isdigit() for c in TEXTS[code])


SCORES = {
    "the tightest fit first": (
        make_ask(2),
        [make_node("empty"), make_node("five", free=5), make_node("two", free=2)],
        ["two", "five", "empty"],
    ),
    "an empty node stays whole even if smaller": (
        make_ask(1),
        [make_node("empty4", free=4, total=4), make_node("used8", free=7)],
        ["used8", "empty4"],
    ),
    "node by node, where Kubernetes is already": (
        make_ask(1),
        [make_node("ours", free=6, claimed=2), make_node("tight", free=1)],
        ["ours", "tight"],
    ),
    "GPU by GPU, the tightest": (
        make_ask(1, exclusive_user=False),
        [make_node("ours", free=6, claimed=2), make_node("tight", free=1)],
        ["tight", "ours"],
    ),
    "a node with a plan soon comes last": (
        make_ask(1, minutes=10),
        [make_node("planned", free=1, plan_start=IN_AN_HOUR), make_node("free", free=7)],
        ["free", "planned"],
    ),
    "a node with a reservation soon comes last": (
        make_ask(1, minutes=10),
        [make_node("reserved", free=1, windows=(window(60, 90),)), make_node("free", free=7)],
        ["free", "reserved"],
    ),
    "only the type asked for counts": (
        make_ask(1, "a100"),
        [
            make_node("loose", free={"a100": 4, "h100": 0}, total={"a100": 4, "h100": 4}),
            make_node("tight", free={"a100": 1, "h100": 4}, total={"a100": 4, "h100": 4}),
        ],
        ["tight", "loose"],
    ),
}


@pytest.mark.parametrize(("ask", "nodes", "expected"), SCORES.values(), ids=SCORES.keys())
def test_score(ask, nodes, expected):
    assert expected == names_by_score(ask, *nodes)
    assert expected == names_by_score(ask, *reversed(nodes))


def test_topology_decides_between_equal_fits_only():
    nodes = [make_node("a", free=3), make_node("b", free=3), make_node("c", free=2)]
    topology = np.array([1, 9, 0], np.int32)
    assert ["c", "b", "a"] == names_by_score(make_ask(2), *nodes, topology=topology)


def test_scores_step_down_from_ten_and_stay_in_range():
    index = compile_view(make_view(*(make_node(f"n{i}") for i in range(30))))
    rows = np.arange(30, dtype=np.int32)
    scores = score(make_ask(), "p", index, rows, NOW, horizon_minutes=HORIZON)
    assert sorted(scores)[::-1] == [*range(10, -1, -1), *[0] * 19]
    assert [10] == list(score(make_ask(), "p", index, rows[:1], NOW, horizon_minutes=HORIZON))
    assert [] == list(score(make_ask(), "p", index, rows[:0], NOW, horizon_minutes=HORIZON))


def test_equal_nodes_are_spread_over_pods_and_stable_for_one():
    nodes = [make_node(f"n{i}") for i in range(50)]
    firsts = [names_by_score(make_ask(), *nodes, uid=f"uid-{i}")[0] for i in range(200)]
    again = [names_by_score(make_ask(), *nodes, uid=f"uid-{i}")[0] for i in range(200)]
    assert firsts == again
    assert len(set(firsts)) > 40


class TestIndex:
    def test_names_outside_the_pool_have_no_row(self):
        index = compile_view(make_view(make_node("a"), make_node("b")))
        assert [1, -1, 0] == list(index.rows(["b", "x", "a"], 3))

    def test_an_update_equals_a_fresh_compilation_and_leaves_the_old_alone(self):
        view = make_view(
            make_node("a", windows=(window(5, 6),)),
            make_node("b", windows=(window(5, 6), window(8, 9, "x"))),
            make_node("c"),
        )
        index = compile_view(view)
        delta = ViewDelta(
            "t1",
            1,
            2,
            NOW,
            1.0,
            nodes={
                "b": make_node("b", free=1, blocked="DRAIN", windows=(window(1, 2, "y"),)),
                "c": make_node("c", free=2, claimed=3, plan_start=NOW, native_jobs=1, agent=False),
            },
        )
        later = apply_delta(view, delta)
        updated, fresh = compile_view(later, index), compile_view(later)
        assert_same(updated, fresh)
        assert [8, 8, 8] == list(index.free[0])
        assert len(index.windows.row) == 3
        assert updated.row_of is index.row_of

    @pytest.mark.parametrize(
        "change",
        [
            {"d": make_node("d")},
            {"a": None},
            {"b": make_node("b", kind="new")},
            {"a": None, "d": make_node("d")},
        ],
        ids=["a node joins", "a node leaves", "a type appears", "one for another"],
    )
    def test_a_change_of_the_set_is_compiled_anew(self, change):
        view = make_view(make_node("a"), make_node("b"))
        later = apply_delta(view, ViewDelta("t1", 1, 2, NOW, 1.0, nodes=change))
        assert_same(compile_view(later, compile_view(view)), compile_view(later))

    def test_a_view_without_news_is_not_compiled(self):
        view = make_view(make_node("a"))
        index = compile_view(view)
        assert compile_view(view, index) is index
        later = apply_delta(view, ViewDelta("t1", 1, 2, NOW + 9, 1.0))
        updated = compile_view(later, index)
        assert updated.view is later
        assert updated.free is index.free

    def test_an_empty_pool_compiles(self):
        index = compile_view(make_view())
        assert [-1] == list(index.rows(["a"], 1))
        assert [] == list(
            judge(make_ask(), "p", index, np.array([], np.int32), NOW, horizon_minutes=1)
        )

    def test_binds_under_way_take_from_their_type_or_from_all(self):
        kinds = {"a100": 4, "h100": 4}
        index = compile_view(make_view(make_node("a", free=kinds, total=kinds), make_node("b")))
        typed = index.with_taken([Taken(0, GpuRequest(3, "h100"), 8, 500)])
        assert [5, 4, 1] == [int(typed.free[i, 0]) for i in range(3)]
        untyped = index.with_taken([Taken(0, GpuRequest(3), 8, 500)])
        assert [5, 1, 1] == [int(untyped.free[i, 0]) for i in range(3)]
        assert 56 == untyped.cpus_free[0]
        assert 499_500 == untyped.memory_free[0]
        assert [8, 8] == list(index.free[0])
        assert 8 == untyped.free[0, 1]


def assert_same(one, two):
    assert one.names == two.names
    assert dict(one.row_of) == dict(two.row_of)
    for kind, row in two.type_row.items():
        assert (one.free[one.type_row[kind]] == two.free[row]).all()
        assert (one.total[one.type_row[kind]] == two.total[row]).all()
    for field in (
        "cpus_free",
        "memory_free",
        "claimed",
        "blocked",
        "has_agent",
        "has_native",
        "plan_start",
        "salt",
    ):
        assert (getattr(one, field) == getattr(two, field)).all(), field
    assert (one.free[0] == two.free[0]).all()
    assert windows_of(one) == windows_of(two)


def windows_of(index):
    names = {number: name for name, number in index.reservations.items()}
    w = index.windows
    rows = zip(
        w.row.tolist(), w.start.tolist(), w.end.tolist(), w.reservation.tolist(), strict=True
    )
    return sorted((row, start, end, names[number]) for row, start, end, number in rows)
