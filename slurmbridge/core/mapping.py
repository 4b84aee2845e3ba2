"""Which Kubernetes node is which Slurm node.

In this order: the configured pairs, the node label, the same name, the same first part of the name
in any case (`gpu7.example.internal` is `gpu7`). Two Kubernetes nodes for one Slurm node: both stay
in the pool, and blocked. So does a Kubernetes node that is several Slurm nodes (a configured pair
with a host list): which of them a pod's GPUs belong to is not known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.hostlist import expand
from slurmbridge.pool.record import KubeNode

ITS_PODS = "renamed while its pods have claims on Slurm node"
OTHERS_PODS = "renamed while there are claims of pods of Kubernetes node"


class NameMap(msgspec.Struct, frozen=True):
    """slurm_of: Kubernetes name -> Slurm name. problems: pool nodes out of use, and why.

    several: Kubernetes name -> Slurm names, where there are more than one. may_be: every Kubernetes
    name, in the pool or not -> the Slurm names that it may have. `slurm_of` says where pods may
    go; what may still run on a Slurm node is asked of all Kubernetes nodes that may be it.
    held_back: those of the problems that are over once the pods have gone.
    """

    slurm_of: Mapping[str, str]
    problems: Mapping[str, str]
    several: Mapping[str, tuple[str, ...]] = {}
    may_be: Mapping[str, tuple[str, ...]] = {}
    held_back: frozenset[str] = frozenset()


def map_names(
    kube_nodes: Mapping[str, KubeNode],
    slurm_names: Iterable[str],
    pairs: Mapping[str, str],
    label: str,
    selector: Mapping[str, str],
    resources: Iterable[str],
    before: Mapping[str, str],
    with_gpus: Collection[str] = (),
) -> NameMap:
    """The nodes of the pool, with their names on both sides.

    Args:
        kube_nodes: all nodes.
        slurm_names: all nodes of the last reading of slurmctld.
        pairs: configured Kubernetes name -> Slurm name.
        label: node label that holds the Slurm name; "" for none.
        selector: labels that a pool node must have; empty: every node that Slurm knows and that has
            a GPU on either side. Not only on Kubernetes' side: there it has none while its device
            plugin is away, and pods would be bound past us in the moment at which it is back.
        resources: the pool's extended resources.
        before: the last result. A node once in the pool stays in it as long as it exists: one that
            Slurm does not list any more is blocked, not set free.
        with_gpus: those of the Slurm nodes that have GPUs.

    """
    known = set(slurm_names)
    folded: dict[str, str] = {}
    for name in known:
        short = name.lower().partition(".")[0]
        folded[short] = "" if short in folded else name
    found: dict[str, str] = {}
    several: dict[str, tuple[str, ...]] = {}
    may_be: dict[str, tuple[str, ...]] = {}
    alike: list[str] = []
    for name, node in kube_nodes.items():
        selected = all(node.labels.get(k) == v for k, v in selector.items())
        has_gpu = any(node.gpus.get(r, 0) > 0 for r in resources)
        wish = pairs.get(name) or (node.labels.get(label, "") if label else "")
        if len(many := _names_in(wish)) > 1:
            may_be[name] = many
            if selected:
                several[name] = many
            continue
        short = name.lower().partition(".")[0]
        slurm = wish or (name if name in known else folded.get(short, ""))
        may_be[name] = tuple({slurm or name, before.get(name, slurm or name)})
        if name in before and (selected or not selector) and wish not in known:
            found[name] = before[name]
            continue
        has_gpu = has_gpu or slurm in with_gpus
        if not selected or (not selector and not has_gpu and name not in before):
            continue
        if slurm in known:
            found[name] = slurm
        elif not slurm and short in folded:
            alike.append(name)
        elif selector:
            found[name] = slurm or name
    owners: dict[str, list[str]] = {}
    for name, slurm in found.items():
        owners.setdefault(slurm, []).append(name)
    problems = dict.fromkeys(several, "several Slurm nodes on one Kubernetes node")
    problems |= dict.fromkeys(alike, "several Slurm nodes have its short name: say which one it is")
    for slurm, names in owners.items():
        if len(names) > 1:
            text = "two Kubernetes nodes map to one Slurm node"
            problems.update(dict.fromkeys(names, text))
        elif slurm not in known:
            problems[names[0]] = "unknown to Slurm"
    good = {name: slurm for name, slurm in found.items() if len(owners[slurm]) == 1}
    return NameMap(good, problems, several, may_be)


def hold_back(names: NameMap, lived: Mapping[str, Collection[str]]) -> NameMap:
    """Take nodes out of use whose names have changed while pods have claims under the old ones.

    The devices that such pods use would be offered a second time, under another name.

    Args:
        names: the names as they are now.
        lived: Kubernetes name -> Slurm nodes on which pods of that node have claims.

    """
    here: dict[str, set[str]] = {}
    for kube, slurms in lived.items():
        for slurm in slurms:
            here.setdefault(slurm, set()).add(kube)
    moved = {}
    for kube, slurm in names.slurm_of.items():
        if away := set(lived.get(kube, ())) - {slurm}:
            moved[kube] = f"{ITS_PODS} {', '.join(sorted(away))}"
        elif others := here.get(slurm, set()) - {kube}:
            moved[kube] = f"{OTHERS_PODS} {', '.join(sorted(others))}"
    if not moved:
        return names
    good = {kube: slurm for kube, slurm in names.slurm_of.items() if kube not in moved}
    return msgspec.structs.replace(
        names, slurm_of=good, problems={**names.problems, **moved}, held_back=frozenset(moved)
    )


def _names_in(wish: str) -> tuple[str, ...]:
    """The Slurm names of a configured pair; one that is no host list is taken as it is."""
    try:
        return tuple(dict.fromkeys(expand(wish)))
    except ParseError:
        return (wish,)
