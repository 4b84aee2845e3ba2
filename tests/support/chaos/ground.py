"""The pool that a chaos run happens on, the pods and jobs that run there, and its parts.

Real nodes: kubelet, containerd, slurmd, the product's agent, Prolog and Epilog on each, device files
for GPUs. Every pod and native job locks the GPUs that it was given (node_pool.py). Hollow nodes: many
of them, whose kubelets are played and which have no agents.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from tests.support.altered import CLOCK, DRIVER
from tests.support.checker import Checker
from tests.support.cluster import Cluster
from tests.support.kube_objects import pod
from tests.support.node_pool import CLUSTER, LOCK, ROOT, NodePool
from tests.support.played_driver import MARK
from tests.support.slurm import SlurmConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.support.chaos.wires import Wires
    from tests.support.kube import KubeCluster
    from tests.support.product import Product
    from tests.support.slurm import SlurmCluster

# A slurmd that slurmctld has not reached is looked at again after a third of its time-out.
EXTRA = ("SlurmdTimeout=45",)
TOTALS_S = 10.0
"""How old the nodes' numbers of GPUs may be: here they do not change, and a sample costs less."""


@dataclass(frozen=True)
class Part:
    """A process of a node that can be killed, paused and started again."""

    kind: str
    target: str
    kill: Callable[[], None]
    start: Callable[[], None]
    send: Callable[[signal.Signals], None]
    poll: Callable[[], int | None]


class Ground(Protocol):
    """What the load and the faults need of a pool.

    most_pods, most_jobs: how many may be there, waiting ones too. sections: more of the product's
    configuration.
    """

    slurm: SlurmCluster
    kube: KubeCluster
    checker: Checker
    cluster_id: str
    sections: dict[str, Any]
    most_pods: int
    most_jobs: int

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def join(self, product: Product, wires: Wires, clocks: Path) -> None:
        """Start what must know the product. clocks: folder of files with the error of a clock."""

    def parts(self) -> list[Part]:
        """Processes of the nodes that are ours to harm."""

    def agent_logs(self) -> dict[str, str]:
        """Logs of the agents by name."""

    def pod(
        self,
        name: str,
        gpus: int,
        namespace: str,
        notes: Mapping[str, str],
        run_s: float,
        stop_s: float,
    ) -> dict[str, Any]:
        """A pod that runs for some seconds, and takes some to stop."""

    def native(self, gpus: int, seconds: float) -> None:
        """Submit a native job of user nobody."""


class HollowGround:
    """Nodes with hollow kubelets and without agents; a context manager."""

    def __init__(self, nodes: int) -> None:
        self._cluster = Cluster(
            SlurmConfig(nodes=nodes, gpus_per_node=8, extra=EXTRA), scheduler=False
        )
        self.cluster_id = "test"
        self.sections: dict[str, Any] = {}
        self.most_pods, self.most_jobs = 40, 14

    def __enter__(self) -> Self:
        self._cluster.start()
        self.slurm, self.kube = self._cluster.slurm, self._cluster.kube
        self.checker = Checker(self.slurm, self.kube, totals_s=TOTALS_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.stop()

    def join(self, product: Product, wires: Wires, clocks: Path) -> None:
        """No agents, so nothing."""

    def parts(self) -> list[Part]:
        """None that can be harmed one by one."""
        return []

    def agent_logs(self) -> dict[str, str]:
        """There are none."""
        return {}

    def pod(
        self,
        name: str,
        gpus: int,
        namespace: str,
        notes: Mapping[str, str],
        run_s: float,
        stop_s: float,
    ) -> dict[str, Any]:
        """See `Ground`."""
        return pod(
            name, gpus=gpus, namespace=namespace, annotations=notes, run_s=run_s, stop_s=stop_s
        )

    def native(self, gpus: int, seconds: float) -> None:
        """See `Ground`."""
        self.slurm.run(
            *("sbatch", "--parsable", "--output=/dev/null", "--chdir=/", "--mem=100"),
            *(f"--gres=gpu:{gpus}", f"--wrap=exec sleep {seconds:g}"),
            user="nobody",
            timeout_s=5,
        )


class RealGround:
    """Real nodes of 8 devices with agents; a context manager."""

    def __init__(self, nodes: int) -> None:
        self.pool = NodePool(
            nodes=nodes, gpus=8, agents=False, releaser=False, slurm_config={"extra": EXTRA}
        )
        self.cluster_id = CLUSTER
        self.sections = {"rules": {"agents": "required"}}
        self.most_pods, self.most_jobs = 16, 4

    def __enter__(self) -> Self:
        self.pool.start()
        self.slurm, self.kube = self.pool.slurm, self.pool.kube
        self.checker = Checker(self.slurm, self.kube, totals_s=TOTALS_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.stop()

    def join(self, product: Product, wires: Wires, clocks: Path) -> None:
        """Start the agents behind the faulty wires, with clocks that can step, and wait for them."""
        pool = self.pool
        kubeconfig = self.kube.dir / "agents.kubeconfig"
        shutil.copy(self.kube.kubeconfig, kubeconfig)
        wires.lead_kubeconfig(kubeconfig)
        pool.sections = {
            "kube": {"kubeconfig": str(kubeconfig)},
            "slurm": {"conf": str(wires.lead_slurm_conf(self.slurm.conf_path))},
        }
        pool.entry = "tests.support.altered"
        pool.agent_env = {
            # Entering a mount namespace leaves the working directory.
            "PYTHONPATH": str(ROOT),
            CLOCK: f"{clocks}/{{}}",
            DRIVER: f"{self.slurm.dir}:{{}}",
        }
        pool.node_config = {"bridge": [product.link(i) for i in range(product.bridges)]}
        for name in pool.names:
            pool.start_agent(name)
        for name in pool.names:
            pool.wait_gpus(name, 60)

    def agent_logs(self) -> dict[str, str]:
        """See `Ground`."""
        nodes = self.pool.node.items()
        return {f"agent-{name}": node.log("agent").read_text() for name, node in nodes}

    def parts(self) -> list[Part]:
        """Agent, kubelet and containerd of each node."""
        found = []
        for name, node in self.pool.node.items():
            starts: dict[str, Callable[[], None]] = {
                "agent": lambda name=name: self.pool.start_agent(name),
                "kubelet": lambda node=node: node.start_kubelet(wait=False),
                "containerd": lambda node=node: node.start_containerd(),
            }
            for kind, start in starts.items():
                found.append(
                    Part(
                        kind,
                        f"{kind}-{name}",
                        kill=lambda node=node, kind=kind: node.kill9(kind),
                        start=start,
                        send=lambda number, node=node, kind=kind: node.send(kind, number),
                        poll=lambda node=node, kind=kind: node.poll(kind),
                    )
                )
        return found

    def pod(
        self,
        name: str,
        gpus: int,
        namespace: str,
        notes: Mapping[str, str],
        run_s: float,
        stop_s: float,
    ) -> dict[str, Any]:
        """See `Ground`; it locks its GPUs, so that a second owner is found exactly."""
        script = (
            f"trap 'sleep {stop_s:g}; exit 0' TERM\n"
            'GPUS=$(IFS=,; set -- $NVIDIA_VISIBLE_DEVICES; echo "$@")\n'
            f"{LOCK}sleep {run_s:g} & wait $!\nexit 0"
        )
        where = {"schedulerName": "default-scheduler"}
        body = self.pool.pod(name, gpus, script=script, spec=where)
        body["metadata"] |= {"namespace": namespace, "annotations": dict(notes)}
        return body

    def native(self, gpus: int, seconds: float) -> None:
        """See `Ground`; a shell can lock seven GPUs at most."""
        options = ("--chdir=/", f"--export=ALL,{MARK}={self.slurm.dir}")
        with contextlib.suppress(ValueError):
            self.pool.native(
                min(gpus, 7), run_s=seconds, options=options, user="nobody", timeout_s=5
            )
