"""Which pod the kubelet is admitting, and which devices it gets. Pure.

The device plugin API does not say for which pod it asks. But the kubelet admits pods strictly one
after the other, and `PodResources.List`, asked inside GetPreferredAllocation, shows exactly one pod
that asks for GPUs and has none yet: that is the pod (1,344 of 1,344 calls, Kubernetes 1.37.2).

A decision is devices or a `Veto`. A veto fails the pod for good, with its text in the pod's status:
so it says what is wrong in the words of the pod's owner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from slurmbridge.node.device import DeviceMap, named
from slurmbridge.pool.claim import ClaimId, group_uid


class Want(msgspec.Struct, frozen=True):
    """GPUs that one container asks for. kind: `init`, `sidecar` or `app`."""

    container: str
    gpus: int
    kind: str = "app"


class PodFacts(msgspec.Struct, frozen=True):
    """What the API server says of a pod on this node.

    wants: only containers that ask for GPUs, in the kubelet's order (init containers first).
    job_id: of its claim annotation, None: it has none that names this pod. indices: GPU indices of
    the claim, None: not written or not readable. fault: why the claim cannot be read.
    is_over: Succeeded or Failed. loose: ways around the device plugin that the pod uses
    (`privileged`, `NVIDIA_VISIBLE_DEVICES`, a CDI annotation, `hostPath /dev`). group: key of its
    gang, "" for none.
    """

    uid: str
    namespace: str
    name: str
    wants: tuple[Want, ...] = ()
    job_id: int | None = None
    indices: tuple[int, ...] | None = None
    fault: str = ""
    is_over: bool = False
    deleting: bool = False
    created: str = ""
    loose: tuple[str, ...] = ()
    resource_version: str = ""
    group: str = ""

    @property
    def ref(self) -> str:
        """`namespace/name`, for people."""
        return f"{self.namespace}/{self.name}"


def is_for(claim: ClaimId, pod: PodFacts) -> bool:
    """Whether a claim is the pod's own, or that of the gang it is a member of.

    Which claim a pod is said to have is an annotation, and whoever may patch the pod can write it.
    """
    if claim.kind == "pod":
        return claim.uid == pod.uid
    return bool(pod.group) and claim.uid == group_uid(pod.group)


class Listed(msgspec.Struct, frozen=True):
    """One pod of PodResources.List: device ids of our resource by container."""

    namespace: str
    name: str
    devices: Mapping[str, frozenset[str]] = {}

    @property
    def all_devices(self) -> frozenset[str]:
        """Of all its containers."""
        return frozenset().union(*self.devices.values())


class Veto(NamedTuple):
    """A refusal, for the pod's owner. code: short and stable, for metrics."""

    code: str
    text: str


Served = Collection[tuple[str, str]]
"""(pod UID, container) that have been given devices by us before."""


def unknown_names(pods: Iterable[PodFacts], listing: Iterable[Listed]) -> list[tuple[str, str]]:
    """(namespace, name) of listed pods without devices that the watch has not brought yet."""
    known = {(pod.namespace, pod.name) for pod in pods if not pod.is_over}
    return [
        (one.namespace, one.name)
        for one in listing
        if not one.all_devices and (one.namespace, one.name) not in known
    ]


def is_served(pod: PodFacts, served: Served) -> bool:
    """Whether all its containers have been given devices: the kubelet should not ask for it again.

    Such a pod can still look as if it waited: the kubelet never lists what an init container has.
    """
    return all((pod.uid, want.container) in served for want in pod.wants)


def init_served(pod: PodFacts, listed: Listed, *, runs: bool) -> list[str]:
    """Init containers that must have been given devices, as the kubelet serves them first.

    Args:
        pod: as the API server has it.
        listed: as the kubelet lists it, which shows nothing of init containers.
        runs: it has processes, so that its admission is over.

    """
    others = [want.container for want in pod.wants if want.kind != "init"]
    is_over = all(listed.devices.get(name) for name in others) if others else runs
    return [w.container for w in pod.wants if w.kind == "init"] if is_over else []


def admitted_pod(
    pods: Sequence[PodFacts],
    listing: Sequence[Listed],
    served: Served,
    ids: Collection[str],
    devices: DeviceMap,
) -> PodFacts | Veto:
    """The pod that the kubelet is admitting now.

    Args:
        pods: on this node, from the API server.
        listing: PodResources.List, asked after the kubelet has asked us.
        served: to whom we have given devices; only to tell several candidates apart.
        ids: device ids that the answer must hold (must_include, or those of Allocate).
        devices: to read indices.

    """
    newest: dict[tuple[str, str], PodFacts] = {}
    for pod in sorted(pods, key=lambda p: (not p.is_over, not p.deleting, p.created)):
        newest[pod.namespace, pod.name] = pod
    found: list[PodFacts] = []
    for one in listing:
        facts = newest.get((one.namespace, one.name))
        if facts is None or facts.is_over or not facts.wants:
            continue
        if any(not one.devices.get(want.container) for want in facts.wants):
            found.append(facts)
    for narrower in (
        [p for p in found if any((p.uid, w.container) not in served for w in p.wants)],
        [p for p in found if set(ids) <= set(devices.uuids(p.indices or ()))] if ids else found,
    ):
        if len(found) > 1 and narrower:
            found = [pod for pod in found if pod in narrower]
    if len(found) == 1:
        return found[0]
    if not found:
        return Veto("nobody", "no pod on this node that waits for GPUs is known to the agent")
    names = ", ".join(sorted(pod.ref for pod in found)[:4])
    return Veto("ambiguous", f"cannot tell for which of these pods the GPUs are: {names}")


def claimed_devices(pod: PodFacts, devices: DeviceMap) -> list[str] | Veto:
    """Device ids of the pod's claim, in the order of their indices."""
    if pod.fault:
        return Veto("claim_form", f"pod {pod.ref}: {pod.fault}")
    if pod.job_id is None:
        text = (
            f"pod {pod.ref} has no claim in Slurm: it was bound without slurmbridge"
            " (spec.nodeName, another scheduler or a static pod)"
        )
        return Veto("no_claim", text)
    if not pod.indices:
        return Veto("no_indices", f"pod {pod.ref}: claim {pod.job_id} names no GPU indices")
    found = devices.uuids(pod.indices)
    if len(found) != len(pod.indices):
        missing = set(pod.indices) - set(devices.by_index)
        text = f"claim {pod.job_id} names {named(missing)}, which this node does not have"
        return Veto("unknown_gpu", f"pod {pod.ref}: {text}")
    return found


def prefer(
    pod: PodFacts,
    size: int,
    available: Collection[str],
    must: Collection[str],
    devices: DeviceMap,
) -> list[str] | Veto:
    """The devices for one container: of the claim, lowest indices first.

    Args:
        pod: the one being admitted.
        size: how many. available: what the kubelet has free, `must` included.
        must: what it wants to reuse (an init container's).
        devices: the map.

    """
    claimed = claimed_devices(pod, devices)
    if isinstance(claimed, Veto):
        return claimed
    outside = set(must) - set(claimed)
    if outside:
        text = f"{named(devices.indices(outside))} would be outside its claim {pod.job_id}"
        return Veto("outside", f"pod {pod.ref}: {text}")
    free = [uuid for uuid in claimed if uuid in available and uuid not in must]
    chosen = [uuid for uuid in claimed if uuid in must] + free
    if len(chosen) < size:
        held = devices.indices(uuid for uuid in claimed if uuid not in chosen)
        text = f"claim {pod.job_id} has {len(claimed)} GPUs, {size} are asked"
        if held:
            text += f", and {named(held)} is still held by another container of this node"
        return Veto("held" if held else "too_few", f"pod {pod.ref}: {text}")
    return sorted(chosen[:size], key=lambda uuid: devices.by_uuid[uuid].index)


def check_devices(pod: PodFacts, ids: Iterable[str], devices: DeviceMap) -> Veto | None:
    """Whether devices that the kubelet wants to give lie within the pod's claim; None: they do."""
    claimed = claimed_devices(pod, devices)
    if isinstance(claimed, Veto):
        return claimed
    outside = [uuid for uuid in ids if uuid not in claimed]
    if not outside:
        return None
    known = devices.indices(outside)
    what = named(known) if known else f"device {outside[0]}"
    return Veto("outside", f"pod {pod.ref}: {what} is outside its claim {pod.job_id}")


def owner_of(ids: Iterable[str], listing: Iterable[Listed]) -> Listed | None:
    """The listed pod of which one container has exactly these devices; None: not one pod."""
    wanted = frozenset(ids)
    found = [one for one in listing if wanted in one.devices.values()]
    return found[0] if len(found) == 1 else None
