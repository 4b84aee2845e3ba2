import pytest

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.gres import format_indices
from slurmbridge.pool.record import GpuCount, JobState
from slurmbridge.slurm.jobtext import read_held, read_jobs
from slurmbridge.slurm.text import read_config, read_nodes, read_partitions, read_reservations
from tests.unit.slurm.listings import VERSIONS, answers, jobs, text

HELD = {
    "slurmbridge-lab": {"gpu001": "0-1"},
    "a line break and a forged record": {"gpu001": "2"},
    "train NodeList=gpu003 GRES=gpu:8(IDX:0-7)": {"gpu001": "3"},
    "u\x1fnit|sep\x1e": {"gpu001": "4"},
    "\\xff\\xfeé": {"gpu001": "5"},
    "acct": {"gpu002": "0"},
    "suspended": {"gpu002": "1-2"},
    "exclusive": {"gpu003": "0-7"},
    "two-nodes": {"gpu001": "6-7", "gpu002": "5"},
    "shard": {"gpu004": "shared 1"},
    "untyped": {"gpu004": "0"},
    "ending": None,
}


def written(held):
    if held is None:
        return None
    return {
        node: f"shared {format_indices(use.shared)}" if use.shared else format_indices(use.indices)
        for node, use in held.items()
    }


def find(version, name):
    if name.startswith("a line break"):
        (name,) = (n for n in jobs(version) if n.startswith("a\n"))
    (job,) = jobs(version)[name]
    return job


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", HELD)
def test_the_gpus_of_a_job_are_read_whatever_its_name_says(version, name):
    job = find(version, name)
    held = read_held(answers(version)[f"show job {job.id}"], {job.id: job})
    assert written(held[job.id]) == HELD[name]


@pytest.mark.parametrize("version", VERSIONS)
def test_in_a_listing_of_all_no_job_gets_gpus_that_another_forged(version):
    wanted = {job.id: job for same in jobs(version).values() for job in same if job.gpus is None}
    held = read_held(text(version, "jobs"), wanted)
    assert held.keys() == wanted.keys()
    for name, expected in HELD.items():
        job = find(version, name)
        assert written(held[job.id]) in (expected, None)
    assert [i for i, gpus in held.items() if gpus and "gpu003" in gpus] == [
        find(version, "exclusive").id
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_queue_tells_what_the_plan_and_the_ledger_need(version):
    found = jobs(version)
    (array,) = (job for job in found["array"] if job.state.base == "PENDING")
    assert (array.tasks, array.gpus_wanted, array.gpus, array.nodes) == (98, 1, {}, ())
    assert len([job for job in found["array"] if job.state.base == "RUNNING"]) == 2
    wanted = {
        name: found[name][0].gpus_wanted for name in ("per-task", "per-node", "per-socket", "held")
    }
    assert wanted == {"per-task": 12, "per-node": 16, "per-socket": None, "held": 4}
    per_task = found["per-task"][0]
    assert per_task.planned_nodes == ("gpu002", "gpu003")
    assert per_task.start is not None
    assert found["held"][0].priority == 0
    assert [len(job.nodes) for job in found["het"]] == [1, 1]
    (ending,) = found["ending"]
    assert ending.state == JobState("UNKNOWN", frozenset({"COMPLETING"}))
    assert (ending.nodes, ending.gpus) == (("gpu004",), None)
    (claim,) = found["slurmbridge-lab"]
    assert claim.comment == "slurmbridge/1 cluster=lab pod=6f1d ref=team/train-0"
    assert (claim.user_id, claim.user, claim.restarts, claim.num_nodes) == (0, "root", 0, 1)
    assert claim.end == claim.start + 3600


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_that_slurmctld_does_not_know_has_an_empty_answer(version):
    assert answers(version)["show job 99999"] == ""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_het_jobs_components_are_read_each_on_its_own(version):
    leader, second = sorted(jobs(version)["het"], key=lambda job: job.id)
    both = {leader.id: leader, second.id: second}
    asked = answers(version)
    together = asked[f"show job {leader.id}"] + asked[f"show job {second.id}"]
    held = read_held(together, both)
    assert sum(use.total for gpus in held.values() for use in gpus.values()) == 2


@pytest.mark.parametrize("version", VERSIONS)
def test_the_nodes_are_read_with_what_they_say_of_their_gpus(version):
    nodes = read_nodes(answers(version)["show node"])
    assert list(nodes) == ["gpu001", "gpu002", "gpu003", "gpu004"]
    first = nodes["gpu001"]
    assert first.state.base == "MIXED"
    assert (first.cpus_total, first.cpus_used, first.memory_mib) == (64, 7, 500000)
    assert (first.gpus, first.gpus_used.indices) == ((GpuCount("a100", 8),), tuple(range(8)))
    assert first.partitions == ("main", "hid")
    assert first.boot_time is not None
    last = nodes["gpu004"]
    assert "COMPLETING" in last.state.flags
    assert (last.gpus, last.gpus_used.total, last.gpus_used.shared) == ((GpuCount("", 4),), 2, (1,))
    assert {node.fault for node in nodes.values()} == {""}


@pytest.mark.parametrize("version", VERSIONS)
def test_partitions_reservations_and_configuration_are_read(version):
    asked = answers(version)
    partitions = read_partitions(asked["show partition"])
    assert partitions["main"].max_time_min is None
    assert (partitions["hid"].hidden, partitions["hid"].max_time_min) == (True, 60)
    assert partitions["hid"].nodes == ("gpu001", "gpu002", "gpu003", "gpu004")
    soon, weekly = read_reservations(asked["show reservation"])
    assert (soon.name, soon.nodes, soon.users) == ("gone soon", ("gpu001", "gpu002"), ("root",))
    assert soon.flags == {"MAINT", "IGNORE_JOBS", "SPEC_NODES"}
    assert (weekly.accounts, weekly.end - weekly.start) == (("a", "b"), 4 * 3600)
    config = read_config(asked["show config"])
    assert (config.cluster, config.version, config.slurm_user) == ("rd", version, "root")
    assert config.scheduler_parameters == {"bf_interval=5"}
    assert config.preempt_type == "preempt/none"
    assert config.boot_time > 1_700_000_000


@pytest.mark.parametrize("version", VERSIONS)
def test_without_the_queue_beside_it_a_listing_with_forged_records_is_refused(version):
    with pytest.raises(ParseError):
        read_jobs(text(version, "jobs"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("share", [0.1, 0.35, 0.5, 0.77, 0.93, 0.999])
def test_an_answer_that_is_cut_is_refused(version, share):
    asked = answers(version)
    for read, question in ((read_nodes, "show node"), (read_partitions, "show partition")):
        whole = asked[question]
        try:
            shorter = read(whole[: int(share * len(whole))])
        except ParseError:
            continue
        # Cut between two records, or behind all that is read of the last.
        complete = read(whole)
        assert all(
            complete[name].gpus == shorter[name].gpus for name in shorter if question == "show node"
        )
        assert len(shorter) >= share * len(complete) - 1
