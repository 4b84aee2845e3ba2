"""Host lists against ClusterShell's NodeSet, which reads the same grammar."""

from ClusterShell.NodeSet import NodeSet
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.hostlist import expand, fold

PREFIX = st.text("abz-._", min_size=1, max_size=4).map(lambda t: "n" + t)


@st.composite
def ranges(draw):
    """A range whose ends have one width, as Slurm prints them; without padding also 8-11."""
    width = draw(st.integers(1, 4))
    low = draw(st.integers(0, 10**width - 1))
    text = f"{low:0{width}d}"
    if draw(st.booleans()):
        return text
    high = draw(st.integers(low, min(low + 30, 10**width - 1)))
    return f"{text}-{high:0{width}d}"


@st.composite
def elements(draw):
    """`prefix[ranges]` once or twice, with or without a suffix."""
    parts = []
    for _ in range(draw(st.integers(1, 2))):
        picked = draw(st.lists(ranges(), min_size=1, max_size=3))
        parts.append(draw(PREFIX) + f"[{','.join(picked)}]")
    return "".join(parts) + draw(st.sampled_from(["", "-ib", "x"]))


@settings(max_examples=150, deadline=None)
@given(st.lists(elements(), min_size=1, max_size=3))
def test_expansion_gives_the_names_that_clustershell_gives(parts):
    text = ",".join(parts)
    assert set(expand(text)) == set(NodeSet(text))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(PREFIX, st.integers(0, 1200), st.integers(1, 4)).map(
            lambda t: f"{t[0]}{t[1]:0{t[2]}d}"
        ),
        max_size=40,
    )
)
def test_folding_loses_and_invents_nothing(names):
    folded = fold(names)
    assert set(expand(folded)) == set(names)
    assert set(NodeSet(folded)) == set(names)
    assert fold(expand(folded)) == folded


@settings(max_examples=300, deadline=None)
@given(st.text("n1-[],.0 ", max_size=30))
def test_any_text_gives_names_or_a_parse_error(text):
    try:
        names = expand(text)
    except ParseError:
        return
    assert sorted(expand(fold(names))) == sorted(set(names))
