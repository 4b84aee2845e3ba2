"""Carries out what the core wants, and brings the answers back as events.

No decision is made here. Whatever goes wrong ends in an event too, so that nothing is ever waited
for that cannot come.
"""

from __future__ import annotations

import asyncio
import logging
import random  # noqa: TID251 - jitter of retries; the core never sees it
from collections.abc import Callable, Coroutine
from typing import Any, Final

import msgspec

from slurmbridge.clock import Clock
from slurmbridge.core import action as act
from slurmbridge.core import event as ev
from slurmbridge.kube import write
from slurmbridge.kube.cluster import ClusterPin
from slurmbridge.kube.events import EventTeller, Subject
from slurmbridge.kube.session import KubeSession
from slurmbridge.kube.status import error_of
from slurmbridge.log import cause_scope, get_logger
from slurmbridge.metrics import Metrics
from slurmbridge.pool import keys
from slurmbridge.pool.claim import ClaimId
from slurmbridge.pool.errors import (
    UNREADABLE,
    PeerError,
    PeerProtocolError,
    PeerRejected,
    PeerUnavailable,
)
from slurmbridge.pool.group import GroupObject, read_group
from slurmbridge.pool.hostlist import fold
from slurmbridge.pool.slurmtime import iso
from slurmbridge.slurm.claims import ClaimUncertain, SlurmClaims
from slurmbridge.slurm.drains import NodeDrains
from slurmbridge.slurm.reader import SlurmReader
from slurmbridge.topology.generation import make

_log = get_logger(__name__)

Emit = Callable[[ev.Event], None]

COVER_S: Final = 20.0
LOOK_S: Final = 5.0
END_S: Final = 20.0
END_BATCH_S: Final = 0.02
"""Claims that end within this time are ended by one command (256 take 0.4 s)."""
MOST_ENDS: Final = 256
PATCH_TRIES: Final = 4
MOST_WRITES: Final = 16
"""Writes to the API server at a time."""


class Carrier:
    """Carries out actions concurrently.

    Args:
        claims, reader, drains: the Slurm adapter.
        session: the Kubernetes adapter.
        events: Kubernetes Events.
        emit: takes the answers.
        resources: gives the pool resources of the configuration in force.
        claim_s: deadline of one claim.

    """

    def __init__(
        self,
        claims: SlurmClaims,
        reader: SlurmReader,
        drains: NodeDrains,
        session: KubeSession,
        pin: ClusterPin,
        events: EventTeller,
        emit: Emit,
        clock: Clock,
        metrics: Metrics,
        resources: Callable[[], dict[str, str]],
        claim_s: float,
    ) -> None:
        self._claims = claims
        self._reader = reader
        self._drains = drains
        self._session = session
        self._pin = pin
        self._events = events
        self._emit = emit
        self._clock = clock
        self._metrics = metrics
        self._resources = resources
        self._claim_s = claim_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: dict[int, act.End] = {}
        self._writes = asyncio.Semaphore(MOST_WRITES)

    def start(self, action: act.Action) -> None:
        """Begin one action; its answer comes as an event."""
        if isinstance(action, act.Tell):
            kind = "Pod" if action.namespace else "Node"
            subject = Subject(kind, action.name, action.uid, action.namespace)
            self._events.tell(subject, action.reason, action.message, warning=action.warning)
        elif isinstance(action, act.LogPlan):
            _log_plan(action)
        elif isinstance(action, act.LogGang):
            _log_gang(action)
        elif isinstance(action, act.LogTopology):
            _log.info("topology", levels=action.levels)
            for text in action.problems:
                _log.warning("topology problem", text=text)
        elif isinstance(action, act.End):
            if not self._ends:
                self._spawn(self._end_all())
            self._ends[action.job_id] = action
        else:
            self._spawn(self._carry(action))

    async def stop(self) -> None:
        """Give up whatever is under way; the next leader finds it in Slurm."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, action: act.Action) -> None:
        kind = type(action).__name__
        uid = getattr(action, "uid", "") or getattr(getattr(action, "claim_id", None), "uid", "")
        began = self._clock.monotonic()
        with cause_scope(getattr(action, "cause", "") or uid[:8]):
            try:
                await self._do(action)
            except PeerError as error:
                self._metrics.actions.labels(kind, "failed").inc()
                _log.warning("action failed", action=kind, uid=uid, error=str(error))
                job_id = getattr(action, "job_id", 0)
                self._emit(ev.ActionFailed(kind, uid, job_id, str(error)))
            except Exception as error:  # noqa: BLE001 - see below
                # A bug of ours; the machine must still hear that no answer will come.
                self._metrics.actions.labels(kind, "failed").inc()
                _log.exception("action broke", action=kind, uid=uid)
                self._emit(ev.ActionFailed(kind, uid, getattr(action, "job_id", 0), repr(error)))
            else:
                self._metrics.actions.labels(kind, "ok").inc()
        self._metrics.action_latency.labels(kind).observe(self._clock.monotonic() - began)

    async def _do(self, action: act.Action) -> None:
        match action:
            case act.Allocate():
                await self._allocate(action)
            case act.Queue():
                await self._queue(action)
            case act.QueueGroup():
                await self._queue_group(action)
            case act.AllocateGroup():
                await self._allocate_group(action)
            case act.Cover():
                await self._cover(action)
            case act.LookJob(uid=uid, job_id=job_id):
                self._emit(ev.JobLooked(uid, job_id, await self._reader.job(job_id)))
            case act.LookPod(uid=uid, namespace=namespace, name=name):
                pod = await write.fetch_pod(
                    self._session, namespace, name, self._resources(), uid, LOOK_S
                )
                if pod is None:
                    await self._pin.check()
                self._emit(ev.PodLooked(uid, pod))
            case act.Extend(claim_id=claim_id, job_id=job_id, ends=wanted):
                ends = await self._claims.extend(job_id, claim_id, wanted, LOOK_S)
                _log.info("claim extended", uid=claim_id.uid, job=job_id, ends=iso(ends))
                self._emit(ev.Extended(claim_id.uid, job_id, ends))
            case act.Evict():
                await self._evict(action)
            case act.Lift():
                await self._lift(action)
            case act.BuildTopology(sources=sources):
                self._emit(ev.TopologyBuilt(sources, await asyncio.to_thread(make, sources)))
            case act.LookGroup(key=key, paths=paths, part=part, asked=asked):
                self._emit(ev.GroupLooked(key, await self._group_object(paths, part), asked))
            case act.AnnotatePod(uid=uid, namespace=namespace, name=name, annotations=values):
                if keys.WAKE in values:
                    self._metrics.wakes.inc()
                await self._write(
                    lambda: write.patch_pod_annotations(self._session, namespace, name, uid, values)
                )
            case act.AnnotateNode(name=name, value=value):
                await self._write(
                    lambda: write.patch_node_annotations(self._session, name, {keys.POOL: value})
                )
            case act.DrainNode(slurm_node=node, reason=reason):
                if await self._drains.drain(node, reason, LOOK_S):
                    _log.warning("node drained in Slurm", node=node, reason=reason)
            case act.ResumeNode(slurm_node=node, cluster=cluster):
                if await self._drains.resume(node, cluster, LOOK_S):
                    _log.warning("node resumed in Slurm", node=node)
            case act.ShowNode():
                await self._write(
                    lambda: write.patch_node_condition(
                        self._session,
                        action.name,
                        keys.SLURM_READY,
                        status=action.status == "True",
                        reason=action.reason,
                        message=action.message,
                        since=action.since,
                    )
                )
            case _:
                raise TypeError(f"no way to carry out {action!r}")

    async def _allocate(self, action: act.Allocate) -> None:
        request = action.request
        try:
            claim = await self._claims.allocate(request, self._claim_s)
        except PeerRejected as error:
            _log.info(
                "claim refused",
                uid=action.uid,
                pod=request.ref,
                node=request.slurm_node,
                reason=error.reason,
                text=error.text,
            )
            self._emit(ev.AllocateRefused(action.uid, error.reason, error.text))
        except ClaimUncertain as error:
            _log.warning("claim uncertain", uid=action.uid, pod=request.ref, error=str(error))
            self._emit(ev.AllocateUnknown(action.uid, error.job_id or 0, error.text))
        except PeerUnavailable as error:
            _log.warning("claim not answered", uid=action.uid, pod=request.ref, error=str(error))
            self._emit(ev.AllocateUnknown(action.uid, 0, error.text))
        else:
            _log.info(
                "claim granted",
                uid=action.uid,
                pod=request.ref,
                node=request.slurm_node,
                job=claim.job_id,
                gpus=claim.gpus.indices,
            )
            self._emit(ev.Allocated(action.uid, claim))

    async def _queue(self, action: act.Queue) -> None:
        try:
            job_id = await self._claims.submit_placeholder(action.request, self._claim_s)
        except PeerRejected as error:
            self._emit(ev.AllocateRefused(action.uid, error.reason, error.text))
        except PeerUnavailable as error:
            self._emit(ev.AllocateUnknown(action.uid, 0, error.text))
        else:
            _log.info("claim queued", uid=action.uid, pod=action.request.ref, job=job_id)
            self._emit(ev.Queued(action.uid, job_id))

    async def _allocate_group(self, action: act.AllocateGroup) -> None:
        request = action.request
        try:
            job = await self._claims.allocate_group(request, self._claim_s)
        except PeerRejected as error:
            _log.info(
                "gang refused",
                uid=action.uid,
                gang=request.ref,
                nodes=request.nodes,
                reason=error.reason,
                text=error.text,
            )
            self._emit(ev.GroupRefused(action.uid, error.reason, error.text))
        else:
            _log.info(
                "gang granted",
                uid=action.uid,
                gang=request.ref,
                nodes=job.nodes,
                job=job.id,
                members=request.members,
            )
            self._emit(ev.GroupAllocated(action.uid, job))

    async def _queue_group(self, action: act.QueueGroup) -> None:
        request = action.request
        try:
            job_id = await self._claims.submit_group(request, self._claim_s)
        except PeerRejected as error:
            _log.info("gang not queued", uid=action.uid, gang=request.ref, text=error.text)
            self._emit(ev.GroupRefused(action.uid, error.reason, error.text))
        else:
            _log.info(
                "gang queued",
                uid=action.uid,
                gang=request.ref,
                job=job_id,
                members=request.members,
            )
            self._emit(ev.GroupQueued(action.uid, job_id))

    async def _cover(self, action: act.Cover) -> None:
        request = action.request
        try:
            claim = await self._claims.cover(request, action.indices, COVER_S)
        except PeerRejected as error:
            _log.warning("pod not covered", uid=action.uid, pod=request.ref, error=str(error))
            self._emit(ev.CoverRefused(action.uid, error.reason, error.text))
        else:
            _log.info("pod covered", uid=action.uid, pod=request.ref, job=claim.job_id)
            self._emit(ev.Covered(action.uid, claim))

    async def _evict(self, action: act.Evict) -> None:
        """Evict; a disruption budget is heard, but GPUs that are another's cannot wait for it."""
        args = (self._session, action.namespace, action.name, action.uid)
        async with self._writes:
            try:
                await write.evict_pod(*args)
            except PeerRejected as error:
                if error.reason != "pdb":
                    raise
                await write.delete_pod(*args)
        self._metrics.evictions.inc()
        _log.warning("pod evicted", uid=action.uid, pod=action.name, why=action.why)
        self._emit(ev.Evicted(action.uid))

    async def _group_object(self, paths: tuple[str, ...], part: str) -> GroupObject | None:
        for path in paths:
            answer = await self._session.exchange("GET", f"/{path}", deadline_s=LOOK_S)
            if not answer.is_ok:
                error = error_of(f"GET /{path}", answer)
                if isinstance(error, PeerRejected) and error.reason == "notfound":
                    continue
                raise error
            try:
                return read_group(path, msgspec.json.decode(answer.body), part)
            except UNREADABLE as error:
                raise PeerProtocolError("kube-apiserver", f"GET /{path}", str(error)) from error
        return None

    async def _lift(self, action: act.Lift) -> None:
        """Nomination first: once the gate is off, kube-scheduler looks at the pod at once."""
        pod = (self._session, action.namespace, action.name, action.uid)
        async with self._writes:
            is_there = not action.kube_node or await write.nominate_node(
                *pod, action.kube_node, is_anew=not action.gate
            )
            if is_there and action.gate:
                await write.lift_gate(*pod, action.gate, action.annotations)
            elif is_there:
                await write.patch_pod_annotations(*pod, action.annotations)
        _log.info("pod lifted", uid=action.uid, pod=action.name, node=action.kube_node)
        self._emit(ev.Lifted(action.uid))

    async def _end_all(self) -> None:
        """End the claims that have come together."""
        await self._clock.sleep(END_BATCH_S)
        batch, self._ends = (
            list(self._ends.values())[:MOST_ENDS],
            dict(list(self._ends.items())[MOST_ENDS:]),
        )
        if self._ends:
            self._spawn(self._end_all())
        pairs: list[tuple[ClaimId, int]] = [(a.claim_id, a.job_id) for a in batch]
        try:
            await self._claims.cancel_many(pairs, END_S)
        except Exception as error:  # noqa: BLE001 - a bug of ours too must be heard of, as above
            if not isinstance(error, PeerError):
                _log.exception("action broke", action="End")
            self._metrics.actions.labels("End", "failed").inc(len(batch))
            _log.warning("claims not ended", count=len(batch), error=str(error))
            for a in batch:
                self._emit(ev.ActionFailed("End", a.claim_id.uid, a.job_id, str(error)))
            return
        self._metrics.actions.labels("End", "ok").inc(len(batch))
        for a in batch:
            _log.info("claim ended", uid=a.claim_id.uid, job=a.job_id, why=a.why)
            self._emit(ev.Ended(a.claim_id.uid, a.job_id))

    async def _write(self, once: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        """A patch that may be said again: a few tries, then the next change says it anyway."""
        for attempt in range(PATCH_TRIES):
            try:
                async with self._writes:
                    await once()
            except PeerUnavailable:
                if attempt == PATCH_TRIES - 1:
                    raise
                await self._clock.sleep(0.2 * 2**attempt * (1 + random.random()))  # noqa: S311
            else:
                return


def _log_plan(plan: act.LogPlan) -> None:
    """One line a plan; what was free, node by node, only for those who want to check it."""
    _log.info(
        "gang planned", gang=plan.gang, pods=len(plan.seats), level=plan.level, domain=plan.domain
    )
    if _log.is_enabled_for(logging.DEBUG):
        free: dict[int, list[str]] = {}
        for node, gpus in plan.room:
            if gpus:
                free.setdefault(gpus, []).append(node)
        room = {str(gpus): fold(nodes) for gpus, nodes in sorted(free.items())}
        _log.debug("gang laid", gang=plan.gang, seats=plan.seats, room=room, beside=plan.beside)


def _log_gang(gang: act.LogGang) -> None:
    """The plan that was carried out: not the last one, where an earlier leader's claims came in."""
    _log.info(
        "gang let go",
        gang=gang.gang,
        pods=len(gang.seats),
        jobs=sorted({job for *_, job in gang.seats}),
        nodes=fold(node for _, node, _ in gang.seats),
        level=gang.level,
        domain=gang.domain,
    )
