"""Bind: first the claim, then the Binding, never one without the other, never two nodes.

kube-scheduler calls bind once and takes silence for failure: after `httpTimeout` it tries the pod
again from the start, though the Binding may have been posted (kubernetes/kubernetes#96579). So a
bind that has begun is carried to its end whoever still listens, a second call for the same pod and
node joins the first, and a call for another node is refused while the fate of the first is open.
That a pod was bound is not remembered: once its bind has ended only the API server says so, which
may have been set back since, and a success that is none would hide the pod from kube-scheduler,
until that is started anew.

What is not known stays: a claim whose Binding may exist is left to the bridge, which looks at the
pod itself before it ends anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

from extender.inflight import LINGER_S, InFlight
from extender.wire import Bind
from slurmbridge.clock import Clock
from slurmbridge.link.message import ClaimAsk, ClaimGrant, ReleaseAsk
from slurmbridge.log import get_logger
from slurmbridge.pool import keys
from slurmbridge.pool.errors import PeerRejected, PeerUnavailable, SlurmBridgeError

_log = get_logger(__name__)

CLAIM_S: Final = 2.5
"""Longest wait for a claim: slurmctld grants in some 5 ms, and in a second when it is busy."""
BINDING_S: Final = 2.4
"""Longest wait for the Binding, tries and looks together. With the claim it fits into the 5 s that
kube-scheduler waits by default."""
LEAST_TRY_S: Final = 0.2
LOOK_S: Final = 1.0
RELEASE_S: Final = 2.0
TEXT_CHARS: Final = 256


class Claims(Protocol):
    """The bridge, as the binder needs it (`slurmbridge.link.client.LinkClient`)."""

    async def claim(self, ask: ClaimAsk, deadline_s: float) -> ClaimGrant:
        """A claim, or `PeerRejected` (no) or `PeerUnavailable` (nobody knows)."""

    async def release_unbound(self, ask: ReleaseAsk, deadline_s: float) -> None:
        """Say that the pod of a claim was not bound."""


class PostBinding(Protocol):
    """Posts a Binding whose annotations land on the pod in the same write.

    Returns when the pod is bound to this node, by this call or an earlier one. Raises
    `PeerRejected` when it is not and will not be, `PeerUnavailable` when nobody knows. deadline_s
    holds for posting, and once more for looking at what came of it.
    """

    async def __call__(
        self, bind: Bind, annotations: Mapping[str, str], deadline_s: float, /
    ) -> None:
        """Post."""


class AsksForGpus(Protocol):
    """Looks at a pod itself: whether it names a pool GPU. Errors as `PostBinding`."""

    async def __call__(self, bind: Bind, deadline_s: float, /) -> bool:
        """Look."""


class Outcome(NamedTuple):
    """How a bind ended. error: "" when the pod is bound. word: for metrics."""

    error: str
    word: str


BOUND: Final = Outcome("", "bound")


class Binder:
    """Binds pods, each at most once at a time.

    Args:
        claims: the bridge.
        post: posts Bindings.
        asks_for_gpus: looks at a pod that the bridge would not take.
        inflight: the book of binds under way; changed here alone.
        clock: for deadlines.

    """

    def __init__(
        self,
        claims: Claims,
        post: PostBinding,
        asks_for_gpus: AsksForGpus,
        inflight: InFlight,
        clock: Clock,
    ) -> None:
        self._claims = claims
        self._post = post
        self._asks_for_gpus = asks_for_gpus
        self._inflight = inflight
        self._clock = clock
        self._running: dict[str, tuple[str, asyncio.Task[Outcome]]] = {}
        self._releases: set[asyncio.Task[None]] = set()

    async def bind(self, bind: Bind, *, in_pool: bool, term: str, cause: str) -> Outcome:
        """Claim and bind. Being cancelled does not stop what has begun.

        Args:
            bind: pod and node.
            in_pool: False: the node is known not to be of the pool, and no claim is needed.
            term: of the view that the node was chosen on.
            cause: id for both logs.

        """
        if (running := self._running.get(bind.uid)) is not None:
            if running[0] != bind.node:
                return _elsewhere()
            return await asyncio.shield(running[1])
        if self._inflight.home_of(bind.uid) not in ("", bind.node):
            return _elsewhere()
        if self._inflight.is_full:
            return Outcome("slurmbridge: too many binds at once, trying again", "full")
        if in_pool and not self._inflight.is_plain(bind.uid):
            work = self._carry_out(bind, term, cause)
        else:
            work = self._post_binding(bind, None, cause)
        task = asyncio.create_task(work)
        self._running[bind.uid] = (bind.node, task)
        task.add_done_callback(lambda _: self._running.pop(bind.uid, None))
        return await asyncio.shield(task)

    async def close(self, within_s: float) -> None:
        """Let what has begun come to its end, for so long."""
        pending = [task for _, task in self._running.values()] + list(self._releases)
        if not pending:
            return
        _, late = await asyncio.wait(pending, timeout=within_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _carry_out(self, bind: Bind, term: str, cause: str) -> Outcome:
        uid, inflight = bind.uid, self._inflight
        inflight.begin(uid, bind.node, term, self._later(CLAIM_S + LINGER_S))
        ask = ClaimAsk(uid, bind.namespace, bind.name, bind.node, cause)
        try:
            grant = await self._claims.claim(ask, CLAIM_S)
        except PeerRejected as error:
            inflight.end(uid)
            if error.reason == "request" and await self._is_plain(bind):
                return await self._post_binding(bind, None, cause)
            _log.info("claim refused", node=bind.node, reason=error.reason, error=error.text)
            return Outcome(_cut(f"slurmbridge: claim refused: {error.text}"), "refused")
        except PeerUnavailable as error:
            inflight.keep(uid, self._later(LINGER_S))
            _log.warning("no answer to a claim", node=bind.node, error=str(error))
            return Outcome("slurmbridge: no answer from the bridge, trying again", "unavailable")
        except BaseException:
            inflight.keep(uid, self._later(LINGER_S))
            raise
        inflight.grant(
            uid, grant.job_id, grant.gpus, grant.generation, self._later(BINDING_S + LINGER_S)
        )
        return await self._post_binding(bind, grant, cause)

    async def _is_plain(self, bind: Bind) -> bool:
        """Whether the pod asks for no pool GPU.

        Where the extender has no `managedResources` it is called for all pods, and another replica
        may have filtered this one.
        """
        try:
            return not await self._asks_for_gpus(bind, LOOK_S)
        except SlurmBridgeError as error:
            _log.warning("pod not readable", error=str(error))
            return False

    async def _post_binding(self, bind: Bind, grant: ClaimGrant | None, cause: str) -> Outcome:
        annotations: dict[str, str] = {}
        if grant is not None:
            annotations = {keys.CLAIM: f"{grant.job_id}/{bind.uid}", keys.GPUS: grant.gpus}
        end = self._later(BINDING_S)
        for tries_left in (1, 0):
            try:
                await self._post(bind, annotations, (end - self._clock.monotonic()) / 2)
            except PeerRejected as error:
                self._inflight.end(bind.uid)
                if grant is not None:
                    self._release(bind, grant, cause)
                _log.warning("binding refused", node=bind.node, error=str(error))
                return Outcome(_cut(f"slurmbridge: binding refused: {error.text}"), "not_bound")
            except PeerUnavailable as error:
                if not tries_left or end - self._clock.monotonic() < 2 * LEAST_TRY_S:
                    _log.warning("binding not known", node=bind.node, error=str(error))
                    return Outcome(
                        "slurmbridge: no answer from kube-apiserver, trying again", "unknown"
                    )
            else:
                break
        _log.info("bound", node=bind.node, claim=annotations.get(keys.CLAIM, ""))
        return BOUND

    def _release(self, bind: Bind, grant: ClaimGrant, cause: str) -> None:
        """Tell the bridge, without keeping the scheduler waiting for it."""
        ask = ReleaseAsk(bind.uid, bind.namespace, bind.name, grant.job_id, cause)
        task = asyncio.create_task(self._say_unbound(ask))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _say_unbound(self, ask: ReleaseAsk) -> None:
        try:
            await self._claims.release_unbound(ask, RELEASE_S)
        except SlurmBridgeError as error:
            # The bridge ends a claim that is not bound within its hold time by itself.
            _log.warning("release not taken", job_id=ask.job_id, error=str(error))

    def _later(self, seconds: float) -> float:
        return self._clock.monotonic() + seconds


def _elsewhere() -> Outcome:
    text = "slurmbridge: the pod is being bound to another node, trying again"
    return Outcome(text, "elsewhere")


def _cut(text: str) -> str:
    return text[:TEXT_CHARS]
