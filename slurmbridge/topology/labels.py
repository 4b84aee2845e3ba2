"""Places from Kubernetes node labels.

A label value names a domain only inside the domains above it: rack `r1` of zone `a` and rack `r1`
of zone `b` are two racks (as Kueue's topology-aware scheduling has it).
Topograph's keys: its node label reference (tier 0 is the switch closest to the node).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from slurmbridge.pool.errors import Problem
from slurmbridge.pool.hostlist import natural
from slurmbridge.topology.source import Places, Reading, sample

ZONE_KEY = "topology.kubernetes.io/zone"
TOPOGRAPH_TIER = "fabric.topograph.run/tier-"
TOPOGRAPH_DOMAIN = "accelerator.topograph.run/domain"
TOPOGRAPH_SUB_DOMAIN = "accelerator.topograph.run/sub-domain"

_TIER_RE = re.compile(re.escape(TOPOGRAPH_TIER) + r"(0|[1-9]\d{0,3})")

NodeLabels = Mapping[str, Mapping[str, str]]
"""Node name (Slurm's) -> label key -> value."""


class LabelLevel(msgspec.Struct, frozen=True):
    """A label key and the level that it names; name "": the key's last part (`zone`)."""

    key: str
    name: str = ""

    @property
    def level(self) -> str:
        """The level's name."""
        return self.name or self.key.rpartition("/")[2]


ACCELERATOR_LEVELS = (
    LabelLevel(TOPOGRAPH_SUB_DOMAIN, "sub-accelerator"),
    LabelLevel(TOPOGRAPH_DOMAIN, "accelerator"),
)
"""Topograph's accelerator (NVLink) dimension, closest first."""


def topograph_levels(labels: NodeLabels) -> tuple[LabelLevel, ...]:
    """The fabric tiers that the nodes carry, closest first: `tier-0`, `tier-1`, ..."""
    tiers = {
        int(match[1]) for node in labels.values() for key in node if (match := _TIER_RE.match(key))
    }
    return tuple(LabelLevel(f"{TOPOGRAPH_TIER}{tier}", f"tier-{tier}") for tier in sorted(tiers))


def read_labels(
    labels: NodeLabels,
    levels: Sequence[LabelLevel],
    *,
    root_first: bool = False,
    side: bool = False,
    source: str = "labels",
) -> Reading:
    """Places by label values.

    Args:
        labels: of all pool nodes.
        levels: keys, closest to the node first, or the other way round with `root_first`.
        root_first: `levels` begins at the top (zone before rack).
        side: these keys are a dimension of their own (accelerator domains).
        source: how to call it in problems.

    """
    ordered = tuple(reversed(levels)) if root_first else tuple(levels)
    values = {
        node: [having.get(level.key, "") or None for level in ordered]
        for node, having in labels.items()
        if any(having.get(level.key) for level in ordered)
    }
    problems: list[Problem] = []
    for height in range(len(ordered) - 1, -1, -1):
        problems += _name_domains(values, height, ordered, source)
    of = {node: tuple(values[node]) for node in sorted(values, key=lambda n: _turn(n, values[n]))}
    names = tuple(level.level for level in ordered)
    return Reading((Places(source, names, of, side=side),), tuple(problems))


def _turn(node: str, found: Sequence[str | None]) -> tuple[object, ...]:
    """Order of nodes, and so of ranks: labels state none, so names count, the top level's first."""
    above = ((value is None, natural(value or "")) for value in reversed(found))
    return (*above, natural(node))


def _name_domains(
    values: Mapping[str, list[str | None]],
    height: int,
    ordered: Sequence[LabelLevel],
    source: str,
) -> Iterable[Problem]:
    """Make the values of one level unique; everything above it already is.

    Where all nodes of a value agree on what is above, those without a label there are taken along.
    """
    above: dict[str, dict[tuple[str | None, ...], list[str]]] = {}
    for node, found in values.items():
        value = found[height]
        if value is not None:
            above.setdefault(value, {}).setdefault(tuple(found[height + 1 :]), []).append(node)
    split: list[str] = []
    lost: list[str] = []
    for value, chains in above.items():
        whole = _merged(list(chains))
        for chain, nodes in chains.items():
            for node in nodes:
                if whole is not None:
                    values[node][height + 1 :] = whole
                elif all(part is None for part in chain):
                    values[node][height] = None
                    lost.append(node)
                else:
                    closest = next(part for part in chain if part is not None)
                    values[node][height] = f"{closest}/{value}"
        if whole is None:
            split.append(value)
    if split:
        text = f"under more than one parent, taken as different domains: {sample(split)}"
        yield Problem(f"{source}:{ordered[height].key}", text)
    if lost:
        text = f"could be any of several domains of that name, taken as unplaced: {sample(lost)}"
        yield Problem(f"{source}:{ordered[height].key}", text)


def _merged(chains: Sequence[tuple[str | None, ...]]) -> tuple[str | None, ...] | None:
    """One chain that all agree with, where None agrees with everything; None if there is none."""
    merged: list[str | None] = []
    for parts in zip(*chains, strict=True):
        known = {part for part in parts if part is not None}
        if len(known) > 1:
            return None
        merged.append(next(iter(known), None))
    return tuple(merged)
