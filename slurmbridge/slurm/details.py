"""Reads single jobs with their GPU indices, and merges questions that come at the same time.

After each grant the claim must be read back, since only slurmctld knows which GPUs it gave. With
sixteen grants at a time a process for each question would cost as much as the grants; so at most
one scontrol runs, and all that is asked meanwhile goes to the next one together.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

from slurmbridge.pool.errors import ParseError, PeerError, PeerProtocolError
from slurmbridge.pool.record import SlurmJob
from slurmbridge.slurm.batch import BATCH_ARGV, read_batch, write_batch
from slurmbridge.slurm.command import PEER, SlurmCommand, failure_of
from slurmbridge.slurm.jobtext import read_jobs
from slurmbridge.slurm.queue import make_mark

MOST: Final = 64
"""Jobs a question: 64 take some 100 ms, and the next in line wait no longer than that."""

_GONE: Final = "Invalid job id specified"
_ARGV: Final = (*BATCH_ARGV, "--local")
"""Without --local each question asks slurmctld about a federation first."""


class JobDetails:
    """Asks slurmctld for single jobs: `scontrol show job ID`, many ids a process.

    Args:
        command: runs scontrol.
        timeout_s: deadline of one scontrol.
        pick: random choice of a character, for the marks (`slurm.queue`).

    """

    def __init__(
        self,
        command: SlurmCommand,
        timeout_s: float = 10.0,
        pick: Callable[[str], str] = secrets.choice,
    ) -> None:
        self._command = command
        self._timeout_s = timeout_s
        self._pick = pick
        self._waiting: dict[int, asyncio.Future[SlurmJob | None]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def job(self, job_id: int) -> SlurmJob | None:
        """One job as it is after this call began; None: slurmctld says that there is none.

        Where the record has two readings (`slurm.jobtext`) it has no comment and is nobody's.

        Raises:
            PeerUnavailable: no usable answer.

        """
        future = self._waiting.get(job_id)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            self._waiting[job_id] = future
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_all(), name="job details")
        # The answer may be awaited by others too.
        return await asyncio.shield(future)

    async def _ask_all(self) -> None:
        try:
            while self._waiting:
                batch = dict(list(self._waiting.items())[:MOST])
                for job_id in batch:
                    del self._waiting[job_id]
                await self._ask(batch)
        finally:
            self._asking = None

    async def _ask(self, batch: dict[int, asyncio.Future[SlurmJob | None]]) -> None:
        try:
            jobs = await self._read(list(batch))
        except PeerError as error:
            for future in batch.values():
                future.set_exception(error)
                # Who asked may have gone; then nobody fetches it, which is no fault.
                future.exception()
        except BaseException:
            for future in batch.values():
                future.cancel()
            raise
        else:
            for job_id, future in batch.items():
                future.set_result(jobs.get(job_id))

    async def _read(self, job_ids: list[int]) -> dict[int, SlurmJob]:
        mark = make_mark(self._pick)
        questions = [f"show job {job_id}" for job_id in job_ids]
        result = await self._command.run(
            _ARGV,
            timeout_s=self._timeout_s,
            stdin=write_batch(questions, mark),
            check=False,
        )
        complaints = [line for line in result.stderr.splitlines() if line.strip()]
        if any(_GONE not in line for line in complaints) or (result.code and not complaints):
            raise failure_of(questions[0], result)
        jobs: dict[int, SlurmJob] = {}
        try:
            answers = read_batch(result.stdout, questions, mark)
            missing = 0
            for job_id, answer in zip(job_ids, answers, strict=True):
                if answer.strip():
                    # Of an array or het job more than one record may come.
                    jobs.update((j.id, j) for j in read_jobs(answer) if j.id == job_id)
                else:
                    missing += 1
        except ParseError as error:
            raise PeerProtocolError(PEER, questions[0], str(error)) from error
        if missing > len(complaints):
            raise PeerProtocolError(PEER, questions[0], "neither a job nor an error")
        return jobs
