"""From the API server's JSON of a pod to `PodFacts`: what it asks, its claim, and its ways around.

Only the fields that matter are decoded (msgspec skips the rest).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from slurmbridge.node.identity import PodFacts, Want
from slurmbridge.pool import keys
from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.gres import parse_indices
from slurmbridge.pool.group import group_of
from slurmbridge.pool.quantity import Number, parse_count
from slurmbridge.pool.raw import RawMeta, RawPod, RawPodSpec, RawResources, RawSchedulingGroup

VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"
CDI: Final = "cdi.k8s.io/"
"""Annotations of a pod that begin so name devices, which some runtimes give it."""


class _Raw(msgspec.Struct, frozen=True, rename="camel", gc=False):
    pass


class _Env(_Raw, frozen=True):
    name: str = ""
    value: str | None = None


class _Security(_Raw, frozen=True):
    privileged: bool | None = None


class _Container(_Raw, frozen=True):
    name: str = ""
    resources: RawResources | None = None
    restart_policy: str | None = None
    security_context: _Security | None = None
    env: tuple[_Env, ...] | None = None


class _HostPath(_Raw, frozen=True):
    path: str = ""


class _Volume(_Raw, frozen=True):
    host_path: _HostPath | None = None


class _Spec(_Raw, frozen=True):
    containers: tuple[_Container, ...] | None = None
    init_containers: tuple[_Container, ...] | None = None
    ephemeral_containers: tuple[_Container, ...] | None = None
    volumes: tuple[_Volume, ...] | None = None
    scheduling_group: RawSchedulingGroup | None = None


class _Status(_Raw, frozen=True):
    phase: str | None = None


class _Pod(_Raw, frozen=True):
    metadata: RawMeta = RawMeta()
    spec: _Spec = _Spec()
    status: _Status = _Status()


_decoder: Final = msgspec.json.Decoder(_Pod)


def read_facts(body: bytes, resource: str) -> PodFacts:
    """The facts of a pod.

    Args:
        body: JSON of one pod.
        resource: the extended resource of our devices (`nvidia.com/gpu`).

    Raises:
        ParseError: a GPU request cannot be read.
        msgspec.DecodeError: not a pod.

    """
    raw = _decoder.decode(body)
    meta, spec = raw.metadata, raw.spec
    group = group_of(RawPod(meta, RawPodSpec(scheduling_group=spec.scheduling_group)))
    wants = tuple(_wants(spec, resource))
    job_id, indices, fault = _claim(meta.annotations or {}, meta.uid)
    return PodFacts(
        uid=meta.uid,
        namespace=meta.namespace,
        name=meta.name,
        wants=wants,
        job_id=job_id,
        indices=indices,
        fault=fault if wants else "",
        is_over=raw.status.phase in ("Succeeded", "Failed"),
        deleting=meta.deletion_timestamp is not None,
        created=meta.creation_timestamp or "",
        loose=tuple(
            sorted({*_loose(spec, with_gpus=bool(wants)), *_named(meta.annotations or {})})
        ),
        resource_version=meta.resource_version,
        group="" if group is None else group.key,
    )


def _wants(spec: _Spec, resource: str) -> Iterator[Want]:
    for is_init, containers in ((True, spec.init_containers), (False, spec.containers)):
        for one in containers or ():
            count = _count(one.resources, resource)
            if count:
                kind = "app"
                if is_init:
                    kind = "sidecar" if one.restart_policy == "Always" else "init"
                yield Want(one.name, count, kind)


def _count(resources: RawResources | None, resource: str) -> int:
    if resources is None:
        return 0
    amounts: Mapping[str, Number] = {**(resources.requests or {}), **(resources.limits or {})}
    return parse_count(amounts[resource]) if resource in amounts else 0


def _claim(
    annotations: Mapping[str, str], uid: str
) -> tuple[int | None, tuple[int, ...] | None, str]:
    """Job id and indices as annotated, and what is wrong with them."""
    text = annotations.get(keys.CLAIM)
    if text is None:
        return None, None, ""
    job_id, _, owner = text.partition("/")
    if not (job_id.isascii() and job_id.isdigit() and len(job_id) <= 12):
        return None, None, f"annotation {keys.CLAIM} cannot be read: {text[:60]!r}"
    if owner != uid:
        return None, None, f"claim {job_id} was made for another pod (UID {owner[:40]!r})"
    try:
        return int(job_id), parse_indices(annotations.get(keys.GPUS, "")) or None, ""
    except ParseError as error:
        return int(job_id), None, f"annotation {keys.GPUS}: {error}"


def _named(annotations: Mapping[str, str]) -> Iterator[str]:
    """Annotations that name devices."""
    for key in annotations:
        if key.startswith(CDI):
            yield f"annotation {key}"[:60]


def _loose(spec: _Spec, *, with_gpus: bool) -> Iterator[str]:
    """Ways in which the pod reaches GPUs that nobody has given it."""
    for one in (
        *(spec.init_containers or ()),
        *(spec.containers or ()),
        *(spec.ephemeral_containers or ()),
    ):
        if one.security_context is not None and one.security_context.privileged:
            yield "privileged"
        for env in one.env or ():
            if env.name == VISIBLE and (with_gpus or env.value not in ("", "void", "none")):
                yield f"{VISIBLE}={env.value or ''}"[:60]
    for volume in spec.volumes or ():
        path = (volume.host_path.path if volume.host_path else "").rstrip("/")
        if path == "/dev" or path.startswith("/dev/nvidia"):
            yield f"hostPath {path}"
