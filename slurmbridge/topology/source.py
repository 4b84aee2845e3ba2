"""What one source says about where nodes stand.

A switch tree is kept as it is written, since it may hold loops and double entries that only the
graph finds (`graph.places_of_tree`); every other source speaks of nodes one by one (`Places`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from slurmbridge.pool.errors import Problem

NODE: str = "node"
"""Name of the lowest level in every index."""
CLUSTER: str = "cluster"
"""Name of the level above all others where the sources let every node work with every other."""


class Switch(msgspec.Struct, frozen=True):
    """One switch as written. level: Slurm's own number (0 is a leaf), None where it says none.

    nodes: `scontrol show topology` lists at an upper switch all nodes below it; the graph keeps
    each node at its lowest switch.
    where: place in the source, for problems.
    """

    name: str
    switches: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    level: int | None = None
    where: str = ""


class SwitchTree(msgspec.Struct, frozen=True):
    """A tree topology as written; switches in the order of the text.

    level_names: names of Slurm's levels 0, 1, ...; what is missing is called `level<number>`.
    topology: its name in topology.yaml, "" elsewhere. default: it is the cluster's default there.
    """

    source: str
    switches: tuple[Switch, ...]
    level_names: tuple[str, ...] = ()
    topology: str = ""
    default: bool = False


class Places(msgspec.Struct, frozen=True):
    """Node by node, the domains it stands in.

    levels: names, closest to the node first. of: node name -> one domain name (or None: not known)
    per level; nodes in the order that the source lists them, which becomes the order of ranks.
    linked: whether nodes that share no domain may still work together. False for switch trees:
    Slurm refuses a job over switches without a common parent.
    side: a dimension of its own beside the tree (accelerator domains).
    """

    source: str
    levels: tuple[str, ...]
    of: Mapping[str, tuple[str | None, ...]]
    linked: bool = True
    side: bool = False
    topology: str = ""
    default: bool = False


Stated = SwitchTree | Places


class Reading(msgspec.Struct, frozen=True):
    """All topologies that a text states, and what is wrong with it. Faults never hide the rest."""

    stated: tuple[Stated, ...]
    problems: tuple[Problem, ...] = ()

    def default(self) -> Stated | None:
        """The cluster's default topology: the one that says so, else the first, else None."""
        return next((s for s in self.stated if s.default), self.stated[0] if self.stated else None)


SAMPLE_NAMES = 5
"""How many names a problem lists; the rest is counted."""


def sample(names: Iterable[str]) -> str:
    """The first few names for a problem's text: `a, b, c and 7 more`."""
    listed = list(names)
    head = ", ".join(listed[:SAMPLE_NAMES])
    rest = len(listed) - SAMPLE_NAMES
    return f"{head} and {rest} more" if rest > 0 else head
