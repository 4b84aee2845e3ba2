"""Reads all of slurmctld's state that matters to us, as one snapshot or not at all.

Three processes a reading (docs/adr/0002-reading-slurm.md has the numbers): scontrol for nodes,
partitions and reservations; squeue for the jobs; scontrol again for the configuration and for the
details of jobs that are new. The number of calls does not depend on the number of jobs.

Why the order is nodes, then jobs, then details, then configuration. The answers are not of one
moment: things happen between them. A GPU counts as used when the node *or* a job says so (the
union is made by `pool.ledger`), so it can look free only if neither did:

- used before the first answer and still used at the last: both say so, or the jobs alone where the
  node under-reports (after a restart of slurmctld, while an Epilog runs);
- given out in between: the jobs are read last and say so, or it happened after the last answer and
  is younger than the snapshot;
- given back in between: the node still says used. Late by one reading, and safe;
- given back and given out again in between: the node says used by the first, the jobs by the
  second: used;
- a job that is in the listing but has ended before its details were asked keeps `gpus` None, which
  holds all that nobody else owns on its nodes until the next reading.

The configuration comes last, for its BOOT_TIME: after a restart in the midst of a reading we must
think of lost claims too early rather than too late.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC
from itertools import islice
from typing import Final, TypeVar

import msgspec

from slurmbridge.clock import Clock
from slurmbridge.pool.errors import ParseError, PeerProtocolError, PeerRejected
from slurmbridge.pool.policy import OPTION_RE
from slurmbridge.pool.record import GpuUse, SlurmConfig, SlurmJob, SlurmNode, SlurmSnapshot
from slurmbridge.slurm.batch import BATCH_ARGV, read_batch, write_batch
from slurmbridge.slurm.command import PEER, CommandResult, SlurmCommand, failure_of
from slurmbridge.slurm.jobtext import read_held
from slurmbridge.slurm.poller import Poller, next_interval
from slurmbridge.slurm.queue import Row, make_mark, queue_argv, read_row, read_rows
from slurmbridge.slurm.refusal import RefusalReason
from slurmbridge.slurm.text import read_config, read_nodes, read_partitions, read_reservations

__all__ = ["Poller", "SlurmReader", "next_interval"]

_T = TypeVar("_T")

LISTED_PER_ASKED: Final = 90
"""Asking for one job costs slurmctld as much as listing so many (0.87 ms against 49 ms for 5,200,
22.05.8): beyond that, one listing of all is cheaper than asking for each."""

ASKED_AT_LEAST: Final = 8
"""So few are always asked for one by one, however short the listing of all."""

RETRY_S: Final = 15.0
"""Details that could not be had (the job is ending, its text is doubtful) are asked again after."""


class _Known(msgspec.Struct, frozen=True):
    """What is known of one run of a job. run: what changes when it runs anew."""

    run: tuple[float | None, int]
    nodes: tuple[str, ...]
    gpus: Mapping[str, GpuUse] | None
    asked: float


class SlurmReader:
    """Reads slurmctld through its own commands; one reading at a time, the others wait.

    Args:
        command: runs them. The user must be root, SlurmUser or an operator, or hidden partitions
            and other users' jobs may be missing.
        clock: wall time for the snapshot, monotonic for ages.
        timeout_s: deadline of one snapshot or question.
        pick: random choice of a character, for the marks (`slurm.queue`).

    """

    def __init__(
        self,
        command: SlurmCommand,
        clock: Clock,
        *,
        timeout_s: float = 30.0,
        pick: Callable[[str], str] = secrets.choice,
    ) -> None:
        self._command = command
        self._clock = clock
        self._timeout_s = timeout_s
        self._pick = pick
        self._one = asyncio.Lock()
        self._jobs: dict[Row, SlurmJob] = {}
        self._nodes: dict[str, SlurmNode] = {}
        self._known: dict[int, _Known] = {}
        self._boot_time: float | None = None

    async def snapshot(self) -> SlurmSnapshot:
        """Read everything.

        Raises:
            PeerUnavailable: any of the questions had no usable answer: there is no snapshot, and
                nothing follows about anything.
            PeerRejected: slurmctld refuses to tell (no permission).

        """
        async with self._one:
            round_ = _Round(self._command, self._clock, self._timeout_s, self._pick)
            began = self._clock.steady()
            partitions_text, reservations_text, nodes_text = await round_.ask(
                "show partition", "show reservation", "show node"
            )
            nodes = await _read("nodes", read_nodes, nodes_text, UTC, self._nodes)
            rows = await round_.queue()
            listed = await _read("jobs", self._decode, rows)
            jobs, config = await self._with_gpus(round_, listed, nodes)
            return SlurmSnapshot(
                began=began,
                ended=self._clock.steady(),
                config=config,
                nodes=nodes,
                jobs=jobs,
                reservations=await _read("reservations", read_reservations, reservations_text),
                partitions=await _read("partitions", read_partitions, partitions_text),
                cost_s=round_.cost_s,
            )

    async def job(self, job_id: int) -> SlurmJob | None:
        """Read one job; None only when slurmctld says that there is no such job.

        A job that is over stays known to slurmctld for MinJobAge (300 s by default).

        Raises:
            PeerUnavailable: no usable answer.

        """
        round_ = _Round(self._command, self._clock, self._timeout_s, self._pick)
        try:
            rows = await round_.queue(f"--jobs={job_id:d}")
        except PeerRejected as error:
            if error.reason == RefusalReason.IDENTITY:
                return None
            raise
        jobs = await _read("job", _decode_all, rows)
        if not jobs:  # squeue fails for a job that is not there; a bare header is not its answer
            raise PeerProtocolError(PEER, f"squeue --jobs={job_id}", "neither a job nor an error")
        told = await self._told(round_, [job for job in jobs if job.id == job_id])
        return told[0] if told else None

    async def jobs_named(self, name: str) -> list[SlurmJob]:
        """Read the jobs of exactly this name, of all states and users.

        Raises:
            ParseError: the name cannot be asked for (it holds a comma, a space, ...).
            PeerUnavailable: no usable answer.

        """
        if OPTION_RE.fullmatch(name) is None:
            raise ParseError(name, "not a job name of ours")
        round_ = _Round(self._command, self._clock, self._timeout_s, self._pick)
        jobs = await _read("jobs", _decode_all, await round_.queue(f"--name={name}"))
        return await self._told(round_, [job for job in jobs if job.name == name])

    async def jobs_on(self, node: str) -> list[SlurmJob]:
        """Read the jobs that have been given a node, of all states and users.

        Raises:
            ParseError: not the name of one node.
            PeerRejected: there is no such node.
            PeerUnavailable: no usable answer.

        """
        if OPTION_RE.fullmatch(node) is None:
            raise ParseError(node, "not a node name")
        round_ = _Round(self._command, self._clock, self._timeout_s, self._pick)
        jobs = await _read("jobs", _decode_all, await round_.queue(f"--nodelist={node}"))
        return await self._told(round_, [job for job in jobs if node in job.nodes])

    async def _told(self, round_: _Round, jobs: list[SlurmJob]) -> list[SlurmJob]:
        """Give jobs with their GPUs, asked anew for each that holds some."""
        wanted = {job.id: job for job in jobs if job.gpus is None}
        if not wanted:
            return jobs
        answers = await round_.ask(*_details(wanted))
        held = await _read("details", _read_details, answers, wanted)
        return [_with(job, held.get(job.id)) if job.id in wanted else job for job in jobs]

    def _decode(self, rows: list[Row]) -> list[SlurmJob]:
        """Decode rows; one that was in the last reading too is taken from there."""
        before, self._jobs = self._jobs, {}
        for row in rows:
            self._jobs[row] = before.get(row) or read_row(row)
        return list(self._jobs.values())

    async def _with_gpus(
        self, round_: _Round, listed: list[SlurmJob], nodes: Mapping[str, SlurmNode]
    ) -> tuple[dict[int, SlurmJob], SlurmConfig]:
        """Add GPUs to the jobs that hold some; read the configuration, last."""
        wanted = {job.id: job for job in listed if self._is_unknown(job, nodes)}
        config = await self._learn(round_, wanted, len(listed))
        if self._boot_time is not None and config.boot_time != self._boot_time:
            # A restart: job ids may have been used again, and indices given anew.
            self._known.clear()
            wanted = {job.id: job for job in listed if self._is_unknown(job, nodes)}
            config = await self._learn(round_, wanted, len(listed))
        self._boot_time = config.boot_time
        jobs = {
            job.id: job if job.gpus is not None else _with(job, self._gpus(job, nodes))
            for job in listed
        }
        for job_id in self._known.keys() - jobs.keys():
            del self._known[job_id]
        return jobs, config

    async def _learn(self, round_: _Round, wanted: dict[int, SlurmJob], listed: int) -> SlurmConfig:
        """Ask for the details of some of the jobs listed, and for the configuration."""
        most = max(ASKED_AT_LEAST, listed // LISTED_PER_ASKED)
        if len(wanted) > most:
            (listing,) = await round_.ask("show job")
            held = await _read("details", read_held, listing, wanted)
            self._keep(held, wanted)
            # In a listing of all one user can make another's record doubtful, not in its own
            # answer. More of them than a few wait for a later reading.
            wanted = {i: job for i, job in wanted.items() if held.get(i) is None}
            wanted = dict(islice(wanted.items(), most))
        *answers, config = await round_.ask(*_details(wanted), "show config")
        self._keep(await _read("details", _read_details, answers, wanted), wanted)
        return await _read("configuration", read_config, config)

    def _keep(
        self, held: Mapping[int, Mapping[str, GpuUse] | None], wanted: Mapping[int, SlurmJob]
    ) -> None:
        now = self._clock.monotonic()
        for job_id, job in wanted.items():
            self._known[job_id] = _Known(_run(job), job.nodes, held.get(job_id), now)

    def _is_unknown(self, job: SlurmJob, nodes: Mapping[str, SlurmNode]) -> bool:
        """Whether the details of a job must be asked for."""
        if job.gpus is not None or self._gpus(job, nodes) is not None:
            return False
        known = self._known.get(job.id)
        return (
            known is None
            or known.run != _run(job)
            or known.nodes != job.nodes
            or self._clock.monotonic() - known.asked >= RETRY_S
        )

    def _gpus(self, job: SlurmJob, nodes: Mapping[str, SlurmNode]) -> Mapping[str, GpuUse] | None:
        """Tell what is known of the GPUs that a job holds now; None: not known."""
        if all(name in nodes and not nodes[name].gpus for name in job.nodes):
            return {}
        known = self._known.get(job.id)
        if known is None or known.run != _run(job) or known.gpus is None:
            return None
        if known.nodes == job.nodes:
            return known.gpus
        if "COMPLETING" in job.state.flags and set(job.nodes) <= set(known.nodes):
            # Its nodes become ready one after the other; slurmctld tells no details any more.
            return {name: use for name, use in known.gpus.items() if name in job.nodes}
        return None


class _Round:
    """The questions of one reading: one deadline for all, and what they cost together."""

    def __init__(
        self, command: SlurmCommand, clock: Clock, timeout_s: float, pick: Callable[[str], str]
    ) -> None:
        self._command = command
        self._clock = clock
        self._deadline = clock.monotonic() + timeout_s
        self._pick = pick
        self.cost_s = 0.0

    async def ask(self, *questions: str) -> list[str]:
        """Ask scontrol; "" for a job that slurmctld does not know (any more)."""
        mark = make_mark(self._pick)
        script = write_batch(questions, mark)
        result = await self._run(BATCH_ARGV, script)
        if result.code != 0 and not _only_unknown_jobs(result.stderr):
            raise failure_of(" ".join(BATCH_ARGV), result)
        return await _read("answers", read_batch, result.stdout, questions, mark)

    async def queue(self, *filters: str) -> list[Row]:
        """Ask squeue."""
        mark = make_mark(self._pick)
        argv = queue_argv(mark, *filters)
        result = await self._run(argv)
        if result.code != 0:
            raise failure_of("squeue", result)
        return await _read("jobs", read_rows, result.stdout, mark)

    async def _run(self, argv: Iterable[str], stdin: str = "") -> CommandResult:
        left = max(0.001, self._deadline - self._clock.monotonic())
        result = await self._command.run(list(argv), timeout_s=left, stdin=stdin, check=False)
        self.cost_s += result.cost_s
        return result


async def _read(what: str, reader: Callable[..., _T], *args: object) -> _T:
    """Read a text off the event loop (thousands of jobs take a while).

    Raises:
        PeerProtocolError: it cannot be read; the `ParseError` is its cause.

    """
    try:
        return await asyncio.to_thread(reader, *args)
    except ParseError as error:
        raise PeerProtocolError(PEER, f"read {what}", str(error)) from error


def _decode_all(rows: list[Row]) -> list[SlurmJob]:
    return [read_row(row) for row in rows]


def _details(jobs: Iterable[int]) -> list[str]:
    return [f"show job {job_id}" for job_id in jobs]


def _read_details(
    answers: list[str], jobs: Mapping[int, SlurmJob]
) -> dict[int, Mapping[str, GpuUse] | None]:
    """Read one answer for each job, in their order; what a user wrote stays in his own answer."""
    held: dict[int, Mapping[str, GpuUse] | None] = {}
    for answer, (job_id, job) in zip(answers, jobs.items(), strict=True):
        held.update(read_held(answer, {job_id: job}))
    return held


def _only_unknown_jobs(stderr: str) -> bool:
    """Whether scontrol complains of nothing but jobs that are no longer known."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    return bool(lines) and all("Invalid job id specified" in line for line in lines)


def _run(job: SlurmJob) -> tuple[float | None, int]:
    return job.start, job.restarts


def _with(job: SlurmJob, gpus: Mapping[str, GpuUse] | None) -> SlurmJob:
    return msgspec.structs.replace(job, gpus=gpus)
