"""Keeps the book's native jobs in step with slurmctld, where a Prolog or an Epilog had no agent.

A Prolog tells the agent of a job, its Epilog of the end. Where either ran while no agent was there,
the book would name a job that is over, or none for a GPU that one has, for good. So now and then
slurmctld is asked for just these jobs. Nothing follows from no answer, and nothing from one answer
alone: a Prolog may be at work right now.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

from slurmbridge.log import get_logger
from slurmbridge.node.book import Book, NativeJob
from slurmbridge.pool.errors import PeerError
from slurmbridge.pool.noderecord import GpuOwner
from slurmbridge.pool.record import SlurmJob

_log = get_logger(__name__)

CHECK_S: Final = 30.0
"""Between two checks: each asks slurmctld for the jobs of one node, in one command."""


class Jobs(Protocol):
    """Slurm's jobs, one by one."""

    async def job(self, job_id: int) -> SlurmJob | None:
        """See `slurmbridge.slurm.details.JobDetails.job`."""


class NativeJobs:
    """The native jobs of this node.

    Args:
        book: where they are noted.
        jobs: slurmctld.
        node: Slurm node name.

    """

    def __init__(self, book: Book, jobs: Jobs, node: str) -> None:
        self._book = book
        self._jobs = jobs
        self._node = node
        self._doubts: set[int] = set()

    async def check(self, owners: Collection[GpuOwner], alive: Collection[int]) -> None:
        """Forget jobs that are over, note those that were missed; each after two checks in a row.

        Args:
            owners: the bridge's ledger of this node, () when it has not told it.
            alive: jobs of which a process was seen on a GPU just now.

        """
        owning = {owner.job_id for owner in owners if owner.kind == "native"}
        asked = (owning | set(self._book.native)) - {0}
        doubts: set[int] = set()
        for job_id in sorted(asked):
            try:
                job = await self._jobs.job(job_id)
            except PeerError as error:
                # Who is doubted stays so; whoever cannot be asked for is left as it is.
                doubts |= self._doubts & {job_id}
                _log.info("a native job cannot be checked", job=job_id, error=str(error))
                continue
            known = self._book.native.get(job_id)
            fresh = held_by(job, self._node)
            if (known is None) is (fresh is None) or (fresh is None and job_id in alive):
                continue
            if job_id not in self._doubts:
                doubts.add(job_id)
            elif fresh is None:
                _log.info("a native job is over, its Epilog ran without an agent", job=job_id)
                self._book.ended(job_id)
            else:
                _log.info("a native job has started without an agent", job=job_id)
                self._book.started(fresh)
        self._doubts = doubts


def held_by(job: SlurmJob | None, node: str) -> NativeJob | None:
    """What a job has on a node now; None: nothing, by slurmctld's own word.

    Args:
        job: None: slurmctld says that there is none.
        node: Slurm node name.

    """
    if job is None or not job.state.holds_resources or node not in job.nodes:
        return None
    use = (job.gpus or {}).get(node)
    return NativeJob(
        job_id=job.id,
        user=job.user,
        account=job.account,
        partition=job.partition,
        gpus=() if use is None else use.indices or (),
    )
