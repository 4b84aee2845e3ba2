"""Claims that tell slurmctld which nodes it need not look at: the same answers, and they last."""

import asyncio
import re
import time

import pytest

from slurmbridge.pool.errors import PeerRejected
from slurmbridge.slurm.claims import SlurmClaims
from slurmbridge.slurm.others import Others
from tests.integration.slurm.test_claims import CLOCK, Side, asking
from tests.support.slurm_config import SlurmConfig

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def slurm_of_four(slurm_cluster):
    return slurm_cluster(SlurmConfig(nodes=4))


def sides(slurm):
    """The adapter without and with the others excluded."""
    return Side(slurm), Side(slurm, others=Others(slurm.node_names).but)


async def exclusion(side, claim):
    text = await asyncio.to_thread(side.slurm.run, "scontrol", "show", "job", str(claim.job_id))
    return re.findall(r"ExcNodeList=(\S*)", text)


REFUSED = {
    "busy": asking("late", gpus=8),
    "more than a node has": asking("large", gpus=9),
    "a node that is not there": asking("lost", node="gpu999", gpus=1),
    "a drained node": asking("drained", node="gpu002", gpus=1),
}


async def test_a_claim_is_the_same_and_refusals_give_the_same_reasons(slurm_of_four):
    plain, narrow = sides(slurm_of_four)
    drain = ("scontrol", "update", "NodeName=gpu002", "State=DRAIN", "Reason=test")
    await asyncio.to_thread(slurm_of_four.run, *drain)
    claim = await narrow.claims.allocate(asking("first", gpus=2), 5)
    assert claim.gpus.indices == (0, 1)
    assert await exclusion(narrow, claim) == ["gpu[002-004]"]
    for request in REFUSED.values():
        reasons = []
        for side in (plain, narrow):
            with pytest.raises(PeerRejected) as error:
                await side.claims.allocate(request, 5)
            reasons.append(error.value.reason)
        assert reasons[0] == reasons[1], request


async def test_an_excluded_node_that_is_gone_by_now_refuses_nothing(slurm_of_four):
    names = [*slurm_of_four.node_names, "gpu005"]
    side = Side(slurm_of_four, others=Others(names).but)
    claim = await side.claims.allocate(asking("still", node="gpu003", gpus=1), 5)
    assert await exclusion(side, claim) == ["(null)"]


async def test_a_claim_outlives_the_removal_of_a_node_that_it_excluded(slurm_of_four):
    slurm = slurm_of_four
    _, narrow = sides(slurm)
    claim = await narrow.claims.allocate(asking("lasting", node="gpu004", gpus=1), 5)
    # Let the state be saved, then take gpu003 out of both files.
    await asyncio.to_thread(slurm.stop_slurmctld)
    slurm.kill9_slurmd("gpu003")
    for name in ("slurm.conf", "gres.conf"):
        path = slurm.conf_path.parent / name
        text = path.read_text()
        ports = re.search(r"Port=\[(\d+)-(\d+)\]", text)
        text = text.replace("gpu[001-004]", "gpu[001-002,004]")
        if ports:
            first = int(ports[1])
            text = text.replace(ports[0], f"Port=[{first}-{first + 1},{first + 3}]")
        path.write_text(text)
    await asyncio.to_thread(slurm.start_slurmctld)
    end = time.monotonic() + 15
    while await narrow.state(claim.job_id) != "RUNNING":
        assert time.monotonic() < end
        await asyncio.sleep(0.2)
    found = await SlurmClaims(narrow.command, narrow.reader, 0, clock=CLOCK).find("slurmbridge-t1")
    assert claim.job_id in [job.id for _, job in found if job.state.base == "RUNNING"]
