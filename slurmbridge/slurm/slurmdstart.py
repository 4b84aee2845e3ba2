"""When a node's slurmd has started, as slurmctld knows it."""

from __future__ import annotations

import re
from datetime import UTC
from typing import Final

from slurmbridge.pool.errors import ParseError, PeerProtocolError
from slurmbridge.pool.slurmtime import parse_time
from slurmbridge.slurm.command import PEER, SlurmCommand

DEADLINE_S: Final = 10.0
_START: Final = re.compile(r"\sSlurmdStartTime=(\S+)")


async def slurmd_start(command: SlurmCommand, node: str) -> float | None:
    """Unix seconds of slurmd's last start, whole; None: slurmctld has not heard of one.

    Raises:
        PeerUnavailable: slurmctld does not answer.
        PeerRejected: it knows no such node.
        PeerProtocolError: the answer cannot be read.

    """
    op = f"show node {node}"
    result = await command.run(("scontrol", "show", "node", "-o", node), timeout_s=DEADLINE_S)
    if not result.stdout.startswith(f"NodeName={node} "):
        raise PeerProtocolError(PEER, op, "not the record of this node")
    match = _START.search(result.stdout)
    if match is None:
        raise PeerProtocolError(PEER, op, "no SlurmdStartTime")
    try:
        return parse_time(match[1], UTC)
    except ParseError as error:
        raise PeerProtocolError(PEER, op, str(error)) from error
