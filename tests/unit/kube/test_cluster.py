"""The cluster that answers is ours, or its word counts for nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slurmbridge.kube.cluster import PATH, ClusterPin
from slurmbridge.pool.errors import PeerProtocolError, PeerUnavailable


class Server:
    """Answers with what is told, in order."""

    def __init__(self, *answers: str | Exception) -> None:
        self._answers = list(answers)

    async def request(self, method: str, path: str, body: object = None, **_: Any) -> bytes:
        assert (method, path) == ("GET", PATH)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return json.dumps({"kind": "Namespace", "metadata": {"uid": answer}}).encode()


async def test_the_first_cluster_that_answers_is_held_on_to() -> None:
    pin = ClusterPin(Server("one", "one", "two", "one"))
    await pin.check()
    await pin.check()
    with pytest.raises(PeerProtocolError, match="another cluster answers"):
        await pin.check()
    await pin.check()


async def test_one_that_is_configured_counts_from_the_start() -> None:
    with pytest.raises(PeerProtocolError, match="its kube-system is two, ours one"):
        await ClusterPin(Server("two"), "one").check()


async def test_no_answer_is_no_other_cluster() -> None:
    silent = PeerUnavailable("kube-apiserver", "GET", "refused")
    pin = ClusterPin(Server(silent, "one"))
    with pytest.raises(PeerUnavailable):
        await pin.check()
    await pin.check()
