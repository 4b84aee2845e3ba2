"""Times and limits of the core; a part of the configuration file (docs/config.md)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from slurmbridge.pool.policy import Policy
from slurmbridge.pool.share import NodeGroup

Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]


class Eviction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How many pods may be evicted because their claims are gone.

    per_minute: at most so many in any 60 s; a gang that goes as a whole is one.
    share, at_least: if more than this share of the claims in use (and more than at_least) are lost
        at once, the breaker opens: nothing is evicted until a person has looked (`slurmbridge
        breaker`). A place of a gang in Slurm's queue that somebody cancels is a loss too.
    """

    per_minute: Annotated[int, msgspec.Meta(ge=1, le=10000)] = 60
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.2
    at_least: Annotated[int, msgspec.Meta(ge=1)] = 10


class Freshness(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How old what is known may be, in seconds.

    stale: older than this (and than twice the poll interval): no new claims.
    agent: how old an agent's look at its node may be: older, and no pod goes there
        (docs/node-agent.md).
    """

    stale: Seconds = 5.0
    agent: Seconds = 5.0


class NodeSync(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Node state between Kubernetes and Slurm.

    cordon: a cordoned node is drained in Slurm.
    not_ready_s: a node that has not been Ready for so many seconds is drained in Slurm; 0: never.
    resume_s: a drain of ours is taken back once the node has given no cause for it for so many
        seconds; twice as long for each further drain of the last hour.
    share, at_least: if more than this share of the pool's nodes (and more than at_least) are not
        Ready at once, none is drained for it: more likely the API server or the network is in
        trouble. Cordons are a person's will and not held back by it.
    per_minute: at most so many drains in any 60 s.
    condition: show each node's state in Slurm as its condition `SlurmReady`.
    """

    cordon: bool = True
    not_ready_s: Seconds = 300.0
    resume_s: Annotated[float, msgspec.Meta(ge=1, le=86400)] = 10.0
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.1
    at_least: Annotated[int, msgspec.Meta(ge=1)] = 2
    per_minute: Annotated[int, msgspec.Meta(ge=1, le=10000)] = 60
    condition: bool = True


class Settings(msgspec.Struct, frozen=True):
    """Everything that the machine needs to know besides events.

    slurm_cluster: ClusterName that has to answer; "": the first that did.
    hold_s: an unbound claim is ended after this. doubt_s: a claim whose fate is unknown and which
    no reading shows is given up after this. linger_s: a force-deleted pod's claim is kept at least
    this long. end_retry_s: a claim that should have ended is ended again after this.
    look_retry_s: a look that was not answered is repeated after this. orphan_s: the API server is
    asked about a claim without a pod after this. answer_s: an action that was not answered for
    this long counts as failed.
    renew_share: a rolling claim is renewed when less than this share of its minutes is left.
    group_s: a group that is not complete after this is told so. climb_s: a preferred topology wish
    holds for this long. group_queue_s: a gang that does not fit is put into Slurm's queue after
    this. gangs_as_one: a gang whose members ask for the same gets one claim for all.
    topology_labels: node labels of the levels, root first; accelerator_labels: of the
    accelerator domains, empty: topograph's.
    planned_at_once: so many pods of the planned way are at a time between the asking for their
        claim and the taking off of their gate.
    agents_required: with granularity gpu a node takes pods, and gives claims back, only by its
    agent's word.
    """

    policy: Policy
    slurm_cluster: str = ""
    owner_uid: int = 0
    eviction: Eviction = Eviction()
    freshness: Freshness = Freshness()
    node_sync: NodeSync = NodeSync()
    hold_s: float = 60.0
    doubt_s: float = 8.0
    linger_s: float = 30.0
    end_retry_s: float = 5.0
    look_retry_s: float = 2.0
    orphan_s: float = 5.0
    answer_s: float = 60.0
    renew_share: float = 0.5
    node_annotation_s: float = 15.0
    planned_at_once: int = 32
    agents_required: bool = False
    group_s: float = 300.0
    group_queue_s: float = 2.0
    gangs_as_one: bool = True
    climb_s: float = 120.0
    topology_labels: tuple[str, ...] = ("topology.kubernetes.io/zone",)
    accelerator_labels: tuple[str, ...] = ()
    slurm_node_label: str = ""
    names: tuple[tuple[str, str], ...] = ()
    selector: tuple[tuple[str, str], ...] = ()
    groups: tuple[NodeGroup, ...] = ()
