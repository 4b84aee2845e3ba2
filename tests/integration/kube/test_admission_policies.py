"""manifests/admission on a real API server: what each rule refuses, and what it lets through."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.kube import KubeCluster, KubeError
from tests.support.kube_objects import pod

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kube_api import KubeApi

pytestmark = pytest.mark.kube

USER = "alice"
BRIDGE = "system:serviceaccount:slurmbridge:slurmbridge"
EXTENDER = "system:serviceaccount:slurmbridge:slurmbridge-extender"
KEYS = ("claim", "gpus", "reason", "share", "together", "wake")
TAINT = {"key": "slurmbridge.dev/pool", "operator": "Exists", "effect": "NoSchedule"}


@pytest.fixture(scope="module", name="closed")
def _closed() -> Iterator[KubeCluster]:
    """A cluster of its own: policies hold for everybody."""
    with KubeCluster(api_args=("--allow-privileged=true",)) as kube:
        kube.create_nodes(["gpu001"])
        for name, trusted in (("team", ""), ("agents", "true"), ("slurmbridge", "")):
            labels = {"slurmbridge.dev/trusted": trusted} if trusted else {}
            meta = {"name": name, "labels": labels}
            kube.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
        kube.kubectl("apply", "-k", "manifests/admission")
        kube.kubectl("apply", "-k", "manifests/admission/strict")
        yours = kube.api.acting_as(USER, "system:masters")
        for probe in (
            pod("probe", namespace="team", annotations={"slurmbridge.dev/claim": "x"}),
            pod("probe", namespace="team", gpus=1, node_name="gpu001"),
            _devices(securityContext={"privileged": True}),
            _devices(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]),
            _host("/dev"),
        ):
            # The API server compiles policies in the background.
            end = time.monotonic() + 30
            while not _refusal(yours, probe):
                assert time.monotonic() < end, probe
                time.sleep(0.2)
        yield kube


def _refusal(api: KubeApi, body: dict[str, Any]) -> str:
    """Why the API server refuses to create a pod; "" when it would not."""
    path = f"/api/v1/namespaces/{body['metadata']['namespace']}/pods"
    try:
        api.request("POST", path, body, query={"dryRun": "All"})
    except KubeError as error:
        assert error.status in (403, 422), error
        return str(error)
    return ""


def _devices(**fields: Any) -> dict[str, Any]:
    body = pod("p", namespace="team")
    body["spec"]["containers"][0] |= fields
    return body


def _host(path: str) -> dict[str, Any]:
    volume = {"name": "v", "hostPath": {"path": path}}
    return pod("p", namespace="team", spec={"volumes": [volume]})


def _in(namespace: str, body: dict[str, Any]) -> dict[str, Any]:
    return body | {"metadata": body["metadata"] | {"namespace": namespace}}


def _tolerating(gpus: int, **toleration: str) -> dict[str, Any]:
    return pod("p", namespace="team", gpus=gpus, spec={"tolerations": [toleration]})


REFUSED = {
    "a node named by hand": pod("p", namespace="team", gpus=1, node_name="gpu001"),
    "a GPU in an init container, a node by hand": pod(
        "p",
        namespace="team",
        node_name="gpu001",
        spec={
            "initContainers": [
                {"name": "i", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
            ]
        },
    ),
    "another scheduler": pod("p", namespace="team", gpus=1, spec={"schedulerName": "mine"}),
    "our toleration, no GPU": _tolerating(0, **TAINT),
    "our toleration, a limit of no GPU": pod(
        "p",
        namespace="team",
        spec={
            "tolerations": [TAINT],
            "initContainers": [
                {"name": "i", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "0"}}}
            ],
        },
    ),
    "all tolerations, no GPU": _tolerating(0, operator="Exists"),
    "our toleration against eviction": _tolerating(
        0, key="slurmbridge.dev/pool", operator="Exists", effect="NoExecute"
    ),
    "privileged": _devices(securityContext={"privileged": True}),
    "privileged init container": pod(
        "p",
        namespace="team",
        spec={
            "initContainers": [{"name": "i", "image": "i", "securityContext": {"privileged": True}}]
        },
    ),
    "all devices by variable": _devices(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]),
    "a device by variable": _devices(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"}]),
    "a variable from elsewhere": _devices(
        env=[
            {
                "name": "NVIDIA_VISIBLE_DEVICES",
                "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
            }
        ]
    ),
    "all devices by variable in an init container": pod(
        "p",
        namespace="team",
        spec={
            "initContainers": [
                {
                    "name": "i",
                    "image": "i",
                    "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}],
                }
            ]
        },
    ),
    "a CDI annotation": pod(
        "p", namespace="team", annotations={"cdi.k8s.io/x": "nvidia.com/gpu=0"}
    ),
    **{
        f"host path {path}": _host(path)
        for path in (
            "/",
            "/dev",
            "/dev/nvidia0",
            "//dev",
            "/./dev",
            "/proc",
            "/sys/fs/cgroup",
            "/run/slurmbridge",
            "/var",
            "/var/lib",
            "/var/lib/kubelet/device-plugins",
            "/var/run/docker.sock",
            "/var/lib/containerd",
        )
    },
}
ALLOWED = {
    "a GPU pod": pod("p", namespace="team", gpus=1),
    "a GPU pod of the second scheduler": pod(
        "p", namespace="team", gpus=1, spec={"schedulerName": "slurmbridge"}
    ),
    "a GPU pod that tolerates the pool": _tolerating(1, **TAINT),
    "a GPU pod with wishes": pod(
        "p",
        namespace="team",
        gpus=1,
        annotations={"slurmbridge.dev/duration": "1h", "slurmbridge.dev/account": "ml"},
        gates=("slurmbridge.dev/claim",),
    ),
    "a node by hand, no GPU": pod("p", namespace="team", node_name="gpu001"),
    "another scheduler, no GPU": pod("p", namespace="team", spec={"schedulerName": "mine"}),
    "another toleration": _tolerating(0, key="example.org/x", operator="Exists"),
    "no devices by variable": _devices(env=[{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]),
    "another variable": _devices(env=[{"name": "A", "value": "all"}]),
    "not privileged": _devices(securityContext={"privileged": False}),
    "a harmless host path": _host("/srv/data"),
    "a host path that only begins so": _host("/devices"),
    "an agent on every node": _in("agents", _tolerating(0, operator="Exists")),
    "an agent of the GPUs": _in("agents", _devices(securityContext={"privileged": True})),
    "an agent of the system": _in("kube-system", _host("/dev")),
    "our own agent": _in("slurmbridge", _host("/var/lib/kubelet")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(closed: KubeCluster, name: str) -> None:
    assert "slurmbridge: " in _refusal(_user(closed), REFUSED[name])


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(closed: KubeCluster, name: str) -> None:
    assert _refusal(_user(closed), ALLOWED[name]) == ""


def _user(kube: KubeCluster, name: str = USER) -> KubeApi:
    """A user with all rights: what is refused is refused by policy."""
    return kube.api.acting_as(name, "system:masters")


# Annotations.


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("who", "allowed"),
    [
        (USER, False),
        ("system:serviceaccount:kube-system:replicaset-controller", False),
        ("system:serviceaccount:team:slurmbridge", False),
        ("system:kube-scheduler", False),
        (BRIDGE, True),
        (EXTENDER, True),
    ],
)
def test_who_may_write_our_annotations(
    closed: KubeCluster, key: str, who: str, allowed: bool
) -> None:
    api, name = _user(closed, who), f"{key}-{abs(hash(who)) % 1000}"
    path = f"/api/v1/namespaces/team/pods/{name}"
    notes = {f"slurmbridge.dev/{key}": "7/abc"}
    forged = pod(name, namespace="team", gpus=1, annotations=notes)
    assert (_refusal(api, forged) == "") is allowed
    closed.api.create(pod(name, namespace="team", gpus=1))
    for target in (path, f"{path}/status"):
        try:
            api.request(
                "PATCH",
                target,
                {"metadata": {"annotations": notes}},
                content_type="application/merge-patch+json",
                query={"dryRun": "All"},
            )
        except KubeError as error:
            assert "slurmbridge: the annotations" in str(error)
            assert not allowed, target
        else:
            assert allowed, target
    closed.api.delete(path, grace_s=0)


def test_what_stands_on_a_pod_is_neither_changed_nor_taken_away_and_does_no_harm(
    closed: KubeCluster,
) -> None:
    path = "/api/v1/namespaces/team/pods/held"
    closed.api.create(pod("held", namespace="team", gpus=1))
    ours, yours = _user(closed, BRIDGE), _user(closed)
    ours.patch(path, {"metadata": {"annotations": {"slurmbridge.dev/claim": "7/x"}}})
    for value in ("8/x", None):
        with pytest.raises(KubeError, match="written by"):
            yours.patch(path, {"metadata": {"annotations": {"slurmbridge.dev/claim": value}}})
    yours.patch(path, {"metadata": {"annotations": {"slurmbridge.dev/duration": "1h"}}})
    yours.patch(path, {"metadata": {"labels": {"a": "b"}}})
    yours.patch(path, {"metadata": {"finalizers": ["example.org/x"]}})
    yours.delete(path, grace_s=0)
    yours.patch(path, {"metadata": {"finalizers": None}})
    assert closed.api.find(path) is None


def test_only_the_extender_writes_a_claim_by_a_binding(closed: KubeCluster) -> None:
    def bind(api: KubeApi, name: str, notes: dict[str, str]) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "annotations": notes},
            "target": {"kind": "Node", "name": "gpu001"},
        }
        api.request("POST", f"/api/v1/namespaces/team/pods/{name}/binding", body)

    for name in ("b1", "b2"):
        closed.api.create(pod(name, namespace="team", gpus=1))
    notes = {"slurmbridge.dev/claim": "7/x", "slurmbridge.dev/gpus": "0"}
    scheduler = _user(closed, "system:kube-scheduler")
    with pytest.raises(KubeError, match="written by"):
        bind(scheduler, "b1", notes)
    bind(scheduler, "b1", {})
    bind(_user(closed, EXTENDER), "b2", notes)
    found = closed.api.get("/api/v1/namespaces/team/pods/b2")["metadata"]["annotations"]
    assert found["slurmbridge.dev/claim"] == "7/x"


def test_the_pod_of_a_file_on_a_node_is_let_in_so_that_it_is_seen(closed: KubeCluster) -> None:
    assert _refusal(_kubelet(closed), _mirror(closed, "static")) == ""


def _kubelet(kube: KubeCluster) -> KubeApi:
    return kube.api.acting_as("system:node:gpu001", "system:nodes")


def _mirror(kube: KubeCluster, name: str) -> dict[str, Any]:
    """The pod of a file, as its kubelet shows it."""
    body = pod(name, namespace="team", gpus=1, node_name="gpu001")
    owner = {"apiVersion": "v1", "kind": "Node", "name": "gpu001", "controller": True}
    owner["uid"] = kube.api.get("/api/v1/nodes/gpu001")["metadata"]["uid"]
    body["metadata"]["ownerReferences"] = [owner]
    body["metadata"]["annotations"] = {"kubernetes.io/config.mirror": "x"}
    body["spec"]["automountServiceAccountToken"] = False
    return body


def test_a_toleration_is_not_added_later_and_an_old_one_does_no_harm(closed: KubeCluster) -> None:
    path = "/api/v1/namespaces/team/pods/late"
    closed.api.create(pod("late", namespace="team"))
    yours = _user(closed)
    kept = closed.api.get(path)["spec"].get("tolerations", [])
    with pytest.raises(KubeError, match="tolerated by"):
        yours.patch(path, {"spec": {"tolerations": [*kept, TAINT]}})
    yours.patch(path, {"metadata": {"labels": {"a": "b"}}})


def test_a_privileged_container_is_not_added_later(closed: KubeCluster) -> None:
    path = "/api/v1/namespaces/team/pods/debugged"
    closed.api.create(pod("debugged", namespace="team"))
    container = {"name": "dbg", "image": "x", "securityContext": {"privileged": True}}
    with pytest.raises(KubeError, match="privileged containers"):
        _user(closed).request(
            "PATCH",
            f"{path}/ephemeralcontainers",
            {"spec": {"ephemeralContainers": [container]}},
            content_type="application/strategic-merge-patch+json",
        )


def _debug(api: KubeApi, path: str, *containers: dict[str, Any]) -> None:
    api.request(
        "PATCH",
        f"{path}/ephemeralcontainers",
        {"spec": {"ephemeralContainers": list(containers)}},
        content_type="application/strategic-merge-patch+json",
    )


def test_devices_are_not_named_later_and_what_names_them_already_does_no_harm(
    closed: KubeCluster,
) -> None:
    yours = _user(closed)
    env = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    notes = {"cdi.k8s.io/x": "nvidia.com/gpu=0"}
    merge = "application/merge-patch+json"
    closed.api.create(pod("named", namespace="team"))
    path = "/api/v1/namespaces/team/pods/named"
    with pytest.raises(KubeError, match="NVIDIA_VISIBLE_DEVICES takes"):
        _debug(yours, path, {"name": "dbg", "image": "x", "env": env})
    for target in (path, f"{path}/status"):
        with pytest.raises(KubeError, match="a CDI annotation takes"):
            yours.request("PATCH", target, {"metadata": {"annotations": notes}}, content_type=merge)
    _debug(yours, path, {"name": "dbg", "image": "x"})
    # A kubelet is let through, as whoever made a pod before there was the policy.
    old = _mirror(closed, "old")
    old["metadata"]["annotations"] |= notes
    old["spec"]["containers"][0]["env"] = env
    _kubelet(closed).create(old)
    path = "/api/v1/namespaces/team/pods/old"
    yours.patch(path, {"metadata": {"labels": {"a": "b"}}})
    running = {"status": {"phase": "Running"}}
    yours.request("PATCH", f"{path}/status", running, content_type=merge)
    with pytest.raises(KubeError, match="a CDI annotation takes"):
        yours.patch(path, {"metadata": {"annotations": {"cdi.k8s.io/x": "nvidia.com/gpu=1"}}})
    yours.patch(path, {"metadata": {"annotations": {"cdi.k8s.io/x": None}}})
