"""What is counted of the node groups."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurmbridge.pool.share import NodeGroup


@dataclass(slots=True)
class GroupCount:
    """One group.

    nodes: its Slurm nodes, sorted. total: their GPUs; largest: those of the largest node. most:
    GPUs that pods may hold; pods, native: GPUs that pods and native jobs hold.
    """

    group: NodeGroup
    nodes: tuple[str, ...]
    total: int
    largest: int
    most: int
    pods: int = 0
    native: int = 0

    @property
    def room(self) -> int:
        """GPUs that pods may still take."""
        return max(0, self.most - self.pods)


@dataclass(slots=True)
class GroupCounts:
    """All groups by name. of: the group of each Slurm node. held: (pods, native) of each node."""

    groups: dict[str, GroupCount] = field(default_factory=dict)
    of: dict[str, GroupCount] = field(default_factory=dict)
    held: dict[str, tuple[int, int]] = field(default_factory=dict)
