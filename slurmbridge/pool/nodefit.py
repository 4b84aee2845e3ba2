"""Which nodes kube-scheduler would let a pod go to, by what its spec says of nodes.

nodeSelector, required node affinity, and taints with their tolerations, as kube-scheduler's filters
NodeAffinity and TaintToleration have them (Kubernetes docs, "Assigning Pods to Nodes", "Taints and
Tolerations"). Volumes, ports, topology spread and plugins are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

_KEEPS_OUT: Final = ("NoSchedule", "NoExecute")


class Taint(msgspec.Struct, frozen=True, order=True):
    """One of a node's `spec.taints`."""

    key: str
    value: str = ""
    effect: str = ""

    @property
    def keeps_out(self) -> bool:
        """Whether it keeps pods off that do not tolerate it (PreferNoSchedule does not)."""
        return self.effect in _KEEPS_OUT


class Toleration(msgspec.Struct, frozen=True, order=True):
    """One of a pod's `spec.tolerations`. key "": all taints. effect "": all effects."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        """Whether a taint does not keep the pod off."""
        if self.effect not in ("", taint.effect) or (self.key and self.key != taint.key):
            return False
        return self.operator == "Exists" or (bool(self.key) and self.value == taint.value)


class Requirement(msgspec.Struct, frozen=True, order=True):
    """One of `matchExpressions`, or of `matchFields` (is_field: of the node's name)."""

    key: str
    operator: str
    values: tuple[str, ...] = ()
    is_field: bool = False

    def holds(self, name: str, labels: Mapping[str, str]) -> bool:
        """Whether a node meets it. An operator that is not known holds: kube-scheduler decides."""
        found = labels.get(self.key) if not self.is_field else name
        match self.operator:
            case "In":
                return found is not None and found in self.values
            case "NotIn":
                return found is None or found not in self.values
            case "Exists":
                return found is not None
            case "DoesNotExist":
                return found is None
            case "Gt" | "Lt":
                return self._compares(found)
            case _:
                return True

    def _compares(self, found: str | None) -> bool:
        try:
            have, want = int(found or ""), int(self.values[0])
        except (ValueError, IndexError):
            return False
        return have > want if self.operator == "Gt" else have < want


class NodeFit(msgspec.Struct, frozen=True, order=True):
    """What a pod's spec says of nodes.

    selector: nodeSelector, sorted. tolerations: sorted. terms: of required node affinity, one of
    which has to hold, all of its requirements; None: there is no such affinity.
    """

    selector: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    terms: tuple[tuple[Requirement, ...], ...] | None = None

    def admits(self, name: str, labels: Mapping[str, str], taints: tuple[Taint, ...]) -> bool:
        """Whether a node is one of those. An empty term holds for no node, as in Kubernetes."""
        if any(labels.get(key) != value for key, value in self.selector):
            return False
        if self.terms is not None and not any(
            term and all(requirement.holds(name, labels) for requirement in term)
            for term in self.terms
        ):
            return False
        return all(
            any(toleration.tolerates(taint) for toleration in self.tolerations)
            for taint in taints
            if taint.keeps_out
        )


ANYWHERE: Final = NodeFit()
