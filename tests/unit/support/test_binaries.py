from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support import binaries

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_kubebuilder_assets_win_for_what_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd = tmp_path / "etcd"
    etcd.write_text("#!/bin/sh\n")
    etcd.chmod(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    monkeypatch.setattr(binaries, "kubelab", lambda: tmp_path / "kubelab")
    assert binaries.command("etcd") == [str(etcd)]
    assert binaries.command("kube-scheduler") == [str(tmp_path / "kubelab"), "kube-scheduler"]


def test_the_cache_is_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURMBRIDGE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert binaries.cache_folder() == tmp_path / "xdg" / "slurmbridge"
    monkeypatch.setenv("SLURMBRIDGE_CACHE", str(tmp_path / "own"))
    assert binaries.cache_folder() == tmp_path / "own" / "slurmbridge"


def test_the_module_names_its_go_and_kubernetes_versions() -> None:
    assert binaries.needed_go() >= (1, 26)
    assert binaries._kubernetes_version().startswith("1.")
