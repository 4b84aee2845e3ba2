import pytest

from slurmbridge.slurm.refusal import RefusalReason, reason_of, reason_of_code

# What salloc, sbatch, scontrol and scancel of 22.05.8 printed when made to fail; the ones without
# a command in front are slurmrestd's, or of later versions.
SEEN = {
    "no GPU left": ("salloc: error: Unable to allocate resources: Requested nodes are busy", "busy"),
    "a bigger job waits": (
        "salloc: error: Unable to allocate resources: Immediate execution impossible, insufficient priority",
        "priority",
    ),
    "more memory than the node has": (
        ("salloc: error: Memory specification can not be satisfied\n"
        "salloc: error: Job submit/allocate failed: Requested node configuration is not available"),
        "too_large",
    ),
    "more CPUs than the node has": (
        ("salloc: error: CPU count per node can not be satisfied\n"
        "salloc: error: Job submit/allocate failed: Requested node configuration is not available"),
        "too_large",
    ),
    "a GPU type that no node has": (
        "salloc: error: Job submit/allocate failed: Requested node configuration is not available",
        "too_large",
    ),
    "no such node": (
        "salloc: error: Job submit/allocate failed: Invalid node name specified",
        "node",
    ),
    "node drained": (
        "salloc: error: Job submit/allocate failed: Required node not available (down, drained or reserved)",
        "node",
    ),
    "no such partition": (
        ("salloc: error: invalid partition specified: nope\n"
        "salloc: error: Job submit/allocate failed: Invalid partition name specified"),
        "partition",
    ),
    "partition down": (
        "salloc: error: Job submit/allocate failed: Partition in DOWN state",
        "partition",
    ),
    "partition drained": (
        "salloc: error: Job submit/allocate failed: Required partition not available (inactive or drain)",
        "partition",
    ),
    "account not allowed in the partition": (
        "salloc: error: Job submit/allocate failed: Requested partition configuration not available now",
        "partition",
    ),
    "partition for root only": (
        "salloc: error: Job submit/allocate failed: Access/permission denied",
        "partition",
    ),
    "group not allowed in the partition": (
        "salloc: error: Job submit/allocate failed: User's group not permitted to use this partition",
        "partition",
    ),
    "no such reservation": (
        "salloc: error: Job submit/allocate failed: Requested reservation is invalid",
        "reservation",
    ),
    "reservation of another user": (
        "salloc: error: Job submit/allocate failed: Access denied to requested reservation",
        "reservation",
    ),
    "reservation that has not begun": (
        "salloc: error: Job submit/allocate failed: Job dependency problem",
        "reservation",
    ),
    "site schedules in cycles": (
        ("salloc: error: Job submit/allocate failed: Immediate execution impossible."
        " Individual job submission scheduling attempts deferred"),
        "defer",
    ),
    "jobs complete and CompleteWait is set": (
        "salloc: error: Job submit/allocate failed: Immediate execution impossible, resources too fragmented for allocation",
        "fragmented",
    ),
    "association unknown": (
        "salloc: error: Job submit/allocate failed: Invalid account or account/partition combination specified",
        "account",
    ),
    "qos unknown": ("sbatch: error: Batch job submission failed: Invalid qos specification", "qos"),
    "over a limit": (
        ("salloc: error: Job submit/allocate failed: Job violates accounting/QOS policy"
        " (job submit limit, user's size and/or time limits)"),
        "limit",
    ),
    "longer than the association may": (
        "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
        "time_limit",
    ),
    "job gone": ("slurm_load_jobs error: Invalid job id specified", "identity"),
    "job under the id has another name": (
        "scancel: error: No active jobs match ALL job filters, including: job_name=bar user_name=root ",
        "identity",
    ),
    "job ending": (
        "slurm_update error: Job/step already completing or completed",
        "completing",
    ),
    "slurmrestd gives the name": ("ESLURM_NODES_BUSY", "busy"),
    "slurmrestd gives name and text": (
        "ESLURM_NOT_TOP_PRIORITY: Immediate execution impossible, insufficient priority",
        "priority",
    ),
    "upper case": ("REQUESTED NODES ARE BUSY", "busy"),
    "never heard of": ("salloc: error: the moon is full", "other"),
    "nothing": ("", "other"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SEEN.values(), ids=SEEN.keys())
def test_a_refusal_is_understood(text, expected):
    assert reason_of(text) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    {2016: "busy", 2014: "too_large", 2018: "node", 2013: "priority", 2053: "reservation",
     2000: "partition", 2051: "time_limit", 2045: "account", 2066: "qos", 2050: "limit",
     2017: "identity", 2021: "completing", 9999: "other", 0: "other"}.items(),
)  # fmt: skip
def test_an_error_number_of_slurmrestd_is_understood(code, expected):
    assert reason_of_code(code) == expected


def test_every_reason_but_our_own_has_a_number():
    ours = {
        RefusalReason.OTHER,
        RefusalReason.STARTING,  # slurmctld says NODE; its age tells
        RefusalReason.INDICES,
    }
    assert {reason_of_code(code) for code in range(2000, 9000)} | ours == set(RefusalReason)
