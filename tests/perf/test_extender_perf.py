"""The bench of the extender runs, and tells what it promises; it judges no speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_5000_names_are_answered_and_the_bench_tells_both_sides_of_its_ratios() -> None:
    done = subprocess.run(
        [sys.executable, "bench/extender.py", "--pairs", "200"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    for figure in ("cpu_ms", "p50_ms", "p99_ms", "req_per_s"):
        assert told[figure] > 0
        assert told[f"null_{figure}"] > 0
