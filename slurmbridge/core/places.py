"""The topology of the pool: which generation is in use, and when the next one is wanted.

A generation is built outside of the events (`BuildTopology`, answered by `TopologyBuilt`). Until it
is there the last one goes on: nodes that it does not know stand alone. Before the first one nothing
is planned.
"""

from __future__ import annotations

from slurmbridge.core.action import BuildTopology, LogTopology
from slurmbridge.core.event import TopologyBuilt, TopologyRead
from slurmbridge.core.state import State
from slurmbridge.pool.index import ViewIndex
from slurmbridge.pool.record import KubeNode
from slurmbridge.topology.generation import (
    Labels,
    Sources,
    fitted,
    keys_in_use,
    labels_in_use,
)
from slurmbridge.topology.index import TopologyIndex, TopologyRecord
from slurmbridge.topology.source import CLUSTER, NODE

_NOTHING = TopologyRecord((), (), (), ())


def topology(state: State, index: ViewIndex) -> TopologyIndex:
    """The generation in use, its rows those of a view index.

    Arrays alone: where the nodes are others than those that it was made of, it is compiled again.
    """
    waiting = state.waiting
    if waiting.places is None or waiting.places_of is not index.names:
        nodes = tuple(state.slurm_of.get(name, name) for name in index.names)
        made = waiting.topology
        if made is not None and made.index.nodes == nodes:
            waiting.places = made.index
        elif waiting.places is None or waiting.places.nodes != nodes:
            waiting.places = fitted(_NOTHING if made is None else made.record, nodes)
        waiting.places_of = index.names
    return waiting.places


def is_wanted(state: State) -> bool:
    """Whether another generation may be wanted, and none is being built."""
    waiting, asked = state.waiting, state.waiting.topology_asked
    if not waiting.topology_due or not waiting.topology_told or not state.nodes_listed:
        return False
    return asked is None or state.now - asked >= state.settings.answer_s


def ask(state: State, names: tuple[str, ...]) -> None:
    """Have the next generation built, where what it is made of has changed.

    Args:
        state: the state.
        names: the pool's Kubernetes nodes, in the order of the view.

    """
    waiting, settings = state.waiting, state.settings
    sources = Sources(
        nodes=tuple(state.slurm_of.get(name, name) for name in names),
        labels=_labels(state, *map(state.kube_nodes.get, names)),
        topology_keys=settings.topology_labels,
        accelerator_keys=settings.accelerator_labels,
        text=waiting.topology_text,
        file=waiting.topology_file,
    )
    for gone in waiting.looked_through.keys() - state.kube_nodes.keys():
        del waiting.looked_through[gone]
    if sources == waiting.topology_of:
        waiting.topology_due = False
    else:
        waiting.topology_asked = state.now
        state.out.append(BuildTopology(sources))


def on_read(state: State, event: TopologyRead) -> None:
    """What Slurm says of its switches or blocks."""
    waiting = state.waiting
    waiting.topology_text, waiting.topology_file = event.text, event.file
    waiting.topology_told = waiting.topology_due = True


def on_built(state: State, event: TopologyBuilt) -> None:
    """The next generation is in use from now on."""
    waiting, made = state.waiting, event.topology
    waiting.topology, waiting.topology_of, waiting.topology_asked = made, event.sources, None
    waiting.places, state.view_changed, waiting.grew = None, True, True
    waiting.topology_due = True  # an answer may be late, and of older sources
    if made.problems or set(made.index.levels) - {NODE, CLUSTER}:
        state.out.append(LogTopology(made.index.levels, tuple(str(p) for p in made.problems)))


def on_mapped(state: State) -> None:
    """Nodes of the pool are others, or have other names in Slurm."""
    state.waiting.places, state.waiting.topology_due = None, True


def on_labels(state: State, old: KubeNode | None, new: KubeNode) -> None:
    """A node's labels may have changed; only those that say where it stands count."""
    if _labels(state, old) != _labels(state, new):
        state.waiting.topology_due = True


def _labels(state: State, *nodes: KubeNode | None) -> tuple[Labels, ...]:
    """Of each node the labels in use; of one that was looked through before they are known."""
    known, settings = state.waiting.looked_through, state.settings
    keys = keys_in_use(settings.topology_labels, settings.accelerator_labels)
    found: list[Labels] = []
    for node in nodes:
        if node is None:
            found.append(())
            continue
        last = known.get(node.name)
        if last is None or last[0] is not node.labels or last[1] != keys:
            last = known[node.name] = node.labels, keys, labels_in_use(node.labels, keys)
        found.append(last[2])
    return tuple(found)


def switch_heights(state: State, index: ViewIndex) -> tuple[int, ...]:
    """Heights of the levels of slurmctld's own switch tree, leaf switches first; () without one."""
    places, made, of = topology(state, index), state.waiting.topology, state.waiting.topology_of
    own = made.switch_levels if made is not None and of is not None and of.text else ()
    if not own or own[0] not in places.height_of:
        return ()
    return tuple(places.height_of[name] for name in own if name in places.height_of)


def place_nodes(state: State, index: ViewIndex) -> bool:
    """Bring `State.domains` up to date; whether a node stands elsewhere than before."""
    made = topology(state, index)
    if state.placed_by is made:
        return False
    state.placed_by = made
    domains = {name: made.path(row) for row, name in enumerate(index.names)} if made.top else {}
    if domains == state.domains:
        return False
    state.domains = domains
    return True
