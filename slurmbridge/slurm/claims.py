"""Makes, finds, extends and ends claims with Slurm's command line tools, 22.05 to 26.05.

A claim is an allocation without a process (`salloc --no-shell --immediate`: granted or refused in
about 6 ms), or, where Slurm does not do that at once, a sleeping batch job. A refused immediate
claim leaves a record in state FAILED with our name and comment until MinJobAge; it holds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from slurmbridge.clock import Clock
from slurmbridge.pool.claim import Claim, ClaimId, ClaimRequest, GroupRequest, claim_of
from slurmbridge.pool.errors import ClaimUncertain, PeerRejected, PeerTimeout, PeerUnavailable
from slurmbridge.pool.record import SlurmJob
from slurmbridge.slurm.claim_argv import MAX_MINUTES
from slurmbridge.slurm.claim_tool import ClaimTool
from slurmbridge.slurm.command import PEER, SlurmCommand
from slurmbridge.slurm.cover import QUEUE_INSTEAD, NodeCover
from slurmbridge.slurm.reader import SlurmReader
from slurmbridge.slurm.refusal import RefusalReason

__all__ = ["ClaimUncertain", "SlurmClaims"]

STARTING_S: Final = 10.0
"""Seconds after the start of slurmctld in which "node not available" may mean "not yet": 4 s were
measured on 4 nodes, and many nodes take longer to answer."""


class SlurmClaims:
    """The claims of one bridge; safe for any number of tasks of one event loop.

    All methods take a deadline in seconds; a command that is under way then gets one second more
    to end. All may raise `PeerUnavailable` (nothing follows about anything) and `PeerRejected`
    with a `RefusalReason`.

    Args:
        command: runs Slurm's tools, as root or SlurmUser: nobody else may have top priority. Slurm
            stores its environment with queued claims, so it should be a bare one.
        reader: reads slurmctld.
        owner_uid: the Unix user id that `command` runs as; jobs of others are never touched.
        clock: wall time for the age of slurmctld, monotonic for deadlines.
        boot_time: Unix seconds of slurmctld's start as last read, None when not known; tells a
            node that is not there from one that is not there yet.
        others: as for `ClaimTool`.

    """

    def __init__(
        self,
        command: SlurmCommand,
        reader: SlurmReader,
        owner_uid: int,
        *,
        clock: Clock,
        boot_time: Callable[[], float | None] = lambda: None,
        others: Callable[[str], str] = lambda _node: "",
    ) -> None:
        self._tool = ClaimTool(command, reader, owner_uid, clock, others)
        self._clock = clock
        self._boot_time = boot_time
        self._covers: dict[str, NodeCover] = {}

    async def allocate(self, request: ClaimRequest, deadline_s: float) -> Claim:
        """Make a claim now, or be refused now.

        Raises:
            PeerRejected: no claim was made; nothing is held.
            ClaimUncertain: it may have been made: look for it (`find`) before asking again.
            ParseError: the request has a value that Slurm cannot be given.

        """
        try:
            return await self._tool.allocate(request, self._ends(deadline_s))
        except PeerRejected as error:
            boot = self._boot_time()
            if (
                error.reason == RefusalReason.NODE
                and boot is not None
                and self._clock.wall() - boot < STARTING_S
            ):
                raise PeerRejected(
                    error.peer, error.op, error.text, RefusalReason.STARTING
                ) from error
            raise

    async def submit_placeholder(self, request: ClaimRequest, deadline_s: float) -> int:
        """Queue a claim at top priority, as a batch job that sleeps; its job id.

        It may wait in Slurm's queue for ever: whoever asked looks at it (`SlurmReader.job`), and
        ends it when it is not wanted any more.

        Raises:
            PeerRejected: Slurm will not queue it.
            ClaimUncertain: it may have been queued.
            ParseError: the request has a value that Slurm cannot be given.

        """
        return await self._tool.submit(request, self._ends(deadline_s))

    async def allocate_group(self, request: GroupRequest, deadline_s: float) -> SlurmJob:
        """Make a claim for a whole gang on given nodes now, or be refused now; the running job.

        Raises:
            PeerRejected, ClaimUncertain, ParseError: as for `allocate`.

        """
        return await self._tool.allocate_group(request, self._ends(deadline_s))

    async def submit_group(self, request: GroupRequest, deadline_s: float) -> int:
        """Queue a claim for a whole gang at its own priority; its job id.

        Raises:
            PeerRejected, ClaimUncertain, ParseError: as for `submit_placeholder`.

        """
        return await self._tool.submit_group(request, self._ends(deadline_s))

    async def look(self, job_ids: Sequence[int], deadline_s: float) -> dict[int, SlurmJob | None]:
        """Some jobs by id, with their GPUs, without listing any others; None: there is none."""
        found = {job.id: job for job in await self._tool.jobs(job_ids, self._ends(deadline_s))}
        return {job_id: found.get(job_id) for job_id in job_ids}

    async def cover(
        self, request: ClaimRequest, indices: tuple[int, ...] | None, deadline_s: float
    ) -> Claim:
        """Make a claim for a pod that runs already, on the GPUs that it has.

        Slurm cannot be asked for given GPUs: `slurm.cover_plan` tells how it is done. It queues
        where Slurm refuses immediate claims, as in the first seconds after its start.

        Args:
            request: whose claim, where, how much. When native jobs have taken the CPUs or the
                memory meanwhile, the claim is made without them: two owners of a core are bad,
                two of a GPU are worse.
            indices: exactly these GPU indices of the node; None: any.
            deadline_s: seconds; 20 leave room for a start of slurmctld.

        Raises:
            PeerRejected: no such claim (INDICES: others have some of the GPUs, or time was up);
                nothing is held.
            ClaimUncertain: it may have been made.

        """
        ends = self._ends(deadline_s)
        if indices is None:
            return await self._cover_any(request, ends)
        if len(set(indices)) != request.ask.gpu.count:
            text = f"{request.ask.gpu.count} GPUs asked for on indices {indices}"
            raise PeerRejected(PEER, "cover", text, RefusalReason.INDICES)
        node = request.slurm_node
        if node not in self._covers:
            self._covers[node] = NodeCover(self._tool, node, lambda: self._covers.pop(node))
        return await self._covers[node].want(request, frozenset(indices), ends)

    async def _cover_any(self, request: ClaimRequest, ends: float) -> Claim:
        try:
            return await self._tool.allocate(request, ends)
        except PeerRejected as error:
            if error.reason not in QUEUE_INSTEAD:
                raise
        job_id = await self._tool.submit(request, ends)
        op = f"sbatch on {request.slurm_node}"
        try:
            return await self._tool.wait_claim(job_id, request, ends)
        except PeerTimeout as error:
            await self._tool.end(request.id.job_name, [job_id], ends + STARTING_S)
            raise PeerRejected(PEER, op, error.text, RefusalReason.BUSY) from error
        except PeerUnavailable as error:
            raise ClaimUncertain(PEER, op, str(error), job_id) from error

    async def find(self, job_name: str, deadline_s: float = 30.0) -> list[tuple[ClaimId, SlurmJob]]:
        """All our claims of a job name that are not over: pending and completing ones too.

        Args:
            job_name: `ClaimId.job_name` of our cluster.
            deadline_s: seconds.

        """
        cluster = _cluster(job_name)
        found: list[tuple[ClaimId, SlurmJob]] = []
        for job in await self._tool.jobs_named(job_name, self._ends(deadline_s)):
            claim_id = claim_of(job, cluster, self._tool.owner_uid)
            if claim_id is not None and not job.state.is_finished:
                found.append((claim_id, job))
        return found

    async def sweep(self, job_name: str, deadline_s: float) -> int:
        """End the fillers that a bridge which died in the midst of a cover left; how many.

        For a new leader and now and then; those of covers that are at work here stay.
        """
        ends = self._ends(deadline_s)
        cluster = _cluster(job_name)
        left = [
            job.id
            for job in await self._tool.listed(job_name, ends)
            if self._tool.is_filler(job, cluster)
            and not job.state.is_finished
            and not any(cover.is_at_work_on(job) for cover in self._covers.values())
        ]
        await self._tool.end(job_name, left, ends)
        return len(left)

    async def extend(
        self, job_id: int, claim_id: ClaimId, wanted: float, deadline_s: float
    ) -> float:
        """Let a claim end at a time, never earlier than it would; its end by then.

        The clock of this host has no say: it may be hours off slurmctld's, and a limit in the past
        ends a claim at once. A shorter limit is wanted by nobody: what is not needed is cancelled.

        Args:
            job_id, claim_id: which claim; looked at just before.
            wanted: Unix seconds by slurmctld's clock; rounded up to whole minutes after the start.
            deadline_s: seconds.

        Returns:
            Unix seconds. Slurm enforces a limit up to half a minute late.

        Raises:
            PeerRejected: IDENTITY: the job is not this claim or does not run; or Slurm's reason.

        """
        ends = self._ends(deadline_s)
        job = await self._live(job_id, claim_id, ends)
        if job is None or job.state.base != "RUNNING" or job.start is None:
            text = "is not this claim, or does not run"
            raise PeerRejected(PEER, f"extend job {job_id}", text, RefusalReason.IDENTITY)
        minutes = min(MAX_MINUTES, max(1, math.ceil((wanted - job.start) / 60.0)))
        end = job.start + 60.0 * minutes
        if job.end is not None and end <= job.end:
            return job.end
        await self._tool.set_limit(job_id, minutes, ends)
        return end

    async def cancel(self, claim_id: ClaimId, job_id: int, deadline_s: float) -> bool:
        """End a claim.

        It is looked at just before, and scancel is told its name and owner too: a job of somebody
        else that was given the id after a crash of slurmctld is never touched.

        Returns:
            True: it was there and is being ended. False: it is not there, for certain.

        """
        ends = self._ends(deadline_s)
        job = await self._live(job_id, claim_id, ends)
        if job is None:
            return False
        if not _is_ending(job):
            await self._tool.end(claim_id.job_name, [job_id], ends)
        return True

    async def cancel_many(
        self, claims: Sequence[tuple[ClaimId, int]], deadline_s: float
    ) -> frozenset[int]:
        """End many claims with few commands; the job ids of those that were there.

        Guarded like `cancel`, by one listing of each job name.
        """
        ends = self._ends(deadline_s)
        ending: set[int] = set()
        for name in sorted({claim_id.job_name for claim_id, _ in claims}):
            wanted = {(claim_id, job_id) for claim_id, job_id in claims}
            live = [
                job
                for job in await self._tool.listed(name, ends)
                if (self._claim_of(job, _cluster(name)), job.id) in wanted
                and not job.state.is_finished
            ]
            await self._tool.end(name, [job.id for job in live if not _is_ending(job)], ends)
            ending.update(job.id for job in live)
        return frozenset(ending)

    async def _live(self, job_id: int, claim_id: ClaimId, ends: float) -> SlurmJob | None:
        """The job if it is this claim and not over, else None."""
        job = await self._tool.job(job_id, ends)
        if job is None or job.state.is_finished:
            return None
        return job if self._claim_of(job, claim_id.cluster) == claim_id else None

    def _claim_of(self, job: SlurmJob, cluster: str) -> ClaimId | None:
        return claim_of(job, cluster, self._tool.owner_uid)

    def _ends(self, deadline_s: float) -> float:
        return self._clock.monotonic() + deadline_s


def _cluster(job_name: str) -> str:
    return job_name.removeprefix("slurmbridge-")


def _is_ending(job: SlurmJob) -> bool:
    return "COMPLETING" in job.state.flags
