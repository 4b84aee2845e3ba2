"""Single steps on single claims and fillers; `claims` and `cover` put them together.

Every answer is read back before it counts: only slurmctld knows which GPUs it gave, and a site's
plugins may change a request on its way. What is not known is said so: after a lost answer a claim
may exist, hence `ClaimUncertain`. On 22.05, of 13 allocations granted to a salloc that had been
killed with SIGKILL meanwhile, slurmctld took back 11 within a moment and kept 2; SIGTERM salloc
ignores while it waits for the answer, and all stay; the job of a killed sbatch stays.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from slurmbridge.clock import Clock
from slurmbridge.pool.claim import (
    Ask,
    Claim,
    ClaimId,
    ClaimRequest,
    GroupRequest,
    filler_of,
    write_comment,
)
from slurmbridge.pool.errors import (
    ClaimUncertain,
    ParseError,
    PeerProtocolError,
    PeerRejected,
    PeerTimeout,
    PeerUnavailable,
)
from slurmbridge.pool.record import FINISHED_STATES, GpuUse, SlurmJob
from slurmbridge.slurm.claim_argv import (
    PLACEHOLDER_SCRIPT,
    allocate_argv,
    cancel_argv,
    comment_argv,
    granted_id,
    group_argv,
    group_now_argv,
    limit_argv,
    placeholder_argv,
    submitted_id,
)
from slurmbridge.slurm.command import PEER, CommandResult, SlurmCommand
from slurmbridge.slurm.details import JobDetails
from slurmbridge.slurm.queue import make_mark, queue_argv, read_queue
from slurmbridge.slurm.reader import SlurmReader
from slurmbridge.slurm.refusal import RefusalReason
from slurmbridge.slurm.text import read_nodes

LOOK_S: Final = 0.05
"""First pause between two looks at a job that is on its way; doubled up to `MOST_LOOK_S`."""
MOST_LOOK_S: Final = 0.4
UNTOLD_S: Final = 1.0
"""A job of ours runs for so long, and slurmctld does not tell its GPUs: it has none."""

CANCEL_AT_ONCE: Final = 512
"""Job ids a scancel: with filters, each call loads the whole job list."""


WHO: Final = frozenset({RefusalReason.ACCOUNT, RefusalReason.QOS, RefusalReason.LIMIT})
"""Refusals of an account or a QOS, or of a limit of theirs: Slurm's text does not say of which."""


class ClaimTool:
    """Runs Slurm's tools on claims; safe for any number of tasks of one event loop.

    `ends` is always a deadline: seconds of the monotonic clock.

    Args:
        command: runs the tools, as root or SlurmUser: nobody else may have top priority. Slurm
            stores its environment with queued claims, so it should be a bare one.
        reader: reads slurmctld.
        owner_uid: the Unix user id that `command` runs as.
        others: of a node, all others, where slurmctld is to be told not to look at them.

    """

    def __init__(
        self,
        command: SlurmCommand,
        reader: SlurmReader,
        owner_uid: int,
        clock: Clock,
        others: Callable[[str], str] = lambda _node: "",
    ) -> None:
        self.owner_uid = owner_uid
        self.clock = clock
        self._command = command
        self._reader = reader
        self._details = JobDetails(command)
        self._others = others

    async def allocate(self, request: ClaimRequest, ends: float, comment: str = "") -> Claim:
        """Make a claim now, or be refused now, and read it back.

        Raises:
            PeerRejected: nothing was made.
            ClaimUncertain: it may have been made.

        """
        op = f"salloc on {request.slurm_node}"
        others = self._others(request.slurm_node)
        with _named(request.ask):
            job_id = await self._granted(lambda: self._salloc(request, comment, others, ends), op)
        try:
            return await self.wait_claim(job_id, request, ends, comment)
        except PeerUnavailable as error:
            raise ClaimUncertain(PEER, op, str(error), job_id) from error

    async def _granted(self, salloc: Callable[[], Awaitable[CommandResult]], op: str) -> int:
        """The job id that a salloc has been granted."""
        try:
            result = await salloc()
        except PeerUnavailable as error:
            raise ClaimUncertain(PEER, op, str(error)) from error
        job_id = granted_id(result.stderr)
        if job_id is None:
            raise ClaimUncertain(PEER, op, f"granted, but which job? {result.stderr[-256:]}")
        return job_id

    async def _salloc(
        self, request: ClaimRequest, comment: str, others: str, ends: float
    ) -> CommandResult:
        argv = allocate_argv(request, comment, others)
        try:
            return await self._command.run(argv, timeout_s=self._left(ends))
        except PeerRejected as error:
            # One of the others may have left Slurm since they were listed.
            if not others or error.reason != RefusalReason.NODE:
                raise
        argv = allocate_argv(request, comment)
        return await self._command.run(argv, timeout_s=self._left(ends))

    async def submit(self, request: ClaimRequest, ends: float, comment: str = "") -> int:
        """Queue a claim as a batch job; its job id.

        Raises:
            PeerRejected: nothing was queued.
            ClaimUncertain: it may have been queued.

        """
        argv = placeholder_argv(request, comment)
        with _named(request.ask):
            return await self._sbatch(argv, f"sbatch on {request.slurm_node}", ends)

    async def submit_group(self, request: GroupRequest, ends: float) -> int:
        """Queue a claim for a whole gang; its job id. Errors as for `submit`."""
        with _named(request.ask):
            return await self._sbatch(group_argv(request), f"sbatch of {request.ref}", ends)

    async def allocate_group(self, request: GroupRequest, ends: float) -> SlurmJob:
        """Make a claim for a whole gang now, or be refused now, and read it back.

        Raises:
            PeerRejected: nothing was made, or something else than was asked for; that is ended.
            ClaimUncertain: it may have been made.

        """
        op = f"salloc of {request.ref}"
        argv = group_now_argv(request)
        with _named(request.ask):
            job_id = await self._granted(
                lambda: self._command.run(argv, timeout_s=self._left(ends)), op
            )
        try:
            comment = write_comment(request.id, request.ref)
            job = await self._running(job_id, request.id, comment, ends)
        except PeerUnavailable as error:
            raise ClaimUncertain(PEER, op, str(error), job_id) from error
        gpus = sum(use.total for use in (job.gpus or {}).values())
        if set(job.nodes) != set(request.nodes) or gpus != request.members * request.ask.gpu.count:
            await self.end(request.id.job_name, [job_id], ends)
            text = f"asked for {request.members} times {request.ask.gpu}, got {job.gpus}"
            raise PeerRejected(PEER, op, text, RefusalReason.OTHER)
        return job

    async def _sbatch(self, argv: list[str], op: str, ends: float) -> int:
        try:
            result = await self._command.run(
                argv, timeout_s=self._left(ends), stdin=PLACEHOLDER_SCRIPT
            )
        except PeerUnavailable as error:
            raise ClaimUncertain(PEER, op, str(error)) from error
        job_id = submitted_id(result.stdout)
        if job_id is None:
            raise ClaimUncertain(PEER, op, f"queued, but which job? {result.stdout[-256:]}")
        return job_id

    async def wait_claim(
        self, job_id: int, request: ClaimRequest, ends: float, comment: str = ""
    ) -> Claim:
        """Wait until a job of ours runs, and check that it is what was asked for.

        It may wait in the queue first, or for a Prolog (`PrologFlags=Alloc`).

        Raises:
            PeerTimeout: it does not run yet.
            PeerUnavailable: no usable answer, or the job is not there: slurmctld has forgotten it.
            PeerRejected: it has ended, or Slurm made something else of the request; it is ended.
                22.05 grants in the moment of its start, before the node's slurmd has registered,
                and such a claim runs with `GRES=gpu:0(IDX:)` for good.

        """
        comment = comment or write_comment(request.id, request.ref)
        job = await self._running(job_id, request.id, comment, ends)
        use = None if job.gpus is None else job.gpus.get(request.slurm_node)
        if use is None or job.nodes != (request.slurm_node,) or not _fits(use, request):
            await self.end(request.id.job_name, [job_id], ends)
            text = f"asked for {request.ask.gpu}, got {job.gpus}"
            raise PeerRejected(PEER, f"job {job_id}", text, RefusalReason.OTHER)
        return Claim(
            id=request.id,
            job_id=job_id,
            slurm_node=request.slurm_node,
            gpus=use,
            state=job.state,
            granted=self.clock.steady(),
            ends=job.end,
            started=job.start,
        )

    async def _running(self, job_id: int, claim_id: ClaimId, comment: str, ends: float) -> SlurmJob:
        """Wait until a job of ours runs and Slurm tells its GPUs; errors as for `wait_claim`."""
        pause = LOOK_S
        ready_at: float | None = None
        while True:
            job = await self.job(job_id, ends)
            if job is None or not self.is_named(job, claim_id.job_name) or job.comment != comment:
                raise PeerUnavailable(PEER, f"job {job_id}", "granted, and then not there")
            is_ending = "COMPLETING" in job.state.flags
            if is_ending or job.state.base in FINISHED_STATES:
                text = f"granted, and then {job.state.base} ({job.reason})"
                raise PeerRejected(PEER, f"job {job_id}", text, RefusalReason.OTHER)
            is_ready = job.state.base == "RUNNING" and "CONFIGURING" not in job.state.flags
            if is_ready and job.gpus is not None:
                return job
            if is_ready:
                now = self.clock.monotonic()
                ready_at = now if ready_at is None else ready_at
                if now - ready_at >= UNTOLD_S:
                    await self.end(claim_id.job_name, [job_id], ends)
                    raise PeerRejected(
                        PEER, f"job {job_id}", "runs without GPUs", RefusalReason.STARTING
                    )
            if self.clock.monotonic() + pause > ends:
                raise PeerTimeout(PEER, f"job {job_id}", f"still {job.state.base} ({job.reason})")
            await self.clock.sleep(pause)
            pause = min(MOST_LOOK_S, 2 * pause)

    async def promote(self, job_id: int, request: ClaimRequest, ends: float) -> Claim:
        """Make a running filler the claim: give it the comment of one.

        Raises:
            PeerRejected: it is not there any more.
            ClaimUncertain: it may be the claim now.

        """
        argv = comment_argv(job_id, write_comment(request.id, request.ref))
        try:
            await self._command.run(argv, timeout_s=self._left(ends))
            return await self.wait_claim(job_id, request, ends)
        except PeerUnavailable as error:
            raise ClaimUncertain(PEER, f"update of job {job_id}", str(error), job_id) from error

    async def set_limit(self, job_id: int, minutes: int, ends: float) -> None:
        """Set the time limit of a job, minutes from its start."""
        await self._command.run(limit_argv(job_id, minutes), timeout_s=self._left(ends))

    async def end(self, job_name: str, job_ids: Sequence[int], ends: float) -> None:
        """End jobs of ours by id, name and owner; one that is over already is no error."""
        for at in range(0, len(job_ids), CANCEL_AT_ONCE):
            argv = cancel_argv(job_name, self.owner_uid, job_ids[at : at + CANCEL_AT_ONCE])
            try:
                await self._command.run(argv, timeout_s=self._left(ends))
            except PeerRejected as error:
                if error.reason not in (RefusalReason.IDENTITY, RefusalReason.COMPLETING):
                    raise

    async def job(self, job_id: int, ends: float) -> SlurmJob | None:
        """One job; None: slurmctld says that there is none."""
        async with self._until(ends, f"show job {job_id}"):
            return await self._details.job(job_id)

    async def jobs(self, job_ids: Sequence[int], ends: float) -> list[SlurmJob]:
        """Those of some jobs that slurmctld knows."""
        async with self._until(ends, "show job"):
            found = await asyncio.gather(*(self._details.job(job_id) for job_id in job_ids))
            return [job for job in found if job is not None]

    async def jobs_named(self, job_name: str, ends: float) -> list[SlurmJob]:
        """All jobs of a name, of all users and states, with their GPUs."""
        async with self._until(ends, f"squeue --name={job_name}"):
            return await self._reader.jobs_named(job_name)

    async def listed(self, job_name: str, ends: float) -> list[SlurmJob]:
        """The same without GPUs: a third of the time."""
        op = f"squeue --name={job_name}"
        mark = make_mark(secrets.choice)
        argv = queue_argv(mark, f"--name={job_name}")
        result = await self._command.run(argv, timeout_s=self._left(ends))
        try:
            return await asyncio.to_thread(read_queue, result.stdout, mark)
        except ParseError as error:
            raise PeerProtocolError(PEER, op, str(error)) from error

    async def jobs_on(self, node: str, ends: float) -> list[SlurmJob]:
        """All jobs that hold a node or have held it."""
        async with self._until(ends, f"squeue --nodelist={node}"):
            return await self._reader.jobs_on(node)

    async def gpu_total(self, node: str, ends: float) -> int:
        """GPUs of all types on a node."""
        argv = ["scontrol", "--oneliner", "--details", "--all", "show", "node", node]
        result = await self._command.run(argv, timeout_s=self._left(ends))
        try:
            return read_nodes(result.stdout)[node].gpu_total
        except (ParseError, KeyError) as error:
            raise PeerProtocolError(PEER, f"show node {node}", str(error)) from error

    def is_filler(self, job: SlurmJob, cluster: str) -> bool:
        """Whether a job is a filler of ours."""
        return filler_of(job, cluster, self.owner_uid) is not None

    def is_named(self, job: SlurmJob, job_name: str) -> bool:
        """Whether a job has our name and owner."""
        return (job.name, job.user_id) == (job_name, self.owner_uid)

    def _left(self, ends: float) -> float:
        return max(0.0, ends - self.clock.monotonic())

    @asynccontextmanager
    async def _until(self, ends: float, op: str) -> AsyncIterator[None]:
        """Turn the end of the deadline into an error of ours."""
        try:
            async with asyncio.timeout(self._left(ends)):
                yield
        except TimeoutError as error:
            raise PeerTimeout(PEER, op, "no answer within the deadline") from error


@contextmanager
def _named(ask: Ask) -> Iterator[None]:
    """Say in a refusal which account and QOS were asked for."""
    try:
        yield
    except PeerRejected as error:
        if error.reason not in WHO:
            raise
        who = f"account {ask.account or '(default)'}, QOS {ask.qos or '(default)'}"
        raise PeerRejected(error.peer, error.op, f"{who}: {error.text}", error.reason) from error


def _fits(use: GpuUse, request: ClaimRequest) -> bool:
    """Whether it is the number and the type of GPUs that were asked for."""
    kind = request.ask.gpu.type
    return use.total == request.ask.gpu.count and all(
        not kind or count.type in ("", kind) for count in use.counts
    )
