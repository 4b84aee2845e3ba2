"""What extender and bridge say to each other, as plain values; no gRPC in here."""

from __future__ import annotations

from typing import Final

import msgspec

from slurmbridge.pool.noderecord import NodeReport

VERSION: Final = 1
"""Version of the meaning of the bytes in the envelope (`ViewMessage.version`)."""


class ClaimAsk(msgspec.Struct, frozen=True):
    """A claim for a pod on the node that kube-scheduler has chosen.

    cause: id that follows this bind through the logs of both daemons.
    """

    uid: str
    namespace: str
    name: str
    kube_node: str
    cause: str = ""


class ClaimGrant(msgspec.Struct, frozen=True):
    """The claim as granted.

    gpus: indices on the node as a Slurm index list (`0-3,6`), "" where Slurm does not number them.
    generation: the first generation of the view that holds the claim.
    """

    job_id: int
    gpus: str
    generation: int


class ReleaseAsk(msgspec.Struct, frozen=True):
    """A claim whose pod was not bound after all.

    The bridge believes nothing of it: it asks the API server before it ends the claim.
    """

    uid: str
    namespace: str
    name: str
    job_id: int
    cause: str = ""


class NodeSaid(msgspec.Struct, frozen=True):
    """A report of a node's agent, as the bridge has received it.

    node: Kubernetes node name, which the agent's certificate was checked for. run: which run of the
    agent. age_s: of the agent's look at the node, at least: a report may have waited on its way, so
    this tells whether an agent is alive, and proves nothing. after: what the bridge's moment was
    (`NodeService`) before the look began, for certain; 0: not known. What the bridge had learnt by
    then had happened when the agent looked.
    """

    node: str
    run: str
    sequence: int
    age_s: float
    after: int
    report: NodeReport
