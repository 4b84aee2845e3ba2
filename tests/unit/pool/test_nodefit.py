"""What a pod's spec says of nodes: as kube-scheduler's own filters have it."""

from __future__ import annotations

import msgspec
import pytest

from slurmbridge.pool.nodefit import ANYWHERE, NodeFit, Requirement, Taint, Toleration
from slurmbridge.pool.podspec import read_node, read_pod
from slurmbridge.pool.raw import RawNode, RawPod

LABELS = {"zone": "z1", "gen": "7"}
DEDICATED = Taint("dedicated", "train", "NoSchedule")


def admits(fit, *taints, name="n1", labels=LABELS):
    return fit.admits(name, labels, taints)


@pytest.mark.parametrize(
    ("toleration", "effect", "ok"),
    [
        (Toleration("dedicated", "Equal", "train"), "NoSchedule", True),
        (Toleration("dedicated", "Equal", "serve"), "NoSchedule", False),
        (Toleration("dedicated", "Exists"), "NoExecute", True),
        (Toleration("dedicated", "Exists", effect="NoExecute"), "NoSchedule", False),
        (Toleration("", "Exists"), "NoSchedule", True),
        (Toleration("", "Equal", "train"), "NoSchedule", False),
        (Toleration("other", "Exists"), "NoSchedule", False),
        (Toleration("other", "Exists"), "PreferNoSchedule", True),
    ],
)
def test_a_taint_keeps_off_who_does_not_tolerate_it(toleration, effect, ok):
    taint = Taint("dedicated", "train", effect)
    assert admits(NodeFit(tolerations=(toleration,)), taint) is ok


def test_each_taint_has_to_be_tolerated():
    fit = NodeFit(tolerations=(Toleration("dedicated", "Exists"),))
    assert admits(fit, DEDICATED)
    assert not admits(fit, DEDICATED, Taint("x", "", "NoExecute"))
    assert not admits(ANYWHERE, DEDICATED)


@pytest.mark.parametrize(
    ("operator", "key", "values", "ok"),
    [
        ("In", "zone", ("z1", "z2"), True),
        ("In", "none", ("z1",), False),
        ("NotIn", "zone", ("z1",), False),
        ("NotIn", "none", ("z1",), True),
        ("Exists", "zone", (), True),
        ("DoesNotExist", "zone", (), False),
        ("Gt", "gen", ("6",), True),
        ("Lt", "gen", ("7",), False),
        ("Gt", "zone", ("6",), False),
        ("Gt", "gen", (), False),
        ("Later", "zone", (), True),
    ],
)
def test_operators_of_node_affinity(operator, key, values, ok):
    assert admits(NodeFit(terms=((Requirement(key, operator, values),),))) is ok


def test_one_term_has_to_hold_with_all_that_it_says_and_an_empty_one_never_does():
    zone, gen = Requirement("zone", "In", ("z1",)), Requirement("gen", "In", ("8",))
    assert admits(NodeFit(terms=((gen,), (zone,))))
    assert not admits(NodeFit(terms=((gen, zone),)))
    assert not admits(NodeFit(terms=((),)))
    assert not admits(NodeFit(terms=()))
    named = Requirement("metadata.name", "In", ("n1",), is_field=True)
    assert admits(NodeFit(terms=((named,),)))
    assert not admits(NodeFit(terms=((named,),)), name="n2")


def test_a_pod_and_a_node_are_read_as_the_api_server_writes_them():
    spec = {
        "nodeSelector": {"zone": "z1"},
        "tolerations": [{"key": "dedicated", "operator": "Exists", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [{"key": "gen", "operator": "Gt", "values": ["6"]}],
                            "matchFields": [
                                {"key": "metadata.name", "operator": "In", "values": ["n1"]}
                            ],
                        }
                    ]
                }
            }
        },
    }
    pod = read_pod(msgspec.convert({"spec": spec}, RawPod), {})
    assert pod.fit == NodeFit(
        (("zone", "z1"),),
        (Toleration("dedicated", "Exists", "", "NoSchedule"),),
        (
            (
                Requirement("gen", "Gt", ("6",)),
                Requirement("metadata.name", "In", ("n1",), is_field=True),
            ),
        ),
    )
    taints = [
        {"key": "dedicated", "value": "train", "effect": "NoSchedule"},
        {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
    ]
    about = {"metadata": {"name": "n1", "labels": LABELS}, "spec": {"taints": taints}}
    about["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
    node = read_node(msgspec.convert(about, RawNode))
    assert node.taints == (DEDICATED,)
    assert node.takes(pod.fit)
    assert not node.takes(ANYWHERE)
    assert read_pod(RawPod(), {}).fit is ANYWHERE
