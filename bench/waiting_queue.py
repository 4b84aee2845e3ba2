"""What a long queue in Slurm costs a pod: creation to Binding with 5,000 held jobs and without.

    python -m bench.waiting_queue [--held N] [--rounds N] [--pods N]

One real cluster. Each round takes the latencies of single pods, one after the other, without the
queue and then with it, so that what changes on the machine meanwhile falls on both. The last line
is one JSON object: medians in ms over all rounds, and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics

from tests.support.cluster import Cluster
from tests.support.product import Product
from tests.support.waiting_queue import empty_queue, fill_queue, latency_s, queue_config


def run(held: int, rounds: int, pods: int) -> dict[str, float]:
    without: list[float] = []
    queued: list[float] = []
    with Cluster(queue_config(), scheduler=False) as cluster, Product(cluster):
        latency_s(cluster, "warm-up")
        for number in range(rounds):
            without += [latency_s(cluster, f"without-{number}-{i}") for i in range(pods)]
            fill_queue(cluster, held)
            queued += [latency_s(cluster, f"queued-{number}-{i}") for i in range(pods)]
            empty_queue(cluster)
            print(f"round {number + 1} of {rounds}", flush=True)
    return {
        "held": held,
        "pods": len(queued),
        "ms_p50": round(1000 * statistics.median(queued), 1),
        "null_ms_p50": round(1000 * statistics.median(without), 1),
        "ratio": round(statistics.median(queued) / statistics.median(without), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held", type=int, default=5000, help="jobs that wait in Slurm")
    parser.add_argument("--rounds", type=int, default=3, help="times with and without")
    parser.add_argument("--pods", type=int, default=25, help="pods each time")
    args = parser.parse_args()
    print(json.dumps(run(args.held, args.rounds, args.pods)))


if __name__ == "__main__":
    main()
