"""Claims of gangs that were found running: what no pod says is its own may still be used.

After a restart of the bridge the pods tell which shares are theirs. In the rest there may be
processes of pods that were deleted by force meanwhile, and of which nobody knows. So before the
agents of its nodes have said that nothing is left there, no other member gets a share of it, and
the claim is not given back. Where there are no agents, both wait for `linger_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from slurmbridge.core import agents
from slurmbridge.core.state import State
from slurmbridge.core.waiting import Adopted
from slurmbridge.pool.record import GpuCount, GpuUse, SlurmJob

WORD_S = 30.0
"""A gang waits so long for the agents' word on the claim that it may have had before."""


def find(state: State) -> None:
    """After a reading: note what it shows that was not asked for by us and that nobody lives in."""
    known, found = state.waiting.adopted, {}
    for uid, jobs in state.live_groups.items():
        ticket = state.waiting.tickets.get(uid)
        for job in jobs:
            if (old := known.get(job.id)) is not None and old.uid == uid:
                found[job.id] = old
            elif (ticket is None or ticket.job_id not in (0, job.id)) and not state.lives_in(
                uid, job.id
            ):
                found[job.id] = Adopted(uid, state.now, state.moment, state.now)
    state.waiting.adopted = found


def unclear(
    state: State, job: SlurmJob, numbers: Mapping[str, Iterable[int]] | None = None
) -> list[str]:
    """Slurm nodes of a gang's claim on which there may be something that nobody knows of.

    Args:
        state: the state.
        job: the claim; one that this bridge has asked for has no such nodes.
        numbers: which of its GPUs matter, by Slurm node; None: all.

    """
    found = state.waiting.adopted.get(job.id)
    if found is None:
        return []
    if not agents.are_needed(state):
        is_long_ago = state.now - found.quiet_since >= state.settings.linger_s
        return [] if is_long_ago else list(job.nodes)
    uses = {name: (job.gpus or {}).get(name) for name in job.nodes}
    if numbers is not None:
        uses = {name: _only(uses.get(name), set(these)) for name, these in numbers.items()}
    members = state.sharing.get(found.uid, ())
    return [
        name
        for name, use in uses.items()
        if agents.are_clear(
            state,
            {name: use},
            found.moment,
            # Of a claim without numbers any pod may be, but those that have an entry of their own.
            members if use is not None else state.by_node.get(name, ()),
        )
        is not True
    ]


def _only(use: GpuUse | None, numbers: set[int]) -> GpuUse | None:
    if use is None or use.indices is None:
        return use
    kept = tuple(n for n in use.indices if n in numbers)
    return GpuUse((GpuCount("", len(kept)),), kept)


def is_young(state: State, job: SlurmJob) -> bool:
    """Whether members are to wait for what may be left in a claim, rather than to go elsewhere."""
    found = state.waiting.adopted.get(job.id)
    limit = max(WORD_S, state.settings.linger_s)
    return found is not None and state.now - found.since <= limit


def keeps_away(state: State, uid: str) -> bool:
    """Whether a gang has waited long enough for the claim that was found under its name.

    Pods of an earlier gang of the name seem to live on in it: it is theirs, and this gang's members
    get claims of their own.
    """
    return any(
        job.id in state.waiting.adopted and not is_young(state, job) and bool(unclear(state, job))
        for job in state.live_groups.get(uid, ())
        if job.id not in state.ending
    )
