"""The topology of the pool, compiled again only when nodes, labels or Slurm's text change."""

from __future__ import annotations

from slurmbridge.core.state import State
from slurmbridge.pool.index import ViewIndex
from slurmbridge.topology.graph import build
from slurmbridge.topology.index import TopologyIndex
from slurmbridge.topology.labels import LabelLevel, read_labels, topograph_levels
from slurmbridge.topology.slurm_text import read_slurm_text
from slurmbridge.topology.source import Stated


def topology(state: State, index: ViewIndex) -> TopologyIndex:
    """The topology whose rows are those of a view index.

    Sources, the most trusted first: `scontrol show topology`, the labels of `Settings`, topograph's
    tiers. Built with NetworkX (tens of milliseconds at 5,000 nodes), used as arrays.
    """
    waiting = state.waiting
    labels = {}
    for name in index.names:
        node = state.kube_nodes.get(name)
        if node is not None:
            labels[state.slurm_of.get(name, name)] = node.labels
    made_of = (index.names, state.settings.topology_labels, waiting.topology_text, labels)
    if waiting.topology is None or waiting.topology_of != made_of:
        nodes = [state.slurm_of.get(name, name) for name in index.names]
        sources: list[Stated] = []
        if waiting.topology_text:
            sources += read_slurm_text(
                waiting.topology_text, source="scontrol show topology"
            ).stated
        levels = [LabelLevel(key) for key in state.settings.topology_labels]
        if levels:
            sources += read_labels(labels, levels, root_first=True).stated
        if tiers := topograph_levels(labels):
            sources += read_labels(labels, tiers, source="topograph").stated
        waiting.topology = build(nodes, sources)
        waiting.topology_of = made_of
    return waiting.topology.index
