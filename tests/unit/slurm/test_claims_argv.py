import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmbridge.pool.claim import TOP_PRIORITY, Ask, ClaimId, ClaimRequest, GroupRequest
from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.record import GpuRequest
from slurmbridge.slurm.claim_argv import (
    allocate_argv,
    cancel_argv,
    comment_argv,
    granted_id,
    group_argv,
    group_now_argv,
    limit_argv,
    placeholder_argv,
    submitted_id,
)

ASK = Ask(gpu=GpuRequest(2, "a100"), cpus=4, memory_mib=8000, minutes=90, rolling=True)
REQUEST = ClaimRequest(ClaimId("prod-1", "0b1c-77"), "team/worker-0", "gpu001", ASK)


def with_ask(**changes):
    return msgspec.structs.replace(REQUEST, ask=msgspec.structs.replace(ASK, **changes))


def test_an_immediate_claim_asks_for_all_that_the_pod_needs_on_one_node():
    assert allocate_argv(with_ask(partition="claims", account="ml", exclusive_user=False)) == [
        "salloc",
        "--no-shell",
        "--immediate",
        "--job-name=slurmbridge-prod-1",
        "--comment=slurmbridge/1 cluster=prod-1 pod=0b1c-77 ref=team/worker-0",
        "--nodelist=gpu001",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=4",
        "--mem=8000M",
        "--gres=gpu:a100:2",
        f"--priority={TOP_PRIORITY}",
        "--gres-flags=disable-binding",
        "--time=90",
        "--chdir=/",
        "--partition=claims",
        "--account=ml",
    ]


def test_a_placeholder_asks_for_the_same_and_leaves_no_output_behind():
    argv = placeholder_argv(REQUEST)
    assert set(allocate_argv(REQUEST)[3:]) < set(argv)
    assert {"--output=/dev/null", "--error=/dev/null", "--no-requeue", "--parsable"} < set(argv)


def test_a_pod_that_asks_for_no_memory_does_not_get_all_of_it():
    argv = allocate_argv(with_ask(memory_mib=0, cpus=0))
    assert "--mem=1M" in argv
    assert "--cpus-per-task=1" in argv


def test_gpus_of_any_type_have_no_type_in_the_request():
    assert "--gres=gpu:3" in allocate_argv(with_ask(gpu=GpuRequest(3)))


def test_granularity_node_keeps_other_users_off():
    assert "--exclusive=user" in allocate_argv(with_ask(exclusive_user=True))
    assert "--exclusive=user" not in allocate_argv(with_ask(exclusive_user=False))


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(with_ask(account="-A"), id="an account that looks like an option"),
        pytest.param(with_ask(partition="a,b"), id="two partitions"),
        pytest.param(with_ask(qos="a b"), id="a qos with a blank"),
        pytest.param(with_ask(reservation="$(id)"), id="a reservation for a shell"),
        pytest.param(with_ask(gpu=GpuRequest(1, "a100:1,gpu")), id="a type that adds GPUs"),
        pytest.param(with_ask(gpu=GpuRequest(0)), id="no GPU"),
        pytest.param(with_ask(gpu=GpuRequest(-1)), id="fewer than no GPU"),
        pytest.param(with_ask(minutes=0), id="no time, which means unlimited to Slurm"),
        pytest.param(with_ask(minutes=10**9), id="a time that Slurm takes for unlimited"),
        pytest.param(with_ask(memory_mib=1 << 40), id="more memory than 64 bits of bytes"),
        pytest.param(with_ask(cpus=1 << 20), id="too many CPUs"),
        pytest.param(msgspec.structs.replace(REQUEST, slurm_node="gpu[1-2]"), id="two nodes"),
        pytest.param(msgspec.structs.replace(REQUEST, slurm_node=""), id="no node"),
        pytest.param(msgspec.structs.replace(REQUEST, ref="a/b\nc"), id="a name of two lines"),
        pytest.param(
            msgspec.structs.replace(REQUEST, id=ClaimId("Prod 1", "u")), id="a bad cluster id"
        ),
    ],
)
def test_a_value_that_is_no_plain_name_or_number_is_refused(request_):
    with pytest.raises(ParseError):
        allocate_argv(request_)
    with pytest.raises(ParseError):
        placeholder_argv(request_)


NAMES = st.sampled_from(["", "gpu001", "ml_prod", "a.b-c"]) | st.text(max_size=6)
NUMBERS = st.integers(1, 64) | st.integers()


@given(
    st.builds(
        Ask,
        gpu=st.builds(GpuRequest, count=NUMBERS, type=NAMES),
        cpus=NUMBERS,
        memory_mib=NUMBERS,
        minutes=NUMBERS,
        rolling=st.booleans(),
        account=NAMES,
        partition=NAMES,
        qos=NAMES,
        reservation=NAMES,
    ),
    NAMES,
    NAMES,
    NAMES,
)
def test_no_text_from_a_pod_becomes_an_option_of_its_own(ask, uid, ref, node):
    try:
        argv = allocate_argv(ClaimRequest(ClaimId("k1", uid), ref, node, ask))
    except ParseError:
        return
    assert argv[:3] == ["salloc", "--no-shell", "--immediate"]
    assert all(element.startswith("--") for element in argv[3:])
    names = [element.partition("=")[0] for element in argv[3:]]
    assert len(names) == len(set(names))
    assert not any(char in element for element in argv for char in "\n\0;|&$`'\"\\*?<>()[]{},")


GANG = GroupRequest(
    ClaimId("prod-1", "g-7", "group"),
    "team/train",
    msgspec.structs.replace(ASK, partition="main", qos="high"),
    members=5,
    exclude="gpu[001-003],x1",
    switches="1@2:00",
    least=2,
    constraint="[rackA|rackB]",
)


def test_a_gang_is_one_job_with_a_task_for_each_member_and_waits_at_its_own_priority():
    argv = group_argv(GANG)
    assert argv[0] == "sbatch"
    assert {
        "--ntasks=5",
        "--cpus-per-task=4",
        "--gpus-per-task=a100:2",
        "--mem-per-gpu=4000M",
        "--time=90",
        "--partition=main",
        "--qos=high",
        "--exclude=gpu[001-003],x1",
        "--switches=1@2:00",
        "--nodes=2-5",
        "--constraint=[rackA|rackB]",
        "--comment=slurmbridge/1 cluster=prod-1 group=g-7 ref=team/train",
    } <= set(argv)
    assert not [option for option in argv if option.startswith(("--priority", "--nodelist"))]


def test_a_gang_that_fits_now_names_its_nodes_and_stands_before_all_others():
    six = msgspec.structs.replace(GANG, nodes=("gpu001", "gpu003"), exclude="", members=6)
    argv = group_now_argv(six)
    assert argv[:3] == ["salloc", "--no-shell", "--immediate"]
    assert {
        "--nodelist=gpu001,gpu003",
        "--nodes=2",
        "--ntasks=6",
        "--ntasks-per-node=3",
        "--gpus-per-task=a100:2",
        f"--priority={TOP_PRIORITY}",
    } <= set(argv)
    with pytest.raises(ParseError):
        group_now_argv(msgspec.structs.replace(six, nodes=("gpu001", "a,b")))
    with pytest.raises(ParseError):
        group_now_argv(msgspec.structs.replace(six, members=5))


@pytest.mark.parametrize(
    "fields",
    [
        {"members": 0},
        {"exclude": "a b"},
        {"exclude": "-x"},
        {"switches": "1@2:00 --x"},
        {"constraint": "rackA"},
    ],
)
def test_a_gang_with_a_value_that_is_no_option_is_refused(fields):
    with pytest.raises(ParseError):
        group_argv(msgspec.structs.replace(GANG, **fields))


def test_cancelling_names_the_job_and_its_owner():
    argv = cancel_argv("slurmbridge-k1", 64030, [7, 8])
    assert argv == ["scancel", "--name=slurmbridge-k1", "--user=64030", "7", "8"]
    with pytest.raises(ParseError):
        cancel_argv("a,b", 0, [7])


def test_updates_name_one_job():
    assert limit_argv(7, 120) == ["scontrol", "update", "JobId=7", "TimeLimit=120"]
    assert comment_argv(7, "a b=c") == ["scontrol", "update", "JobId=7", "Comment=a b=c"]
    with pytest.raises(ParseError):
        limit_argv(7, 0)


@pytest.mark.parametrize(
    ("stderr", "expected"),
    {
        "plain": ("salloc: Granted job allocation 12\n", 12),
        "with a prolog": (
            (
                "salloc: Granted job allocation 8\nsalloc: Waiting for resource configuration\n"
                "salloc: Nodes gpu1 are ready for job\n"
            ),
            8,
        ),
        "after a warning of the site": ("hello\nsalloc: Granted job allocation 9\n", 9),
        "queued first": (
            "salloc: Pending job allocation 5\nsalloc: job 5 queued and waiting for resources\n",
            None,
        ),
        "refused": ("salloc: error: Unable to allocate resources: Requested nodes are busy", None),
        "nothing": ("", None),
    }.values(),
)
def test_the_job_id_is_read_from_what_salloc_prints(stderr, expected):
    assert granted_id(stderr) == expected


@pytest.mark.parametrize(
    ("stdout", "expected"),
    {
        "plain": ("17\n", 17),
        "with the cluster": ("17;tiger\n", 17),
        "after a line of a site's filter": ("welcome\n18\n", 18),
        "nothing": ("", None),
    }.values(),
)
def test_the_job_id_is_read_from_what_sbatch_prints(stdout, expected):
    assert submitted_id(stdout) == expected
