"""One container image for tests, made without a registry: a static busybox, as an OCI archive.

It is also the sandbox image: without a command it sleeps. Built once with umoci and skopeo and kept
in the cache folder; a node imports the archive into its containerd (`ctr images import`).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.support.binaries import cache_folder

IMAGE = "localhost/box:3"
APPLETS = (
    "sh",
    "sleep",
    "env",
    "cat",
    "ls",
    "echo",
    "kill",
    "true",
    "false",
    "stat",
    "touch",
    "mkdir",
)
PROGRAMS = ("/usr/bin/flock",)
"""Programs of this machine that busybox lacks, copied with the libraries that they need."""


def image_archive() -> Path:
    """Path of the archive; builds it when it is not cached.

    Raises:
        subprocess.CalledProcessError: umoci or skopeo failed.

    """
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "box-3.tar"
    with (folder / "box.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            _build(archive)
    return archive


def _build(archive: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        root = Path(work) / "root"
        for name in ("bin", "etc", "tmp", "dev", "proc", "sys", "run"):
            (root / name).mkdir(parents=True)
        shutil.copy("/bin/busybox", root / "bin/busybox")
        for applet in APPLETS:
            (root / "bin" / applet).symlink_to("busybox")
        for program in PROGRAMS:
            _copy_program(program, root)
        image = f"{work}/oci:1"
        for argv in (
            ["umoci", "init", "--layout", f"{work}/oci"],
            ["umoci", "new", "--image", image],
            ["umoci", "insert", "--image", image, str(root), "/"],
            [
                *("umoci", "config", "--image", image),
                *("--config.entrypoint", "/bin/sleep", "--config.cmd", "1000000"),
                *("--config.env", "PATH=/bin"),
            ],
            [
                *("skopeo", "copy", "--quiet", f"oci:{image}"),
                f"oci-archive:{work}/box.tar:{IMAGE}",
            ],
        ):
            subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120)
        part = archive.with_suffix(".part")
        shutil.copy(f"{work}/box.tar", part)
        part.replace(archive)


def _copy_program(program: str, root: Path) -> None:
    shutil.copy(program, root / "bin")
    listed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    for library in re.findall(r"(/\S+) \(0x", listed):
        place = root / library.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(library), place)
