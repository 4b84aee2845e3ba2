"""Output of real slurmctlds of three versions for the same jobs, hostile names among them.

Captured with one fixed mark; host names and build strings replaced. Job ids differ by version, so
jobs are found by name; the 20 jobs of an earlier run that stand there too are all over.
"""

from pathlib import Path

from slurmbridge.slurm.batch import read_batch
from slurmbridge.slurm.queue import read_queue

MARK = "QueueMarkAbc"
VERSIONS = ("22.05.8", "24.11.5", "26.05.5")
FOLDER = Path(__file__).parents[1] / "data" / "slurm"


def text(version, name):
    with (FOLDER / version / f"{name}.txt").open(newline="") as file:
        return file.read()


def jobs(version):
    """Jobs that are not over, by name; of an array a list, of a het job too."""
    found = {}
    for job in read_queue(text(version, "queue"), MARK):
        if not job.state.is_finished:
            found.setdefault(job.name, []).append(job)
    return found


def answers(version):
    """Question -> answer of the batch."""
    ids = [job.id for job in read_queue(text(version, "queue"), MARK)]
    questions = [f"show job {job_id}" for job_id in [*ids, 99999]]
    questions += ["show partition", "show reservation", "show node", "show config"]
    parts = read_batch(text(version, "batch"), questions, MARK)
    return dict(zip(questions, parts, strict=True))
