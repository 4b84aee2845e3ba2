"""Whether a Slurm cluster is set up so that claims can work: what `doctor` and the start tell.

Pure: a reading of slurmctld in, sentences out. What is checked is what has been seen to go wrong on
real Slurm; a site may have reasons, so only what makes claims impossible or unsafe is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from slurmbridge.pool.record import Partition, SlurmNode, SlurmSnapshot

ERROR: Final = "error: "
WARNING: Final = "warning: "
_NAMES_SHOWN: Final = 5


def preflight(snapshot: SlurmSnapshot, partition: str, default_minutes: int = 60) -> list[str]:
    """What stands in the way of claims, errors first; [] when nothing does.

    Args:
        snapshot: one reading of slurmctld.
        partition: where claims go; "" for Slurm's default partition, of which less can be said.
        default_minutes: time limit of a claim whose pod says no duration.

    Returns:
        Sentences that begin with `ERROR` (claims will fail, or harm others) or `WARNING`.

    """
    found = [*_scheduler(snapshot)]
    ours = snapshot.partitions.get(partition)
    if ours is not None:
        found += _partition(ours, default_minutes)
        found += _billing(snapshot, ours)
        found += _preemption(snapshot, ours)
        nodes = [snapshot.nodes[name] for name in ours.nodes if name in snapshot.nodes]
        found += _nodes(nodes, f"partition {ours.name}")
    elif partition:
        found.append(f"{ERROR}there is no partition {partition}: claims have nowhere to go")
    else:
        found.append(
            f"{WARNING}claims go to Slurm's default partition, together with everybody's jobs;"
            " a partition of their own keeps their limits and priorities apart"
        )
        found += _nodes(list(snapshot.nodes.values()), "the cluster")
    return sorted(found, key=lambda text: not text.startswith(ERROR))


def _scheduler(snapshot: SlurmSnapshot) -> Iterator[str]:
    config = snapshot.config
    if config.select_type and config.select_type != "select/cons_tres":
        yield (
            f"{ERROR}SelectType is {config.select_type}: only select/cons_tres gives out GPUs"
            " one by one"
        )
    consumable = {parameter.upper() for parameter in config.select_parameters}
    if consumable and not any("MEMORY" in parameter for parameter in consumable):
        yield (
            f"{WARNING}SelectTypeParameters has no memory (CR_Core_Memory): pods and native jobs"
            " can together use more memory than a node has"
        )
    if "defer" in config.scheduler_parameters:
        yield (
            f"{WARNING}SchedulerParameters has defer: Slurm refuses immediate claims, so each claim"
            " is queued as a batch job and takes a scheduling cycle"
        )


def _partition(ours: Partition, minutes: int) -> Iterator[str]:
    name = f"partition {ours.name}"
    if ours.state and ours.state != "UP":
        yield f"{ERROR}{name} is {ours.state}: Slurm refuses every claim"
    if ours.exclusive:
        yield (
            f"{ERROR}{name} gives whole nodes (OverSubscribe=EXCLUSIVE): a claim on one GPU would"
            " take them all"
        )
    if ours.max_time_min is not None and ours.max_time_min < minutes:
        yield (
            f"{ERROR}{name} has MaxTime {ours.max_time_min} minutes, less than the default of"
            f" {minutes} minutes for a claim"
        )
    if ours.allow_accounts is not None:
        yield f"{WARNING}{name} takes only the accounts {', '.join(ours.allow_accounts)}"


def _billing(snapshot: SlurmSnapshot, ours: Partition) -> Iterator[str]:
    weights = ours.billing_weights
    has_fairshare = snapshot.config.priority_type == "priority/multifactor"
    if has_fairshare and weights is not None and "gres/gpu" not in weights.lower():
        yield (
            f"{WARNING}TRESBillingWeights of partition {ours.name} has no GRES/gpu: fairshare"
            " charges pods for CPUs only"
        )


def _preemption(snapshot: SlurmSnapshot, ours: Partition) -> Iterator[str]:
    on_our_nodes = set(ours.nodes)
    others = [
        other
        for other in snapshot.partitions.values()
        if other.name != ours.name and on_our_nodes & set(other.nodes)
    ]
    kind = snapshot.config.preempt_type
    if kind == "preempt/partition_prio":
        victims = [
            other.name
            for other in others
            if other.priority_tier < ours.priority_tier and other.preempt_mode.upper() != "OFF"
        ]
        if victims:
            yield (
                f"{ERROR}claims in partition {ours.name} preempt jobs of {_some(victims)}, and a"
                " refused claim kills its victims all the same: set PreemptMode=OFF there, or give"
                f" {ours.name} the same PriorityTier"
            )
    elif kind == "preempt/qos":
        yield f"{WARNING}PreemptType is preempt/qos: claims must use a QOS that preempts nobody"
    ahead = [other.name for other in others if other.priority_tier > ours.priority_tier]
    if ahead:
        yield (
            f"{WARNING}jobs of {_some(ahead)} stand before claims of partition {ours.name} by"
            " PriorityTier: queued claims wait for them, and after a slurmctld crash they may take"
            " the GPUs of a forgotten claim first"
        )


def _nodes(nodes: list[SlurmNode], where: str) -> Iterator[str]:
    with_gpus = [node for node in nodes if node.gpu_total > 0]
    if not with_gpus:
        yield f"{ERROR}no node of {where} has GPUs in Slurm (Gres=gpu)"
    unnumbered = [
        node.name
        for node in with_gpus
        if node.gpus_used is not None and node.gpus_used.indices is None
    ]
    if unnumbered:
        yield (
            f"{WARNING}Slurm counts the GPUs of {_some(unnumbered)} but does not number them"
            " (gres.conf without File=): nodes can be shared whole only"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    rest = len(names) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown
