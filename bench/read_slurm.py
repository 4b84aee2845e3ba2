"""What reading slurmctld costs, by way of asking: the numbers of docs/adr/0002-reading-slurm.md.

    python -m bench.read_slurm --nodes 32 --running 200 --pending 5000

Starts a real slurmctld with virtual nodes (tests/support), fills it, and asks in each way.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from slurmbridge.clock import SystemClock
from slurmbridge.slurm.batch import BATCH_ARGV, write_batch
from slurmbridge.slurm.command import SlurmCommand
from slurmbridge.slurm.queue import make_mark, queue_argv, read_queue
from slurmbridge.slurm.reader import SlurmReader
from slurmbridge.slurm.text import read_jobs, read_nodes
from tests.support.slurm import SlurmCluster, SlurmConfig

TICKS = 100
AT_A_TIME = 8


def slurmctld_pid(slurm: SlurmCluster) -> int:
    for pid in slurm.pids():
        if Path(f"/proc/{pid}/comm").read_text().strip() == "slurmctld":
            return pid
    raise RuntimeError("no slurmctld")


def cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICKS


async def fill(command: SlurmCommand, nodes: list[str], running: int, pending: int) -> None:
    slots = asyncio.Semaphore(AT_A_TIME)

    async def one(*argv: str, stdin: str = "") -> None:
        async with slots:
            await command.run(argv, timeout_s=60, stdin=stdin)

    grant = ("salloc", "--no-shell", "-I", "-p", "claims", "--gres=gpu:1", "--mem=10")
    await asyncio.gather(
        *(one(*grant, "-w", nodes[i % len(nodes)], f"-Jrun{i}") for i in range(running))
    )
    submit = ("sbatch", "--hold", "-N2", "--gres=gpu:4", "--time=60", "--comment=a usual comment")
    script = "#!/bin/sh\nsleep 1\n"
    await asyncio.gather(*(one(*submit, f"-Jpend{i}", stdin=script) for i in range(pending)))


async def measure(args: argparse.Namespace) -> None:
    config = SlurmConfig(nodes=args.nodes, extra=("MaxJobCount=60000",))
    with SlurmCluster(config) as slurm:
        command = SlurmCommand(environ=slurm.env())
        await fill(command, slurm.node_names, args.running, args.pending)
        pid = slurmctld_pid(slurm)
        mark = make_mark(secrets.choice)

        async def ask(
            what: str, argv: list[str], stdin: str = "", read: Callable[[str], object] | None = None
        ) -> str:
            before, results, reads = cpu_s(pid), [], [0.0]
            for _ in range(args.rounds):
                results.append(await command.run(argv, timeout_s=120, stdin=stdin))
                begun = time.perf_counter()
                if read is not None:
                    read(results[-1].stdout)
                reads.append(time.perf_counter() - begun)

            def ms(values: list[float]) -> str:
                return f"{statistics.median(values) * 1e3:6.0f} ms"

            own = (cpu_s(pid) - before) / args.rounds
            print(
                f"{what:34} wall {ms([r.wall_s for r in results])}"
                f"  own cpu {ms([r.cpu_s for r in results])}"
                f"  waited {ms([r.cost_s for r in results])}  slurmctld {own * 1e3:6.1f} ms"
                f"  decode {ms(reads[1:])}  {len(results[-1].stdout) / 1e6:6.2f} MB",
                flush=True,
            )
            return results[-1].stdout

        everything = ["scontrol", "-o", "-d", "-a", "show"]
        await ask("scontrol show job -d -o -a", [*everything, "job"], read=read_jobs)
        queue = await ask("squeue -O, marks", queue_argv(mark), read=lambda t: read_queue(t, mark))
        await ask("squeue --json", ["squeue", "--json"])
        await ask("scontrol show node -d -o", [*everything, "node"], read=read_nodes)
        running = [job.id for job in read_queue(queue, mark) if job.gpus is None]
        for some in (1, 50, 200, 1000):
            if some <= len(running):
                script = write_batch([f"show job {i}" for i in running[:some]], mark)
                await ask(f"details of {some}", list(BATCH_ARGV), script)
        reader = SlurmReader(command, SystemClock(), timeout_s=120)
        for number in range(4):
            begun = time.perf_counter()
            snapshot = await reader.snapshot()
            print(
                f"snapshot {number}: {(time.perf_counter() - begun) * 1e3:.0f} ms, waited"
                f" {snapshot.cost_s * 1e3:.0f} ms, {len(snapshot.jobs)} jobs"
            )
        command.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--running", type=int, default=200)
    parser.add_argument("--pending", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=15)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
