"""Whether slurmctld runs the claim that a pod is said to have, and whether that is the pod's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from slurmbridge.agent import Agent
from slurmbridge.node.gate import Gate
from slurmbridge.node.podfacts import read_facts
from slurmbridge.pool import keys
from slurmbridge.pool.claim import ClaimId, group_uid, write_comment
from tests.support.builders import CLUSTER, OWNER, make_job, make_policy, plain

GANG = ClaimId(CLUSTER, group_uid("own/team-a/train/"), "group")
SINGLE = ClaimId(CLUSTER, "uid-a")


def pod(namespace="team-a", name="a", claim=10, gpus="3", **notes):
    """A pod as the API server tells it; notes: annotations more, without our prefix."""
    uid = f"uid-{name}"
    annotations = {keys.CLAIM: f"{claim}/{uid}", keys.GPUS: gpus}
    annotations |= {keys.PREFIX + key.replace("_", "-"): value for key, value in notes.items()}
    body = {
        "metadata": {
            "uid": uid, "namespace": namespace, "name": name, "annotations": annotations,
        },
        "spec": {
            "containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]
        },
    }  # fmt: skip
    return read_facts(json.dumps(body).encode(), "nvidia.com/gpu")


class Jobs:
    """slurmctld, with one claim."""

    def __init__(self, claim, numbers="0-3"):
        job = make_job(10).but(
            name=claim.job_name, comment=write_comment(claim, "team-a/x"), user_id=OWNER
        )
        self._job = plain(job.on("n1", numbers, count=4))

    async def job(self, job_id):
        return self._job if job_id == 10 else None


def agent(claim):
    return SimpleNamespace(
        _jobs=Jobs(claim),
        _config=SimpleNamespace(policy=make_policy()),
        _node=SimpleNamespace(owner_uids=(OWNER,)),
        slurm_name="n1",
    )


@pytest.mark.parametrize(
    ("claim", "facts", "answer"),
    [
        (SINGLE, pod(), ""),
        (SINGLE, pod(name="b"), "is the claim of another pod"),
        (SINGLE, pod(gpus="4"), "holds other GPUs"),
        (SINGLE, pod(claim=11), "knows no job 11"),
        (GANG, pod(group="train", group_size="2"), ""),
        (GANG, pod(), "is the claim of another group"),
        (GANG, pod(group="other", group_size="2"), "is the claim of another group"),
        (GANG, pod("team-b", group="train", group_size="2"), "is the claim of another group"),
    ],
)
async def test_only_a_claim_of_the_pod_or_of_its_gang_is_the_pods(claim, facts, answer):
    found = await Agent._verify(agent(claim), facts)
    assert answer in found
    assert bool(found) == bool(answer)


async def test_a_claim_of_which_slurmctld_tells_no_gpu_numbers_covers_nothing():
    node = agent(SINGLE)
    node._jobs = Jobs(SINGLE, numbers=None)
    found = await Agent._verify(node, pod())
    assert found == "slurmctld does not say which GPUs job 10 holds on n1"


class Look:
    """Everything that is asked about has processes."""

    async def left(self, uids):
        return f"left: {sorted(uids)}" if uids else ""


@pytest.mark.parametrize(
    ("facts", "is_held"),
    [(pod(), True), (pod(group="train", group_size="2"), False)],
    ids=["names a gang that is not its own", "is a member"],
)
async def test_the_end_of_a_claim_is_not_let_go_for_a_claim_that_a_pod_wrote_on_itself(
    facts, is_held
):
    async def verify(pod):
        return await Agent._verify(agent(GANG), pod)

    book, pods = SimpleNamespace(pods={}), SimpleNamespace(known=lambda: [facts])
    gate = Gate("", Look(), book, pods, verify, lambda *_: None, lambda: 0.0)
    assert bool(await gate._hold(20, {"uid-a"}, ())) == is_held
