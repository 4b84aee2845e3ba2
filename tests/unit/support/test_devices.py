"""What the nodes themselves say in a chaos run: who is an owner, and whose processes they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.chaos.devices import Devices
from tests.support.node_checker import PodSeen
from tests.support.played_driver import MARK, native_processes

if TYPE_CHECKING:
    from pathlib import Path

A, B = "gpu001", "gpu002"


class Played(Devices):
    """Nodes whose processes are read twice a look: `before` and `after`, node -> pod -> GPUs."""

    def __init__(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        node = SimpleNamespace(pod_resources="/nowhere.sock")
        pool: Any = SimpleNamespace(
            node={A: node, B: node}, names=(A, B), slurm=SimpleNamespace(dir="/nowhere")
        )
        super().__init__(pool, lambda _uid: None)
        self.readings = [before, after]
        self.order: list[str] = []

    def _owners(self) -> dict[str, dict[str, PodSeen | set[int]]]:
        self.order.append("owners")
        read = self.readings.pop(0)
        return {
            node: {uid: PodSeen(uid, frozenset(), frozenset(held)) for uid, held in pods.items()}
            for node, pods in read.items()
        }

    def _ask(self, node: str) -> Any:
        self.order.append(f"kubelet {node}")
        return SimpleNamespace(result=lambda: SimpleNamespace(pod_resources=()))

    def _book(self, node: str) -> dict[str, tuple[str, set[int]]]:
        self.order.append(f"agent {node}")
        return {}


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({A: {"p": {0}, "q": {0}}, B: {}}, {A: {"p": {0}, "q": {0}}, B: {}}, [f"{A}/0"]),
        ({A: {"p": {0}, "q": {0}}, B: {}}, {A: {"q": {0}}, B: {}}, []),
        ({A: {"p": {0}}, B: {}}, {A: {"p": {0}, "q": {0}}, B: {}}, []),
        ({A: {"p": {0}}, B: {"q": {0}}}, {A: {"p": {0}}, B: {"q": {0}}}, []),
        ({A: {"p": {0}}, B: {"p": {1}}}, {A: {}, B: {"p": {1}}}, []),
    ],
    ids=["both stood", "one ended", "one came", "on two nodes", "its other node's"],
)
def test_an_owner_is_who_stood_on_its_node_while_every_table_was_read(
    before: dict[str, Any], after: dict[str, Any], found: list[str]
) -> None:
    devices = Played(before, after)
    devices.sample()
    assert [text.split()[0] for text in devices.double_owned] == found
    assert devices.order[0] == devices.order[-1] == "owners"
    assert sorted(devices.order[1:-1]) == sorted(
        f"{who} {node}" for who in ("kubelet", "agent") for node in (A, B)
    )


def test_native_processes_of_all_nodes_are_found_in_one_reading(tmp_path: Path) -> None:
    def process(pid: int, **environ: str) -> None:
        (tmp_path / str(pid)).mkdir()
        text = "".join(f"{name}={value}\0" for name, value in environ.items())
        (tmp_path / str(pid) / "environ").write_bytes(text.encode())

    ours = {MARK: "/here", "SLURM_JOB_ID": "7"}
    process(1, **ours, SLURMD_NODENAME=A, SLURM_JOB_GPUS="0,3")
    process(2, **ours, SLURMD_NODENAME=B, SLURM_JOB_GPUS="1")
    process(3, **ours | {MARK: "/elsewhere"}, SLURMD_NODENAME=A, SLURM_JOB_GPUS="2")
    process(4, **ours | {MARK: "/here/too"}, SLURMD_NODENAME=A, SLURM_JOB_GPUS="2")
    process(5, **{MARK: "/here"})
    (tmp_path / "6").mkdir()
    assert native_processes("/here", str(tmp_path)) == {
        A: {1: ("7", {0, 3})},
        B: {2: ("7", {1})},
    }
