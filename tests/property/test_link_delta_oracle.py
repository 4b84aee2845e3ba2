"""Any two views of one term: the delta, sent over the wire, makes the second out of the first."""

from hypothesis import given, settings
from hypothesis import strategies as st

from slurmbridge.link import codec
from slurmbridge.link.delta import WHOLE_SHARE, difference
from slurmbridge.pool.record import GpuCount
from slurmbridge.pool.view import HeldClaim, NodeView, View, Window, apply_delta

NAMES = st.sampled_from([f"n{number}" for number in range(12)])
TIMES = st.floats(0, 4e9)
COUNTS = st.lists(
    st.builds(GpuCount, st.sampled_from(["", "a100"]), st.integers(0, 8)), max_size=2
).map(tuple)
WINDOWS = st.lists(
    st.builds(Window, st.text(max_size=4), TIMES, st.none() | TIMES), max_size=2
).map(tuple)
NODES = st.builds(
    NodeView,
    kube_node=NAMES,
    slurm_node=NAMES,
    total=COUNTS,
    free=COUNTS,
    cpus_free=st.integers(-5, 2**40),
    blocked=st.text(max_size=8),
    plan_start=st.none() | TIMES,
    windows=WINDOWS,
    agent=st.booleans(),
)
HELD = st.builds(HeldClaim, uid=st.text(max_size=8), kube_node=NAMES, job_id=st.integers(0, 2**32))
VIEWS = st.builds(
    View,
    term=st.just("t1"),
    generation=st.just(1),
    as_of=TIMES,
    interval_s=st.floats(0.1, 60),
    nodes=st.dictionaries(NAMES, NODES, max_size=10),
    held=st.dictionaries(st.text(max_size=4), HELD, max_size=4),
)


@settings(max_examples=300, deadline=None)
@given(VIEWS, VIEWS)
def test_first_view_and_delta_make_the_second(old, new):
    new = View(new.term, 2, new.as_of, new.interval_s, new.nodes, new.held)
    delta = difference(old, new)
    changed = sum(old.nodes.get(name) != new.nodes.get(name) for name in old.nodes | new.nodes)
    assert (delta is None) == (changed > WHOLE_SHARE * max(len(new.nodes), 1))
    if delta is not None:
        assert len(delta.nodes) == changed
        assert apply_delta(old, codec.decode_delta(codec.encode(delta))) == new
    assert codec.decode_view(codec.encode(new)) == new
