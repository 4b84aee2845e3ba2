"""The graph of one generation: built and checked with NetworkX, then compiled to arrays.

Nothing here runs inside a request. Edges go from a domain to what stands in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec
import networkx as nx
import numpy as np

from slurmbridge.pool.errors import Problem
from slurmbridge.topology.index import (
    UNPLACED,
    Level,
    TopologyIndex,
    TopologyRecord,
    compile_index,
)
from slurmbridge.topology.merge import Merged, merge
from slurmbridge.topology.side import side_levels
from slurmbridge.topology.source import NODE, Places, Stated, Switch, SwitchTree, sample

Key: TypeAlias = tuple[str, str]
"""A graph node: ("node", name), or (level or "switch", domain)."""
Graph: TypeAlias = "nx.DiGraph[Key]"  # generic only in the stubs


class Topology(msgspec.Struct, frozen=True, eq=False):
    """One generation. graph: domains `(level, name)` and nodes `("node", name)`, a forest.

    record: the same as values for a wire; index: for requests; problems: of all sources.
    switch_levels: names of the levels of the most trusted source if that is a switch tree, leaf
    switches first; () otherwise.
    """

    generation: int
    graph: Graph
    record: TopologyRecord
    index: TopologyIndex
    problems: tuple[Problem, ...]
    switch_levels: tuple[str, ...] = ()


def build(
    nodes: Sequence[str],
    sources: Sequence[Stated],
    *,
    linked: bool | None = None,
    generation: int = 0,
) -> Topology:
    """Make a generation out of what the sources say; their faults are reported, the rest is used.

    Args:
        nodes: the pool's nodes by Slurm name; their order becomes the index's rows.
        sources: the most trusted first. By default the bridge gives: what slurmctld runs with
            (`scontrol show topology`), its files, Kubernetes labels. See docs/topology.md.
        linked: True: nodes without a common switch may work together all the same (Slurm's
            `TopologyParam=TopoOptional`); None: as the sources say.
        generation: number of this build.

    """
    problems: list[Problem] = []
    places: list[Places] = []
    for stated in sources:
        if isinstance(stated, SwitchTree):
            one, found = places_of_tree(stated)
            problems += found
        else:
            one = stated
        places.append(one)
    tree = merge(nodes, [p for p in places if not p.side], linked=linked)
    side = side_levels(nodes, tree, [p for p in places if p.side])
    graph, found = _canonical(nodes, tree)
    problems += (*tree.problems, *found)
    record = _record(nodes, tree, graph)
    if side is not None:
        graph_of_side, found = _canonical(nodes, side)
        problems += (*side.problems, *found)
        record = msgspec.structs.replace(record, side=_record(nodes, side, graph_of_side))
    if any(p.of for p in places):
        unplaced = [name for name in nodes if not any(name in p.of for p in places)]
        if unplaced:
            text = f"{len(unplaced)} pool nodes are in no source and stand alone: "
            problems.append(Problem("topology", text + sample(unplaced)))
    switch_levels = places[0].levels if sources and isinstance(sources[0], SwitchTree) else ()
    return Topology(
        generation, graph, record, compile_index(record), tuple(problems), switch_levels
    )


def places_of_tree(tree: SwitchTree) -> tuple[Places, list[Problem]]:
    """Check a switch tree and tell each node's switches.

    Switches in a loop are left out, with the loop named: what they link is not known. Of several
    parents the first one stated counts. Heights are Slurm's levels: a leaf is 0, a switch one more
    than its highest child.
    """
    problems: list[Problem] = []
    by_name: dict[str, Switch] = {}
    for switch in tree.switches:
        if switch.name in by_name:
            problems.append(Problem(switch.where, f"switch {switch.name} is described twice"))
        by_name.setdefault(switch.name, switch)
    graph: Graph = nx.DiGraph()
    graph.add_nodes_from(("switch", name) for name in by_name)
    rank = 0
    absent: list[str] = []
    for switch in by_name.values():
        absent += [f"{n} (under {switch.name})" for n in switch.switches if n not in by_name]
        if not switch.switches and not switch.nodes:
            problems.append(Problem(switch.where, f"switch {switch.name} has nothing under it"))
        for kind, names in (("switch", switch.switches), (NODE, switch.nodes)):
            for name in names:
                if kind == NODE or name in by_name:
                    graph.add_edge(("switch", switch.name), (kind, name), rank=rank)
                    rank += 1
    if absent:
        text = f"switches that are named but not described: {sample(absent)}"
        problems.append(Problem(tree.source, text))
    problems += settle(graph, tree.source)
    for name in by_name:  # links of a double entry that did not count may leave an empty switch
        if ("switch", name) in graph and not nx.descendants(graph, ("switch", name)):
            graph.remove_node(("switch", name))
    heights = _heights(graph, by_name)
    roots = [key[1] for key, degree in graph.in_degree() if degree == 0 and key[0] == "switch"]
    if len(roots) > 1:
        text = f"{len(roots)} roots, no gang spans two of them: {sample(roots)}"
        problems.append(Problem(tree.source, text))
    depth = max(heights.values(), default=-1) + 1
    of = {
        key[1]: chain
        for key in graph
        if key[0] == NODE and any(chain := _chain(graph, heights, key, depth))
    }
    listed = (name for switch in tree.switches for name in switch.nodes)
    ordered = {name: of[name] for name in _depth_first(graph, listed) if name in of}
    levels = tuple(
        tree.level_names[h] if h < len(tree.level_names) else f"level{h}" for h in range(depth)
    )
    return (
        Places(
            tree.source,
            levels,
            ordered,
            linked=False,
            topology=tree.topology,
            default=tree.default,
        ),
        problems,
    )


def settle(graph: Graph, source: str) -> list[Problem]:
    """Make a forest of a graph, and say what had to go.

    Loops go with all their members. A parent that lies above another parent of the same child is
    no parent of its own. Of several that remain, the one whose edge has the least `rank` counts.
    """
    problems = []
    for members in list(nx.strongly_connected_components(graph)):
        one = next(iter(members))
        if len(members) > 1 or graph.has_edge(one, one):
            # Sorted, so that the text does not depend on hashing.
            inner: Graph = nx.DiGraph(sorted(e for e in graph.edges(members) if e[1] in members))
            loop = [edge[0] for edge in nx.find_cycle(inner, min(members))]
            start = loop.index(min(loop))
            named = [name for _, name in (*loop[start:], *loop[:start], loop[start])]
            text = f"loop {' -> '.join(named)}; left out with all that is in a loop with it: "
            problems.append(Problem(source, text + sample(sorted(n for _, n in members))))
            graph.remove_nodes_from(list(members))
    problems.sort()
    disputes: dict[tuple[str, str, str], list[str]] = {}
    for key in list(nx.topological_sort(graph)):
        parents = list(graph.predecessors(key))
        if len(parents) < 2:
            continue
        above = {a for parent in parents for a in _ancestors(graph, parent)}
        rivals = [p for p in parents if p not in above]
        kept = min(rivals, key=lambda p: graph.edges[p, key]["rank"])
        graph.remove_edges_from([(p, key) for p in parents if p != kept])
        for lost in rivals:
            if lost != kept:
                disputes.setdefault((key[0], kept[1], lost[1]), []).append(key[1])
    for (kind, kept_name, lost_name), names in disputes.items():
        text = f"{kind} {sample(names)} under {kept_name} and {lost_name}: {kept_name} counts"
        problems.append(Problem(source, text))
    return problems


def _ancestors(graph: Graph, key: Key) -> Iterable[Key]:
    """Everything above a key whose own parents are settled: at most one each."""
    parents = list(graph.predecessors(key))
    while parents:
        yield parents[0]
        parents = list(graph.predecessors(parents[0]))


def _heights(graph: Graph, by_name: dict[str, Switch]) -> dict[Key, int]:
    """Slurm's level of each switch; where the text states a greater one, that."""
    heights: dict[Key, int] = {}
    for key in reversed(list(nx.topological_sort(graph))):
        if key[0] == "switch":
            stated = by_name[key[1]].level or 0
            below = max((heights[c] for c in graph[key] if c in heights), default=-1)
            heights[key] = max(stated, below + 1)
    return heights


def _chain(graph: Graph, heights: dict[Key, int], key: Key, depth: int) -> tuple[str | None, ...]:
    chain: list[str | None] = [None] * depth
    for above in _ancestors(graph, key):
        chain[heights[above]] = above[1]
    return tuple(chain)


def _depth_first(graph: Graph, listed: Iterable[str]) -> Iterable[str]:
    """Nodes in tree order, children as written; nodes whose switches were left out come last."""
    roots = [key for key, degree in graph.in_degree() if degree == 0]
    found = (key[1] for r in roots for key in nx.dfs_preorder_nodes(graph, r) if key[0] == NODE)
    return dict.fromkeys((*found, *listed))


def _canonical(nodes: Sequence[str], merged: Merged) -> tuple[Graph, list[Problem]]:
    """The graph of merged places, made a forest; a majority decides between two parents."""
    graph: Graph = nx.DiGraph()
    votes: dict[tuple[Key, Key], int] = {}
    for row in merged.order:
        child: Key = (NODE, nodes[row])
        graph.add_node(child)
        for level in merged.levels:
            number = int(level.of[row])
            if number != UNPLACED:
                above = (level.names[0], level.domains[number])
                votes[above, child] = votes.get((above, child), 0) + 1
                child = above
    graph.add_edges_from((a, b, {"rank": -count}) for (a, b), count in votes.items())
    return graph, settle(graph, "topology")


def _record(nodes: Sequence[str], merged: Merged, graph: Graph) -> TopologyRecord:
    """Read the settled graph back into numbers: every node takes what its domains stand in."""
    heights = {level.names[0]: h for h, level in enumerate(merged.levels)}
    numbers = [{name: i for i, name in enumerate(level.domains)} for level in merged.levels]
    of = np.full((len(merged.levels), len(nodes)), UNPLACED, np.int64)
    chains: dict[Key, list[tuple[int, int]]] = {}
    for key in nx.topological_sort(graph):
        parent = next(iter(graph.predecessors(key)), None)
        chain = [] if parent is None else chains[parent]
        if key[0] != NODE:
            height = heights[key[0]]
            chains[key] = [*chain, (height, numbers[height][key[1]])]
        else:
            chains[key] = chain
    for row, name in enumerate(nodes):
        for height, number in chains[NODE, name]:
            of[height, row] = number
    return TopologyRecord(
        nodes=tuple(nodes),
        levels=tuple(Level(tuple(m.names), tuple(m.domains)) for m in merged.levels),
        of=tuple(tuple(line) for line in of.tolist()),
        order=tuple(merged.order),
    )
