"""gres.conf counts as slurmd has loaded it: an order that slurmd may not have read closes the node."""

import pytest

from slurmbridge.node.book import Book
from slurmbridge.node.device import FoundGpu
from slurmbridge.node.gresconf import GresFile
from slurmbridge.node.inventory import read_map
from slurmbridge.node.loaded import Loaded, is_settled, judge
from slurmbridge.node.mapkeeper import MapKeeper
from slurmbridge.pool.errors import PeerUnavailable
from tests.support.clock import HandClock


def order(*minors):
    return tuple(GresFile(i, "a100", f"/dev/nvidia{m}") for i, m in enumerate(minors))


OLD, NEW = order(0, 1, 2), order(2, 1, 0)
KEPT = Loaded(OLD, started=1000.0)
STRAYED = Loaded(OLD, started=1000.0, strayed=True)

TAKEN = {
    "the first reading, of a file that is older than slurmd's run": (OLD, 900.0, None, 1000.0, (), OLD),
    "one that was written in the second of slurmd's start": (OLD, 1000.9, None, 1000.0, (), OLD),
    "a new order, once slurmd has started after it": (NEW, 1500.0, KEPT, 1600.0, (), NEW),
    "a new order where only a GPU that stays is in use": (NEW, 1500.0, KEPT, 1600.0, (1,), NEW),
    "the old order again, once slurmd has started after that": (OLD, 1500.0, STRAYED, 1600.0, (0,), OLD),
    "the same files with a new time": (OLD, 1500.0, KEPT, 1000.0, (0,), OLD),
    "the same files while slurmctld is away": (OLD, 1500.0, KEPT, None, (0,), OLD),
}  # fmt: skip

CLOSED = {
    "a new order that slurmd has not read": (NEW, 1500.0, KEPT, 1000.0, (), "restart slurmd on this node"),
    "a first reading of a file newer than slurmd's run": (OLD, 1500.0, None, 1000.0, (), "changed at 1970-01-01T00:25:00Z"),
    "a new order while slurmctld is away": (NEW, 1500.0, KEPT, None, (), "does not say when slurmd"),
    "a first reading while slurmctld is away": (OLD, 900.0, None, None, (), "does not say when slurmd"),
    "the old order again, which slurmd may have lost by a reconfigure": (OLD, 1500.0, STRAYED, 1000.0, (), "restart slurmd"),
    "a new order that is said to be old": (NEW, 900.0, KEPT, 1000.0, (), "not what slurmd had read"),
    "a number that a pod has a GPU by": (NEW, 1500.0, KEPT, 1600.0, (1, 2), "gives GPU 2 to another device file"),
    "a GPU that is gone while a pod has it": (order(0, 1), 1500.0, KEPT, 1600.0, (2,), "end these pods"),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_what_slurmd_must_have_read_is_taken(case):
    files, changed, kept, started, used, taken = TAKEN[case]
    fresh, why = judge(files, changed, kept, started, used)
    assert why == ""
    assert fresh.files == taken
    assert is_settled(files, fresh), "and is not asked for again"


@pytest.mark.parametrize("case", CLOSED)
def test_what_slurmd_may_not_have_read_closes_the_node_with_the_remedy(case):
    files, changed, kept, started, used, said = CLOSED[case]
    fresh, why = judge(files, changed, kept, started, used)
    assert said in why
    assert not is_settled(files, fresh), "it is asked for again"
    # The old order alone does not open it either: slurmd may have read the other one meanwhile.
    assert not is_settled(OLD, fresh)


class Node:
    """A folder with gres.conf, three device files and a slurmd of which only the start is known."""

    def __init__(self, tmp_path):
        self.folder, self.started, self.asked = tmp_path, 4e9, 0
        for minor in range(3):
            (tmp_path / f"nvidia{minor}").touch()
        self.write(0, 1, 2)
        self.clock = HandClock()
        self.fresh()

    def fresh(self):
        """Another run of the agent with the same book."""
        self.book = Book(str(self.folder / "book.json"))
        conf = str(self.folder / "gres.conf")
        self.keeper = MapKeeper(
            lambda: read_map(self, conf, "gpu001"),
            (self.folder / "gres.conf").read_text,
            self.book,
            self.start,
            self.clock,
        )

    def write(self, *minors):
        files = ",".join(f"{self.folder}/nvidia{m}" for m in minors)
        (self.folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={files}\n")

    def find(self):
        return [FoundGpu(f"GPU-{m}", m, str(self.folder / f"nvidia{m}")) for m in range(3)]

    async def start(self):
        self.asked += 1
        if self.started is None:
            raise PeerUnavailable("slurmctld", "show node", "down")
        return self.started

    def order(self):
        return [gpu.minor for gpu in self.keeper.devices.gpus]


async def test_the_order_that_slurmd_has_loaded_is_kept_over_edits_and_restarts_of_the_agent(
    tmp_path,
):
    node = Node(tmp_path)
    assert await node.keeper.refresh()
    assert node.order() == [0, 1, 2]
    # Slurm goes on with the old order: no word of slurmctld is needed while nothing changes.
    node.started = None
    await node.clock.advance(11.0)
    assert not await node.keeper.refresh()
    node.fresh()
    await node.keeper.refresh()
    assert (node.order(), node.asked) == ([0, 1, 2], 1)
    node.write(2, 0, 1)
    assert await node.keeper.refresh(), "an edit is seen at the next look"
    assert node.order() == []
    assert "does not say when slurmd" in node.keeper.devices.fault
    # Slurmd still has the old one, and so does the map when it is written back; but a reconfigure
    # may have come in between.
    node.started = 4e9
    node.write(0, 1, 2)
    await node.keeper.refresh()
    assert "restart slurmd" in node.keeper.devices.fault
    node.fresh()
    await node.keeper.refresh()
    assert "restart slurmd" in node.keeper.devices.fault, "a new agent remembers it"
    node.started += 60.0
    await node.clock.advance(2.1)
    assert await node.keeper.refresh()
    assert node.order() == [0, 1, 2]


async def test_a_new_order_opens_the_node_after_slurmds_restart_and_once_the_pods_are_gone(
    tmp_path,
):
    node = Node(tmp_path)
    await node.keeper.refresh()
    node.book.give("u-1", "a/b", 7, "main", ["GPU-2"], [2])
    node.write(2, 0, 1)
    node.started += 60.0
    await node.keeper.refresh()
    assert "while pods have it" in node.keeper.devices.fault
    node.book.drop(["u-1"])
    await node.clock.advance(2.1)
    assert await node.keeper.refresh()
    assert node.order() == [2, 0, 1]
    assert [gpu.minor for gpu in node.book.gpus] == [2, 0, 1]
