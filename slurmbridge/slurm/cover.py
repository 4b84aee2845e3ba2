"""Carries out the plan of `slurm.cover_plan` on one node, for all pods there that need it.

Used when slurmctld has forgotten claims, or for a pod that came past us (docs/adr/0007). Claims on
one node are made one after the other, by one task: two at a time would hold each other's GPUs. What
the fillers hold stays held from the first to the last, so that native jobs cannot come in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from slurmbridge.log import get_logger
from slurmbridge.pool.claim import Ask, Claim, ClaimRequest, write_filler
from slurmbridge.pool.errors import (
    ClaimUncertain,
    ParseError,
    PeerError,
    PeerRejected,
    PeerUnavailable,
)
from slurmbridge.pool.record import GpuRequest, SlurmJob
from slurmbridge.slurm.claim_tool import LOOK_S, MOST_LOOK_S, ClaimTool
from slurmbridge.slurm.command import PEER
from slurmbridge.slurm.cover_plan import (
    Fill,
    GpuSet,
    Lost,
    NodeGpus,
    Promote,
    Release,
    Take,
    Wait,
    next_step,
    node_gpus,
)
from slurmbridge.slurm.refusal import RefusalReason

FILLER_MINUTES: Final = 10
"""Time limit of fillers: when nobody is left to end them, Slurm does."""

QUEUE_S: Final = 1.0
"""After Slurm has refused an immediate claim for its own reasons, queue for so long."""

LOOK_DEADLINE_S: Final = 5.0
RELEASE_TRIES: Final = 3

QUEUE_INSTEAD: Final = frozenset(
    {
        RefusalReason.STARTING,
        RefusalReason.NODE,
        RefusalReason.DEFER,
        RefusalReason.PRIORITY,
        RefusalReason.FRAGMENTED,
    }
)
"""Refusals of an immediate claim after which a queued one may still come."""

_log = get_logger(__name__)


class _Want:
    """One claim to make, and who waits for it."""

    def __init__(self, request: ClaimRequest, gpus: GpuSet, ends: float, now: float) -> None:
        self.request = request
        self.gpus = gpus
        self.ends = ends
        # From half time on without CPUs, memory and exclusiveness: natives may have taken those.
        self.bare_from = (now + ends) / 2
        # Fillers for one GPU may become the claim, where there is room for many of its size.
        self.has_small_fillers = len(gpus) > 1
        self.answer: asyncio.Future[Claim] = asyncio.get_running_loop().create_future()

    @property
    def bare(self) -> Ask:
        """The GPUs and the time that are wanted, and nothing else."""
        return msgspec.structs.replace(self.request.ask, cpus=0, memory_mib=0, exclusive_user=False)

    @property
    def filler(self) -> Ask:
        """One GPU of any type for a few minutes, as the same user of Slurm."""
        minutes = min(FILLER_MINUTES, self.request.ask.minutes)
        return msgspec.structs.replace(self.bare, gpu=GpuRequest(1), minutes=minutes)

    def asking(self, ask: Ask) -> ClaimRequest:
        """The same request, asking for something else."""
        return msgspec.structs.replace(self.request, ask=ask)


class NodeCover:
    """The covers of one node; lives from the first that is wanted until all are done.

    Args:
        tool: the steps.
        node: Slurm node name.
        on_end: called once when nothing is wanted and nothing is held any more.

    """

    def __init__(self, tool: ClaimTool, node: str, on_end: Callable[[], object]) -> None:
        self._tool = tool
        self._clock = tool.clock
        self._node = node
        self._on_end = on_end
        self._wants: deque[_Want] = deque()
        self._fillers: dict[int, Ask | None] = {}
        self._job_name = ""
        self._gpu_total: int | None = None
        self._queue_until = 0.0
        self._task: asyncio.Task[None] | None = None

    async def want(self, request: ClaimRequest, gpus: GpuSet, ends: float) -> Claim:
        """Get a claim on exactly these GPUs; errors as for `SlurmClaims.cover`."""
        want = _Want(request, gpus, ends, self._clock.monotonic())
        self._wants.append(want)
        self._job_name = request.id.job_name
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"cover {self._node}")
        return await want.answer

    def is_at_work_on(self, job: SlurmJob) -> bool:
        """Whether a filler is one of ours at work (or may be: it is on our node)."""
        return job.id in self._fillers or self._node in job.nodes

    async def _run(self) -> None:
        try:
            while self._wants or self._fillers:
                while self._wants:
                    await self._serve(self._wants.popleft())
                await self._end_fillers()
        finally:
            for want in self._wants:
                want.answer.cancel()
            self._on_end()

    async def _serve(self, want: _Want) -> None:
        try:
            claim = await self._cover(want)
        except (PeerError, ParseError) as error:
            if not want.answer.done():
                want.answer.set_exception(error)
        except BaseException:
            want.answer.cancel()
            raise
        else:
            if not want.answer.done():
                want.answer.set_result(claim)

    async def _cover(self, want: _Want) -> Claim:
        """Step by step until there is a claim; what goes wrong may go better the next time."""
        pause, why = LOOK_S, "no time"
        while self._clock.monotonic() < want.ends and not want.answer.done():
            try:
                done = await self._step(want)
            except _PromoteUncertain as error:
                raise error.cause from error
            except PeerUnavailable as error:
                why = str(error)
            except PeerRejected as error:
                why = error.text
                if error.reason in QUEUE_INSTEAD:
                    self._queue_until = self._clock.monotonic() + QUEUE_S
                    continue
                if error.reason != RefusalReason.BUSY:
                    raise
                want.has_small_fillers = True
            else:
                if isinstance(done, Claim):
                    return done
                if done is None:
                    pause = LOOK_S
                    continue
                why = done.why
            await self._clock.sleep(pause)
            pause = min(MOST_LOOK_S, 2 * pause)
        text = f"no claim on GPUs {sorted(want.gpus)} of {self._node} in time: {why}"
        raise PeerRejected(PEER, "cover", text, RefusalReason.INDICES)

    async def _step(self, want: _Want) -> Claim | Wait | None:
        """One step. None: look again at once."""
        ask = want.bare if self._clock.monotonic() >= want.bare_from else want.request.ask
        outgrown = [
            job_id for job_id, filler in self._fillers.items() if filler == want.request.ask != ask
        ]
        node = await self._look({want.request.ask, ask})
        stuck = tuple(f.job_id for f in node.fillers if f.is_pending and f.job_id in outgrown)
        step = Release(stuck) if stuck else next_step(node, want.gpus)
        match step:
            case Lost(gpus=lost):
                text = f"others hold GPUs {sorted(lost)} of {self._node}"
                raise PeerRejected(PEER, "cover", text, RefusalReason.INDICES)
            case Wait():
                return step
            case Release(job_ids=job_ids):
                await self._tool.end(self._job_name, job_ids, want.ends)
            case Fill(least=least, most=most):
                if self._is_queueing:
                    await self._submit(want, want.filler, most)
                else:
                    await self._allocate(
                        want, want.filler if want.has_small_fillers else ask, least
                    )
            case Take(release=release):
                if release or self._is_queueing:
                    await self._submit(want, ask, 1)
                    await self._tool.end(self._job_name, release, want.ends)
                else:
                    await self._allocate(want, ask, 1)
            case Promote(job_id=job_id):
                # Not known as made here any more: from now on its comment alone tells.
                self._fillers[job_id] = None
                try:
                    claim = await self._tool.promote(job_id, want.request, want.ends)
                except ClaimUncertain as error:
                    raise _PromoteUncertain(error) from error
                del self._fillers[job_id]
                return claim
        return None

    @property
    def _is_queueing(self) -> bool:
        return self._clock.monotonic() < self._queue_until

    async def _look(self, asks: set[Ask]) -> NodeGpus:
        """Read the node; learn of fillers whose making was not answered, forget ended ones."""
        ends = self._clock.monotonic() + LOOK_DEADLINE_S
        if self._gpu_total is None:
            self._gpu_total = await self._tool.gpu_total(self._node, ends)
        jobs = await self._tool.jobs_on(self._node, ends)
        on_node = {job.id for job in jobs}
        waiting = [job_id for job_id in self._fillers if job_id not in on_node]
        if waiting:
            jobs += await self._tool.jobs(waiting, ends)
        ours = {job.id for job in jobs if self._is_live(job)}
        self._fillers = {job_id: self._fillers.get(job_id) for job_id in ours}
        takes = {job_id for job_id, ask in self._fillers.items() if ask in asks}
        return node_gpus(self._node, self._gpu_total, jobs, frozenset(ours), frozenset(takes))

    def _is_live(self, job: SlurmJob) -> bool:
        """Whether a job is a filler: says so, or was made here and is not promoted."""
        if job.state.is_finished:
            return False
        is_made = self._fillers.get(job.id) is not None and self._tool.is_named(job, self._job_name)
        return is_made or self._tool.is_filler(job, self._job_name.removeprefix("slurmbridge-"))

    async def _allocate(self, want: _Want, ask: Ask, count: int) -> None:
        """Ask for immediate fillers; raises the first refusal if none came."""
        comment = write_filler(want.request.id)
        results = await asyncio.gather(
            *(self._tool.allocate(want.asking(ask), want.ends, comment) for _ in range(count)),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, Claim | ClaimUncertain) and result.job_id is not None:
                self._fillers[result.job_id] = ask
        errors = [result for result in results if isinstance(result, BaseException)]
        if len(errors) == len(results):
            raise errors[0]

    async def _submit(self, want: _Want, ask: Ask, count: int) -> None:
        """Queue fillers."""
        comment = write_filler(want.request.id)
        for _ in range(count):
            job_id = await self._tool.submit(want.asking(ask), want.ends, comment)
            self._fillers[job_id] = ask

    async def _end_fillers(self) -> None:
        """End what is still a filler; what cannot be ended now is swept later, or times out."""
        for attempt in range(1, RELEASE_TRIES + 1):
            ends = self._clock.monotonic() + LOOK_DEADLINE_S
            try:
                jobs = await self._tool.jobs(list(self._fillers), ends)
                live = [job.id for job in jobs if self._is_live(job)]
                await self._tool.end(self._job_name, live, ends)
                break
            except PeerError as error:
                left = sorted(self._fillers)
                _log.warning("fillers not ended", node=self._node, jobs=left, error=str(error))
                await self._clock.sleep(MOST_LOOK_S * attempt)
        self._fillers.clear()


class _PromoteUncertain(Exception):
    """A filler may have become the claim: the cover must not go on."""

    def __init__(self, cause: ClaimUncertain) -> None:
        self.cause = cause
        super().__init__(str(cause))
