"""What the agent of a node knows of it, as plain values: between agent, link and bridge. Pure.

A report tells the whole state of one node, so the newest one is all that counts. What it does not
name is not on the node, provided that the look began after the moment in question.
"""

from __future__ import annotations

from typing import Final

import msgspec

KINDS: Final = (
    "shared_gpu",
    "outside_claim",
    "stray_process",
    "no_claim",
    "loose_pod",
    "ledger",
    "alarm",
)
"""Kinds of findings; what each means is in docs/node-agent.md."""


class NodeGpu(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One GPU of the node. index: Slurm's. fault: why it takes no pods, "" when it does.

    numa: its NUMA node, -1 where it has none.
    """

    index: int
    uuid: str
    minor: int
    type: str = ""
    fault: str = ""
    numa: int = -1


class NodePod(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A pod with GPUs of which anything is left on the node.

    ref: `namespace/name`. job_id: of its claim, 0: not known. gpus: indices that it was given.
    processes: in its cgroup; with 0 it may start some yet. listed: the kubelet says it has devices.
    """

    uid: str
    ref: str
    job_id: int = 0
    gpus: tuple[int, ...] = ()
    processes: int = 0
    listed: bool = False


class NodeFinding(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Something that should not be.

    kind: one of `KINDS`. subject: which pod, process or GPU. since: Unix seconds, agent's clock.
    """

    kind: str
    subject: str
    text: str
    since: float = 0.0
    gpus: tuple[int, ...] = ()


class NodeReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The whole state of a node.

    slurm_node: its name in Slurm. registered: the running kubelet listens to our devices.
    fault: why the node takes no pods at all, "" when it does. is_whole: every question of the look
    was answered; only then does a pod's absence from `pods` mean that it is gone.
    held: Slurm job ids whose Epilog the agent holds now.
    """

    slurm_node: str
    registered: bool
    is_whole: bool
    fault: str = ""
    gpus: tuple[NodeGpu, ...] = ()
    pods: tuple[NodePod, ...] = ()
    native: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    findings: tuple[NodeFinding, ...] = ()

    def has_left(self, uid: str) -> bool:
        """Whether nothing of a pod is on the node; False also when that cannot be said."""
        return self.is_whole and all(pod.uid != uid for pod in self.pods)


class GpuOwner(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Who owns a GPU in the bridge's ledger. kind: `native`, `claim`, `free`, `unknown`."""

    index: int
    kind: str
    job_id: int = 0
    pod_uid: str = ""
    user: str = ""
    account: str = ""


class NodeOrders(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the bridge tells an agent: the ledger of its node, for audit and metrics.

    as_of: Unix seconds, the bridge's clock, when the reading of slurmctld behind it began.
    closed: indices that must take no new pods.
    """

    as_of: float = 0.0
    owners: tuple[GpuOwner, ...] = ()
    closed: tuple[int, ...] = ()
