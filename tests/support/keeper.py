"""A small process that owns every process of one test cluster and outlives nobody.

`Keeper` is the side of the test runner; run as a script this file is the keeper itself (standard
library only, it starts in about 40 ms). They talk in JSON lines over the keeper's stdin and stdout,
one answer a question.

Why a process of its own: a test runner may be killed with SIGKILL, and Slurm's daemons fork
children that leave their process group and session (slurmstepd, job scripts). The keeper is a child
subreaper, so that whatever its daemons leave behind becomes its own child; when its stdin ends (the
runner is gone, however it died) it kills every process below it, removes the folders it was given
and ends. Should the keeper itself be killed, its direct children get SIGKILL by PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ANSWER_S = 60.0


class KeeperError(RuntimeError):
    """The keeper could not do what was asked, or is gone."""


class Keeper:
    """Starts, signals and ends the processes of one cluster. Thread-safe; every call is bounded.

    Processes are known by a name that the caller chooses; a name may be used again after its
    process has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Process id of the keeper."""
        return self._process.pid

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: tuple[int, int] | None = None,
    ) -> int:
        """Start a process with stdout and stderr appended to `log`; its pid.

        Args:
            name: how it is called in the other methods.
            env: its whole environment; None: ours.
            user: (uid, gid) to run as; None: ours.

        Raises:
            KeeperError: it cannot be executed, or a process of that name runs.

        """
        answer = self._ask(
            op="start",
            name=name,
            argv=list(argv),
            log=str(log),
            env=dict(os.environ if env is None else env),
            cwd=None if cwd is None else str(cwd),
            user=user,
        )
        return int(answer["pid"])

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal; nothing happens when the process has ended."""
        self._ask(op="signal", name=name, signal=int(number))

    def wait(self, name: str, timeout_s: float = 10.0) -> int:
        """Exit status of the process (negative: the signal that ended it).

        Raises:
            KeeperError: it still runs after `timeout_s`.

        """
        deadline = time.monotonic() + timeout_s
        while (status := self.poll(name)) is None:
            if time.monotonic() > deadline:
                raise KeeperError(f"{name} still runs after {timeout_s:g} s")
            time.sleep(0.01)
        return status

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal (SIGKILL when not told otherwise) and wait for the end."""
        self.send(name, number)
        self.wait(name)

    def poll(self, name: str) -> int | None:
        """Exit status, or None while the process runs.

        Raises:
            KeeperError: no process of that name was ever started.

        """
        status = self._ask(op="poll", name=name)["status"]
        return None if status is None else int(status)

    def pids(self) -> list[int]:
        """All living processes below the keeper, job scripts included."""
        return [int(pid) for pid in self._ask(op="pids")["pids"]]

    def remove_at_end(self, folder: Path) -> None:
        """Remove the folder with all that is in it once every process has ended."""
        self._ask(op="remove_at_end", folder=str(folder))

    def stop(self) -> None:
        """Kill every process below the keeper, remove its folders, end it. May be called twice."""
        with self._lock:
            if self._process.stdin is not None and not self._process.stdin.closed:
                self._process.stdin.close()
            self._process.wait(timeout=ANSWER_S)
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _ask(self, **question: Any) -> dict[str, Any]:
        with self._lock:
            stdin, stdout = self._process.stdin, self._process.stdout
            if stdin is None or stdout is None or stdin.closed:
                raise KeeperError("the keeper has been stopped")
            try:
                stdin.write(json.dumps(question) + "\n")
                stdin.flush()
            except BrokenPipeError as error:
                raise KeeperError("the keeper is gone") from error
            ready, _, _ = select.select([stdout], [], [], ANSWER_S)
            line = stdout.readline() if ready else ""
        if not line:
            raise KeeperError(f"no answer from the keeper to {question['op']}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise KeeperError(str(answer["error"]))
        return answer


def fresh_folder(folder: Path | None, prefix: str) -> Path:
    """The folder of a new cluster: `folder`, made if missing, or a temporary one.

    Raises:
        KeeperError: it is not empty, so it may be another cluster's, or not ours to remove.

    """
    if folder is None:
        return Path(tempfile.mkdtemp(prefix=prefix))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise KeeperError(f"not an empty folder: {folder}")
    return folder.absolute()


def keeps(told: bool) -> bool:
    """Whether a cluster's folder outlives it."""
    return told or bool(os.environ.get("SLURMBRIDGE_KEEP"))


class _Processes:
    """What the keeper process keeps: one thread, no locks."""

    def __init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.running: dict[int, str] = {}
        self.by_name: dict[str, int] = {}
        self.ended: dict[str, int] = {}
        self.folders: list[str] = []

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        op, name = question["op"], question.get("name", "")
        self.reap()
        if op == "start":
            return self.start(name, question)
        if op == "signal":
            if name in self.by_name:
                os.kill(self.by_name[name], question["signal"])
            return {}
        if op == "poll":
            if name not in self.by_name and name not in self.ended:
                return {"error": f"no process {name}"}
            return {"status": None if name in self.by_name else self.ended[name]}
        if op == "pids":
            return {"pids": descendants()}
        if op == "remove_at_end":
            self.folders.append(question["folder"])
            return {}
        return {"error": f"unknown op {op}"}

    def start(self, name: str, question: dict[str, Any]) -> dict[str, Any]:
        if name in self.by_name:
            return {"error": f"{name} runs already"}
        own_pid, user = os.getpid(), question["user"]

        def before_exec() -> None:
            if user is not None:
                os.setgroups([])
                os.setgid(user[1])
                os.setuid(user[0])
            # After the change of user, which clears it.
            self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != own_pid:
                os._exit(1)

        try:
            with open(question["log"], "ab") as log:
                process = subprocess.Popen(
                    question["argv"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=question["env"],
                    cwd=question["cwd"],
                    start_new_session=True,
                    preexec_fn=before_exec,  # noqa: PLW1509 - the keeper has one thread
                )
        except (OSError, subprocess.SubprocessError) as error:
            return {"error": f"{question['argv'][0]}: {error}"}
        # reap() waits for all children by pid; Popen must not wait for this one too.
        process.returncode = 0
        self.running[process.pid] = name
        self.by_name[name] = process.pid
        self.ended.pop(name, None)
        return {"pid": process.pid}

    def reap(self) -> bool:
        """Note which processes have ended; whether there are children left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            name = self.running.pop(pid, None)
            if name is not None:
                del self.by_name[name]
                self.ended[name] = os.waitstatus_to_exitcode(status)

    def end(self) -> None:
        # Until two looks in a row find nobody: a dying daemon's children come to us one by one.
        while pids := descendants():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.005)
            self.reap()
        # Nothing below us runs any more: leave no zombie to whoever inherits us either.
        deadline = time.monotonic() + 5.0
        while self.reap() and time.monotonic() < deadline:
            time.sleep(0.002)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def descendants() -> list[int]:
    """Living processes below this one, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as stat:
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    level = [os.getpid()]
    while level:
        level = [child for pid in level for child in children.get(pid, [])]
        found.extend(level)
    return found


def _serve(questions: IO[bytes], answers: IO[str], runner: int) -> None:
    processes = _Processes()
    wakeup_read, wakeup_write = os.pipe()
    for end in (wakeup_read, wakeup_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    pending = b""
    try:
        # A fork of the runner may hold our stdin open after the runner's death: look at the parent
        # too, once a second.
        while os.getppid() == runner:
            ready, _, _ = select.select([questions.fileno(), wakeup_read], [], [], 1.0)
            if wakeup_read in ready:
                os.read(wakeup_read, 4096)
                processes.reap()
            if questions.fileno() not in ready:
                continue
            got = os.read(questions.fileno(), 1 << 20)
            if not got:
                break
            *lines, pending = (pending + got).split(b"\n")
            for line in lines:
                answers.write(json.dumps(processes.answer(json.loads(line))) + "\n")
                answers.flush()
    finally:
        processes.end()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout, os.getppid())
