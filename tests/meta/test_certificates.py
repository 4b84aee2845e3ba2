"""TLS as docs/install.md sets it up: the script's certificates between all parts, end to end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.support.kube_objects import pod
from tests.support.ports import reserve
from tests.support.slurm import SlurmConfig

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "manifests/tls/make-certificates.sh"
NAMESPACE = "slurmbridge"
PARTS = {"bridge": "slurmbridge", "extender": "slurmbridge-extender",
         "scheduler": "slurmbridge-scheduler"}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates")
    done = subprocess.run([SCRIPT, folder], capture_output=True, text=True, check=True, timeout=60)
    return folder, done.stdout


def extensions(certificate):
    text = subprocess.run(
        ["openssl", "x509", "-noout", "-ext", "subjectAltName,extendedKeyUsage", "-in", certificate],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    names = {n.strip() for n in text.partition("DNS:")[2].partition("\n")[0].split(",")}
    uses = {u for u in ("Server", "Client") if f"TLS Web {u} Authentication" in text}
    return {n.removeprefix("DNS:").removeprefix("IP Address:") for n in names}, uses


def test_a_second_run_renews_the_certificates_and_keeps_the_authority(made, tmp_path):
    first = subprocess.run([SCRIPT, tmp_path], capture_output=True, check=True)
    before = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.glob("**/*.*")}
    assert (
        subprocess.run([SCRIPT, tmp_path], capture_output=True, check=True).stdout == first.stdout
    )
    after = {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.glob("**/*.*")}
    changed = {str(p) for p in before if before[p] != after[p]}
    assert changed == {f"{part}/tls.{end}" for part in PARTS for end in ("crt", "key")}
    assert all((tmp_path / p).stat().st_mode & 0o077 == 0 for p in before)


def test_the_printed_commands_make_the_secrets_that_the_deployments_mount(made, build, kube):
    _, commands = made
    for line in commands.splitlines():
        create, apply = line.split(" | ")
        text = kube.kubectl(*create.split()[1:])
        kube.kubectl(*apply.split()[1:], stdin=text)
    secrets = kube.api.items(f"/api/v1/namespaces/{NAMESPACE}/secrets")
    keys = {s["metadata"]["name"]: set(s["data"]) for s in secrets}
    for deployment in build("overlays/second-scheduler"):
        if deployment["kind"] != "Deployment":
            continue
        for volume in deployment["spec"]["template"]["spec"]["volumes"]:
            name = volume.get("secret", {}).get("secretName", "")
            if name.endswith("-tls"):
                assert keys[name] == {"tls.crt", "tls.key", "ca.crt"}


def test_cert_manager_is_asked_for_the_same_certificates(made, build):
    folder, _ = made
    by_name = {o["metadata"]["name"]: o for o in build("tls") if o["kind"] == "Certificate"}
    for part, name in PARTS.items():
        spec = by_name[name]["spec"]
        names, uses = extensions(folder / part / "tls.crt")
        assert {*spec["dnsNames"], *spec.get("ipAddresses", [])} == names
        assert {u.split()[0].title() for u in spec["usages"] if u.endswith("auth")} == uses
        assert spec["secretName"] == f"{name}-tls"
        assert spec["issuerRef"]["name"] == "slurmbridge-ca"


@pytest.mark.e2e
def test_scheduler_extender_bridge_and_command_line_trust_each_other(made, build, cluster):
    folder, _ = made
    pool = cluster(SlurmConfig(nodes=2), scheduler=False)
    kube = pool.kube
    kube.kubectl("apply", "-k", str(ROOT / "manifests/base"))
    ports = reserve(4)
    accounts = {
        name: str(kube.kubeconfig_for_service_account(NAMESPACE, name))
        for name in ("slurmbridge", "slurmbridge-extender")
    }
    (config_map,) = (o for o in build("base") if o["kind"] == "ConfigMap")
    config = yaml.safe_load(config_map["data"]["config.yaml"])
    config["slurm"] = {"conf": str(pool.slurm.conf_path)}
    config["kube"] = {"kubeconfig": accounts["slurmbridge"], "lease": {"namespace": NAMESPACE}}
    config["link"] |= {"listen": f"0.0.0.0:{ports[0]}", "advertise": f"127.0.0.1:{ports[0]}"}
    config["link"]["tls"] = {
        "cert": str(folder / "bridge/tls.crt"),
        "key": str(folder / "bridge/tls.key"),
        "clientCa": str(folder / "bridge/ca.crt"),
    }
    config["admin"] = {"listen": f"127.0.0.1:{ports[1]}"}
    path = kube.dir / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    env = pool.slurm.env() | {"PATH": os.environ["PATH"]}
    kube.start_process(
        "bridge", [sys.executable, "-m", "slurmbridge", "run", "--config", str(path)],
        env=env, cwd=ROOT,
    )  # fmt: skip
    tls = folder / "extender"
    options = [
        f"--bridge=127.0.0.1:{ports[0]}",
        "--bridge-tls-name=slurmbridge.slurmbridge.svc",
        *(f"--bridge-tls-{part}={tls}/{file}" for part, file in
          (("cert", "tls.crt"), ("key", "tls.key"), ("ca", "ca.crt"))),
        f"--kubeconfig={accounts['slurmbridge-extender']}",
        f"--listen=0.0.0.0:{ports[2]}",
        f"--tls-cert={tls}/tls.crt",
        f"--tls-key={tls}/tls.key",
        f"--tls-client-ca={tls}/ca.crt",
        f"--admin-listen=127.0.0.1:{ports[3]}",
    ]  # fmt: skip
    extender = [sys.executable, "-m", "extender"]
    kube.start_process("extender", [*extender, "run", *options], env=env, cwd=ROOT)
    scheduler = yaml.safe_load(
        (ROOT / "manifests/overlays/default-scheduler/scheduler.yaml").read_text()
    )
    scheduler.pop("clientConnection")
    scheduler["leaderElection"]["leaderElect"] = False
    (block,) = scheduler["extenders"]
    block["urlPrefix"] = f"https://127.0.0.1:{ports[2]}"
    block["tlsConfig"] |= {
        "caFile": str(folder / "scheduler/ca.crt"),
        "certFile": str(folder / "scheduler/tls.crt"),
        "keyFile": str(folder / "scheduler/tls.key"),
    }
    kube.start_scheduler(scheduler)

    kube.api.create(pod("secured", gpus=2))
    where = "/api/v1/namespaces/default/pods/secured"
    end = time.monotonic() + 60
    while "nodeName" not in kube.api.get(where)["spec"]:
        assert time.monotonic() < end, (kube.dir / "extender.log").read_text()[-3000:]
        time.sleep(0.2)
    assert "slurmbridge.dev/claim" in kube.api.get(where)["metadata"]["annotations"]

    def run(*argv):
        return subprocess.run(
            argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )

    # As by `kubectl exec` in the bridge's pod: to 127.0.0.1, with the bridge's own certificate.
    asked = run(
        sys.executable, "-m", "slurmbridge", "status", "--config", str(path), "-o", "json"
    )  # fmt: skip
    assert json.loads(asked.stdout)["claims"]["bound"] == 1, asked.stderr
    checked = run(*extender, "check", *options)
    assert checked.returncode == 0, checked.stdout
    assert answer_to_a_stranger(ports[2]) == b""


def answer_to_a_stranger(port: int) -> bytes:
    """What somebody without a certificate reads; in TLS 1.3 that is when he learns of it."""
    context = ssl._create_unverified_context()
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        context.wrap_socket(plain) as secure,
    ):
        secure.sendall(b"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        return secure.recv(1)
    return b""
