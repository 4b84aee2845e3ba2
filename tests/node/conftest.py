"""One pool of real nodes for all tests of the node agent, and the figures that the run ends with."""

import json

import pytest

from tests.support.node import host_problems
from tests.support.node_pool import NodePool

FIGURES = {"starts": 0, "samples": 0, "wrong_devices": 0, "overlaps": 0, "min_gap_ms": None}


class Figures:
    """What all tests together have counted; the guard's own proof that it can fail is not in it."""

    def count(self, *, starts=0, samples=0, wrong=0, overlaps=0):
        FIGURES["starts"] += starts
        FIGURES["samples"] += samples
        FIGURES["wrong_devices"] += wrong
        FIGURES["overlaps"] += overlaps

    def gap(self, seconds):
        """From the last sign of life of one owner to the start of the next."""
        ms = round(seconds * 1000)
        before = FIGURES["min_gap_ms"]
        FIGURES["min_gap_ms"] = ms if before is None else min(before, ms)


@pytest.fixture(scope="session")
def figures():
    return Figures()


@pytest.fixture(scope="package")
def pool():
    with NodePool() as started:
        yield started


@pytest.fixture(autouse=True)
def leaves_no_pod(request):
    """Take away what a test that failed has left, so that only its own failure counts."""
    yield
    if "pool" in request.fixturenames:
        pool = request.getfixturevalue("pool")
        for left in pool.pods():
            pool.delete(left["metadata"]["name"], grace_s=0)


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/node/" in str(item.fspath):
            item.add_marker(pytest.mark.node)


def pytest_unconfigure(config):
    if FIGURES["starts"] and not hasattr(config, "workerinput"):
        print(json.dumps(FIGURES), flush=True)


def pytest_configure(config):
    if problems := host_problems():
        text = "; ".join(problems)
        raise pytest.UsageError(f"tests/node cannot run here, and are not skipped: {text}")
