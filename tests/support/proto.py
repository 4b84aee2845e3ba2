"""Generates the code of the link and of the kubelet's APIs from their .proto files (`make proto`).

Generated code refuses a protobuf runtime older than its generator. It is therefore made with the
generator of the oldest runtime that the project allows, in a virtual environment of its own: that
generator cannot be installed beside the newest runtime.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATOR = "grpcio-tools==1.80.0"
"""Asks for protobuf 6.31 at least, and works with 7."""
SOURCES = {
    "slurmbridge/link": ("pool",),
    "slurmbridge/node": ("deviceplugin", "podresources"),
}
"""Folder -> names of its .proto files; the code goes into `_gen` below the folder."""


def generate(python: str | Path, into: Path) -> list[Path]:
    """Run the generator of a Python; the files made, below `into` as in the repository."""
    made: list[Path] = []
    for folder, names in SOURCES.items():
        subprocess.run(
            [
                str(python),
                "-m",
                "grpc_tools.protoc",
                # A .proto is said to lie where its code will: so the code imports itself from there.
                f"-I{folder}/_gen={folder}",
                f"--python_out={into}",
                f"--pyi_out={into}",
                *(f"{folder}/_gen/{name}.proto" for name in names),
            ],
            cwd=ROOT,
            check=True,
            timeout=120,
        )
        made += [
            into / folder / "_gen" / f"{name}_pb2{end}" for name in names for end in (".py", ".pyi")
        ]
    return made


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin/python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", GENERATOR], check=True)
        for path in generate(python, ROOT):
            print(f"[proto] {path.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
