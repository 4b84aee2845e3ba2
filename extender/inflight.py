"""Binds under way: what this process is having claimed, until the view shows it.

Between a bind call and the view that holds its claim lie some 10 to 50 ms, in which the filter
would offer the same GPUs again; the bridge would refuse, and the pod would go round once more. The
book only saves that round: the bridge and slurmctld decide, so an entry may be missing (another
replica's bind) or stay too long (bounded) without harm.

Pure: time is passed in (monotonic seconds).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.gres import parse_indices
from slurmbridge.pool.record import GpuRequest
from slurmbridge.pool.verdict import NO_ROW, Taken, ViewIndex
from slurmbridge.pool.view import View

MAX_BINDS: Final = 1024
"""Binds under way at a time; a node pool of 5,000 does not start more pods within seconds."""
MAX_SIZES: Final = 8192
"""Pods remembered from filter: bind does not say how much a pod asks for."""
LINGER_S: Final = 20.0
"""How long an entry stays whose fate the view has not shown."""


class Size(msgspec.Struct, frozen=True):
    """What a pod asks for."""

    gpu: GpuRequest
    cpus: int
    memory_mib: int


UNSEEN: Final = Size(GpuRequest(1), 0, 0)
"""Of a pod that another replica has filtered: the least that it can be, corrected by the grant."""


class Bound(msgspec.Struct, frozen=True):
    """One bind. until: when it is forgotten, whatever became of it.

    job_id: of the claim once granted, else 0. generation: first of `term` that shows the claim.
    """

    uid: str
    kube_node: str
    size: Size
    until: float
    term: str
    job_id: int = 0
    generation: int = 0


class InFlight:
    """The book of binds under way; `version` changes with every change of it."""

    def __init__(self) -> None:
        self._binds: dict[str, Bound] = {}
        self._sizes: OrderedDict[str, Size | None] = OrderedDict()
        self.version = 0

    def __len__(self) -> int:
        return len(self._binds)

    def __iter__(self) -> Iterator[Bound]:
        return iter(self._binds.values())

    @property
    def is_full(self) -> bool:
        """Whether no further bind should be begun."""
        return len(self._binds) >= MAX_BINDS

    def remember(self, uid: str, size: Size | None) -> None:
        """A filter call has shown how much a pod asks for; None: no pool GPU."""
        self._sizes[uid] = size
        self._sizes.move_to_end(uid)
        if len(self._sizes) > MAX_SIZES:
            self._sizes.popitem(last=False)

    def is_plain(self, uid: str) -> bool:
        """Whether a pod is known to ask for no pool GPU (False: it does, or nobody has said)."""
        return self._sizes.get(uid, UNSEEN) is None

    def begin(self, uid: str, kube_node: str, term: str, until: float) -> None:
        """A claim is being asked for. until: when no answer can come any more."""
        size = self._sizes.get(uid) or UNSEEN
        self._put(Bound(uid, kube_node, size, until, term))

    def grant(self, uid: str, job_id: int, gpus: str, generation: int, until: float) -> None:
        """The claim was granted: the pod may go nowhere else until the view says more."""
        bind = self._binds.get(uid)
        if bind is not None:
            self._put(
                msgspec.structs.replace(
                    bind,
                    size=_counted(bind.size, gpus),
                    job_id=job_id,
                    generation=generation,
                    until=until,
                )
            )

    def keep(self, uid: str, until: float) -> None:
        """Nobody knows whether there is a claim, or a Binding."""
        bind = self._binds.get(uid)
        if bind is not None:
            self._put(msgspec.structs.replace(bind, until=until))

    def end(self, uid: str) -> None:
        """There is no claim."""
        if self._binds.pop(uid, None) is not None:
            self.version += 1

    def settle(self, view: View | None, now: float) -> None:
        """Forget what the view shows by itself, and what is too old. O(binds)."""
        over = [b.uid for b in self._binds.values() if b.until <= now or _shows(view, b)]
        for uid in over:
            self.end(uid)

    def home_of(self, uid: str) -> str:
        """The node where a claim was granted for a pod, "" if none is known here."""
        bind = self._binds.get(uid)
        return bind.kube_node if bind is not None and bind.job_id else ""

    def taken(self, index: ViewIndex, but: str = "") -> Iterable[Taken]:
        """What all binds but that of one pod take of the nodes of an index."""
        for bind in self._binds.values():
            row = index.row_of.get(bind.kube_node, NO_ROW)
            if bind.uid != but and row != NO_ROW:
                yield Taken(row, bind.size.gpu, bind.size.cpus, bind.size.memory_mib)

    def __contains__(self, uid: object) -> bool:
        return uid in self._binds

    def _put(self, bind: Bound) -> None:
        self._binds[bind.uid] = bind
        self.version += 1


def _shows(view: View | None, bind: Bound) -> bool:
    """Whether a view holds the claim already. One of another leader was read from Slurm anew."""
    if view is None or not bind.job_id:
        return False
    return view.term != bind.term or view.generation >= bind.generation


def _counted(size: Size, gpus: str) -> Size:
    """The size as granted, where Slurm numbers the GPUs."""
    try:
        count = len(parse_indices(gpus)) if gpus else 0
    except ParseError:
        count = 0
    if not count or count == size.gpu.count:
        return size
    return msgspec.structs.replace(size, gpu=GpuRequest(count, size.gpu.type))
