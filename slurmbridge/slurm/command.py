"""Runs Slurm's own commands: argument vectors, a clean environment, a deadline, bounded output.

Nothing here knows what the output means. What it does know is the difference that all the rest
relies on: a definite no of slurmctld (`PeerRejected`) or no usable answer (`PeerUnavailable`).
A text that is in neither list counts as no answer.

Each command runs in a thread of its own, so that neither fork nor a slow pipe holds up the event
loop, and so that the child's own CPU time is known (wait4): what is left of its wall time is, to
a good estimate, the time that slurmctld took.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Final

import msgspec

from slurmbridge.pool.errors import (
    PeerError,
    PeerProtocolError,
    PeerRejected,
    PeerTimeout,
    PeerUnavailable,
)
from slurmbridge.slurm.refusal import RefusalReason, reason_of

PEER: Final = "slurmctld"

MAX_OUTPUT: Final = 256 * 1024 * 1024
"""Bytes of stdout. `scontrol show job -d` prints 2 KiB a job: 100,000 jobs fit."""

MAX_ERRORS: Final = 1024 * 1024
"""Bytes of stderr that are kept; the rest is read and dropped."""

GRACE_S: Final = 1.0
"""Between SIGTERM and SIGKILL after the deadline: salloc uses it to give its allocation back."""

_CHUNK: Final = 256 * 1024
_CLEARED: Final = re.compile(r"(SLURM|SLURMD|SQUEUE|SCONTROL|SALLOC|SBATCH|SRUN|SCANCEL|SINFO)_")

# Sources: slurm_strerror, 22.05 to 26.05, and the messages of the commands before they ask.
_NO_ANSWER: Final = re.compile(
    r"""unable\ to\ contact\ slurm\ controller
    | socket\ timed\ out
    | zero\ bytes\ were\ transmitted
    | communication\ (connection|shutdown)\ failure
    | connection\ (refused|timed\ out|reset)
    | no\ route\ to\ host | network\ is\ unreachable | broken\ pipe
    | transport\ endpoint | unexpected\ missing\ socket
    | (backup\ controller|controller\ is)\ in\ standby
    | temporarily\ unable\ to\ accept\ job | resource\ temporarily\ unavailable
    | munge | authentication | credential | auth(/|\ plugin)
    | incompatible\ versions | header\ lengths\ are\ longer
    | can't\ find\ an\ address | unable\ to\ (resolve|establish|create\ socket)
    | configuration\ file | clustername\ needs\ to\ be | cannot\ stat\ file | fetch_config
    | slurm\ internal\ error | unexpected\ message
    """,
    re.IGNORECASE | re.VERBOSE,
)
_NOT_FOUND: Final = re.compile(
    r"^(Node|Partition|Reservation|Job) .{1,255} not found$", re.MULTILINE
)
_VERDICT: Final = re.compile(
    r"Job submit/allocate failed|Batch job submission failed|Unable to allocate resources"
    r"|Allocation (request )?failure|Failed to allocate resources"
)


class CommandResult(msgspec.Struct, frozen=True):
    r"""What a command printed and cost.

    stdout, stderr: text; bytes that are not UTF-8 stand as `\xff` (backslash and all), so that
    any text can be logged and encoded again. code: exit status, negative for a signal.
    wall_s, cpu_s: seconds from start to end, and CPU seconds of the child itself.
    """

    stdout: str
    stderr: str
    code: int
    wall_s: float
    cpu_s: float

    @property
    def cost_s(self) -> float:
        """Seconds that the command waited for others: above all for slurmctld."""
        return max(0.0, self.wall_s - self.cpu_s)


class SlurmCommand:
    """Runs Slurm's commands; safe for any number of tasks of one event loop.

    Args:
        conf: path of slurm.conf (SLURM_CONF); "" leaves it to the caller's environment.
        folder: where the commands are; "" means PATH.
        concurrency: commands at a time; more callers wait, within their deadline.
        environ: base environment, normally `os.environ`. All variables that change what Slurm's
            commands do are taken out of it (SLURM_*, SQUEUE_*, ...).
        extra: variables that are put back afterwards (`SLURM_JWT` where munge is not used).

    """

    def __init__(
        self,
        conf: str = "",
        folder: str = "",
        *,
        concurrency: int = 16,
        environ: Mapping[str, str] | None = None,
        extra: Mapping[str, str] | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> None:
        base = os.environ if environ is None else environ
        self._folder = folder
        self._env = clean_environment(base, conf) | dict(extra or {})
        self._max_output = max_output
        self._slots = asyncio.Semaphore(concurrency)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="slurm-command")

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, stdin: str = "", check: bool = True
    ) -> CommandResult:
        """Run one command to its end.

        Args:
            argv: the command and its arguments, one element each; no shell sees them.
            timeout_s: deadline in seconds, waiting for a free slot included.
            stdin: what it reads.
            check: raise on an exit status other than 0 (`failure_of`).

        Raises:
            PeerTimeout: the deadline passed; the command may have been carried out.
            PeerUnavailable: no usable answer, or the command cannot be run.
            PeerRejected: a definite no (check only).

        """
        op = " ".join(argv[:3])
        begun = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            raise PeerUnavailable(PEER, op, f"no free slot within {timeout_s:g} s") from None
        try:
            left = max(0.0, begun + timeout_s - time.monotonic())
            result = await self._in_thread(argv, op, stdin, left)
        finally:
            self._slots.release()
        if check and result.code != 0:
            raise failure_of(op, result)
        return result

    async def _in_thread(
        self, argv: Sequence[str], op: str, stdin: str, timeout_s: float
    ) -> CommandResult:
        path = os.path.join(self._folder, argv[0]) if self._folder else argv[0]  # noqa: PTH118
        child = _Child([path, *argv[1:]], op, self._env, stdin, timeout_s, self._max_output)
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, child.run)
        except RuntimeError as error:  # closed: a task of a term that has just ended
            raise PeerUnavailable(PEER, op, str(error)) from None
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            child.stop()
            # The thread still reaps its child; nobody is left to hear how it went.
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    def close(self) -> None:
        """Let the threads end once their commands have ended."""
        self._threads.shutdown(wait=False)


def clean_environment(base: Mapping[str, str], conf: str) -> dict[str, str]:
    """Give the environment in which a command's output does not depend on its caller.

    SLURM_TIME_FORMAT=standard and TZ=UTC make every time readable without guessing;
    SLURM_BITSTR_LEN lifts the cut at 64 characters from the task list of an array; TERM=dumb keeps
    the terminal codes of scontrol's line editor out of its output.
    """
    env = {k: v for k, v in base.items() if not _CLEARED.match(k)}
    if conf or "SLURM_CONF" in base:
        env["SLURM_CONF"] = conf or base["SLURM_CONF"]
    return env | {
        "LC_ALL": "C",
        "SLURM_BITSTR_LEN": "65536",
        "SLURM_TIME_FORMAT": "standard",
        "TERM": "dumb",
        "TZ": "UTC",
    }


def failure_of(op: str, result: CommandResult) -> PeerError:
    """Tell a definite no from no answer; for a result with an exit status other than 0.

    Returns:
        `PeerRejected` (reason: a word of `refusal`, or `not_found`), or `PeerUnavailable`; where
        the text is in no list, its child `PeerProtocolError`: nothing follows from it.

    """
    text = result.stderr.strip() or result.stdout.strip()[-1024:] or f"exit status {result.code}"
    if result.code < 0:
        return PeerUnavailable(PEER, op, f"ended by signal {-result.code}: {text}")
    if _NO_ANSWER.search(result.stderr):
        return PeerUnavailable(PEER, op, text)
    reason = reason_of(text)
    if reason is not RefusalReason.OTHER:
        return PeerRejected(PEER, op, text, reason)
    if _NOT_FOUND.search(result.stdout):
        return PeerRejected(PEER, op, text, "not_found")
    if _VERDICT.search(result.stderr):
        return PeerRejected(PEER, op, text, reason)
    return PeerProtocolError(PEER, op, text)


class _Child:
    """One command: started, fed, drained and reaped by the thread that calls `run`."""

    def __init__(
        self,
        argv: Sequence[str],
        op: str,
        env: Mapping[str, str],
        stdin: str,
        timeout_s: float,
        max_output: int,
    ) -> None:
        self._argv = argv
        self._op = op
        self._env = env
        self._input = stdin.encode()
        self._timeout_s = timeout_s
        self._limits = {"out": max_output, "err": MAX_ERRORS}
        self._kept = {"out": bytearray(), "err": bytearray()}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Signal the child's process group, if it has not been reaped (from any thread)."""
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)

    def run(self) -> CommandResult:
        begun = time.monotonic()
        deadline = begun + self._timeout_s
        with self._lock:
            if self._stopped:
                raise PeerUnavailable(PEER, self._op, "cancelled before it was started")
            try:
                self._process = process = subprocess.Popen(
                    self._argv,
                    stdin=subprocess.PIPE if self._input else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=self._env,
                    start_new_session=True,
                )
            except OSError as error:
                raise PeerUnavailable(PEER, self._op, f"cannot run: {error}") from error
        fault: PeerError | None = None
        try:
            fault = self._talk(process, deadline)
            cpu_s, late = self._reap(process, deadline if fault is None else time.monotonic())
        finally:
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        if fault is not None:
            raise fault
        if late:
            raise PeerTimeout(PEER, self._op, f"no answer within {self._timeout_s:g} s")
        return CommandResult(
            stdout=self._kept["out"].decode("utf-8", "backslashreplace"),
            stderr=self._kept["err"].decode("utf-8", "backslashreplace"),
            code=process.returncode,
            wall_s=time.monotonic() - begun,
            cpu_s=cpu_s,
        )

    def _talk(self, process: subprocess.Popen[bytes], deadline: float) -> PeerError | None:
        """Feed and drain the pipes until both outputs end, or something is too much."""
        to_write = memoryview(self._input)
        with selectors.DefaultSelector() as ready:
            self._register(ready, process.stdout, selectors.EVENT_READ, "out")
            self._register(ready, process.stderr, selectors.EVENT_READ, "err")
            self._register(ready, process.stdin, selectors.EVENT_WRITE, "in")
            while any(key.data != "in" for key in ready.get_map().values()):
                left = deadline - time.monotonic()
                if left <= 0:
                    return PeerTimeout(PEER, self._op, f"no answer within {self._timeout_s:g} s")
                for key, _ in ready.select(left):
                    if key.data == "in":
                        try:
                            to_write = to_write[os.write(key.fd, to_write[:_CHUNK]) :]
                        except BlockingIOError:
                            continue
                        except BrokenPipeError:  # it has read enough, or is ending
                            to_write = to_write[:0]
                        if not to_write:
                            ready.unregister(key.fileobj)
                            if process.stdin is not None:
                                process.stdin.close()
                        continue
                    data = os.read(key.fd, _CHUNK)
                    kept = self._kept[key.data]
                    if not data:
                        ready.unregister(key.fileobj)
                    elif len(kept) + len(data) <= self._limits[key.data]:
                        kept += data
                    elif key.data == "out":
                        return PeerProtocolError(
                            PEER, self._op, f"more than {self._limits['out']} bytes of output"
                        )
        return None

    def _reap(self, process: subprocess.Popen[bytes], deadline: float) -> tuple[float, bool]:
        """Wait for the end; from the deadline on with SIGTERM, later SIGKILL.

        Returns:
            CPU seconds of the child, and whether the deadline had to be enforced.

        """
        pause, late, killed = 0.0005, False, False
        while True:
            with self._lock:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    return usage.ru_utime + usage.ru_stime, late
            now = time.monotonic()
            if now >= deadline and not late:
                late = True
                self.stop(signal.SIGTERM)
            elif now >= deadline + GRACE_S and not killed:
                killed = True
                self.stop(signal.SIGKILL)
            time.sleep(pause)
            pause = min(0.02, 2 * pause)

    @staticmethod
    def _register(
        ready: selectors.BaseSelector, pipe: IO[bytes] | None, event: int, name: str
    ) -> None:
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)
            ready.register(pipe, event, name)
