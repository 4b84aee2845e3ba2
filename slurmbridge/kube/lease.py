"""Which replica leads: a `coordination.k8s.io/v1` Lease, held by whoever keeps renewing it.

Why not `kubernetes.aio.leaderelection` (37.0.2, read in full): it compares wall times, so that a
stepped clock makes two leaders or none; it waits for *its own* lease duration in place of the one
in the record, so that a follower with a shorter one steals the lease; it never looks at the task
that it has started, so that a process whose work has died keeps leading; it does not release; its
leader trusts a lease up to the moment at which another may take it. Each of these has hurt someone
(kubernetes#125761, fabric8io/kubernetes-client PR#7258, kubernetes-client/python#2075).

The rules here, after client-go's:

- *Following.* Only the local monotonic clock decides. The record is watched for change, whatever
  the times in it say; it is free when it has not changed for the duration that its holder wrote
  into it, or when it names no holder.
- *Leading.* Each write is a compare-and-set on resourceVersion. After a write that was *sent* at t
  and confirmed, `is_leader` holds until t + 2/3 of the duration. A follower takes over no sooner
  than it has seen the record unchanged for the whole duration, which begins after t: the third in
  between is for clocks that run at different speeds and for work that takes a while to stop.
- *Work.* It runs only while leading; it is cancelled when the hold runs out, and the lease is given
  back only after it has really ended. When the work fails, the lease is given back and the failure
  goes up.
- *No lease.* Whoever finds none makes one, but leads only after the hold of a leader under whom it
  may have been deleted is over. The manifests ship an empty Lease, so that no new site waits.

`is_leader` must be asked right before each act that must not be done twice; what is in flight when
the hold ends is for the preconditions of the act itself (UID, resourceVersion, job comment).
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from slurmbridge.kube.session import MERGE_PATCH, resource_path
from slurmbridge.kube.status import PEER, error_of
from slurmbridge.kube.write import Api, rfc3339
from slurmbridge.pool.errors import (
    UNREADABLE,
    Conflict,
    InvariantError,
    PeerError,
    PeerProtocolError,
    PeerRejected,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from slurmbridge.clock import Clock

HOLD: Final = 2 / 3
"""Share of the lease duration for which a renewal is trusted."""
STOP_S: Final = 5.0
"""How long cancelled work may take to end before the lease is left to run out by itself."""


class Spec(msgspec.Struct, frozen=True, rename="camel"):
    """`spec` of a Lease, as read and written. Times are texts that only people read.

    lease_transitions counts leaders and is the number of the term; None is written as null, which
    removes the field in a merge patch.
    """

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""


class Record(msgspec.Struct, frozen=True, rename="camel"):
    """A Lease object."""

    metadata: _Meta = _Meta()
    spec: Spec = Spec()


class Sighting(msgspec.Struct, frozen=True):
    """A record as a follower has seen it. since: when we first saw it like this (monotonic)."""

    record: Record
    since: float


def see(before: Sighting | None, record: Record, now: float) -> Sighting:
    """The sighting after looking: only a record with another spec is young again."""
    if before is not None and before.record.spec == record.spec:
        return Sighting(record=record, since=before.since)
    return Sighting(record=record, since=now)


def free_in(sighting: Sighting, identity: str, now: float, default_s: float) -> float:
    """Seconds until a lease may be taken; 0: now.

    Args:
        sighting: what we know of it.
        identity: ours. A record with it is of our predecessor in this very pod, which is dead,
            since we are here: free, unless that one had only made it and not led yet (term 0).
        now: monotonic.
        default_s: for a record that says no duration.

    """
    spec = sighting.record.spec
    if not spec.holder_identity or (spec.holder_identity == identity and spec.lease_transitions):
        return 0.0
    duration = spec.lease_duration_seconds
    wait_s = default_s if duration is None or duration <= 0 else float(duration)
    return max(0.0, sighting.since + wait_s - now)


class LeadershipLost(PeerError):
    """The hold ran out, or another replica has the lease: the work has been cancelled."""


class LeaderLease:
    """One replica's part in the election. One `lead` at a time.

    Args:
        api: the session.
        namespace: of the Lease.
        name: of the Lease.
        identity: of this replica: unique among all that run; the pod's name and UID, so that a
            container that is restarted in its pod goes on at once.
        clock: monotonic for all decisions (on hosts that suspend, one that counts the suspension),
            wall only for the texts in the record.
        uniform: returns a float in [0, 1).
        duration_s: how long a dead leader blocks the others, whole seconds.
        renew_s: distance of renewals and of a follower's looks; at most a third of `duration_s`.

    Attributes:
        term: number of the present or last term (leaseTransitions); grows with each leader.
        holder: who holds the lease, as last seen; "" nobody or not known.

    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        identity: str,
        *,
        clock: Clock,
        uniform: Callable[[], float],
        duration_s: int = 15,
        renew_s: float = 2.0,
    ) -> None:
        self._api = api
        leases = ("apis", "coordination.k8s.io", "v1", "namespaces", namespace, "leases")
        self._all = resource_path(*leases)
        self._path = resource_path(*leases, name)
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._clock = clock
        self._uniform = uniform
        self._duration_s = duration_s
        self._renew_s = min(renew_s, duration_s / 3)
        self._mine: Record | None = None
        self._created: Record | None = None
        self._until = float("-inf")
        self._seen: Sighting | None = None
        self._stuck = False
        self.term = 0
        self.holder = ""
        self.last_error: PeerError | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this replica may act as the leader now; False before another one may."""
        return self._clock.monotonic() < self._until

    @property
    def created(self) -> int:
        """Unix seconds at which the Lease that we hold was created; 0: we hold none."""
        if self._mine is None:
            return 0
        return int(datetime.fromisoformat(self._mine.metadata.creation_timestamp).timestamp())

    async def lead(self, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Wait for the lease, do the work under it, give it back: one term.

        Args:
            work: called with the number of the term; must build all state anew from the peers,
                since another may have led in between; must end soon when cancelled.

        Raises:
            LeadershipLost: the lease could not be renewed in time, or was taken.
            PeerRejected: we may not use Leases (`auth`, `forbidden`): a fault of the installation.
            InvariantError: the work of the last term, though cancelled, still runs: exit.
            Exception: whatever the work raised; the lease has been given back.

        """
        if self._stuck:
            raise InvariantError("the work of the last term has not ended", [])
        await self._acquire()
        task = asyncio.ensure_future(work(self.term))
        keeper = asyncio.ensure_future(self._keep())
        hold = asyncio.ensure_future(self._outlast_hold())
        worked = False
        try:
            await asyncio.wait({task, keeper, hold}, return_when=asyncio.FIRST_COMPLETED)
            worked = task.done()
        finally:
            # Also when we are cancelled ourselves: first the work ends, then the lease is free.
            keeper.cancel()
            hold.cancel()
            self._stuck = True
            await _stop(task)
            self._stuck = not task.done()
            await asyncio.wait({keeper, hold})
            if self._stuck:
                self._until = float("-inf")  # the lease runs out by itself
            else:
                await self._release()
        if worked:
            return task.result()
        cause = None if self._stuck or task.cancelled() else task.exception()
        if not keeper.cancelled():
            raise keeper.result() from cause
        raise self._lost("the lease could not be renewed in time") from cause

    # Following

    async def _acquire(self) -> None:
        while True:
            wait_s = self._renew_s * (0.75 + self._uniform() / 2)
            try:
                wait_s = min(wait_s, await self._try_acquire())
            except PeerError as error:
                if isinstance(error, PeerRejected) and error.reason in ("auth", "forbidden"):
                    raise
                self.last_error = error
            if self.is_leader:
                return
            await self._clock.sleep(wait_s)

    async def _try_acquire(self) -> float:
        """Take the lease if it is free. Returns: seconds until another look is worth while."""
        record = await self._read()
        if record is None:
            await self._create_and_wait()
            record = await self._read()
            if record is None:
                return self._renew_s
        now = self._clock.monotonic()
        self._seen = see(self._seen, record, now)
        spec = record.spec
        self.holder = spec.holder_identity or ""
        waited_out = self._created is not None and spec == self._created.spec
        wait_s = 0.0 if waited_out else free_in(self._seen, self._identity, now, self._duration_s)
        if wait_s == 0:
            self.term = (spec.lease_transitions or 0) + 1
            await self._write(record, rfc3339(self._clock.wall(), micro=True))
        return wait_s

    async def _create_and_wait(self) -> None:
        """Make a lease in our name, at term 0, and wait while an older leader may trust its own.

        Raises:
            Conflict: another replica made one first.

        """
        spec = self._spec(0, rfc3339(self._clock.wall(), micro=True))
        body = self._body(_Meta(), spec)
        answer = await self._api.exchange("POST", self._all, body, deadline_s=self._renew_s)
        if not answer.is_ok:
            raise error_of(f"POST {self._all}", answer)
        self._created = self._decoded(answer.body)
        await self._clock.sleep(self._duration_s * HOLD)

    # Leading

    async def _keep(self) -> LeadershipLost:
        """Renew for ever; ends when another has the lease."""
        while True:
            await self._clock.sleep(self._renew_s)
            try:
                await self._renew()
            except LeadershipLost as lost:
                return lost
            except PeerError as error:
                self.last_error = error  # the hold runs on; ask again

    async def _outlast_hold(self) -> None:
        """End when the hold has ended."""
        while self.is_leader:
            await self._clock.sleep(self._until - self._clock.monotonic())

    async def _renew(self) -> None:
        """Extend the hold.

        Raises:
            LeadershipLost: another has the lease, or it was deleted.
            PeerError: no answer; the hold stays what it was.

        """
        # None: an answer got lost, or someone wrote in between.
        record = self._mine or await self._read()
        if record is None:
            raise self._lost("the lease was deleted")
        spec = record.spec
        if spec.holder_identity != self._identity or spec.lease_transitions != self.term:
            self.holder = spec.holder_identity or ""
            raise self._lost(f"the lease is held by {spec.holder_identity!r}")
        is_remembered = record is self._mine
        try:
            await self._write(record, spec.acquire_time)
        except Conflict:
            if not is_remembered:
                raise
            await self._renew()  # once more, over what is there now
        except PeerRejected as error:
            if error.reason == "notfound":
                raise self._lost("the lease was deleted") from error
            raise

    async def _write(self, record: Record, acquired: str | None) -> None:
        """Write ourselves as holder over `record`, and extend the hold."""
        sent = self._clock.monotonic()
        self._mine = None
        self._mine = await self._patch(record, self._spec(self.term, acquired))
        self._seen = self._created = None
        self.holder = self._identity
        self.last_error = None
        self._until = sent + self._duration_s * HOLD

    async def _release(self) -> None:
        """Give the lease back, so that another replica can lead at once."""
        self._until = float("-inf")
        with contextlib.suppress(PeerError):
            record = self._mine or await self._read()
            if record is None or record.spec.holder_identity != self._identity:
                return
            if record.spec.lease_transitions == self.term:
                await self._patch(record, Spec(None, 1, None, None, self.term))
                self.holder = ""
        self._mine = None

    # The API server

    async def _read(self) -> Record | None:
        answer = await self._api.exchange("GET", self._path, deadline_s=self._renew_s)
        if answer.is_ok:
            return self._decoded(answer.body)
        error = error_of(f"GET {self._path}", answer)
        if isinstance(error, PeerRejected) and error.reason == "notfound":
            return None
        raise error

    async def _patch(self, record: Record, spec: Spec) -> Record:
        """Change the spec of exactly this version of the Lease; labels and the like stay.

        Raises:
            Conflict: someone wrote in between.

        """
        answer = await self._api.exchange(
            "PATCH",
            self._path,
            self._body(record.metadata, spec),
            content_type=MERGE_PATCH,
            deadline_s=self._renew_s,
        )
        if answer.is_ok:
            return self._decoded(answer.body)
        raise error_of(f"PATCH {self._path}", answer)

    def _spec(self, term: int, acquired: str | None) -> Spec:
        return Spec(
            holder_identity=self._identity,
            lease_duration_seconds=self._duration_s,
            acquire_time=acquired,
            renew_time=rfc3339(self._clock.wall(), micro=True),
            lease_transitions=term,
        )

    def _body(self, meta: _Meta, spec: Spec) -> dict[str, Any]:
        metadata = {"name": self._name, "namespace": self._namespace}
        if meta.resource_version:
            metadata |= {"uid": meta.uid, "resourceVersion": meta.resource_version}
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": spec,
        }

    def _decoded(self, body: bytes) -> Record:
        try:
            record = _RECORD.decode(body)
        except UNREADABLE as error:
            raise PeerProtocolError(PEER, self._path, str(error)) from error
        if not record.metadata.resource_version:
            raise PeerProtocolError(PEER, self._path, "the answer is no Lease")
        return record

    def _lost(self, text: str) -> LeadershipLost:
        return LeadershipLost(PEER, f"lease {self._namespace}/{self._name}", text)


async def _stop(task: asyncio.Future[None]) -> None:
    """Cancel the work and wait for its end, at most `STOP_S`."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=STOP_S)


_RECORD: Final = msgspec.json.Decoder(Record)
