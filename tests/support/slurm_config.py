"""What a Slurm test cluster looks like, and its configuration files as text.

Pure: values in, text out. `tests.support.slurm` writes the files and starts the daemons.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

DEFAULT_PARTITIONS = (
    "PartitionName=main Nodes=ALL Default=YES State=UP MaxTime=INFINITE OverSubscribe=NO",
    # Where claims go: preempts nobody (a refused immediate claim would still kill its victims), and
    # only root and SlurmUser may submit to it.
    (
        "PartitionName=claims Nodes=ALL Default=NO State=UP MaxTime=INFINITE OverSubscribe=NO"
        " PreemptMode=OFF Hidden=NO RootOnly=YES"
    ),
)


@dataclass(frozen=True)
class NodeGroup:
    """Virtual nodes of one kind, called `<prefix>001`, `<prefix>002`, ...; one group a prefix.

    memory_mb: RealMemory, MiB. extra: more of the node line (`Feature=...`). `gpu_type` "" makes
    GPUs without a type.
    """

    count: int
    prefix: str = "gpu"
    gpus: int = 8
    gpu_type: str = "a100"
    cpus: int = 64
    memory_mb: int = 512_000
    extra: str = ""

    @property
    def names(self) -> list[str]:
        """Node names in order."""
        return [f"{self.prefix}{number:0{self._width}d}" for number in range(1, self.count + 1)]

    @property
    def hostlist(self) -> str:
        """The same as a Slurm hostlist."""
        return f"{self.prefix}[{1:0{self._width}d}-{self.count:0{self._width}d}]"

    @property
    def _width(self) -> int:
        return max(3, len(str(self.count)))


@dataclass(frozen=True)
class SlurmConfig:
    """What the cluster looks like. `groups` stands for nodes ... prefix when given.

    partitions: slurm.conf lines. extra: more slurm.conf lines; `Key=Value` replaces ours.
    topology: text of topology.conf (with `TopologyPlugin=topology/tree` set), "" for none.
    numbered: False gives count-only GRES (no device files), so jobs have no indices.
    sides: the first half of a node's GPUs is near the first half of its cores (gres.conf Cores=).
    bf_interval_s, min_job_age_s: seconds. prolog, epilog: absolute paths of scripts.
    rest: slurmrestd with JWT beside it (see SlurmCluster.rest_url).
    accounting: slurmdbd and a database of its own beside it: accounts, QOS and their limits, which
    `sacctmgr` makes and slurmctld enforces. Whoever has no association may not submit.
    """

    nodes: int = 64
    gpus_per_node: int = 8
    gpu_type: str = "a100"
    cpus: int = 64
    memory_mb: int = 512_000
    prefix: str = "gpu"
    groups: tuple[NodeGroup, ...] = ()
    partitions: tuple[str, ...] = DEFAULT_PARTITIONS
    extra: tuple[str, ...] = ()
    topology: str = ""
    numbered: bool = True
    sides: bool = False
    bf_interval_s: int = 5
    min_job_age_s: int = 30
    prolog: str = ""
    epilog: str = ""
    rest: bool = False
    accounting: bool = False

    def all_groups(self) -> tuple[NodeGroup, ...]:
        """The node groups, also when only the simple fields were given."""
        if self.groups:
            return self.groups
        return (
            NodeGroup(
                count=self.nodes,
                prefix=self.prefix,
                gpus=self.gpus_per_node,
                gpu_type=self.gpu_type,
                cpus=self.cpus,
                memory_mb=self.memory_mb,
            ),
        )


@dataclass(frozen=True)
class Places:
    """Where one cluster lives: its folder, its ports and who runs it.

    Port `first_port` is slurmctld's, the next slurmrestd's, the next slurmdbd's, then one for each
    node.
    """

    folder: Path
    first_port: int
    user: str

    @property
    def first_node_port(self) -> int:
        """Port of the first slurmd."""
        return self.first_port + 3

    @property
    def dbd_port(self) -> int:
        """Port of slurmdbd."""
        return self.first_port + 2

    @property
    def database(self) -> Path:
        """Folder of the database; nobody else may enter it, since its root needs no password."""
        return self.folder / "database"

    @property
    def database_socket(self) -> Path:
        """The one way to the database server."""
        return self.database / "socket"

    @property
    def conf_path(self) -> Path:
        """slurm.conf."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def log_folder(self) -> Path:
        """Logs of all daemons."""
        return self.folder / "log"

    @property
    def munge_socket(self) -> Path:
        """Socket of the cluster's own munged."""
        return self.folder / "run" / "munge.socket"

    @property
    def jwt_key(self) -> Path:
        """Key that slurmctld signs REST tokens with."""
        return self.folder / "state" / "jwt.key"


def slurm_conf(config: SlurmConfig, places: Places) -> str:
    """Text of slurm.conf."""
    folder, log = places.folder, places.log_folder
    settings = {
        "ClusterName": "pool",
        "SlurmctldHost": "localhost(127.0.0.1)",
        "SlurmctldPort": str(places.first_port),
        "SlurmUser": places.user,
        "SlurmdUser": places.user,
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "AuthInfo": f"socket={places.munge_socket}",
        "StateSaveLocation": str(folder / "state"),
        "SlurmdSpoolDir": str(folder / "spool" / "%n"),
        "SlurmctldPidFile": str(folder / "run" / "slurmctld.pid"),
        "SlurmdPidFile": str(folder / "run" / "%n.pid"),
        "SlurmctldLogFile": str(log / "slurmctld.log"),
        "SlurmdLogFile": str(log / "%n.log"),
        "SlurmdParameters": "config_overrides",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "GresTypes": "gpu",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "JobCompType": "jobcomp/none",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": f"bf_interval={config.bf_interval_s},batch_sched_delay=0",
        # Without it a job that asks for no memory takes all of the node's.
        "DefMemPerCPU": "1024",
        "ReturnToService": "2",
        "MinJobAge": str(config.min_job_age_s),
        "InactiveLimit": "0",
        "KillWait": "5",
        "SlurmctldTimeout": "60",
        "SlurmdTimeout": "300",
        # One hop to every node: all are on this machine, and a slow one delays no other.
        "TreeWidth": "65000",
        "MailProg": "/bin/true",
    }
    for key, value in (("Prolog", config.prolog), ("Epilog", config.epilog)):
        if value:
            settings[key] = value
    if config.topology:
        settings["TopologyPlugin"] = "topology/tree"
    if config.rest:
        settings["AuthAltTypes"] = "auth/jwt"
        settings["AuthAltParameters"] = f"jwt_key={places.jwt_key}"
    if config.accounting:
        settings["AccountingStorageType"] = "accounting_storage/slurmdbd"
        settings["AccountingStorageHost"] = "localhost"
        settings["AccountingStoragePort"] = str(places.dbd_port)
        # The munge socket: clients of slurmdbd do not look into AuthInfo.
        settings["AccountingStoragePass"] = str(places.munge_socket)
        settings["AccountingStorageEnforce"] = "limits,qos,safe"
        settings["AccountingStorageTRES"] = "gres/gpu"
    more = []
    for line in config.extra:
        key, _, value = line.partition("=")
        # NodeName=, PartitionName= and the like stand many times and hold more pairs.
        if " " in line.strip() or key.endswith("Name"):
            more.append(line)
        else:
            settings[key] = value
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [*_node_lines(config, places.first_node_port), *config.partitions, *more]
    return "\n".join(lines) + "\n"


def _node_lines(config: SlurmConfig, port: int) -> list[str]:
    lines = []
    for group in config.all_groups():
        kind = f":{group.gpu_type}" if group.gpu_type else ""
        gres = f" Gres=gpu{kind}:{group.gpus}" if group.gpus else ""
        lines.append(
            f"NodeName={group.hostlist} NodeAddr=127.0.0.1 NodeHostname=localhost"
            f" Port=[{port}-{port + group.count - 1}] CPUs={group.cpus}"
            f" RealMemory={group.memory_mb}{gres} State=UNKNOWN {group.extra}".rstrip()
        )
        port += group.count
    return lines


def slurmdbd_conf(places: Places) -> str:
    """Text of slurmdbd.conf, which only its user may read."""
    settings = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={places.munge_socket}",
        "DbdHost": "localhost",
        "DbdPort": str(places.dbd_port),
        "SlurmUser": places.user,
        "StorageType": "accounting_storage/mysql",
        # The socket is named by the environment (MYSQL_UNIX_PORT).
        "StorageHost": "localhost",
        "StorageLoc": "slurm_acct_db",
        "StorageUser": "root",
        "LogFile": str(places.log_folder / "slurmdbd.log"),
        "PidFile": str(places.folder / "run" / "slurmdbd.pid"),
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def database_argv(places: Places) -> list[str]:
    """Options of mariadbd: reached by its socket alone, small, and fast rather than durable."""
    return [
        "--no-defaults",
        f"--user={places.user}",
        f"--datadir={places.database / 'data'}",
        f"--socket={places.database_socket}",
        f"--pid-file={places.database / 'pid'}",
        f"--tmpdir={places.database}",
        "--skip-networking",
        "--skip-log-bin",
        "--skip-name-resolve",
        "--performance-schema=OFF",
        "--innodb-buffer-pool-size=16M",
        "--innodb-log-file-size=8M",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-flush-method=nosync",
        "--innodb-doublewrite=OFF",
        "--innodb-use-native-aio=OFF",
        "--innodb-lock-wait-timeout=900",
    ]


def gres_conf(config: SlurmConfig, places: Places) -> str:
    """Text of gres.conf: GPUs as plain files, or only counted."""
    lines = ["AutoDetect=off"]
    for group in config.all_groups():
        if not group.gpus:
            continue
        kind = f" Type={group.gpu_type}" if group.gpu_type else ""
        what = f" Count={group.gpus}"
        if config.numbered:
            what = f" File={places.folder / 'dev'}/nvidia[0-{group.gpus - 1}]"
        line = f"NodeName={group.hostlist} Name=gpu{kind}"
        if config.numbered and config.sides:
            half, cores, dev = group.gpus // 2, group.cpus // 2, places.folder / "dev"
            lines += [
                f"{line} File={dev}/nvidia[0-{half - 1}] Cores=0-{cores - 1}",
                f"{line} File={dev}/nvidia[{half}-{group.gpus - 1}] Cores={cores}-{group.cpus - 1}",
            ]
        else:
            lines.append(line + what)
    return "\n".join(lines) + "\n"
