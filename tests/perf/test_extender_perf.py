"""The extender against a do-nothing extender in the same run; ratios only, never milliseconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_answers_cost_about_as_much_as_echoing_all_names():
    """Measured on two shared cores: 0.9-1.15 of its processor time, 1.2 times its requests."""
    done = subprocess.run(
        [sys.executable, "bench/extender.py", "--pairs", "200"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["cpu_ms"] <= 1.5 * told["null_cpu_ms"]
    assert told["p50_ms"] <= 1.5 * told["null_p50_ms"]
    assert told["req_per_s"] >= 0.6 * told["null_req_per_s"]
