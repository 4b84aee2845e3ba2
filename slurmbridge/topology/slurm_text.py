"""Slurm's line form: topology.conf and the answer of `scontrol show topology`.

Sources: topology.conf(5) and scontrol(1), Slurm 22.05 to 26.05; the topology guide for rings.
Keys are case-insensitive, `#` begins a comment, a backslash at the end joins lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec

from slurmbridge.pool.errors import ParseError, Problem
from slurmbridge.pool.hostlist import expand
from slurmbridge.topology.blocks import Aggregate, Block, places_of_blocks, read_sizes
from slurmbridge.topology.source import Places, Reading, Stated, Switch, SwitchTree, sample

_PAIR = re.compile(r"(\w+)\s*=\s*(?:\"([^\"]*)\"|(\S*))")
_COMMENT = re.compile(r"(?<!\\)#.*")
_NOTHING = "no topology information"


class _Lines(msgspec.Struct):
    """What has been read so far. is_answer: scontrol's, which lists aggregated blocks itself."""

    source: str
    switches: list[Switch] = []
    blocks: list[Block] = []
    aggregates: list[Aggregate] = []
    rings: list[tuple[str, tuple[str, ...]]] = []
    sizes: tuple[int, ...] | None = None
    is_answer: bool = False
    problems: list[Problem] = []

    def names(self, where: str, text: str) -> tuple[str, ...]:
        """Expand a hostlist; a faulty one is a problem and counts as empty."""
        if not text:
            return ()
        try:
            return tuple(expand(text))
        except ParseError as error:
            self.problems.append(Problem(where, str(error)))
            return ()


def read_slurm_text(
    text: str, *, source: str = "topology.conf", level_names: tuple[str, ...] = ()
) -> Reading:
    """Read topology.conf, or what `scontrol show topology` prints; both have the same lines.

    Args:
        text: the whole text.
        source: how to call it in problems.
        level_names: names of a tree's levels from Slurm's level 0 up (`("rack", "row")`).

    Returns:
        A tree if there are SwitchName lines, places if there are BlockName or RingName lines; more
        than one kind in one text is reported (Slurm reads only the lines of its plugin).

    """
    found = _Lines(source)
    for number, line in _joined_lines(text):
        where = f"{source}:{number}"
        values = {m[1].lower(): m[2] if m[2] is not None else m[3] for m in _PAIR.finditer(line)}
        for key, take in _TAKERS.items():
            if key in values:
                take(found, where, values)
                break
        else:
            if _NOTHING not in line.lower():
                found.problems.append(Problem(where, f"not a line of a topology: {line[:80]!r}"))
    stated = _stated(found, level_names)
    if len(stated) > 1:
        text = "switch, block and ring lines are mixed; Slurm reads only those of its plugin"
        found.problems.append(Problem(source, text))
    return Reading(stated, tuple(found.problems))


def _joined_lines(text: str) -> Iterator[tuple[int, str]]:
    """Logical lines without comments, with the number of the first physical line."""
    pending, began = "", 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = _COMMENT.sub("", raw).rstrip()
        began = began or number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        pending += line
        if pending.strip():
            yield began, pending.strip()
        pending, began = "", 0
    if pending.strip():
        yield began, pending.strip()


def _take_switch(found: _Lines, where: str, values: dict[str, str]) -> None:
    level = values.get("level", "")
    found.switches.append(
        Switch(
            name=values["switchname"],
            switches=found.names(where, values.get("switches", "")),
            nodes=found.names(where, values.get("nodes", "")),
            level=int(level) if level.isascii() and level.isdigit() else None,
            where=where,
        )
    )


def _take_block(found: _Lines, where: str, values: dict[str, str]) -> None:
    nodes = found.names(where, values.get("nodes", ""))
    if not nodes:
        found.problems.append(Problem(where, f"block {values['blockname']} has no nodes"))
    found.is_answer |= "blockindex" in values
    found.blocks.append(Block(values["blockname"], nodes, where))


def _take_aggregate(found: _Lines, where: str, values: dict[str, str]) -> None:
    size = values.get("blocksize", "")
    if not (size.isascii() and size.isdigit()):
        text = f"aggregated block {values['aggregatedblock']} has no BlockSize and is left out"
        found.problems.append(Problem(where, text))
        return
    nodes = found.names(where, values.get("nodes", ""))
    found.aggregates.append(Aggregate(values["aggregatedblock"], nodes, int(size)))


def _take_sizes(found: _Lines, where: str, values: dict[str, str]) -> None:
    found.sizes, problems = read_sizes(values["blocksizes"].split(","), where)
    found.problems.extend(problems)


def _take_ring(found: _Lines, where: str, values: dict[str, str]) -> None:
    found.rings.append((values["ringname"], found.names(where, values.get("nodes", ""))))


_TAKERS: dict[str, Callable[[_Lines, str, dict[str, str]], None]] = {
    "switchname": _take_switch,
    "aggregatedblock": _take_aggregate,
    "blockname": _take_block,
    "blocksizes": _take_sizes,
    "ringname": _take_ring,
}


def _stated(found: _Lines, level_names: tuple[str, ...]) -> tuple[Stated, ...]:
    stated: list[Stated] = []
    if found.switches:
        stated.append(SwitchTree(found.source, tuple(found.switches), level_names))
    if found.blocks:
        places, problems = places_of_blocks(
            found.source,
            found.blocks,
            found.sizes,
            found.aggregates if found.is_answer or found.aggregates else None,
        )
        stated.append(places)
        found.problems.extend(problems)
    elif found.sizes is not None:
        found.problems.append(Problem(found.source, "BlockSizes without any block"))
    if found.rings:
        places, problems = places_of_groups(found.source, "ring", found.rings)
        stated.append(places)
        found.problems.extend(problems)
    return tuple(stated)


def places_of_groups(
    source: str, level: str, groups: list[tuple[str, tuple[str, ...]]]
) -> tuple[Places, list[Problem]]:
    """Places of plain groups of nodes (rings, toruses), in the order of the lists."""
    of: dict[str, tuple[str | None, ...]] = {}
    twice: list[str] = []
    for name, nodes in groups:
        for node in nodes:
            if node in of:
                twice.append(node)
            else:
                of[node] = (name,)
    problems = []
    if twice:
        text = f"in two {level}s, the first counts: {sample(twice)}"
        problems.append(Problem(source, text))
    return Places(source, (level,), of, linked=False), problems
