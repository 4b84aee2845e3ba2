"""manifests/node as it is: it builds, is valid, and says what the code reads."""

import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from slurmbridge.config import parse
from slurmbridge.node.gresconf import read_gres_conf
from slurmbridge.node.slurm_script import DEFAULTS, TOLD_S
from slurmbridge.pool.policy import Granularity
from tests.support import binaries
from tests.support.kube_api import KubeError

MANIFESTS = Path(__file__).parents[2] / "manifests"
OVERLAY = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [base]
components: [node]
"""


def overlay(tmp_path):
    """What a site with the node agent applies, as YAML."""
    for name in ("base", "node"):
        shutil.copytree(MANIFESTS / name, tmp_path / name)
    (tmp_path / "kustomization.yaml").write_text(OVERLAY)
    argv = [*binaries.command("kubectl"), "kustomize", str(tmp_path)]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout


def built(tmp_path):
    every = yaml.safe_load_all(overlay(tmp_path))
    return [one for one in every if "slurmbridge-node" in one["metadata"]["name"]]


@pytest.mark.kube
def test_a_real_api_server_takes_the_agents_objects_and_its_pods(kube, tmp_path):
    text = overlay(tmp_path)
    daemonset = next(one for one in yaml.safe_load_all(text) if one["kind"] == "DaemonSet")
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "try", "labels": daemonset["spec"]["template"]["metadata"]["labels"]},
        "spec": daemonset["spec"]["template"]["spec"],
    }
    path = "/api/v1/namespaces/slurmbridge/pods"
    apply = ("apply", "--server-side", "--force-conflicts", "--validate=strict", "-f", "-")
    kube.kubectl(*apply, "--dry-run=server", stdin=text)
    # Without the component its namespace would not let it in.
    with pytest.raises(KubeError, match="violates PodSecurity"):
        kube.api.request("POST", path, pod, query={"dryRun": "All"})
    kube.kubectl(*apply, stdin=text)
    kube.api.request("POST", path, pod, query={"dryRun": "All"})


def test_the_component_builds_into_valid_objects_of_our_namespace(tmp_path):
    objects = built(tmp_path)
    assert {one["kind"] for one in objects} == {
        "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "ConfigMap", "DaemonSet",
    }  # fmt: skip
    for one in objects:
        kubernetes_validate.validate(one, "1.37", strict=True)
        if not one["kind"].startswith("Cluster"):
            assert one["metadata"]["namespace"] == "slurmbridge"


def test_the_agent_may_only_read_pods_and_tell_events_and_is_not_privileged(tmp_path):
    objects = {one["kind"]: one for one in built(tmp_path)}
    assert objects["ClusterRole"]["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
    ]
    spec = objects["DaemonSet"]["spec"]["template"]["spec"]
    security = spec["containers"][0]["securityContext"]
    assert not security.get("privileged")
    assert security["capabilities"]["drop"] == ["ALL"]
    assert not spec.get("hostNetwork")


def test_the_config_map_is_read_by_the_agent(tmp_path):
    objects = {one["kind"]: one for one in built(tmp_path)}
    config = parse(objects["ConfigMap"]["data"]["config.yaml"].encode())
    assert config.policy.granularity is Granularity.GPU
    assert config.node.resource in config.policy.resources
    assert config.node.tls is not None
    spec = objects["DaemonSet"]["spec"]["template"]["spec"]
    mounts = [m["mountPath"] for m in spec["containers"][0]["volumeMounts"]]
    for path in (config.node.tls.cert, config.node.tls.key, config.node.tls.client_ca):
        assert str(Path(path).parent) in mounts


def test_the_image_has_what_the_config_map_asks_the_driver_by(tmp_path):
    objects = {one["kind"]: one for one in built(tmp_path)}
    config = parse(objects["ConfigMap"]["data"]["config.yaml"].encode())
    assert config.node.devices == "nvml"
    root = MANIFESTS.parent
    lines = (root / "Dockerfile").read_text().splitlines()
    wheel, install = (
        next(line for line in lines if f"RUN python -m pip {verb} " in line)
        for verb in ("wheel", "install")
    )
    assert "'.[nvidia]'" in wheel
    assert "'slurmbridge[nvidia]'" in install


def test_the_snippets_for_slurm_are_what_the_code_takes():
    folder = MANIFESTS / "node/slurm"
    gpus = read_gres_conf((folder / "gres.conf.snippet").read_text(), "gpu007")
    assert [gpu.index for gpu in gpus] == list(range(8))
    for hook in ("epilog", "prolog"):
        text = (folder / hook).read_text()
        assert text.rstrip().endswith(f"slurm_script.py {hook}")
        subprocess.run(["sh", "-n", str(folder / hook)], check=True)
        assert f"{hook.capitalize()}=" in (folder / "slurm.conf.snippet").read_text()
    limits = dict(
        re.findall(r"^(\w+)=(\d+)$", (folder / "slurm.conf.snippet").read_text(), re.MULTILINE)
    )
    # Slurm must not end what our hooks wait for by default.
    most_s = DEFAULTS["prolog_wait_s"] + 2 * TOLD_S
    assert int(limits["BatchStartTimeout"]) > most_s
    assert int(limits["PrologEpilogTimeout"]) > DEFAULTS["longest_hold_s"]
