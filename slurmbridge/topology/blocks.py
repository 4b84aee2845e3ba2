"""Slurm's block topology: base blocks and the aggregated blocks above them.

Source: topology/block of Slurm 23.11 to 26.05 (topology.conf(5): BlockName, BlockSizes). A size
is a base size times a power of two; the aggregated blocks of a size are made of so many
neighbouring base blocks, in the order of the file, and the last one may be smaller.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slurmbridge.pool.errors import Problem
from slurmbridge.pool.hostlist import fold
from slurmbridge.topology.source import Places, sample

BLOCK = "block"
"""Level name of base blocks; aggregated blocks are called `block-<size>`."""
MAX_DOUBLINGS = 15
DEFAULT_MULTIPLES = (1, 2, 4, 8, 16)
"""What Slurm takes when BlockSizes is not given."""


class Block(msgspec.Struct, frozen=True):
    """A base block as written."""

    name: str
    nodes: tuple[str, ...]
    where: str = ""


class Aggregate(msgspec.Struct, frozen=True):
    """An aggregated block as `scontrol show topology` prints it; size in nodes."""

    name: str
    nodes: tuple[str, ...]
    size: int


def read_sizes(words: Sequence[object], where: str) -> tuple[tuple[int, ...], list[Problem]]:
    """The valid beginning of a BlockSizes list; from the first faulty size on it is ignored.

    Slurm refuses to start on such a list; -1 comes from generators that had nothing to say.
    """
    sizes: list[int] = []
    for word in words:
        text = str(word).strip()
        size = int(text) if text.isascii() and text.isdigit() else 0
        base = sizes[0] if sizes else size
        multiple = size // base if base else 0
        valid = (
            size > 0
            and size % base == 0
            and multiple & (multiple - 1) == 0
            and multiple <= 1 << MAX_DOUBLINGS
        )
        if not valid:
            rule = "a positive number of nodes, each the first one times a power of two"
            return tuple(sizes), [Problem(where, f"block size {text!r} is ignored: wanted {rule}")]
        sizes.append(size)
    return tuple(sizes), []


def places_of_blocks(
    source: str,
    blocks: Sequence[Block],
    sizes: tuple[int, ...] | None,
    aggregates: Sequence[Aggregate] | None = None,
) -> tuple[Places, list[Problem]]:
    """Places in base and aggregated blocks.

    Args:
        source: name of the source.
        blocks: base blocks in the order of the text; blocks without nodes keep their number.
        sizes: a valid BlockSizes list; None or empty: Slurm's default.
        aggregates: aggregated blocks where the text lists them itself, as scontrol does; `sizes`
            is not used then. None: they follow from `sizes`.

    """
    problems: list[Problem] = []
    first: dict[str, str] = {}
    twice: list[str] = []
    for block in blocks:
        twice += [n for n in block.nodes if first.setdefault(n, block.name) != block.name]
    if twice:
        problems.append(Problem(source, f"in two blocks, the first counts: {sample(twice)}"))
    if aggregates is not None:
        upper = _stated_levels(aggregates)
    else:
        base = (sizes or (0,))[0] or next((len(b.nodes) for b in blocks if b.nodes), 1)
        small = [b.name for b in blocks if 0 < len(b.nodes) < base]
        if small:
            text = f"fewer nodes than the base block size {base}: {sample(small)}"
            problems.append(Problem(source, text))
        upper = _counted_levels(blocks, base, sizes)
    levels = (BLOCK, *(name for name, _ in upper))
    of = {
        node: (block, *(members.get(node) for _, members in upper)) for node, block in first.items()
    }
    return Places(source, levels, of), problems


def _stated_levels(aggregates: Sequence[Aggregate]) -> list[tuple[str, dict[str, str]]]:
    by_size: dict[int, dict[str, str]] = {}
    for aggregate in aggregates:
        members = by_size.setdefault(aggregate.size, {})
        for node in aggregate.nodes:
            members.setdefault(node, aggregate.name)
    return [(f"{BLOCK}-{size}", by_size[size]) for size in sorted(by_size)]


def _counted_levels(
    blocks: Sequence[Block], base: int, sizes: tuple[int, ...] | None
) -> list[tuple[str, dict[str, str]]]:
    """Aggregated blocks as Slurm makes them, up to the first size that holds all blocks."""
    multiples = [size // base for size in sizes] if sizes else list(DEFAULT_MULTIPLES)
    levels: list[tuple[str, dict[str, str]]] = []
    below = 1
    for multiple in multiples[1:]:
        if below >= len(blocks):
            break
        members: dict[str, str] = {}
        for start in range(0, len(blocks), multiple):
            group = blocks[start : start + multiple]
            if len(group) < multiple and len(group) <= below:
                continue  # what is left over is one block of the level below already
            name = fold([b.name for b in group])
            for block in group:
                for node in block.nodes:
                    members.setdefault(node, name)
        levels.append((f"{BLOCK}-{base * multiple}", members))
        below = multiple
    return levels
