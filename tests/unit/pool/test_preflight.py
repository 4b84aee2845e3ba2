import pytest
from msgspec.structs import replace

from slurmbridge.pool.preflight import ERROR, WARNING, preflight
from slurmbridge.pool.record import (
    GpuCount,
    GpuUse,
    NodeState,
    Partition,
    SlurmConfig,
    SlurmNode,
    SlurmSnapshot,
)

NODE = SlurmNode(
    name="gpu1",
    state=NodeState("IDLE"),
    cpus_total=64,
    cpus_used=0,
    memory_mib=500_000,
    memory_used_mib=0,
    gpus=(GpuCount("a100", 8),),
    gpus_used=GpuUse((), ()),
)
MAIN = Partition(name="main", state="UP", nodes=("gpu1",))
CLAIMS = Partition(name="claims", state="UP", nodes=("gpu1",))
CONFIG = SlurmConfig(
    cluster="c",
    version="22.05.8",
    boot_time=0.0,
    select_type="select/cons_tres",
    select_parameters=frozenset({"CR_CORE_MEMORY"}),
)


def reading(config=CONFIG, main=MAIN, claims=CLAIMS, node=NODE):
    return SlurmSnapshot(
        began=0.0,
        ended=0.0,
        config=config,
        nodes={"gpu1": node},
        jobs={},
        partitions={p.name: p for p in (main, claims)},
    )


FAIR = replace(CONFIG, priority_type="priority/multifactor")
PRIO = replace(CONFIG, preempt_type="preempt/partition_prio")
CASES = {
    "claim partition is down": (reading(claims=replace(CLAIMS, state="DOWN")), ERROR, "is DOWN"),
    "claim partition gives whole nodes": (
        reading(claims=replace(CLAIMS, exclusive=True)),
        ERROR,
        "EXCLUSIVE",
    ),
    "claims may not be as long as the default": (
        reading(claims=replace(CLAIMS, max_time_min=30)),
        ERROR,
        "MaxTime 30",
    ),
    "claims would preempt native jobs": (
        reading(PRIO, replace(MAIN, preempt_mode="REQUEUE"), replace(CLAIMS, priority_tier=2)),
        ERROR,
        "preempt jobs of main",
    ),
    "claims stand behind native jobs": (
        reading(main=replace(MAIN, priority_tier=2)),
        WARNING,
        "jobs of main stand before claims",
    ),
    "qos preempts": (
        reading(replace(CONFIG, preempt_type="preempt/qos")),
        WARNING,
        "preempt/qos",
    ),
    "immediate claims are refused": (
        reading(replace(CONFIG, scheduler_parameters=frozenset({"defer"}))),
        WARNING,
        "defer",
    ),
    "slurm gives whole nodes only": (
        reading(replace(CONFIG, select_type="select/linear")),
        ERROR,
        "select/linear",
    ),
    "memory is not counted": (
        reading(replace(CONFIG, select_parameters=frozenset({"CR_CORE"}))),
        WARNING,
        "memory",
    ),
    "gpus are not numbered": (
        reading(node=replace(NODE, gpus_used=GpuUse((), None))),
        WARNING,
        "does not number them",
    ),
    "nodes have no gpus": (reading(node=replace(NODE, gpus=())), ERROR, "has GPUs in Slurm"),
    "fairshare does not see gpus": (
        reading(FAIR, claims=replace(CLAIMS, billing_weights="CPU=1.0,Mem=0.25G")),
        WARNING,
        "TRESBillingWeights",
    ),
    "some accounts only": (
        reading(claims=replace(CLAIMS, allow_accounts=("ml", "bio"))),
        WARNING,
        "ml, bio",
    ),
}


@pytest.mark.parametrize(("now", "severity", "words"), CASES.values(), ids=CASES.keys())
def test_doctor_tells_that(now, severity, words):
    (text,) = preflight(now, "claims")
    assert text.startswith(severity)
    assert words in text


@pytest.mark.parametrize(
    "now",
    {
        "plain": reading(),
        "native jobs may be preempted but not by claims": reading(
            PRIO, replace(MAIN, preempt_mode="REQUEUE")
        ),
        "claims come first and nobody may be preempted": reading(
            PRIO, MAIN, replace(CLAIMS, priority_tier=2)
        ),
        "fairshare sees gpus": reading(
            FAIR, claims=replace(CLAIMS, billing_weights="CPU=1.0,GRES/gpu=8.0")
        ),
        "there is no fairshare": reading(claims=replace(CLAIMS, billing_weights="")),
        "defer_batch is something else": reading(
            replace(CONFIG, scheduler_parameters=frozenset({"defer_batch", "bf_interval=2"}))
        ),
        "used gpus are not known now": reading(node=replace(NODE, gpus_used=None)),
    }.values(),
)
def test_doctor_has_nothing_to_say(now):
    assert preflight(now, "claims") == []


def test_a_missing_partition_is_an_error_and_none_a_warning():
    (text,) = preflight(reading(), "nope")
    assert text == f"{ERROR}there is no partition nope: claims have nowhere to go"
    (text,) = preflight(reading(), "")
    assert text.startswith(WARNING)


def test_errors_come_first():
    found = preflight(
        reading(
            replace(CONFIG, scheduler_parameters=frozenset({"defer"})),
            claims=replace(CLAIMS, state="DRAIN"),
        ),
        "claims",
    )
    assert [text.split(":")[0] for text in found] == ["error", "warning"]
