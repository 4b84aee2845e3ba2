"""Compares what Slurm, the kubelet, the driver and the processes say of a node. Pure.

A finding is told as long as it is seen, with the time since when. Those that stand only for the
moment of a change (a pod that is just ending) are kept back for `SETTLE_S`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final, Literal

import msgspec

from slurmbridge.node.book import BookEntry, NativeJob
from slurmbridge.node.device import DeviceMap, named
from slurmbridge.node.identity import PodFacts
from slurmbridge.node.look import Sample
from slurmbridge.node.podfacts import VISIBLE
from slurmbridge.pool.noderecord import GpuOwner, NodeFinding

SETTLE_S: Final = 3.0
"""How long a finding must be seen before it is told."""

SHARED: Final = "shared_gpu"
OUTSIDE: Final = "outside_claim"
STRAY: Final = "stray_process"
LOOSE: Final = "loose_pod"
NO_CLAIM: Final = "no_claim"
LEDGER: Final = "ledger"
NOTHING: Final = frozenset({"void", "none"})
"""Values of NVIDIA_VISIBLE_DEVICES that show no GPU."""


class Facts(msgspec.Struct, frozen=True):
    """All that is compared. owners: the bridge's ledger, () when it has not told it."""

    devices: DeviceMap
    sample: Sample
    pods: Collection[PodFacts]
    book: Collection[BookEntry]
    native: Collection[NativeJob]
    owners: tuple[GpuOwner, ...] = ()


def find(facts: Facts) -> list[NodeFinding]:
    """Everything that does not fit now; `since` is 0."""
    return [
        *_shared(facts),
        *_users(facts),
        *_listed(facts),
        *_loose(facts),
        *_ledger(facts),
    ]


def settle(
    now: float, found: Collection[NodeFinding], before: Mapping[tuple[str, str], float]
) -> tuple[list[NodeFinding], dict[tuple[str, str], float]]:
    """Findings that have stood long enough, and since when each one stands.

    Args:
        now: Unix seconds.
        found: of `find`.
        before: what this returned last.

    """
    since = {(f.kind, f.subject): before.get((f.kind, f.subject), now) for f in found}
    told = [
        msgspec.structs.replace(f, since=since[f.kind, f.subject])
        for f in found
        if now - since[f.kind, f.subject] >= SETTLE_S
    ]
    return told, since


def closed_by(
    told: Collection[NodeFinding], devices: DeviceMap, policy: Literal["none", "gpu", "node"]
) -> frozenset[int]:
    """Slurm indices of the GPUs that findings close to new pods."""
    found = frozenset(index for finding in told for index in finding.gpus)
    if policy == "node" and found:
        return found | set(devices.by_index)
    return found if policy == "gpu" else frozenset()


def _shared(facts: Facts) -> Iterator[NodeFinding]:
    """One GPU, two owners: two pods, or a pod and a native job."""
    alive = [e for e in facts.book if e.uid in facts.sample.processes]
    for gpu in facts.devices.gpus:
        owners = [f"pod {e.ref} ({e.uid})" for e in alive if gpu.index in e.gpus]
        owners += [f"job {j.job_id}" for j in facts.native if gpu.index in j.gpus]
        if len(owners) > 1:
            text = f"{named([gpu.index])} has several owners: {', '.join(owners)}"
            yield NodeFinding(SHARED, named([gpu.index]), text, gpus=(gpu.index,))


def _users(facts: Facts) -> Iterator[NodeFinding]:
    """Processes on GPUs that are not theirs."""
    entries = {e.uid: e for e in facts.book}
    for user in facts.sample.users:
        who = f"process {user.pid} ({user.command or 'ended'})"
        entry = entries.get(user.pod)
        if user.pod and (entry is None or user.index not in entry.gpus):
            text = f"{who} of pod {user.pod} uses {named([user.index])}, not given to it"
            yield NodeFinding(OUTSIDE, f"pod {user.pod}", text, gpus=(user.index,))
        elif not user.pod:
            jobs = [job.job_id for job in facts.native if user.index in job.gpus]
            if user.job in jobs or (jobs and not user.job):
                continue
            owners = [f"pod {e.ref}" for e in facts.book if user.index in e.gpus]
            owners += [f"job {job_id}" for job_id in jobs]
            of = f"job {user.job}" if user.job else "no pod"
            whose = owners[0] if owners else "nobody"
            text = f"{who} of {of} uses {named([user.index])}, which {whose} has"
            yield NodeFinding(STRAY, f"process {user.pid}", text, gpus=(user.index,))


def _listed(facts: Facts) -> Iterator[NodeFinding]:
    """Devices by the kubelet against the pods' claims."""
    by_ref = {pod.ref: pod for pod in facts.pods if not pod.is_over}
    for one in facts.sample.listing or ():
        if not one.all_devices:
            continue
        ref = f"{one.namespace}/{one.name}"
        pod = by_ref.get(ref)
        indices = facts.devices.indices(one.all_devices)
        if pod is None:
            continue
        if pod.job_id is None:
            text = f"pod {ref} has {named(indices)} and no claim"
            yield NodeFinding(NO_CLAIM, f"pod {ref}", text, gpus=tuple(indices))
        elif not set(indices) <= set(pod.indices or ()):
            text = (
                f"pod {ref} has {named(indices)}, its claim {pod.job_id} {named(pod.indices or ())}"
            )
            yield NodeFinding(OUTSIDE, f"pod {ref}", text, gpus=tuple(indices))


def _loose(facts: Facts) -> Iterator[NodeFinding]:
    """Pods with a way past the device plugin: by their spec, or as they really run.

    An image can set NVIDIA_VISIBLE_DEVICES=all (those with CUDA do), of which no spec tells.
    """
    pods = {pod.uid: pod for pod in facts.pods if not pod.is_over}
    given = {entry.uid: facts.devices.uuids(entry.gpus) for entry in facts.book}
    for uid in sorted(facts.sample.processes):
        pod = pods.get(uid)
        ways = () if pod is None else pod.loose
        seen = facts.sample.visible.get(uid, frozenset()).difference(NOTHING, given.get(uid, ()))
        if seen and not facts.devices.fault and not any(way.startswith(VISIBLE) for way in ways):
            ways = (*ways, f"it runs with {VISIBLE}={','.join(sorted(seen))}"[:200])
        if ways:
            who = f"pod {uid if pod is None else pod.ref}"
            text = f"{who} can reach GPUs past its claim: {', '.join(ways)}"
            yield NodeFinding(LOOSE, who, text)


def _ledger(facts: Facts) -> Iterator[NodeFinding]:
    """The bridge's ledger against what runs here."""
    owners = {owner.index: owner for owner in facts.owners}
    for entry in facts.book:
        if entry.uid not in facts.sample.processes:
            continue
        wrong = [i for i in entry.gpus if i in owners and owners[i].pod_uid not in ("", entry.uid)]
        wrong += [i for i in entry.gpus if i in owners and owners[i].kind in ("native", "free")]
        if wrong:
            text = f"pod {entry.ref} runs on {named(wrong)}, Slurm says {owners[wrong[0]].kind}"
            yield NodeFinding(LEDGER, f"pod {entry.ref}", text, gpus=tuple(sorted(set(wrong))))
