"""The pure core in a small exact world, under every order of events that Hypothesis can think of.

The world and its promises are in tests/support/core_world.py; a longer random run is
`python -m tests.property.soak --operations 100000`.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slurmbridge.core import grant
from tests.property.soak import main, run_story, world_of
from tests.support.core_agents import Agents
from tests.support.core_world import AGENT_WEIGHTS, WEIGHTS, World

numbers = st.integers(0, 2**16 - 1)
FEW = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


class CoreModel(RuleBasedStateMachine):
    """Each rule is one operation of the world, which checks its promises after it."""

    agents = False

    @initialize(pods=st.integers(0, 3), node=st.integers(0, 1))
    def begin(self, pods, node):
        self.world = World(agents=Agents() if self.agents else None)
        self.world.step("poll", 0, 1)
        for _ in range(pods):
            self.world.step("wait", 4, 0)
            self.world.step("deploy", 0, node)

    @rule(name=st.sampled_from(sorted(WEIGHTS)), pick=numbers, how=numbers)
    def do(self, name, pick, how):
        self.world.step(name, pick, how)

    @rule(pick=numbers, how=numbers)
    def act(self, pick, how):
        self.world.step("act", pick, how)

    @rule(seconds=st.integers(0, 9))
    def read(self, seconds):
        self.world.step("wait", seconds, 0)
        self.world.step("poll", 0, 1)

    @invariant()
    def nobody_waits_for_an_answer_of_an_entry_that_is_not_asking(self):
        if hasattr(self, "world"):
            book = self.world.machine.state.book.values()
            assert all(e.phase == "asking" for e in book if e.waiters)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.settle(220)


class AgentModel(CoreModel):
    """The same with agents, without whose word no claim may be given back."""

    agents = True

    @rule(name=st.sampled_from(sorted(AGENT_WEIGHTS)), pick=numbers, how=numbers)
    def hear_an_agent(self, name, pick, how):
        self.world.step(name, pick, how)


TestCoreModel = CoreModel.TestCase
TestCoreModel.settings = FEW
TestAgentModel = AgentModel.TestCase
TestAgentModel.settings = settings(FEW, max_examples=30)


@pytest.mark.parametrize("first", range(1, 121, 40))
def test_random_stories_with_faults_break_no_promise_and_settle(first):
    for seed in range(first, first + 40):
        run_story(seed, 150, World())


def test_a_short_soak_counts_nothing_broken_and_tells_so_in_one_line(capsys):
    assert main(["--operations", "3000", "--seed", "1000"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["operations"] >= 3000
    assert (told["double_owned"], told["leaked_claims"], told["wrong_evictions"]) == (0, 0, 0)
    assert told["other"] == {}


def test_a_soak_of_a_bridge_that_believes_slurm_alone_finds_gpus_with_two_owners(
    capsys, monkeypatch
):
    """The model can fail: this bridge asks its own book no more who still uses the GPUs."""
    monkeypatch.setattr(grant, "others_on", lambda state, entry, gpus: False)
    assert main(["--operations", "6000", "--stories", "1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["double_owned"] > 0
    assert any("-> Reply(" in line for line in lines), "the story is told"


@pytest.mark.parametrize("first", range(1, 61, 30))
def test_a_bridge_that_dies_after_every_single_action_breaks_no_promise(first):
    for seed in range(first, first + 30):
        run_story(seed, 150, World(), kills=1.0)


def test_pods_over_which_the_core_fails_cost_the_others_nothing(monkeypatch):
    """Every promise holds for the rest, and nothing of what is set aside is taken for free."""
    monkeypatch.setitem(WEIGHTS, "poison", 8)
    set_aside = 0
    for seed in range(2001, 2041):
        world, kills = world_of(seed)
        story = run_story(seed, 150, world, kills).story
        set_aside += sum("Aside(" in line for line in story)
    assert set_aside > 20


def test_random_stories_with_agents_break_no_promise_and_settle():
    for seed in range(1001, 1041):
        run_story(seed, 150, World(agents=Agents()), kills=0.2 * (seed % 2))
