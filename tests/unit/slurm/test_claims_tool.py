"""What a claim step makes of answers that a healthy Slurm does not give."""

import msgspec
import pytest

from slurmbridge.pool.claim import Ask, ClaimId, ClaimRequest, GroupRequest
from slurmbridge.pool.errors import ClaimUncertain, PeerRejected, PeerTimeout
from slurmbridge.pool.record import GpuRequest
from slurmbridge.slurm.claims import SlurmClaims
from slurmbridge.slurm.command import CommandResult, failure_of
from tests.unit.slurm.claim_records import record

ASK = Ask(gpu=GpuRequest(1, "a100"), cpus=1, memory_mib=1, minutes=10, rolling=True)
REQUEST = ClaimRequest(ClaimId("k1", "u1"), "ns/p1", "n1", ASK)
GOOD = record()
GRANTED = ("", "salloc: Granted job allocation 1\n", 0)


class Clock:
    """Sleeping takes no time here; the clock of deadlines moves by what was slept.

    off_s: how wrong the wall clock is.
    """

    def __init__(self, off_s=0.0):
        self.now = 0.0
        self.off_s = off_s

    def wall(self):
        return 1_796_054_936.0 + self.now + self.off_s

    def monotonic(self):
        return self.now

    def steady(self):
        return self.wall()

    async def sleep(self, seconds):
        self.now += seconds


class Slurm:
    """Scripted: what salloc, sbatch or scancel answers, and the job's record at each look."""

    def __init__(self, answer=GRANTED, looks=(GOOD,)):
        self.answer = answer
        self.looks = list(looks)
        self.ran = []

    async def run(self, argv, *, timeout_s, stdin="", check=True):
        self.ran.append(" ".join(argv))
        if argv[0] == "scontrol" and "show job" in stdin:
            mark = stdin.split()[2]
            look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
            error = "" if look else "slurm_load_jobs error: Invalid job id specified\n"
            return CommandResult(f"{mark}\n{look}{mark}\n", error, 1 if error else 0, 0.0, 0.0)
        answer = ("", "", 0) if argv[0] in ("scancel", "scontrol") else self.answer
        if isinstance(answer, Exception):
            raise answer
        result = CommandResult(*answer, 0.0, 0.0)
        if check and result.code:
            raise failure_of(argv[0], result)
        return result


def claims(slurm, off_s=0.0):
    return SlurmClaims(slurm, None, 0, clock=Clock(off_s))


async def test_a_claim_waits_for_its_prolog():
    configuring = GOOD.replace("JobState=RUNNING", "JobState=CONFIGURING")
    claim = await claims(Slurm(looks=(configuring, configuring, GOOD))).allocate(REQUEST, 5)
    assert (claim.job_id, claim.gpus.indices) == (1, (1,))


@pytest.mark.parametrize(
    ("slurm", "job_id"),
    {
        "slurmctld forgot it in a crash": (Slurm(looks=("",)), 1),
        "the id is a stranger's by now": (
            Slurm(looks=(GOOD.replace("root(0)", "eve(7)"),)),
            1,
        ),
        "it is another pod's": (Slurm(looks=(GOOD.replace("pod=u1", "pod=u2"),)), 1),
        "its prolog takes too long": (
            Slurm(looks=(GOOD.replace("JobState=RUNNING", "JobState=CONFIGURING"),)),
            1,
        ),
        "salloc says nothing": (Slurm(("", "", 0)), None),
        "the deadline passed": (Slurm(PeerTimeout("slurmctld", "salloc", "late")), None),
        "slurmctld is down": (
            Slurm(("", "salloc: error: Unable to contact slurm controller (connect failure)", 1)),
            None,
        ),
        "a text that nobody knows": (Slurm(("", "salloc: error: the moon is full", 1)), None),
    }.values(),
)
async def test_it_is_uncertain_whether_there_is_a_claim_when(slurm, job_id):
    with pytest.raises(ClaimUncertain) as caught:
        await claims(slurm).allocate(REQUEST, 5)
    assert caught.value.job_id == job_id
    assert not any(line.startswith("scancel") for line in slurm.ran)


@pytest.mark.parametrize(
    "look",
    {
        "more GPUs": GOOD.replace("GRES=gpu:a100:1(IDX:1)", "GRES=gpu:a100:2(IDX:1-2)"),
        "another type": GOOD.replace("gpu:a100:1(", "gpu:h100:1("),
        "another node": GOOD.replace("NodeList=n1", "NodeList=n2").replace("Nodes=n1", "Nodes=n2"),
        "no GPU": GOOD.replace("GRES=gpu:a100:1(IDX:1)", "GRES=").replace("JOB_GRES=gpu:a100:1", ""),
    }.values(),
)  # fmt: skip
async def test_a_claim_that_a_plugin_of_the_site_has_changed_is_ended(look):
    slurm = Slurm(looks=(look,))
    with pytest.raises(PeerRejected) as refused:
        await claims(slurm).allocate(REQUEST, 5)
    assert refused.value.reason == "other"
    assert slurm.ran[-1] == "scancel --name=slurmbridge-k1 --user=0 1"


async def test_a_claim_that_runs_without_gpus_since_slurmctld_had_just_started_is_ended():
    """As 22.05 prints it when the node's slurmd had not registered yet."""
    look = GOOD.replace("GRES=gpu:a100:1(IDX:1)", "GRES=gpu:a100:0(IDX:)")
    look = look.replace("JOB_GRES=gpu:a100:1", "JOB_GRES=gpu:a100:0")
    slurm = Slurm(looks=(look.replace("Comment=", "TresPerNode=gres:gpu:1 Comment="),))
    with pytest.raises(PeerRejected) as refused:
        await claims(slurm).allocate(REQUEST, 5)
    assert refused.value.reason == "starting"
    assert slurm.ran[-1] == "scancel --name=slurmbridge-k1 --user=0 1"


async def test_a_claim_that_ended_at_once_is_no_claim():
    slurm = Slurm(looks=(GOOD.replace("JobState=RUNNING", "JobState=PREEMPTED"),))
    with pytest.raises(PeerRejected):
        await claims(slurm).allocate(REQUEST, 5)


GANG = GroupRequest(ClaimId("k1", "g-1"), "ns/g", ASK, 2)


@pytest.mark.parametrize(
    "way", ["allocate", "submit_placeholder", "allocate_group", "submit_group"]
)
async def test_a_refusal_of_an_account_a_qos_or_a_limit_says_which_were_asked_for(way):
    request = REQUEST if way in ("allocate", "submit_placeholder") else GANG
    if way == "allocate_group":
        request = msgspec.structs.replace(request, nodes=("n1",))
    request = msgspec.structs.replace(request, ask=msgspec.structs.replace(ASK, account="ml"))
    text = "salloc: error: Job submit/allocate failed: Invalid qos specification"
    with pytest.raises(PeerRejected) as refused:
        await getattr(claims(Slurm(("", text, 1))), way)(request, 5)
    assert refused.value.text == f"account ml, QOS (default): {text}"
    assert refused.value.reason == "qos"
    busy = Slurm(("", "salloc: error: Unable to allocate resources: Requested nodes are busy", 1))
    with pytest.raises(PeerRejected) as refused:
        await getattr(claims(busy), way)(request, 5)
    assert refused.value.text.startswith("salloc: error: Unable")


async def test_a_placeholder_without_an_id_is_uncertain():
    assert await claims(Slurm(("7\n", "", 0))).submit_placeholder(REQUEST, 5) == 7
    with pytest.raises(ClaimUncertain):
        await claims(Slurm(("", "", 0))).submit_placeholder(REQUEST, 5)


async def test_indices_must_be_as_many_as_gpus():
    with pytest.raises(PeerRejected) as refused:
        await claims(Slurm()).cover(REQUEST, (1, 2), 5)
    assert refused.value.reason == "indices"


START = 1_796_054_936.0
"""When the job of the record has started: 16:08:56 UTC. It ends ten minutes later."""


async def test_a_claim_is_extended_from_its_start_in_whole_minutes():
    slurm = Slurm()
    assert await claims(slurm).extend(1, REQUEST.id, START + 29.5 * 60, 5) == START + 30 * 60
    assert slurm.ran[-1] == "scontrol update JobId=1 TimeLimit=30"


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
async def test_a_host_whose_clock_is_wrong_extends_a_claim_to_the_same_end(off_s):
    slurm, wanted = Slurm(), START + 45 * 60
    assert await claims(slurm, off_s).extend(1, REQUEST.id, wanted, 5) == wanted
    assert slurm.ran[-1] == "scontrol update JobId=1 TimeLimit=45"


@pytest.mark.parametrize("wanted", [START - 3600, START + 60, START + 10 * 60])
async def test_no_claim_is_made_shorter(wanted):
    slurm = Slurm()
    assert await claims(slurm).extend(1, REQUEST.id, wanted, 5) == START + 10 * 60
    assert not [command for command in slurm.ran if "update" in command]
