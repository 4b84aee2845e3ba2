"""Generates the link's code from its .proto (`make proto`).

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
MADE = ("pool_pb2.py", "pool_pb2.pyi")


def generate(python: str | Path, into: Path) -> list[Path]:
    """Run the generator of a Python; the files made, below `into` as in the repository."""
    subprocess.run(
        [
            str(python),
            "-m",
            "grpc_tools.protoc",
            # The .proto is said to lie where its code will: so the code imports itself from there.
            "-Islurmbridge/link/_gen=slurmbridge/link",
            f"--python_out={into}",
            f"--pyi_out={into}",
            "slurmbridge/link/_gen/pool.proto",
        ],
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    return [into / "slurmbridge/link/_gen" / name for name in MADE]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin/python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", GENERATOR], check=True)
        for path in generate(python, ROOT):
            print(f"[proto] {path.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
