"""Slurm's topology.yaml: several topologies in one file, each of another kind.

Source: topology.yaml(5), Slurm 25.05 (tree, block, flat) and 26.05 (ring, torus3d).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import yaml

from slurmbridge.pool.errors import ParseError, Problem
from slurmbridge.pool.hostlist import expand
from slurmbridge.topology.blocks import Block, places_of_blocks, read_sizes
from slurmbridge.topology.slurm_text import places_of_groups
from slurmbridge.topology.source import Places, Reading, Stated, Switch, SwitchTree

_KINDS = ("tree", "block", "flat", "ring", "torus3d")


class _Walk:
    """Takes values out of untyped YAML and notes what is not as expected."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def note(self, where: str, text: str) -> None:
        self.problems.append(Problem(where, text))

    def rows(self, value: Any, where: str) -> list[tuple[str, Mapping[str, Any]]]:
        """A list of mappings, each with its path; others are noted and left out."""
        if not isinstance(value, list):
            self.note(where, "expected a list")
            return []
        found: list[tuple[str, Mapping[str, Any]]] = []
        for number, row in enumerate(value):
            path = f"{where}[{number}]"
            if isinstance(row, dict):
                found.append((path, row))
            else:
                self.note(path, "expected a mapping")
        return found

    def text(self, row: Mapping[str, Any], key: str, where: str) -> str:
        """A name; a number is taken as its text, since names of digits need no quotes in YAML."""
        value = row.get(key, "")
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            return str(value)
        self.note(f"{where}.{key}", "expected a name")
        return ""

    def names(self, row: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
        """A hostlist, expanded; () when the key is missing."""
        if row.get(key) is None:
            return ()
        try:
            return tuple(expand(self.text(row, key, where)))
        except ParseError as error:
            self.note(f"{where}.{key}", str(error))
            return ()


def read_topology_yaml(
    text: str, *, source: str = "topology.yaml", level_names: tuple[str, ...] = ()
) -> Reading:
    """Read all topologies of a topology.yaml; which of them counts is the caller's choice.

    `Reading.default` gives the one with `cluster_default: true`, else the first.

    Args:
        text: the whole text.
        source: how to call it in problems.
        level_names: names of a tree's levels from Slurm's level 0 up.

    """
    walk = _Walk()
    try:
        document = yaml.safe_load(text)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # it lets out those of its numbers
        return Reading((), (Problem(source, f"not YAML: {' '.join(str(error).split())[:200]}"),))
    stated: list[Stated] = []
    for where, row in walk.rows(document or [], source):
        name = walk.text(row, "topology", where)
        kinds = [k for k in _KINDS if row.get(k) is not None and row.get(k) is not False]
        if len(kinds) != 1:
            found = ", ".join(kinds) or "none"
            walk.note(where, f"expected one of {', '.join(_KINDS)}, found {found}")
            continue
        one = _stated(walk, kinds[0], row[kinds[0]], f"{where}.{kinds[0]}", source, level_names)
        if one is not None:
            is_default = row.get("cluster_default") is True
            stated.append(msgspec.structs.replace(one, topology=name, default=is_default))
    names = [s.topology for s in stated]
    for name in sorted({n for n in names if names.count(n) > 1}):
        walk.note(source, f"topology {name} is described twice")
    if sum(s.default for s in stated) > 1:
        walk.note(source, "more than one topology is the cluster's default; the first counts")
    return Reading(tuple(stated), tuple(walk.problems))


def _stated(
    walk: _Walk, kind: str, body: Any, where: str, source: str, level_names: tuple[str, ...]
) -> Stated | None:
    if kind == "flat":
        return Places(source, (), {})
    if not isinstance(body, dict):
        walk.note(where, "expected a mapping")
        return None
    if kind == "tree":
        switches = tuple(
            Switch(
                name=walk.text(row, "switch", path),
                switches=walk.names(row, "children", path),
                nodes=walk.names(row, "nodes", path),
                where=path,
            )
            for path, row in walk.rows(body.get("switches"), f"{where}.switches")
        )
        return SwitchTree(source, switches, level_names)
    if kind == "block":
        sizes = body.get("block_sizes")
        valid = None
        if sizes is not None:
            words = sizes if isinstance(sizes, list) else [sizes]
            valid, problems = read_sizes(words, f"{where}.block_sizes")
            walk.problems.extend(problems)
        blocks = [
            Block(walk.text(row, "block", path), walk.names(row, "nodes", path), path)
            for path, row in walk.rows(body.get("blocks"), f"{where}.blocks")
        ]
        for block in blocks:
            if not block.nodes:
                walk.note(block.where, f"block {block.name} has no nodes")
        places, problems = places_of_blocks(source, blocks, valid)
    else:
        list_key, name_key = ("rings", "ring") if kind == "ring" else ("toruses", "name")
        groups = [
            (walk.text(row, name_key, path), _group_nodes(walk, row, path))
            for path, row in walk.rows(body.get(list_key), f"{where}.{list_key}")
        ]
        places, problems = places_of_groups(source, kind, groups)
    walk.problems.extend(problems)
    return places


def _group_nodes(walk: _Walk, row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Nodes of a ring or torus; a torus may list them by regions.

    The shapes (`placements`) that a torus allows are Slurm's to enforce: it refuses what does not
    match, and we plan again.
    """
    nodes = walk.names(row, "nodes", where)
    if row.get("regions") is not None:
        for path, region in walk.rows(row["regions"], f"{where}.regions"):
            nodes += walk.names(region, "nodes", path)
    if not nodes:
        walk.note(where, "has no nodes")
    return nodes
