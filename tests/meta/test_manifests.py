"""manifests/ as it is: schemas, a real API server, a real kube-scheduler, our own parsers."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from extender.cli import _parser as extender_parser
from slurmbridge.cli import _parser as bridge_parser
from slurmbridge.config import parse
from slurmbridge.node.metrics import OWNER
from slurmbridge.pool.policy import Granularity
from tests.support import reference
from tests.support.kube_api import KubeError
from tests.support.kube_objects import pod

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
OVERLAYS = ("overlays/default-scheduler", "overlays/second-scheduler")
BUILT = ("base", *OVERLAYS)
NAMESPACE = "slurmbridge"
API_VERSION = "1.37"


def of_kind(objects, kind):
    return [o for o in objects if o["kind"] == kind]


def named(objects, kind, name):
    (found,) = (o for o in of_kind(objects, kind) if o["metadata"]["name"] == name)
    return found


# Each object by itself.


@pytest.mark.parametrize("folder", [*BUILT, "admission", "admission/strict"])
def test_every_object_is_valid_and_has_no_unknown_field(build, folder):
    objects = build(folder)
    assert objects
    for one in objects:
        kubernetes_validate.validate(one, API_VERSION, strict=True)


@pytest.mark.parametrize("folder", [*BUILT, "monitoring"])
def test_every_namespaced_object_is_in_our_namespace(build, folder):
    cluster_wide = {"Namespace", "ClusterRole", "ClusterRoleBinding"}
    elsewhere = {
        (o["kind"], o["metadata"]["name"], o["metadata"].get("namespace"))
        for o in build(folder)
        if o["kind"] not in cluster_wide and o["metadata"].get("namespace") != NAMESPACE
    }
    stock = {("RoleBinding", "slurmbridge-scheduler-authentication-reader", "kube-system")}
    assert elsewhere <= stock


def test_the_configuration_of_the_config_map_is_good_and_the_safe_one(build):
    config = parse(named(build("base"), "ConfigMap", "slurmbridge")["data"]["config.yaml"].encode())
    assert config.policy.granularity is Granularity.NODE
    assert config.link.tls is not None
    assert not config.link.insecure


def containers(build, folder="overlays/second-scheduler"):
    for deployment in of_kind(build(folder), "Deployment"):
        spec = deployment["spec"]["template"]["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            yield deployment["metadata"]["name"], spec, container


def test_no_container_is_root_can_become_it_or_writes_to_its_image(build):
    for where, spec, container in containers(build):
        assert spec["securityContext"]["runAsNonRoot"] is True, where
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, where
        assert container["resources"]["requests"], where


def test_the_arguments_of_our_containers_are_those_of_our_command_lines(build):
    parsers = {"bridge": bridge_parser(), "extender": extender_parser()}
    seen = set()
    for _, _, container in containers(build):
        if container["name"] in parsers:
            parsers[container["name"]].parse_args(container["args"])
            seen.add(container["name"])
    assert seen == set(parsers)


def test_every_file_that_a_container_is_told_of_is_on_a_volume_of_it(build):
    pattern = re.compile(r"/(?:etc|run)/[\w./-]+")
    for where, spec, container in containers(build):
        mounts = [m["mountPath"] for m in container["volumeMounts"]]
        volumes = {v["name"] for v in spec["volumes"]}
        assert {m["name"] for m in container["volumeMounts"]} <= volumes, where
        texts = [*container.get("command", []), *container.get("args", [])]
        for path in pattern.findall(" ".join(texts)):
            assert any(path.startswith(mount) for mount in mounts), (where, path)


def test_the_paths_of_the_configuration_are_on_volumes_of_the_bridge(build):
    config = parse(named(build("base"), "ConfigMap", "slurmbridge")["data"]["config.yaml"].encode())
    (mounts,) = (
        [m["mountPath"] for m in c["volumeMounts"]]
        for _, _, c in containers(build)
        if c["name"] == "bridge"
    )
    tls = config.link.tls
    assert tls is not None
    for path in (config.slurm.conf, tls.cert, tls.key, tls.client_ca):
        assert any(path.startswith(mount + "/") for mount in mounts), path


@pytest.mark.parametrize("folder", OVERLAYS)
def test_every_selector_finds_pods_and_every_port_name_is_a_port(build, folder):
    objects = build(folder)
    pods = [d["spec"]["template"] for d in of_kind(objects, "Deployment")]

    def selected(labels):
        found = [p for p in pods if labels.items() <= p["metadata"]["labels"].items()]
        assert found, labels
        return {port["name"] for p in found for c in p["spec"]["containers"] for port in c["ports"]}

    for service in of_kind(objects, "Service"):
        ports = selected(service["spec"]["selector"])
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= ports
    for policy in of_kind(objects, "NetworkPolicy"):
        ports = selected(policy["spec"]["podSelector"]["matchLabels"])
        for rule in policy["spec"]["ingress"]:
            assert {p["port"] for p in rule["ports"]} <= ports
    for budget in of_kind(objects, "PodDisruptionBudget"):
        selected(budget["spec"]["selector"]["matchLabels"])
    for deployment in of_kind(objects, "Deployment"):
        selected(deployment["spec"]["selector"]["matchLabels"])


def test_the_policy_lets_extenders_and_the_other_bridge_to_the_link_and_nobody_else(build):
    objects = build("overlays/second-scheduler")
    rule = named(objects, "NetworkPolicy", "slurmbridge")["spec"]["ingress"][0]
    (peer,) = rule["from"]
    (expression,) = peer["podSelector"]["matchExpressions"]
    assert expression["key"] == "app.kubernetes.io/name"
    may = {
        d["metadata"]["name"]
        for d in of_kind(objects, "Deployment")
        if d["spec"]["template"]["metadata"]["labels"][expression["key"]] in expression["values"]
    }
    assert may == {"slurmbridge", "slurmbridge-extender"}


# The extender block.


def scheduler_configs(build):
    text = named(
        build("overlays/second-scheduler"), "ConfigMap", "slurmbridge-scheduler"
    )["data"]["scheduler.yaml"]  # fmt: skip
    default = (MANIFESTS / "overlays/default-scheduler/scheduler.yaml").read_text()
    return {"second": yaml.safe_load(text), "default": yaml.safe_load(default)}


def test_both_schedulers_get_the_same_extender(build):
    blocks = {name: copy.deepcopy(c["extenders"]) for name, c in scheduler_configs(build).items()}
    for (block,) in blocks.values():
        block.pop("tlsConfig")
    assert blocks["second"] == blocks["default"]
    (block,) = blocks["default"]
    verbs = {v.removesuffix("Verb"): word for v, word in block.items() if v.endswith("Verb")}
    assert verbs == {v: v for v in ("filter", "prioritize", "bind", "preempt")}


def test_the_extenders_address_is_its_service(build):
    objects = build("base")
    service = named(objects, "Service", "slurmbridge-extender")
    port = next(p["port"] for p in service["spec"]["ports"] if p["name"] == "extender")
    for config in scheduler_configs(build).values():
        (block,) = config["extenders"]
        assert block["urlPrefix"] == f"https://slurmbridge-extender.{NAMESPACE}.svc:{port}"


# A real control plane.


@pytest.mark.kube
@pytest.mark.parametrize("folder", OVERLAYS)
def test_the_api_server_takes_an_overlay_and_a_second_time_changes_nothing(kube, build, folder):
    kube.kubectl("apply", "-k", str(MANIFESTS / folder))
    versions = {}
    for one in build(folder):
        path = kube.api.path(
            one["kind"],
            one["metadata"]["name"],
            one["metadata"].get("namespace"),
            one["apiVersion"],
        )
        versions[path] = kube.api.get(path)["metadata"]["resourceVersion"]
    again = kube.kubectl("apply", "-k", str(MANIFESTS / folder)).splitlines()
    assert len(again) == len(versions)
    # kubectl says "configured" of some kinds whatever happens: the version tells.
    assert {p: kube.api.get(p)["metadata"]["resourceVersion"] for p in versions} == versions


@pytest.mark.kube
def test_an_upgrade_leaves_the_lease_to_whoever_holds_it(kube):
    path = kube.api.path("Lease", "slurmbridge", NAMESPACE, "coordination.k8s.io/v1")
    held = {"holderIdentity": "bridge-a", "leaseDurationSeconds": 15, "leaseTransitions": 3}
    kube.api.patch(path, {"spec": held})
    kube.kubectl("apply", "-k", str(MANIFESTS / OVERLAYS[0]))
    assert kube.api.get(path)["spec"] == held


@pytest.mark.kube
@pytest.mark.parametrize("what", [*OVERLAYS, "admission", "admission/strict", "planned"])
def test_no_field_is_unknown_to_the_api_server(kube, tmp_path, what):
    """The node agent's are tried in test_node_manifests; monitoring and tls need others' CRDs."""
    text = kube.kubectl("kustomize", str(MANIFESTS / what))
    kube.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict",
                 "--force-conflicts", "-f", "-", stdin=text)  # fmt: skip


@pytest.mark.kube
def test_pod_security_of_the_namespace_lets_our_pods_in(kube, build):
    for deployment in of_kind(build("overlays/second-scheduler"), "Deployment"):
        template = deployment["spec"]["template"]
        tried = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "try", "labels": template["metadata"]["labels"]},
            "spec": template["spec"],
        }
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        kube.api.request("POST", path, tried, query={"dryRun": "All"})
        rooted = copy.deepcopy(tried)
        rooted["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
        with pytest.raises(KubeError, match="violates PodSecurity"):
            kube.api.request("POST", path, rooted, query={"dryRun": "All"})


@pytest.mark.kube
@pytest.mark.parametrize("which", ["second", "default"])
def test_kube_scheduler_takes_the_configuration(kube, build, which):
    config = scheduler_configs(build)[which]
    certificate = kube.issue(f"scheduler-{which}", "DNS:scheduler")
    files = {
        "caFile": str(kube.ca_crt),
        "certFile": str(certificate.crt),
        "keyFile": str(certificate.key),
    }
    (block,) = config["extenders"]
    assert files.keys() <= block["tlsConfig"].keys()
    block["tlsConfig"] |= files
    # The file names a path of the control plane's host; tests have their own.
    config.pop("clientConnection", None)
    config["leaderElection"]["leaderElect"] = False
    kube.start_scheduler(config, name=f"scheduler-{which}")
    kube.kill9_scheduler(f"scheduler-{which}")


@pytest.mark.kube
def test_the_second_scheduler_leads_and_schedules_with_the_rights_of_its_account(kube, build):
    config = scheduler_configs(build)["second"]
    # Who calls the extender is told in test_certificates.
    config["extenders"] = []
    account = kube.kubeconfig_for_service_account(NAMESPACE, "slurmbridge-scheduler")
    config["clientConnection"] = {"kubeconfig": str(account)}
    kube.create_nodes(["gpu001"], gpus=8)
    kube.start_scheduler(config, name="second")
    kube.api.create(pod("opted-in", gpus=1, spec={"schedulerName": "slurmbridge"}))
    where = kube.api.path("Pod", "opted-in")
    end = time.monotonic() + 30
    while "nodeName" not in kube.api.get(where)["spec"]:
        assert time.monotonic() < end, (kube.dir / "second.log").read_text()[-3000:]
        time.sleep(0.1)
    lease = kube.api.path("Lease", "slurmbridge-scheduler", NAMESPACE, "coordination.k8s.io/v1")
    assert kube.api.get(lease)["spec"]["holderIdentity"]
    kube.kill9_scheduler("second")
    assert "forbidden" not in (kube.dir / "second.log").read_text().lower()


# Rights: what each service account may do, no more and no less.

BRIDGE = {
    ("", "pods", "get"),
    ("", "pods", "list"),
    ("", "pods", "watch"),
    ("", "pods", "patch"),
    ("", "pods", "delete"),
    ("", "pods/eviction", "create"),
    ("", "pods/status", "patch"),
    ("scheduling.x-k8s.io", "podgroups", "get"),
    ("scheduling.k8s.io", "podgroups", "get"),
    ("jobset.x-k8s.io", "jobsets", "get"),
    ("batch", "jobs", "get"),
    *(
        ("kubeflow.org", kind, "get")
        for kind in ("pytorchjobs", "tfjobs", "mpijobs", "xgboostjobs", "paddlejobs", "jaxjobs")
    ),
    ("", "namespaces", "get", "kube-system"),
    ("", "nodes", "get"),
    ("", "nodes", "list"),
    ("", "nodes", "watch"),
    ("", "nodes", "patch"),
    ("", "nodes/status", "patch"),
    ("", "events", "create"),
    ("", "events", "patch"),
}
LEASE = {
    ("coordination.k8s.io", "leases", "create"),
    ("coordination.k8s.io", "leases", "get", "slurmbridge"),
    ("coordination.k8s.io", "leases", "patch", "slurmbridge"),
}
EXTENDER = {("", "pods/binding", "create"), ("", "pods", "get")}


def rights(kube, account, namespace):
    """Everything that an account may do to objects of a namespace, as the API server sees it."""
    api = kube.api_as(kube.kubeconfig_for_service_account(NAMESPACE, account))
    answer = api.request(
        "POST",
        "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": namespace},
        },
    )
    return {
        (group, resource, verb, *([name] if name else []))
        for rule in answer["status"]["resourceRules"]
        for name in rule.get("resourceNames") or [""]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.kube
@pytest.mark.parametrize(
    ("account", "namespace", "expected"),
    [
        ("slurmbridge", "default", BRIDGE),
        ("slurmbridge", NAMESPACE, BRIDGE | LEASE),
        ("slurmbridge-extender", "default", EXTENDER),
        ("slurmbridge-extender", NAMESPACE, EXTENDER),
    ],
)
def test_an_account_may_do_what_it_needs_and_nothing_else(kube, account, namespace, expected):
    anybodys = rights(kube, "somebody-without-rights", namespace)
    assert not anybodys & expected
    assert rights(kube, account, namespace) - anybodys == expected


@pytest.mark.kube
@pytest.mark.parametrize(
    ("account", "verb", "resource", "namespace", "allowed"),
    [
        ("slurmbridge", "patch", "pods", "any", True),
        ("slurmbridge", "create", "pods/binding", "any", False),
        ("slurmbridge", "create", "pods", "any", False),
        ("slurmbridge", "patch", "pods/status", "any", True),
        ("slurmbridge", "patch", "nodes/status", "", True),
        ("slurmbridge", "update", "nodes/status", "", False),
        ("slurmbridge", "update", "nodes", "", False),
        ("slurmbridge", "delete", "nodes", "", False),
        ("slurmbridge", "get", "namespaces/kube-system", "", True),
        ("slurmbridge", "get", "namespaces/default", "", False),
        ("slurmbridge", "get", "secrets", NAMESPACE, False),
        ("slurmbridge", "get", "configmaps", NAMESPACE, False),
        ("slurmbridge", "patch", "leases.coordination.k8s.io/other", NAMESPACE, False),
        ("slurmbridge", "patch", "leases.coordination.k8s.io/slurmbridge", "kube-system", False),
        ("slurmbridge-extender", "create", "pods/binding", "any", True),
        ("slurmbridge-extender", "list", "pods", "any", False),
        ("slurmbridge-extender", "patch", "pods", "any", False),
        ("slurmbridge-extender", "create", "pods/eviction", "any", False),
        ("slurmbridge-extender", "get", "nodes", "", False),
        ("slurmbridge-scheduler", "list", "pods", "any", True),
        ("slurmbridge-scheduler", "list", "storageclasses.storage.k8s.io", "", True),
        ("slurmbridge-scheduler", "get", "leases.coordination.k8s.io/slurmbridge-scheduler",
         NAMESPACE, True),
        ("slurmbridge-scheduler", "update", "leases.coordination.k8s.io/slurmbridge-scheduler",
         NAMESPACE, True),
        ("slurmbridge-scheduler", "update", "leases.coordination.k8s.io/slurmbridge",
         NAMESPACE, False),
        ("slurmbridge-scheduler", "get", "configmaps/extension-apiserver-authentication",
         "kube-system", True),
        ("slurmbridge-scheduler", "get", "secrets", NAMESPACE, False),
    ],
)  # fmt: skip
def test_single_rights(kube, account, verb, resource, namespace, allowed):
    who = f"system:serviceaccount:{NAMESPACE}:{account}"
    where = ["--namespace", namespace] if namespace else []
    sub = []
    if resource.startswith("pods/") or resource == "nodes/status":
        resource, _, name = resource.partition("/")
        sub = [f"--subresource={name}"]
    if allowed:
        kube.kubectl("auth", "can-i", verb, resource, *sub, *where, f"--as={who}")
    else:
        with pytest.raises(RuntimeError):
            kube.kubectl("auth", "can-i", verb, resource, *sub, *where, f"--as={who}", "--quiet")


# Monitoring.


def rules(build) -> list[dict[str, Any]]:
    (rule,) = of_kind(build("monitoring"), "PrometheusRule")
    return [one for group in rule["spec"]["groups"] for one in group["rules"]]


def test_every_alert_asks_for_metrics_and_labels_that_exist(build):
    known = {}
    for metric in (*reference.bridge(), *reference.of_extender()):
        names = set(re.findall(r"`(\w+)`", metric.labels)) | {"le"}
        for suffix in ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",):
            known[metric.name + suffix] = names
    for rule in rules(build):
        used = re.findall(r"(slurmbridge_\w+)(?:\{([^}]*)\})?", rule["expr"])
        assert used, rule["alert"]
        for name, selector in used:
            assert name in known, rule["alert"]
            assert set(re.findall(r"(\w+)\s*(?:=|!)", selector)) <= known[name], rule["alert"]


def test_every_alert_tells_how_bad_it_is_and_what_it_means(build):
    names = [rule["alert"] for rule in rules(build)]
    assert len(names) == len(set(names))
    for rule in rules(build):
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].strip().endswith(".")


def test_the_monitor_scrapes_a_port_that_both_services_have(build):
    (monitor,) = of_kind(build("monitoring"), "ServiceMonitor")
    labels = monitor["spec"]["selector"]["matchLabels"]
    found = [
        s
        for s in of_kind(build("overlays/second-scheduler"), "Service")
        if labels.items() <= s["metadata"]["labels"].items()
    ]
    assert {s["metadata"]["name"] for s in found} == {"slurmbridge", "slurmbridge-extender"}
    for endpoint in monitor["spec"]["endpoints"]:
        for service in found:
            assert endpoint["port"] in {p["name"] for p in service["spec"]["ports"]}


def test_the_agents_are_scraped_and_their_labels_are_left_as_they_are(build):
    (monitor,) = of_kind(build("monitoring"), "PodMonitor")
    text = (MANIFESTS / "node/daemonset.yaml").read_text()
    template = yaml.safe_load(text)["spec"]["template"]
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    )
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = {p["name"] for c in template["spec"]["containers"] for p in c["ports"]}
    assert endpoint["port"] in ports
    # Job, namespace and pod of a GPU's owner, which a scrape would else put its own names over.
    assert endpoint["honorLabels"] is True


def test_the_dashboard_asks_for_series_and_labels_that_the_agents_have(build):
    (made,) = of_kind(build("monitoring"), "ConfigMap")
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
    panels = json.loads(made["data"]["dashboard.json"])["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(asked) == 13
    told = (MANIFESTS.parent / "docs/metrics.md").read_text()
    for expr in asked:
        for series in re.findall(r"slurmbridge_\w+", expr):
            assert f"| `{series}` |" in told, series
        for labels in re.findall(r"(?:by|group_left) \(([^)]+)\)", expr):
            assert set(labels.split(", ")) <= set(OWNER), expr


@pytest.mark.kube
def test_the_api_server_takes_the_monitoring_objects_once_their_kinds_are_known(kube):
    for plural, kind in (
        ("servicemonitors", "ServiceMonitor"),
        ("podmonitors", "PodMonitor"),
        ("prometheusrules", "PrometheusRule"),
    ):
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        kube.api.request(
            "POST",
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {"name": f"{plural}.monitoring.coreos.com"},
                "spec": {
                    "group": "monitoring.coreos.com",
                    "scope": "Namespaced",
                    "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
                    "versions": [
                        {
                            "name": "v1",
                            "served": True,
                            "storage": True,
                            "schema": {"openAPIV3Schema": schema},
                        }
                    ],
                },
            },
        )
    end = time.monotonic() + 20
    while True:
        try:
            kube.kubectl("apply", "-k", str(MANIFESTS / "monitoring"))
        except RuntimeError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
        else:
            return


# The munged sidecar.


def test_munged_starts_in_volumes_as_the_kubelet_makes_them(build, tmp_path):
    (sidecar,) = (c for _, _, c in containers(build) if c["name"] == "munged")
    user = 64030 if os.geteuid() == 0 else os.geteuid()
    group = user if os.geteuid() == 0 else os.getegid()
    for name in ("munge-secret", "munge-key", "munge"):
        folder = tmp_path / name
        folder.mkdir()
        os.chown(folder, -1, group)
        # fsGroup: of root, written by the group, no sticky bit.
        folder.chmod(0o2777)
    for above in tmp_path.parents:
        if above == Path(tempfile.gettempdir()):
            break
        above.chmod(above.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    key = tmp_path / "munge-secret/munge.key"
    key.write_bytes(os.urandom(128))
    os.chown(key, -1, group)
    key.chmod(0o440)
    (script,) = sidecar["args"]
    for mount in sorted(sidecar["volumeMounts"], key=lambda m: -len(m["mountPath"])):
        script = script.replace(mount["mountPath"] + "/", f"{tmp_path}/{mount['name']}/")
    as_user = {"user": user, "group": group, "extra_groups": []} if os.geteuid() == 0 else {}
    with subprocess.Popen(
        [*sidecar["command"], script],
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"},
        **as_user,
    ) as daemon:
        try:
            probe = [f"--socket={tmp_path}/munge/munge.socket.2", "-n"]
            end = time.monotonic() + 10
            while subprocess.run(["munge", *probe], capture_output=True, check=False).returncode:
                assert daemon.poll() is None, daemon.stderr.read()
                assert time.monotonic() < end
                time.sleep(0.1)
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.communicate(timeout=10)
