"""What the nodes themselves say, every 200 ms: the third witness beside slurmctld and the API server.

Of each node: the agent's table (its file), the kubelet's (PodResources), the environment and device
nodes of the pods' processes, and the native jobs' processes. Only who has a process before and after
the tables were read is an owner. All nodes are looked at together: the processes of one machine are
read twice a look, and the kubelets answer side by side. What two processes took at the same time in between is told by the
lock that everybody takes on his GPUs (`NodePool.overlaps`).
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import grpc

from tests.support.node_checker import NodeChecker
from tests.support.played_driver import native_processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.chaos.judge import Told
    from tests.support.node_checker import PodSeen
    from tests.support.node_pool import NodePool


class Devices(NodeChecker):
    """A context manager; `double_owned` are GPUs with two owners or with another than the claim's.

    told: what the API server says of a pod's GPUs, by UID.
    """

    def __init__(self, pool: NodePool, told: Callable[[str], Told | None]) -> None:
        super().__init__(pool, every_s=0.2)
        self._told = told
        self.double_owned: list[str] = []
        self.checked: set[str] = set()
        self.native_seen: set[str] = set()
        self._caught: list[str] | None = None
        self._fault: Exception | None = None
        for channel in self._channels.values():
            channel.close()
        # A kubelet that was killed is asked again soon.
        options = [
            ("grpc.max_reconnect_backoff_ms", 300),
            ("grpc.initial_reconnect_backoff_ms", 100),
        ]
        self._channels = {
            name: grpc.insecure_channel(f"unix:{node.pod_resources}", options)
            for name, node in pool.node.items()
        }

    def __exit__(self, *told: object) -> None:
        super().__exit__(*told)
        self._caught = self.pool.overlaps()
        if self._fault is not None:
            raise self._fault  # it has seen nothing since

    def _run(self) -> None:
        try:
            super()._run()
        except Exception as error:
            self._fault = error

    def sample(self) -> None:
        """One look at every node."""
        before = self._owners()
        asked = {node: self._ask(node) for node in self.pool.names}
        tables = {node: self._book(node) for node in self.pool.names}
        listed = {node: dict(self._listed(answer)) for node, answer in asked.items()}
        after = self._owners()
        for node in self.pool.names:
            stood = {who: held for who, held in before[node].items() if who in after[node]}
            self._judge(node, stood, tables[node], listed[node])
        self.samples += 1

    def overlaps_found(self) -> list[str]:
        """What was seen, and whom the locks have caught."""
        caught = self.pool.overlaps() if self._caught is None else self._caught
        # A container that a killed kubelet starts anew meets itself.
        others = [line for line in caught if line.split()[0] != line.split()[-1]]
        return self.double_owned + [f"lock: {line}" for line in others]

    def _owners(self) -> dict[str, dict[str, PodSeen | set[int]]]:
        """Pods (by UID) and native jobs (`job N`) with living processes, by node."""
        native = native_processes(str(self.pool.slurm.dir))
        found: dict[str, dict[str, PodSeen | set[int]]] = {}
        for node in self.pool.names:
            found[node] = dict(self._pods(node))
            for job, gpus in native.get(node, {}).values():
                found[node][f"job {job}"] = gpus
        return found

    def _judge(
        self,
        node: str,
        stood: dict[str, PodSeen | set[int]],
        table: dict[str, tuple[str, set[int]]],
        listed: dict[str, frozenset[str]],
    ) -> None:
        owners: dict[int, set[str]] = {}
        for who, seen in stood.items():
            if isinstance(seen, set):
                self.native_seen.add(who)
                held = seen
            else:
                self.pods_seen.add(who)
                held = seen.devices | {_index(u) for u in seen.visible}
                ref, given = table.get(who, ("", set()))
                in_list = {_index(u) for u in listed.get(ref.rpartition("/")[2], ())}
                self._compare(node, who, {"process": held, "agent": given, "kubelet": in_list})
                held |= given
            for index in held:
                owners.setdefault(index, set()).add(who)
        for index, names in owners.items():
            if len(names) > 1:
                self._tell(f"{node}/{index} is used by {sorted(names)}")

    def _compare(self, node: str, uid: str, tables: dict[str, set[int]]) -> None:
        told = self._told(uid)
        if told is None:
            return
        self.checked.add(uid)
        for name, held in tables.items():
            if held and (node != told.node or not held <= told.gpus):
                self._tell(f"{node}: {name} says {sorted(held)} of {told.name}: {told}")

    def _book(self, node: str) -> dict[str, tuple[str, set[int]]]:
        """Pods of the agent's table: UID -> (namespace/name, indices)."""
        try:
            body = json.loads((self.pool.run_folder(node) / "node.json").read_text())
        except (OSError, ValueError):
            return {}
        return {pod["uid"]: (pod["ref"], set(pod["gpus"])) for pod in body["pods"]}

    def _tell(self, text: str) -> None:
        if text not in self.double_owned:
            self.double_owned.append(text)
            print(f"[devices] {time.monotonic():.1f} {text}", flush=True)


def _index(uuid: str) -> int:
    return int(uuid.rpartition("-")[2])
