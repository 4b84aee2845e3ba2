"""Which GPUs of a node a claim gets: those of one side, where gres.conf says which cores are near."""

import pytest

from tests.integration.slurm.test_claims import Side, asking
from tests.support.slurm_config import SlurmConfig

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def slurm_with_sides(slurm_cluster):
    return slurm_cluster(SlurmConfig(nodes=3, sides=True))


# What is in use, how many are asked for, and which are given; the sides are 0-3 and 4-7.
CASES = {
    "gpu001": ({0}, 4, {4, 5, 6, 7}),
    "gpu002": ({0, 1, 2}, 2, {4, 5}),
    "gpu003": ({0, 5}, 2, {4, 6}),
}


@pytest.mark.parametrize("node", CASES)
async def test_a_claim_stays_on_one_side_of_the_node_while_that_has_room(slurm_with_sides, node):
    in_use, gpus, given = CASES[node]
    side = Side(slurm_with_sides)
    await side.take_others(set(range(8)) - in_use, node)
    claim = await side.claims.allocate(asking("asked", node, gpus=gpus, cpus=1), 5)
    assert set(claim.gpus.indices) == given
    side.command.close()
