"""One pool, two schedulers: the Slurm and the Kubernetes test cluster over the same nodes.

    python -m tests.support.cluster up --nodes 64 --gpus 8 [--dir D]

starts both (real slurmctld, slurmds, etcd, API server, kube-scheduler; hollow kubelets), prints how
to use them, runs until Ctrl-C and leaves nothing.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.support import binaries
from tests.support.checker import Checker
from tests.support.kube import KubeCluster, KubeProblem
from tests.support.slurm import SlurmCluster, SlurmConfig, SlurmError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass
class Cluster:
    """Both clusters between `start` and `stop` (or as a context manager).

    Every Slurm node is also a Kubernetes node of the same name and size.
    folder: gets `slurm/` and `kube/`; None: two temporary folders.
    labels: of the Kubernetes nodes, a mapping or called with (position, name).
    scheduler: start kube-scheduler; extenders: its extenders. hollow: start the hollow kubelets.
    Attributes: `slurm` (SlurmCluster), `kube` (KubeCluster), `checker` (the judge over both).
    """

    config: SlurmConfig = field(default_factory=SlurmConfig)
    folder: Path | None = None
    labels: Callable[[int, str], Mapping[str, str]] | Mapping[str, str] | None = None
    scheduler: bool = True
    extenders: Sequence[Mapping[str, Any]] = ()
    hollow: bool = True
    controller_manager: bool = False
    api_args: tuple[str, ...] = ()
    keep: bool = False

    def __post_init__(self) -> None:
        folder = self.folder
        self.slurm = SlurmCluster(self.config, folder and folder / "slurm", self.keep)
        self.kube = KubeCluster(folder and folder / "kube", self.api_args, self.keep)
        self.checker = Checker(self.slurm, self.kube)

    def start(self) -> Self:
        """Start everything; about 5 s for 64 nodes once kubelab is built.

        Raises:
            SlurmError, KubeProblem: with the end of the log of what failed; nothing is left.

        """
        try:
            with ThreadPoolExecutor(2) as pool:
                for half in (pool.submit(self.kube.start), pool.submit(self.slurm.start)):
                    half.result()
            self._create_nodes()
            if self.hollow:
                self.kube.start_hollow_kubelets()
            if self.scheduler:
                self.kube.start_scheduler(extenders=self.extenders)
            if self.controller_manager:
                self.kube.start_controller_manager()
            self.slurm.wait_scheduling()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End everything and remove the folders."""
        try:
            self.slurm.stop()
        finally:
            self.kube.stop()
            _remove_if_empty(self.folder)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _create_nodes(self) -> None:
        for group in self.config.all_groups():
            self.kube.create_nodes(
                group.names,
                gpus=group.gpus,
                cpus=group.cpus,
                memory_mb=group.memory_mb,
                labels=self.labels,
            )


def _remove_if_empty(folder: Path | None) -> None:
    if folder is not None and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _up(arguments: argparse.Namespace) -> int:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    config = SlurmConfig(nodes=arguments.nodes, gpus_per_node=arguments.gpus)
    folder = None if arguments.dir is None else Path(arguments.dir)
    cluster = Cluster(config, folder, controller_manager=arguments.controllers)
    # Before the clock runs: the first time it is built.
    binaries.command("kube-apiserver")
    print(f"starting {arguments.nodes} nodes with {arguments.gpus} GPUs each ...", flush=True)
    started = time.monotonic()
    try:
        with cluster:
            print(_how_to_use(cluster, time.monotonic() - started), flush=True)
            ended.wait()
            print("stopping", flush=True)
    except (SlurmError, KubeProblem, binaries.BinariesError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _how_to_use(cluster: Cluster, seconds: float) -> str:
    kubectl = cluster.kube.dir / "bin" / "kubectl"
    kubectl.parent.mkdir()
    command = shlex.join(binaries.command("kubectl"))
    kubectl.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    kubectl.chmod(0o755)
    return f"""up after {seconds:.1f} s. In another shell:

  export SLURM_CONF={cluster.slurm.conf_path}
  export KUBECONFIG={cluster.kube.kubeconfig}
  export PATH={kubectl.parent}:$PATH

  sinfo; kubectl get nodes
  sbatch --gres=gpu:2 --output=/dev/null --wrap "sleep 600"; squeue
  scontrol show job -d 1        # the GPUs it got: IDX

Slurm's logs: {cluster.slurm.log_folder}
Kubernetes' logs: {cluster.kube.dir}/*.log
Ctrl-C ends it and removes everything."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.cluster", description=__doc__)
    commands = parser.add_subparsers(required=True)
    up = commands.add_parser("up", help="start a cluster and run it until Ctrl-C")
    up.add_argument("--nodes", type=int, default=64, metavar="N", help="nodes (default 64)")
    up.add_argument("--gpus", type=int, default=8, metavar="G", help="GPUs per node (default 8)")
    up.add_argument("--dir", metavar="D", help="missing or empty folder to live in")
    up.add_argument("--controllers", action="store_true", help="kube-controller-manager too")
    up.set_defaults(run=_up)
    parsed = parser.parse_args(arguments)
    if not 1 <= getattr(parsed, "nodes", 1) <= 2048:
        parser.error("--nodes: 1 to 2048")
    return int(parsed.run(parsed))


if __name__ == "__main__":
    sys.exit(main())
