"""Real Slurm and Kubernetes under load and random faults, watched by the independent checker.

    python -m tests.support.chaos [--minutes 10] [--seed 1] [--hollow 6]

Two real nodes of 8 devices, each with kubelet, containerd, slurmd, agent, Prolog and Epilog (as root),
or hollow nodes without agents. Tells what it does every 15 s, and one JSON line at the end; exits 1
when a promise was broken. `double_owned`, `leaked_claims` and `wrong_evictions` are as judge.py and
devices.py say; `stuck_pods` are those that had room at the end and were not bound. The faults of a
seed are the same each time, what they meet is not.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.support.chaos.run import Plan, run


def main(argv: list[str] | None = None) -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="of load and faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--hollow", type=int, default=0, help="hollow nodes without agents; 0: two real ones"
    )
    args = parser.parse_args(argv)
    report = run(Plan(args.minutes, args.seed, args.hollow))
    print(json.dumps(report.as_json()), flush=True)
    return int(not report.is_good)


if __name__ == "__main__":
    sys.exit(main())
