import random  # noqa: TID251 - seeded, below

import msgspec
import pytest

from slurmbridge.pool.record import GpuCount, GpuUse, JobState, SlurmJob
from slurmbridge.slurm.cover_plan import (
    Fill,
    Held,
    Lost,
    NodeGpus,
    Promote,
    Release,
    Take,
    Wait,
    next_step,
    node_gpus,
)

EIGHT = frozenset(range(8))


def gpus(*indices):
    return frozenset(indices)


def node(*fillers, others=(), leaving=(), **more):
    return NodeGpus(
        total=EIGHT,
        others=frozenset(others),
        leaving=frozenset(leaving),
        is_leaving=bool(leaving),
        fillers=fillers,
        **more,
    )


STEPS = {
    "only the wanted GPUs are free": (node(others=[0, 1, 2, 3, 4, 5]), Take()),
    "others are free too": (node(others=[0, 1, 2, 3]), Fill(2, 4)),
    "a native job has one of them": (node(others=[6]), Lost(gpus(6))),
    "an unnumbered job is on the node": (
        node(is_unknown=True),
        Wait("a job holds GPUs that Slurm does not number"),
    ),
    "some fillers still wait in the queue": (
        node(Held(1, gpus(), is_pending=True), others=[0, 1, 2, 3]),
        Fill(1, 3),
    ),
    "all fillers wait in the queue": (
        node(*(Held(i, gpus(), is_pending=True) for i in range(4)), others=[0, 1, 2, 3]),
        Wait("fillers are queued"),
    ),
    "more fillers than GPUs wait in the queue": (
        node(Held(1, gpus(), is_pending=True), Held(2, gpus(5)), others=[0, 1, 2, 3, 4]),
        Release((1,)),
    ),
    "fillers hold wanted GPUs": (
        node(Held(1, gpus(6)), Held(2, gpus(7)), Held(3, gpus(5)), others=[0, 1, 2, 3, 4]),
        Take((1, 2)),
    ),
    "the claim is queued and fillers are still in its way": (
        node(
            Held(1, gpus(6)),
            Held(3, gpus(5)),
            Held(4, gpus(), is_pending=True, is_take=True),
            others=[0, 1, 2, 3, 4],
        ),
        Release((1,)),
    ),
    "the claim is queued and the fillers are ending": (
        node(
            Held(4, gpus(), is_pending=True, is_take=True), others=[0, 1, 2, 3, 4, 5], leaving=[6]
        ),
        Wait("the claim is queued"),
    ),
    "two claims are queued after an answer was lost": (
        node(
            Held(4, gpus(), is_pending=True, is_take=True),
            Held(5, gpus(), is_pending=True, is_take=True),
            others=[0, 1, 2, 3, 4, 5],
        ),
        Release((5,)),
    ),
    "the claim got what was wanted": (
        node(Held(1, gpus(0)), Held(2, gpus(6, 7), is_take=True), others=[1, 2]),
        Promote(2),
    ),
    "the claim got something else": (
        node(Held(2, gpus(3, 4), is_take=True), others=[0, 1, 2]),
        Fill(1, 3),
    ),
    "the claim got one of two": (
        node(Held(2, gpus(5, 6), is_take=True), others=[0, 1, 2]),
        Release((2,)),
    ),
    "a filler of two GPUs by chance holds them": (
        node(Held(2, gpus(6, 7)), others=[0, 1, 2, 3, 4, 5]),
        Take((2,)),
    ),
    "a job is ending on the node": (
        node(others=[0, 1, 2, 3, 4], leaving=[5]),
        Wait("jobs are ending on the node"),
    ),
}


@pytest.mark.parametrize(("now", "expected"), STEPS.values(), ids=STEPS.keys())
def test_towards_gpus_6_and_7(now, expected):
    assert next_step(now, gpus(6, 7)) == expected


def test_an_index_that_the_node_does_not_have_is_lost():
    assert next_step(node(), gpus(8)) == Lost(gpus(8))


def job(job_id, state, *indices, **more):
    use = GpuUse((GpuCount("a100", len(indices)),), indices)
    return SlurmJob(
        id=job_id,
        name="x",
        comment="",
        user_id=0,
        account="",
        partition="",
        qos="",
        state=JobState(state),
        nodes=("n1",),
        gpus={"n1": use},
        **more,
    )


def seen(*jobs, fillers=(), takes=()):
    return node_gpus("n1", 8, list(jobs), frozenset(fillers), frozenset(takes))


def test_jobs_become_what_a_cover_sees():
    now = seen(
        job(1, "RUNNING", 0),
        job(2, "RUNNING", 1),
        job(3, "PENDING"),
        job(4, "PENDING"),
        job(5, "COMPLETED", 2),
        job(6, "SUSPENDED", 3),
        fillers=(2, 4),
        takes=(2,),
    )
    assert now == NodeGpus(
        total=EIGHT,
        others=gpus(0, 3),
        fillers=(Held(2, gpus(1), is_take=True), Held(4, gpus(), is_pending=True)),
    )


def test_the_gpus_of_an_ending_job_are_not_free_yet():
    ending = JobState("CANCELLED", frozenset({"COMPLETING"}))
    now = seen(msgspec.structs.replace(job(1, "X", 0), state=ending))
    assert (now.leaving, now.free, now.is_leaving) == (gpus(0), EIGHT - {0}, True)
    # As a rule slurmctld does not tell them any more.
    now = seen(msgspec.structs.replace(job(1, "X"), state=ending, gpus=None))
    assert (now.is_leaving, now.is_unknown) == (True, False)


def test_a_job_whose_gpus_are_not_numbered_makes_the_node_unknown():
    assert seen(msgspec.structs.replace(job(1, "RUNNING"), gpus=None)).is_unknown
    counted = GpuUse((GpuCount("", 2),), None)
    assert seen(msgspec.structs.replace(job(1, "RUNNING"), gpus={"n1": counted})).is_unknown
    assert not seen(msgspec.structs.replace(job(1, "RUNNING"), gpus={})).is_unknown


class Slurm:
    """Gives out GPUs of one node in an order of its own; native jobs end when it likes."""

    def __init__(self, rng, taken):
        self.rng = rng
        self.order = rng.sample(range(8), 8)
        self.running = {}
        self.queue = []
        self.native = {index: index + 1000 for index in taken}
        self.ids = iter(range(1, 10_000))

    def free(self):
        held = set(self.native).union(*(held.gpus for held in self.running.values()))
        return [index for index in self.order if index not in held]

    def ask(self, count, is_take, is_queued):
        job_id = next(self.ids)
        free = self.free()
        if not is_queued and len(free) < count:
            return
        self.queue.append((job_id, count, is_take))
        if not is_queued:
            self.cycle()

    def cycle(self):
        while self.queue and len(free := self.free()) >= self.queue[0][1]:
            job_id, count, is_take = self.queue.pop(0)
            self.running[job_id] = Held(job_id, frozenset(free[:count]), is_take=is_take)

    def end(self, job_ids):
        for job_id in job_ids:
            self.running.pop(job_id, None)
        self.queue = [entry for entry in self.queue if entry[0] not in job_ids]

    def look(self):
        waiting = (Held(i, frozenset(), is_pending=True, is_take=take) for i, _, take in self.queue)
        return NodeGpus(EIGHT, frozenset(self.native), fillers=(*self.running.values(), *waiting))


@pytest.mark.parametrize("is_queued", [False, True], ids=["immediate", "queued"])
@pytest.mark.parametrize("are_natives_ending", [False, True], ids=["quiet", "natives end"])
def test_in_whatever_order_slurm_gives_gpus_out_the_right_ones_come(is_queued, are_natives_ending):
    rng = random.Random(1)
    most = 0
    for _ in range(500):
        slurm = Slurm(rng, rng.sample(range(8), rng.randrange(7)))
        want = frozenset(rng.sample(slurm.free(), rng.randint(1, len(slurm.free()))))
        for turn in range(60):
            step = next_step(slurm.look(), want)
            match step:
                case Promote(job_id=job_id):
                    assert slurm.running[job_id].gpus == want
                    most = max(most, turn)
                    break
                case Take(release=release):
                    slurm.ask(len(want), is_take=True, is_queued=is_queued or bool(release))
                    slurm.end(release)
                case Fill(least=least, most=many):
                    for _ in range(many if is_queued else least):
                        slurm.ask(1, is_take=False, is_queued=is_queued)
                case Release(job_ids=job_ids):
                    slurm.end(job_ids)
                case Lost():
                    pytest.fail("nobody took them")
            if are_natives_ending and slurm.native and rng.random() < 0.3:
                slurm.native.popitem()
            slurm.cycle()
        else:
            pytest.fail(f"no end: {slurm.look()} want {set(want)}")
    assert most < 30
