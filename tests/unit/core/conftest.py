"""A pod that runs in its claim: where most stories of what goes wrong begin."""

from __future__ import annotations

import pytest

from tests.support.builders import Story, make_pod


@pytest.fixture
def pod():
    return make_pod("a").gpus(2)


@pytest.fixture
def story(pod):
    return Story("n1", "n2").start(pod).run(pod, 10, "n1", "0-1").forget()
