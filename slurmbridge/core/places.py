"""The topology of the pool, compiled again only when nodes, labels or Slurm's text change."""

from __future__ import annotations

import msgspec

from slurmbridge.core.action import LogTopology
from slurmbridge.core.state import State
from slurmbridge.pool.errors import ParseError, Problem
from slurmbridge.pool.index import ViewIndex
from slurmbridge.topology.graph import Topology, build
from slurmbridge.topology.index import TopologyIndex
from slurmbridge.topology.labels import (
    ACCELERATOR_LEVELS,
    LabelLevel,
    NodeLabels,
    read_labels,
    topograph_levels,
)
from slurmbridge.topology.slurm_text import read_slurm_text
from slurmbridge.topology.slurm_yaml import read_topology_yaml
from slurmbridge.topology.source import CLUSTER, NODE, Reading


def topology(state: State, index: ViewIndex) -> TopologyIndex:
    """The topology whose rows are those of a view index.

    Sources, the most trusted first: `scontrol show topology`, the file of `Settings`, the labels of
    `Settings`, topograph's tiers; and topograph's accelerator domains as a dimension of their own.
    Built with NetworkX (tens of milliseconds at 5,000 nodes), used as arrays.
    """
    waiting = state.waiting
    made_of = (
        index.names,
        state.settings.topology_labels,
        state.settings.accelerator_labels,
        waiting.topology_text,
        waiting.topology_file,
        state.labels_changed,
    )
    if waiting.topology is None or waiting.topology_of != made_of:
        waiting.topology, waiting.topology_of = _build(state, index), made_of
    return waiting.topology.index


def switch_heights(state: State, index: ViewIndex) -> tuple[int, ...]:
    """Heights of the levels of slurmctld's own switch tree, leaf switches first; () without one."""
    places, made = topology(state, index), state.waiting.topology
    own = made.switch_levels if made is not None and state.waiting.topology_text else ()
    if not own or own[0] not in places.height_of:
        return ()
    return tuple(places.height_of[name] for name in own if name in places.height_of)


def _build(state: State, index: ViewIndex) -> Topology:
    waiting, settings = state.waiting, state.settings
    labels = {}
    for name in index.names:
        node = state.kube_nodes.get(name)
        if node is not None:
            labels[state.slurm_of.get(name, name)] = node.labels
    readings = []
    if waiting.topology_text:
        readings.append(read_slurm_text(waiting.topology_text, source="scontrol show topology"))
    if waiting.topology_file is not None:
        readings.append(_read_file(*waiting.topology_file))
    readings += _of_labels(labels, settings.topology_labels, settings.accelerator_labels)
    nodes = [state.slurm_of.get(name, name) for name in index.names]
    made = build(nodes, [stated for reading in readings for stated in reading.stated])
    problems = (*(p for reading in readings for p in reading.problems), *made.problems)
    if problems or set(made.index.levels) - {NODE, CLUSTER}:
        state.out.append(LogTopology(made.index.levels, tuple(str(p) for p in problems)))
    return msgspec.structs.replace(made, problems=problems)


def _read_file(path: str, text: str) -> Reading:
    """topology.conf, or of topology.yaml (by the end of its name) the default topology."""
    if not path.endswith((".yaml", ".yml")):
        return read_slurm_text(text, source=path)
    try:
        reading = read_topology_yaml(text, source=path)
    except ParseError as error:
        return Reading((), (Problem(path, str(error)),))
    first = reading.default()
    return Reading(() if first is None else (first,), reading.problems)


def _of_labels(
    labels: NodeLabels, topology_keys: tuple[str, ...], accelerator_keys: tuple[str, ...]
) -> list[Reading]:
    found = []
    if topology_keys:
        levels = [LabelLevel(key) for key in topology_keys]
        found.append(read_labels(labels, levels, root_first=True))
    if tiers := topograph_levels(labels):
        found.append(read_labels(labels, tiers, source="topograph"))
    sides = [LabelLevel(key) for key in reversed(accelerator_keys)] or list(ACCELERATOR_LEVELS)
    carried = [level for level in sides if any(level.key in node for node in labels.values())]
    if carried:
        found.append(read_labels(labels, carried, side=True, source="accelerators"))
    return found


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
