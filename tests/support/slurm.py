"""A real Slurm cluster on this machine: munged, slurmctld, one slurmd per virtual node.

Everything is Debian's (22.05 and newer): own munge key and socket, own ports, own folder; the
system's Slurm and munge are not touched. Works as root and as any user (`SlurmUser` is the caller).

Nodes may claim more CPUs, memory and GPUs than the machine has (`config_overrides`); their GPUs are
plain files, which is enough for slurmctld to number them: `GRES=gpu:a100:4(IDX:0-3)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.support.keeper import Keeper, fresh_folder, keeps
from tests.support.ports import PortBlock, reserve
from tests.support.slurm_config import (
    NodeGroup,
    Places,
    SlurmConfig,
    database_argv,
    gres_conf,
    slurm_conf,
    slurmdbd_conf,
)

__all__ = ["NodeGroup", "SlurmCluster", "SlurmConfig", "SlurmError"]

if TYPE_CHECKING:
    from collections.abc import Callable

UNIX_PATH_MAX = 107
CLIENT_VARIABLES = re.compile(r"^(SLURM|SLURMD|SBATCH|SALLOC|SRUN|SCANCEL|SQUEUE|SINFO|MUNGE)_")


class SlurmError(RuntimeError):
    """A Slurm command or daemon of the test cluster failed; the text has its output."""


@dataclass
class SlurmCluster:
    """A running cluster between `start` and `stop` (or as a context manager).

    folder: where it lives, missing or empty; None makes one under the temporary folder. It is
    removed at the end unless `keep` (or SLURMBRIDGE_KEEP in the environment) says otherwise.
    Attributes after start: `conf_path`, `node_names`, `log_folder`.
    """

    config: SlurmConfig = field(default_factory=SlurmConfig)
    folder: Path | None = None
    keep: bool = False

    def __post_init__(self) -> None:
        self._keeper: Keeper | None = None
        self._ports: PortBlock | None = None
        self._dir = Path()

    # Life

    def start(self, timeout_s: float = 120.0) -> Self:
        """Start all daemons and wait until every node is IDLE.

        Raises:
            SlurmError: a daemon ended, or nodes are not up in time; with the end of its log.

        """
        for command in ("munged", "slurmctld", "slurmd", "scontrol"):
            if _which(command) is None:
                raise SlurmError(f"{command} is not installed: see tests.support.bootstrap")
        self._dir = fresh_folder(self.folder, "sb-slurm-")
        if len(str(self._places.munge_socket)) > UNIX_PATH_MAX:
            raise SlurmError(f"folder name too long for a Unix socket: {self._dir}")
        self._keeper = Keeper()
        if not keeps(self.keep):
            self._keeper.remove_at_end(self._dir)
        try:
            # One each for slurmctld, slurmrestd, slurmdbd, and one for each node.
            self._ports = reserve(3 + len(self.node_names))
            self._lay_folder()
            self.write_config()
            self._start_munged()
            if self.config.accounting:
                self._start_database()
                self.start_slurmdbd()
                # A slurmctld that enforces limits does not start before slurmdbd knows its cluster.
                self.run("sacctmgr", "-i", "add", "cluster", "pool")
            self.start_slurmctld(wait=False)
            for name in self.node_names:
                self.start_slurmd(name)
            self.wait_nodes(timeout_s=timeout_s)
            if self.config.rest:
                self.start_slurmrestd()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Kill everything, job scripts included, and remove the folder (see `keep`)."""
        if self._keeper is not None:
            self._keeper.stop()
        if self._ports is not None:
            self._ports.release()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # What clients need

    @property
    def conf_path(self) -> Path:
        """slurm.conf; everything else of the configuration stands beside it."""
        return self._places.conf_path

    @property
    def dir(self) -> Path:
        """The cluster's folder (after start)."""
        return self._dir

    @property
    def log_folder(self) -> Path:
        """slurmctld.log, <node>.log, munged.log, and those of what else was asked for."""
        return self._places.log_folder

    @property
    def node_names(self) -> list[str]:
        """All nodes in slurm.conf order."""
        return [name for group in self.config.all_groups() for name in group.names]

    @property
    def slurm_user(self) -> str:
        """Name of SlurmUser: whoever started the cluster."""
        return getpass.getuser()

    def env(self) -> dict[str, str]:
        """Environment for Slurm commands of this cluster: ours, cleaned of other Slurm settings."""
        clean = {k: v for k, v in os.environ.items() if not CLIENT_VARIABLES.match(k)}
        clean["SLURM_CONF"] = str(self.conf_path)
        clean["PATH"] = _path_with_sbin()
        return clean

    def run(
        self,
        *argv: str,
        check: bool = True,
        stdin: str = "",
        user: str | None = None,
        timeout_s: float = 60.0,
    ) -> str:
        """Run a command (`scontrol`, `sbatch`, ...) in the cluster's environment; its stdout.

        Args:
            check: raise when it fails; False gives stdout whatever happened.
            user: run as this Unix user (root only).

        Raises:
            SlurmError: it exited non-zero (and `check`).
            subprocess.TimeoutExpired: it did not end in time.

        """
        done = self.run_raw(*argv, stdin=stdin, user=user, timeout_s=timeout_s)
        if check and done.returncode != 0:
            raise SlurmError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def run_raw(
        self, *argv: str, stdin: str = "", user: str | None = None, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Like `run`, but with exit status and stderr."""
        uid = None if user is None else pwd.getpwnam(user)
        return subprocess.run(
            argv,
            env=self.env(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd="/",
            user=None if uid is None else uid.pw_uid,
            group=None if uid is None else uid.pw_gid,
            extra_groups=None if uid is None else [],
        )

    @property
    def port(self) -> int:
        """Port of slurmctld."""
        return self._block[0]

    # slurmctld

    def start_slurmctld(self, *, wait: bool = True, timeout_s: float = 30.0) -> None:
        """Start slurmctld on its saved state, until it listens; with `wait` until it answers."""
        self._keep.start(
            "slurmctld",
            ["slurmctld", "-D", "-f", str(self.conf_path)],
            log=self.log_folder / "slurmctld.out",
            env=self.env(),
            cwd=self._dir,
        )
        # A client or slurmd that comes before the port is open sleeps a second before it tries again.
        port = self._block[0]
        self._wait_for("slurmctld listens", lambda: _listens(port), timeout_s, "slurmctld")
        if wait:
            self._wait_for("slurmctld answers", self._slurmctld_answers, timeout_s, "slurmctld")

    def kill9_slurmctld(self) -> None:
        """End slurmctld as a crash does: nothing is saved."""
        self._keep.kill("slurmctld")

    def stop_slurmctld(self) -> None:
        """End slurmctld in order (SIGTERM): it saves its state."""
        self._keep.kill("slurmctld", signal.SIGTERM)

    def pause_slurmctld(self) -> None:
        """SIGSTOP: connections are accepted by the kernel, and nothing answers."""
        self._keep.send("slurmctld", signal.SIGSTOP)

    def resume_slurmctld(self) -> None:
        """Undo `pause_slurmctld`."""
        self._keep.send("slurmctld", signal.SIGCONT)

    # slurmd

    def start_slurmd(self, node: str) -> None:
        """Start the slurmd of one node; does not wait for its registration."""
        self._keep.start(
            node,
            ["slurmd", "-D", "-N", node, "-f", str(self.conf_path)],
            log=self.log_folder / f"{node}.out",
            env=self.env(),
            cwd=self._dir,
        )

    def kill9_slurmd(self, node: str) -> None:
        """End one slurmd with SIGKILL; its job scripts (slurmstepd) live on, as in real life."""
        self._keep.kill(node)

    def pause_slurmd(self, node: str) -> None:
        """SIGSTOP one slurmd."""
        self._keep.send(node, signal.SIGSTOP)

    def resume_slurmd(self, node: str) -> None:
        """Undo `pause_slurmd`."""
        self._keep.send(node, signal.SIGCONT)

    # slurmrestd

    @property
    def rest_url(self) -> str:
        """Base URL of slurmrestd when `rest` is set: `http://127.0.0.1:<port>`."""
        return f"http://127.0.0.1:{self._block[1]}"

    def start_slurmrestd(self, timeout_s: float = 20.0) -> None:
        """Start slurmrestd (JWT only) and wait until it listens. It refuses to run as root."""
        if _which("slurmrestd") is None:
            raise SlurmError("slurmrestd is not installed: see tests.support.bootstrap")
        as_root = os.getuid() == 0
        nobody = pwd.getpwnam("nobody")
        env = self.env() | {
            "SLURM_JWT": "daemon",
            "SLURMRESTD_SECURITY": "disable_unshare_sysv,disable_unshare_files",
        }
        # The accounting half of the API is fatal without slurmdbd, so only slurmctld's is asked for.
        # 22.05 names its plugin after the data version, since 23.11 after the daemon.
        half = "openapi/v0.0.38" if self._slurm_version() < (23, 11) else "openapi/slurmctld"
        argv = ["slurmrestd", "-f", str(self.conf_path), "-a", "rest_auth/jwt", "-s", half]
        self._keep.start(
            "slurmrestd",
            [*argv, f"127.0.0.1:{self._block[1]}"],
            log=self.log_folder / "slurmrestd.out",
            env=env,
            cwd=Path("/"),
            user=(nobody.pw_uid, nobody.pw_gid) if as_root else None,
        )
        self._wait_for(
            "slurmrestd listens", lambda: _listens(self._block[1]), timeout_s, "slurmrestd"
        )

    def kill9_slurmrestd(self) -> None:
        """End slurmrestd with SIGKILL."""
        self._keep.kill("slurmrestd")

    def token(self, user: str | None = None, lifespan_s: int = 3600) -> str:
        """A JWT for slurmrestd, of SlurmUser or (as root) of another user."""
        whom = [] if user is None else [f"username={user}"]
        text = self.run("scontrol", "token", f"lifespan={lifespan_s}", *whom)
        return text.strip().removeprefix("SLURM_JWT=")

    # slurmdbd

    def start_slurmdbd(self, timeout_s: float = 60.0) -> None:
        """Start slurmdbd (again), until it listens. The first time it makes its tables."""
        self._keep.start(
            "slurmdbd",
            ["slurmdbd", "-D"],
            log=self.log_folder / "slurmdbd.out",
            env=self.env() | {"MYSQL_UNIX_PORT": str(self._places.database_socket)},
            cwd=self._dir,
        )
        port = self._places.dbd_port
        self._wait_for("slurmdbd listens", lambda: _listens(port), timeout_s, "slurmdbd")

    def kill9_slurmdbd(self) -> None:
        """End slurmdbd with SIGKILL; slurmctld keeps for it what it would have been told."""
        self._keep.kill("slurmdbd")

    # Waiting and asking

    def wait_nodes(self, state: str = "idle", timeout_s: float = 60.0) -> None:
        """Wait until every node shows exactly this state in `sinfo -o %T`."""

        def reached() -> bool:
            text = self.run("sinfo", "-h", "-N", "-o", "%N %T", check=False)
            states = dict(line.split() for line in text.splitlines())
            return len(states) == len(self.node_names) and set(states.values()) == {state}

        self._wait_for(f"all nodes {state}", reached, timeout_s, "slurmctld")

    def wait_scheduling(self, timeout_s: float = 30.0) -> None:
        """Wait for the first cycle of the main scheduler.

        Up to 3 s after its start slurmctld grants immediate claims (`-I`) but starts no queued job;
        one that has recovered jobs may do so only after a minute (`sched_interval`), or when it is
        given a cause: an update of a node.
        """

        def cycled() -> bool:
            cause = ("scontrol", "update", f"nodename={self.node_names[0]}", "comment=")
            self.run(*cause, check=False)
            main = self.run("sdiag").partition("Main schedule")[2].partition("Backfilling")[0]
            match = re.search(r"Total cycles:\s*(\d+)", main)
            return match is not None and int(match[1]) > 0

        self._wait_for("first scheduling cycle", cycled, timeout_s, "slurmctld")

    def wait_saved(self, job_id: int | str, timeout_s: float = 60.0) -> None:
        """Wait until a kill of slurmctld costs nothing of a job, and of those before it.

        It saves all jobs at once, 5 s after a change, or later on a busy machine. The job gets a mark
        (AdminComment), and is saved when that is in the file.
        """
        mark = f"saved-{secrets.token_hex(8)}"
        self.run("scontrol", "update", f"jobid={job_id}", f"admincomment={mark}")

        def is_saved() -> bool:
            try:
                return mark.encode() in (self.dir / "state" / "job_state").read_bytes()
            except FileNotFoundError:
                return False  # it is being replaced

        self._wait_for(f"job {job_id} is saved", is_saved, timeout_s, "slurmctld")

    def job_field(self, job_id: int | str, name: str) -> str:
        """One `Name=value` of `scontrol show job -d -o`, "" when it is not there.

        For tests that need one simple field; `tests.support.checker` reads whole listings.
        """
        text = self.run("scontrol", "show", "job", "-d", "-o", str(job_id))
        match = re.search(rf"(?:^|\s){re.escape(name)}=(\S*)", text)
        return match[1] if match else ""

    def pids(self) -> list[int]:
        """Every living process of the cluster, job scripts included."""
        return self._keep.pids()

    # Configuration

    def reconfigure(self, **changes: object) -> None:
        """Change fields of `config`, rewrite the files and run `scontrol reconfigure`.

        The nodes must stay the same: their ports are fixed at start.
        """
        self.config = dataclasses.replace(self.config, **changes)  # type: ignore[arg-type]
        self.write_config()
        self.run("scontrol", "reconfigure")

    def write_config(self) -> None:
        """Write slurm.conf, gres.conf, topology.conf and cgroup.conf from `config`."""
        self._write("slurm.conf", slurm_conf(self.config, self._places))
        self._write("gres.conf", gres_conf(self.config, self._places))
        topology = self.conf_path.with_name("topology.conf")
        topology.unlink(missing_ok=True)
        if self.config.topology:
            self._write("topology.conf", self.config.topology)
        # 22.05 does not know the value; newer slurmds would look for a cgroup tree of their own.
        if self._slurm_version() >= (23, 11):
            self._write("cgroup.conf", "CgroupPlugin=disabled\n")
        if self.config.accounting:
            self._write("slurmdbd.conf", slurmdbd_conf(self._places))
            self.conf_path.with_name("slurmdbd.conf").chmod(0o600)

    # Inside

    @property
    def _keep(self) -> Keeper:
        if self._keeper is None:
            raise SlurmError("the cluster has not been started")
        return self._keeper

    @property
    def _block(self) -> PortBlock:
        if self._ports is None:
            raise SlurmError("the cluster has not been started")
        return self._ports

    @property
    def _places(self) -> Places:
        first = 0 if self._ports is None else self._ports.first
        return Places(self._dir, first, self.slurm_user)

    def _write(self, name: str, text: str) -> None:
        """One file, where it changes: a gres.conf that is newer than slurmd is none of slurmd's."""
        path = self.conf_path.with_name(name)
        if path.exists() and path.read_text() == text:
            return
        path.write_text(text)
        path.chmod(0o644)

    def _lay_folder(self) -> None:
        # Clients of other Unix users must reach slurm.conf and the munge socket.
        for folder in ("", "etc", "log", "run", "state", "spool", "dev", "munge"):
            (self._dir / folder).mkdir(mode=0o755, parents=True, exist_ok=True)
            (self._dir / folder).chmod(0o700 if folder == "munge" else 0o755)
        for name in self.node_names:
            (self._dir / "spool" / name).mkdir(exist_ok=True)
        for index in range(max(group.gpus for group in self.config.all_groups())):
            (self._dir / "dev" / f"nvidia{index}").touch()
        for name, size in (("munge/munge.key", 128), ("state/jwt.key", 32)):
            path = self._dir / name
            path.write_bytes(secrets.token_bytes(size))
            path.chmod(0o600)

    def _start_database(self) -> None:
        """Make an empty database and start its server: mariadbd, with a socket only."""
        if _which("mariadbd") is None or _which("slurmdbd") is None:
            raise SlurmError("mariadbd or slurmdbd is not installed: see tests.support.bootstrap")
        places = self._places
        if len(str(places.database_socket)) > UNIX_PATH_MAX:
            raise SlurmError(f"folder name too long for a Unix socket: {self._dir}")
        (places.database / "data").mkdir(parents=True)
        places.database.chmod(0o700)
        options = database_argv(places)
        more = ["--auth-root-authentication-method=normal", "--skip-test-db"]
        argv = {
            "mariadb-install-db": ["mariadb-install-db", *options, *more],
            "mariadbd": ["mariadbd", *options],
        }
        for name, command in argv.items():
            log = self.log_folder / f"{name}.log"
            self._keep.start(name, command, log=log, env=self.env(), cwd=self._dir)
            if name == "mariadb-install-db" and self._keep.wait(name, timeout_s=60.0) != 0:
                raise SlurmError(f"{name} failed: {self._log_end(name)}")
        self._wait_for("mariadbd listens", places.database_socket.is_socket, 30.0, "mariadbd")

    def _start_munged(self) -> None:
        private = self._dir / "munge"
        self._keep.start(
            "munged",
            [
                "munged",
                "--foreground",
                "--force",
                "--num-threads=4",
                f"--socket={self._places.munge_socket}",
                f"--key-file={private / 'munge.key'}",
                f"--pid-file={private / 'munged.pid'}",
                f"--seed-file={private / 'munged.seed'}",
                f"--log-file={private / 'munged.log'}",
            ],
            log=self.log_folder / "munged.log",
            env=self.env(),
            cwd=self._dir,
        )
        self._wait_for("munged listens", self._places.munge_socket.is_socket, 10.0, "munged")

    def _slurmctld_answers(self) -> bool:
        return self.run_raw("sinfo", "-h", "-o", "%D", timeout_s=10.0).returncode == 0

    def _wait_for(
        self, what: str, reached: Callable[[], bool], timeout_s: float, daemon: str
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            # First: a client of a dead slurmctld tries for 9 s before it says so.
            status = self._keep.poll(daemon)
            if status is not None:
                raise SlurmError(f"{daemon} ended with {status}: {self._log_end(daemon)}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                if reached():
                    return
            if time.monotonic() > deadline:
                raise SlurmError(f"{what}: not in {timeout_s:g} s: {self._log_end(daemon)}")
            time.sleep(0.02)

    def _log_end(self, daemon: str) -> str:
        texts = [
            path.read_text(errors="replace")[-1500:]
            for path in (self.log_folder / f"{daemon}.log", self.log_folder / f"{daemon}.out")
            if path.exists()
        ]
        return "\n".join(texts)

    def _slurm_version(self) -> tuple[int, int]:
        text = subprocess.run(
            ["slurmctld", "-V"], env=self.env(), capture_output=True, text=True, check=True
        ).stdout
        match = re.search(r"(\d+)\.(\d+)", text)
        if match is None:
            raise SlurmError(f"slurmctld -V says {text!r}")
        return int(match[1]), int(match[2])


def _which(command: str) -> str | None:
    return shutil.which(command, path=_path_with_sbin())


def _path_with_sbin() -> str:
    # Debian keeps the daemons in sbin, which a user's PATH may lack.
    return os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
