"""The claim: the Slurm allocation that covers one pod (or one gang), and how it is recognised.

A claim carries its identity twice: as job name (one fixed name per bridge, so that Slurm can be
asked for all claims at once) and as comment (which pod it was made for). Both, the job's owner and
the job id together are the identity; a job id alone is not, since slurmctld can give the id of a
forgotten claim to a stranger's job after a crash.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Final

import msgspec

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.record import GpuRequest, GpuUse, JobState, SlurmJob

CLUSTER_RE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
UID_RE: Final = re.compile(r"[0-9a-zA-Z]([0-9a-zA-Z_.-]{0,126}[0-9a-zA-Z])?")
COMMENT_MARK: Final = "slurmbridge/1"
COMMENT_RE: Final = re.compile(
    r"slurmbridge/1 cluster=(?P<cluster>[a-z0-9-]{1,40}) (?P<kind>pod|group)=(?P<uid>[\w.-]{1,128})"
    r" ref=(?P<ref>[\w./-]{1,520})",
    re.ASCII,
)
FILLER_RE: Final = re.compile(
    r"slurmbridge/1 cluster=(?P<cluster>[a-z0-9-]{1,40}) filler=(?P<uid>[\w.-]{1,128})"
)
TOP_PRIORITY: Final = 4294967000
"""Just below Slurm's highest (0xfffffffe is "no value"): no pending job stands before a claim."""


class ClaimId(msgspec.Struct, frozen=True):
    """Whose claim: `uid` of the pod (or group) in the Kubernetes cluster `cluster`."""

    cluster: str
    uid: str
    kind: str = "pod"

    @property
    def job_name(self) -> str:
        """The Slurm job name of all claims of this cluster."""
        return f"slurmbridge-{self.cluster}"


GROUP_UID_PREFIX: Final = "g-"
"""Begins the UID of a gang's claim, and no pod's: those are hexadecimal."""


@lru_cache(maxsize=16_384)
def group_uid(key: str) -> str:
    """The UID of a gang's claim: a gang has no object of its own, so it is made of its key.

    Args:
        key: `Group.key`: kind, namespace, name, and the UID of what made the group.

    """
    return GROUP_UID_PREFIX + hashlib.sha256(key.encode()).hexdigest()[:32]


def group_ref(namespace: str, name: str) -> str:
    """`namespace/name` of a gang for a comment: whatever the name has that a comment must not."""
    return f"{namespace}/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:200] or '_'}"


def write_comment(claim_id: ClaimId, ref: str) -> str:
    """The Slurm comment of a claim; `ref` (`namespace/name`) is for people only.

    Raises:
        ParseError: a part has characters that Kubernetes never puts into it.

    """
    comment = f"{COMMENT_MARK} cluster={claim_id.cluster} {claim_id.kind}={claim_id.uid} ref={ref}"
    if not COMMENT_RE.fullmatch(comment):
        raise ParseError(comment, "cluster id, UID or pod name is not in Kubernetes' form")
    return comment


@lru_cache(maxsize=16_384)  # every reading shows the same claims again
def read_comment(comment: str) -> ClaimId | None:
    """The identity in a comment, or None when the comment is not exactly of our form."""
    match = COMMENT_RE.fullmatch(comment)
    if match is None:
        return None
    return ClaimId(cluster=match["cluster"], uid=match["uid"], kind=match["kind"])


def claim_of(job: SlurmJob, cluster: str, owner_uid: int) -> ClaimId | None:
    """Whose claim a job is, or None: not ours, whatever its comment says.

    Args:
        cluster: our cluster id; claims of other clusters are native jobs to us.
        owner_uid: the Unix user id that our bridge submits as. A job of another user with our name
            and comment is a forgery or an accident, and never touched.

    """
    if job.user_id != owner_uid or job.name != ClaimId(cluster, "").job_name:
        return None
    claim_id = read_comment(job.comment)
    return claim_id if claim_id is not None and claim_id.cluster == cluster else None


def write_filler(claim_id: ClaimId) -> str:
    """The comment of a filler: a job of ours that only steers which GPUs a claim will get.

    A claim on given GPU indices is made in steps (`slurmbridge.slurm.cover`); all its jobs are
    fillers until one has the right GPUs and is given the comment of a claim. So a crash in between
    leaves fillers, which may always be ended, and never a claim on wrong GPUs. A filler runs
    nothing: neither Prolog nor Epilog needs to hold a node for it.

    Raises:
        ParseError: cluster id or UID is not in Kubernetes' form.

    """
    comment = f"{COMMENT_MARK} cluster={claim_id.cluster} filler={claim_id.uid}"
    if not FILLER_RE.fullmatch(comment):
        raise ParseError(comment, "cluster id or UID is not in Kubernetes' form")
    return comment


def filler_of(job: SlurmJob, cluster: str, owner_uid: int) -> str | None:
    """The UID that a filler of ours works for, or None: not a filler of ours.

    Args:
        cluster: our cluster id.
        owner_uid: the Unix user id that our bridge submits as.

    """
    match = FILLER_RE.fullmatch(job.comment)
    if match is None or match["cluster"] != cluster or job.user_id != owner_uid:
        return None
    if job.name != ClaimId(cluster=cluster, uid="").job_name:
        return None
    return match["uid"]


class Ask(msgspec.Struct, frozen=True):
    """What a pod asks of Slurm, after policy has been applied to its annotations.

    minutes: time limit of the claim, >= 1. rolling: the claim is renewed while the pod lives (the
    pod said no duration). Empty account, partition, qos or reservation: Slurm's default.
    partition "" means the bridge's own claim partition.
    exclusive_user: granularity node: Slurm keeps all other users' jobs off the node.
    """

    gpu: GpuRequest
    cpus: int
    memory_mib: int
    minutes: int
    rolling: bool
    account: str = ""
    partition: str = ""
    qos: str = ""
    reservation: str = ""
    exclusive_user: bool = True
    mode: str = "immediate"


class ClaimRequest(msgspec.Struct, frozen=True):
    """One claim to ask of Slurm: for whom, on which node, how much."""

    id: ClaimId
    ref: str
    slurm_node: str
    ask: Ask


class GroupRequest(msgspec.Struct, frozen=True):
    """One claim for a whole gang: `members` times what `ask` says, on nodes that Slurm chooses.

    ask: of one member, as a rule; of one task, where members that differ share them (`pool.tasks`).
    exclude: Slurm nodes that it must not get, as a host list. switches: at most so many leaf
    switches, waited for so long (`1@2:00`, sbatch --switches), on `least` nodes or more.
    constraint: alternatives of node features of which all nodes must have one (`[rackA|rackB]`).
    nodes: these, as many members on each, now, at top priority; (): it waits for nodes of Slurm's
    choice.
    """

    id: ClaimId
    ref: str
    ask: Ask
    members: int
    exclude: str = ""
    switches: str = ""
    least: int = 1
    constraint: str = ""
    nodes: tuple[str, ...] = ()


class Claim(msgspec.Struct, frozen=True):
    """A claim as slurmctld holds it.

    gpus: what it holds on `slurm_node`. ends: Unix seconds of its time limit, None: no limit.
    granted: our clock when we learnt of the grant.
    """

    id: ClaimId
    job_id: int
    slurm_node: str
    gpus: GpuUse
    state: JobState
    granted: float
    ends: float | None = None
    started: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether it covers its pod: RUNNING and nothing else."""
        return self.state.base == "RUNNING" and not self.state.flags & {"COMPLETING"}
