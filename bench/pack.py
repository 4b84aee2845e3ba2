"""A gang of 64 whole nodes in 5,000 nodes with 30 % random load: arrays against NetworkX walks.

5,000 nodes of 8 GPUs in racks of 16, rows of 10 racks, 4 zones. Each load is random: every other
one takes whole nodes, the rest jobs of 1, 2, 4 or 8 GPUs, until 30 % of the GPUs are in use. The
NetworkX answer walks the generation's graph once from the nodes up, adding up room, takes the
lowest domain that holds the gang, and fills its roomiest children: fewer promises, same question.
Both must find a domain of the same level.

Then random small trees are packed and compared with exhaustive search (tests/support/pack_oracle).

    python bench/pack.py [--nodes N] [--gang N] [--loads N] [--cases N]

Last line of the output: one JSON object. ms_*: one call of `pack`, by the clock; cpu_ms_p99: the
same by the processor's time of this process, for machines that have other things to do;
networkx_ms_p50: by walks; sources_cpu_ms: all labels looked through when a node's have changed;
generation_cpu_ms: the graph, built beside the events; fitted_cpu_ms: a generation brought to other
nodes inside an event; level_differs: loads on which the two differ in level; oracle_worse:
cases in which exhaustive search found a lower domain or fewer children, or a gang was refused that
fits.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slurmbridge.topology.gang import Gang, Placement  # noqa: E402
from slurmbridge.topology.generation import Sources, fitted, keys_in_use, labels_in_use, make  # noqa: E402
from slurmbridge.topology.graph import Topology  # noqa: E402
from slurmbridge.topology.pack import pack  # noqa: E402
from slurmbridge.topology.source import NODE  # noqa: E402
from tests.support.pack_checks import answer, faults_of, key_of  # noqa: E402
from tests.support.pack_oracle import best, random_case  # noqa: E402

GPUS = 8
LOAD = 0.3
RACK, ROW, ZONES = 16, 160, 4
LEVELS = ("zone", "row", "rack")
WALKS = 20


def sources_of(count: int) -> Sources:
    """As the core makes them: of all labels of a node those that say where it stands."""
    per_zone = -(-count // ZONES)
    others = {f"example.com/feature-{n}": "true" for n in range(20)}
    keys = keys_in_use(LEVELS, ())
    nodes, labels = [], []
    for i in range(count):
        where = {
            "rack": f"rack-{i // RACK}",
            "row": f"row-{i // ROW}",
            "zone": f"zone-{i // ROW * ROW // per_zone}",
        }
        nodes.append(f"gpu-{i:05d}")
        labels.append(labels_in_use({**others, **where}, keys))
    return Sources(tuple(nodes), tuple(labels), LEVELS)


def make_topology(count: int) -> tuple[Topology, dict[str, Any]]:
    """A generation, and what it costs in CPU: beside the events, and in them."""
    began = time.process_time()
    sources = sources_of(count)
    compared = time.process_time()
    made = make(sources)
    built = time.process_time()
    fitted(made.record, made.index.nodes[1:])
    done = time.process_time()
    return made, {
        "sources_cpu_ms": round(1e3 * (compared - began), 1),
        "generation_cpu_ms": round(1e3 * (built - compared), 1),
        "fitted_cpu_ms": round(1e3 * (done - built), 1),
    }


def random_free(rng: np.random.Generator, count: int, whole: bool) -> np.ndarray:
    free = np.full(count, GPUS)
    if whole:
        free[rng.permutation(count)[: int(LOAD * count)]] = 0
        return free
    in_use = 0
    while in_use < LOAD * GPUS * count:
        row, gpus = int(rng.integers(count)), int(rng.choice([1, 2, 4, 8]))
        if free[row] >= gpus:
            free[row] -= gpus
            in_use += gpus
    return free


def walk(graph: Any, roots: list[Any], free: dict[str, int], gang: Gang) -> tuple[str, list[str]]:
    """Level and nodes by NetworkX: room from the leaves up, then down the roomiest children."""
    size, pods = gang.gpus[0], len(gang.gpus)
    room: dict[Any, int] = {}
    holder, depth = None, -1
    depths = dict.fromkeys(roots, 0)
    for root in roots:
        for parent, child in nx.dfs_edges(graph, root):
            depths[child] = depths[parent] + 1
        for key in nx.dfs_postorder_nodes(graph, root):
            if key[0] == NODE:
                room[key] = free[key[1]] // size
            else:
                room[key] = sum(room[child] for child in graph.successors(key))
            lower = depths[key] > depth or (depths[key] == depth and room[key] < room[holder])
            if room[key] >= pods and lower:
                holder, depth = key, depths[key]
    chosen: list[str] = []

    def fill(key: Any, wanted: int) -> int:
        if key[0] == NODE:
            chosen.extend([key[1]] * min(wanted, room[key]))
            return min(wanted, room[key])
        got = 0
        for child in sorted(graph.successors(key), key=lambda c: -room[c]):
            if got < wanted:
                got += fill(child, wanted - got)
        return got

    fill(holder, pods)
    return holder[0], chosen


def measure(count: int, pods: int, loads: int) -> dict[str, Any]:
    topology, costs = make_topology(count)
    index, gang = topology.index, Gang((GPUS,) * pods)
    rng = np.random.default_rng(20261130)
    total = np.full(count, GPUS)
    roots = [key for key, degree in topology.graph.in_degree() if degree == 0]
    pack(index, total, gang)  # imports and first-call costs are not the gang's
    arrays, busy, walks, inexact, differ = [], [], [], 0, 0
    for turn in range(loads):
        free = random_free(rng, count, whole=turn % 2 == 0)
        began, cpu = time.perf_counter(), time.process_time()
        found = pack(index, free, gang, total=total)
        arrays.append(1e3 * (time.perf_counter() - began))
        busy.append(1e3 * (time.process_time() - cpu))
        assert isinstance(found, Placement), found
        inexact += not found.exact
        if len(walks) < WALKS:
            by_name = dict(zip(index.nodes, free.tolist(), strict=True))
            began = time.perf_counter()
            level, chosen = walk(topology.graph, roots, by_name, gang)
            walks.append(1e3 * (time.perf_counter() - began))
            assert len(chosen) == pods
            differ += level != found.level
    return {
        "nodes": count,
        "gang": pods,
        "loads": loads,
        "ms_p50": round(float(np.percentile(arrays, 50)), 2),
        "ms_p99": round(float(np.percentile(arrays, 99)), 2),
        "cpu_ms_p99": round(float(np.percentile(busy, 99)), 2),
        "networkx_ms_p50": round(float(np.percentile(walks, 50)), 2),
        "level_differs": differ,
        "inexact": inexact,
        **costs,
    }


def compare(cases: int) -> dict[str, int]:
    worse = 0
    for seed in range(cases):
        case = random_case(seed)
        index, found = answer(case)
        wanted = best(case)
        if isinstance(found, Placement):
            is_best = wanted is not None and key_of(case, index, found) <= wanted
            worse += not is_best or bool(faults_of(case, found))
        else:
            worse += wanted is not None
    return {"oracle_cases": cases, "oracle_worse": worse}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--gang", type=int, default=64)
    parser.add_argument("--loads", type=int, default=300)
    parser.add_argument("--cases", type=int, default=2000)
    args = parser.parse_args()
    result: dict[str, Any] = measure(args.nodes, args.gang, args.loads)
    result |= compare(args.cases)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
