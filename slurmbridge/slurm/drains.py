"""Drains nodes and takes our own drains back, with scontrol.

Slurm has no "only if": each order is given right after a look at the node, a few milliseconds
before. What an operator does within them is overwritten by a drain of ours, or undone with it.
"""

from __future__ import annotations

from typing import Final

from slurmbridge.pool.drain import may_drain, may_resume
from slurmbridge.pool.errors import ParseError, PeerProtocolError, PeerRejected
from slurmbridge.pool.policy import OPTION_RE
from slurmbridge.pool.record import SlurmNode
from slurmbridge.slurm.command import PEER, SlurmCommand
from slurmbridge.slurm.text import read_nodes

_NOT_FOUND: Final = "not_found"


class NodeDrains:
    """Orders about nodes; safe for any number of tasks.

    Args:
        command: runs scontrol, as root, SlurmUser or an operator of Slurm.

    """

    def __init__(self, command: SlurmCommand) -> None:
        self._command = command

    async def drain(self, node: str, reason: str, deadline_s: float) -> bool:
        """Drain a node; False when it is not (any more) ours to drain, and nothing was done.

        Args:
            node: its name in Slurm.
            reason: of `slurmbridge.pool.drain.write_reason`.
            deadline_s: seconds for each of the two steps.

        Raises:
            ParseError: not a node name.
            PeerError: no answer; the node may have been drained.

        """
        found = await self._look(node, deadline_s)
        if found is None or not may_drain(found):
            return False
        await self._update(node, ["State=DRAIN", f"Reason={reason}"], deadline_s)
        return True

    async def resume(self, node: str, cluster: str, deadline_s: float) -> bool:
        """Take back a drain of ours; False when there is none, and nothing was done.

        UNDRAIN and not RESUME: a node that is DOWN stays so.

        Raises:
            ParseError: not a node name.
            PeerError: no answer; the drain may have been taken back.

        """
        found = await self._look(node, deadline_s)
        if found is None or not may_resume(found, cluster):
            return False
        await self._update(node, ["State=UNDRAIN"], deadline_s)
        return True

    async def _look(self, node: str, deadline_s: float) -> SlurmNode | None:
        if not OPTION_RE.fullmatch(node):
            raise ParseError(node, "not a node name")
        argv = ["scontrol", "show", "node", "-d", node]
        try:
            done = await self._command.run(argv, timeout_s=deadline_s)
        except PeerRejected as error:
            if error.reason == _NOT_FOUND:
                return None
            raise
        try:
            return read_nodes(done.stdout).get(node)
        except ParseError as error:
            raise PeerProtocolError(PEER, "show node", str(error)) from error

    async def _update(self, node: str, changes: list[str], deadline_s: float) -> None:
        argv = ["scontrol", "update", f"NodeName={node}", *changes]
        await self._command.run(argv, timeout_s=deadline_s)
