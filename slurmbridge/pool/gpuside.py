"""Which free GPUs of a node a pod gets: those of one side (NUMA node), where that can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def choose(indices: Sequence[int], count: int, sides: Mapping[int, int]) -> tuple[int, ...]:
    """As few sides as can be; then best fit, so that other sides stay whole; then the lowest.

    Args:
        indices: GPUs that are free; a GPU without a number may be among them, more than once.
        count: how many are wanted, 0 <= count <= len(indices).
        sides: side of each GPU by index; one that is not in it counts as alone.

    Returns:
        `count` of the indices, sorted.

    """
    groups: dict[tuple[int, bool], list[int]] = {}
    for position, index in enumerate(sorted(indices)):
        known = index in sides
        groups.setdefault((sides[index] if known else position, known), []).append(index)
    by_size = sorted(groups.values(), key=lambda group: (-len(group), group))
    chosen: list[int] = []
    while len(chosen) < count:
        wanted = count - len(chosen)
        enough = [group for group in by_size if len(group) >= wanted]
        group = min(enough, key=lambda g: (len(g), g)) if enough else by_size[0]
        by_size.remove(group)
        chosen += group[:wanted]
    return tuple(sorted(chosen))
