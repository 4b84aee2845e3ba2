"""Random operations with faults against the pure core, for as long as one likes.

`python -m tests.property.soak --operations 100000 [--seed N] [--stories N]`

Every story is a world of its own: single pods or gangs, and in some of them the bridge is killed
after every single action, or after one in five. The story of a seed is the same each time.

Prints the story of the first broken promises, and one JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random  # noqa: TID251 - seeded: each story can be told again
import sys
import time

from tests.support.core_agents import Agents
from tests.support.core_world import AGENT_WEIGHTS, WEIGHTS, BrokenPromise, World
from tests.support.gang_world import GangWorld, RestlessGangWorld
from tests.support.odd_world import OddGangWorld, OddWorld
from tests.support.restored_world import RestoredGangWorld, RestoredWorld

STORY_STEPS = 150
TOLD_LINES = 120


KILLS = (0.0, 0.0, 0.2, 1.0)
"""How often the bridge is killed after an action, by the seed of the story."""


def world_of(seed: int) -> tuple[World, float]:
    """What kind of story a seed has: its world, and how often the bridge dies after an action.

    Every second one has agents, which are needed there; in every fourth names, lists and time
    limits go wrong besides, and in some the API server is set back to an older state.
    """
    agents = Agents() if seed % 2 == 0 else None
    gangs = (GangWorld, RestoredGangWorld, RestlessGangWorld, OddGangWorld)
    single = (World, World, RestoredWorld, OddWorld)
    kinds: tuple[type[World], ...] = single if seed % 3 else gangs
    return kinds[seed // 2 % 4](agents=agents), KILLS[seed // 3 % len(KILLS)]


def run_story(seed: int, steps: int, world: World, kills: float = 0.0) -> World:
    """One world from its beginning until it has settled.

    Args:
        seed: of all luck.
        steps: operations; kills are more.
        world: a new one.
        kills: how likely the bridge is killed right after an action.

    Raises:
        BrokenPromise: with the world as `world`.

    """
    luck = random.Random(seed)
    all_weights = WEIGHTS | dict(world.more_weights)
    all_weights |= {} if world.agents is None else AGENT_WEIGHTS
    names, weights = list(all_weights), list(all_weights.values())
    # Each story has its own mix, so that rare operations come together now and then.
    mixed = [w * luck.choice((0, 0.3, 1, 1, 2)) if w < 6 else w for w in weights]
    try:
        for name in luck.choices(names, mixed, k=steps):
            world.step(name, luck.getrandbits(16), luck.getrandbits(16))
            if name == "act" and kills and luck.random() < kills:
                world.step("kill_machine", 0, luck.getrandbits(16))
        world.settle()
    except BrokenPromise as error:
        error.world = world
        raise
    return world


def main(argv: list[str] | None = None) -> int:
    """Run, report, and give the exit status: 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first story")
    parser.add_argument("--stories", type=int, default=3, help="so many broken ones are told")
    args = parser.parse_args(argv)
    if argv is None and "PYTHONHASHSEED" not in os.environ:
        # The order of sets is luck too: without this, the story of a seed is another each time.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.property.soak", *sys.argv[1:]])
    found: dict[str, int] = {}
    done, seed, told, began = 0, args.seed, 0, time.monotonic()
    while done < args.operations:
        try:
            world, kills = world_of(seed)
            done += run_story(seed, STORY_STEPS, world, kills).steps
        except BrokenPromise as error:
            done += error.world.steps
            found[error.what] = found.get(error.what, 0) + 1
            print(f"--- seed {seed}: {str(error)[:300]}", flush=True)
            if told < args.stories:
                told += 1
                print("\n".join(error.world.story[-TOLD_LINES:]))
        seed += 1
    broken = bool(found)
    total = {
        "operations": done,
        "seconds": round(time.monotonic() - began, 1),
        "double_owned": found.pop("double_owned", 0),
        "leaked_claims": found.pop("leaked_claims", 0),
        "wrong_evictions": found.pop("wrong_evictions", 0),
        "other": found,
    }
    print(json.dumps(total))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
