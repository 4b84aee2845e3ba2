"""What changed between two views: pure. The inverse is `slurmbridge.pool.view.apply_delta`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from operator import is_not
from typing import Final, TypeVar

from slurmbridge.pool.errors import InvariantError
from slurmbridge.pool.view import View, ViewDelta

_V = TypeVar("_V")

WHOLE_SHARE: Final = 0.5
"""From this share of changed nodes on a whole view is as cheap, and it heals the client."""


def difference(old: View, new: View) -> ViewDelta | None:
    """The delta from `old` to `new`, or None where a whole view serves better.

    None: of another term, or with more than `WHOLE_SHARE` of the nodes changed. A view that only
    was read again (newer `as_of`, same generation) gives a delta without nodes.

    Cost: O(nodes); unchanged nodes that are the same object cost a pointer comparison.

    Raises:
        InvariantError: within a term the generation went back, or the content changed under the
            same generation: readers keep what they compiled by generation.

    """
    if new.term != old.term:
        return None
    nodes = _changed(old.nodes, new.nodes)
    held = _changed(old.held, new.held)
    if new.generation < old.generation or (new.generation == old.generation and (nodes or held)):
        raise InvariantError(
            "view published out of order",
            [
                f"published term {old.term} generation {old.generation}",
                f"then generation {new.generation}: {len(nodes)} nodes, {len(held)} held differ",
            ],
        )
    if len(nodes) > WHOLE_SHARE * max(len(new.nodes), 1):
        return None
    return ViewDelta(
        term=new.term,
        base=old.generation,
        generation=new.generation,
        as_of=new.as_of,
        interval_s=new.interval_s,
        nodes=nodes,
        held=held,
    )


def _changed(old: Mapping[str, _V], new: Mapping[str, _V]) -> dict[str, _V | None]:
    if old is new:
        return {}
    if list(old) == list(new):  # as for nodes nearly always: no look-up of each
        others = compress(new, map(is_not, old.values(), new.values()))
        return {key: new[key] for key in others if old[key] != new[key]}
    changed: dict[str, _V | None] = {
        key: value
        for key, value in new.items()
        if (was := old.get(key)) is not value and was != value
    }
    changed.update((key, None) for key in old if key not in new)
    return changed
