"""Luck that leaves nothing out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random  # noqa: TID251 - passed in
    from collections.abc import Sequence


class Bag:
    """Draws by luck, and nothing a second time before everything was drawn."""

    def __init__(self, things: Sequence[str], luck: random.Random) -> None:
        self._things, self._luck, self._left = things, luck, list[str]()

    def draw(self) -> str:
        """The next one."""
        if not self._left:
            self._left = self._luck.sample(self._things, len(self._things))
        return self._left.pop()

    def put_back(self, thing: str) -> None:
        """It could not be used now: let it be drawn once more, after all others."""
        self._left.insert(0, thing)
