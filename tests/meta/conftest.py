"""What several of these tests need: built manifests, and one control plane that accepts them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support import binaries

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.fixtures import KubeFactory
    from tests.support.kube import KubeCluster

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def build() -> Callable[[str], list[dict[str, Any]]]:
    """`build("overlays/second-scheduler")`: the objects that kustomize makes of a folder."""
    built: dict[str, list[dict[str, Any]]] = {}

    def run(folder: str) -> list[dict[str, Any]]:
        if folder not in built:
            done = subprocess.run(
                [*binaries.command("kubectl"), "kustomize", str(ROOT / "manifests" / folder)],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
            built[folder] = list(yaml.safe_load_all(done.stdout))
        return built[folder]

    return run


@pytest.fixture(scope="module")
def kube(kube_cluster: KubeFactory) -> KubeCluster:
    """A control plane on which the bigger overlay is installed."""
    cluster = kube_cluster()
    cluster.kubectl("apply", "-k", str(ROOT / "manifests/overlays/second-scheduler"))
    return cluster
