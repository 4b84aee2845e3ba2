"""Who gets devices, who does not, and what the pod's owner is told."""

import time

import pytest

from tests.support.node_image import IMAGE
from tests.support.node_pool import RESOURCE, Claimed, unique, wait

NODE = "gpu002"


def message(pool, name):
    return (pool.get(name) or {"status": {}})["status"].get("message", "")


def events(pool, name):
    """Events about a pod or node."""
    path = "/api/v1/namespaces/default/events"
    return pool.kube.api.items(path, fieldSelector=f"involvedObject.name={name}")


def test_a_pod_without_a_claim_is_refused_with_a_clear_text(pool):
    name = unique("stray")
    pool.kube.api.create(pool.pod(name, 1, spec={"nodeName": NODE}))
    wait(lambda: pool.phase(name) == "Failed", 20, "refusal", pool.get, name)
    assert f"pod default/{name} has no claim in Slurm" in message(pool, name)
    pool.delete(name)


def test_a_claim_of_another_pod_is_refused(pool):
    name = unique("thief")
    uid = pool.kube.api.create(pool.pod(name, 1))["metadata"]["uid"]
    pool.kube.api.request(
        "POST",
        f"/api/v1/namespaces/default/pods/{name}/binding",
        {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {
                "name": name,
                "uid": uid,
                "annotations": {
                    "slurmbridge.dev/claim": "1/11111111-2222-3333-4444-555555555555",
                    "slurmbridge.dev/gpus": "0",
                },
            },
            "target": {"apiVersion": "v1", "kind": "Node", "name": NODE},
        },
    )
    wait(lambda: pool.phase(name) == "Failed", 20, "refusal", pool.get, name)
    assert "was made for another pod" in message(pool, name)
    pool.delete(name)


def test_a_claim_that_slurm_has_ended_starts_no_container(pool):
    name = unique("late")
    uid = pool.kube.api.create(pool.pod(name, 1))["metadata"]["uid"]
    claim = pool.claim(NODE, 1, uid, f"default/{name}")
    pool.slurm.run("scancel", str(claim.job_id))
    pool.bind(claim)

    def told():
        return [e for e in events(pool, name) if "does not cover it any more" in e["message"]]

    wait(told, 30, "the event", pool.get, name)
    assert not (pool.marks / "start" / name).exists()
    pool.delete(name, grace_s=0)


def container(name, gpus, script="exit 0", **more):
    return {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "env": [{"name": "M", "value": "/m"}],
        "volumeMounts": [{"name": "marks", "mountPath": "/m"}],
        "resources": {"limits": {RESOURCE: str(gpus)} if gpus else {}},
        **more,
    }


SHAPES = {
    "two containers": ([], [("a", 1), ("b", 2)], 3),
    "init container with all, then one": ([("i", 3, {})], [("a", 3)], 3),
    "init container with fewer": ([("i", 1, {})], [("a", 3)], 3),
    "init container with more": ([("i", 3, {})], [("a", 1)], 3),
    "sidecar beside": ([("s", 1, {"restartPolicy": "Always"})], [("a", 2)], 3),
    "init container alone": ([("i", 2, {})], [("a", 0)], 2),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_container_gets_devices_of_the_pods_claim(pool, figures, shape):
    init, apps, total = SHAPES[shape]
    name = unique("shape")
    say = f'echo "$NVIDIA_VISIBLE_DEVICES" > $M/start/{name}-'
    body = pool.pod(name, 0)
    body["spec"]["containers"] = [
        container(c, n, f"{say}{c}; trap 'exit 0' TERM; sleep 1000 & wait") for c, n in apps
    ]
    body["spec"]["initContainers"] = [
        container(
            c,
            n,
            f"{say}{c}" + ("; trap 'exit 0' TERM; sleep 1000 & wait" if more else ""),
            **more,
        )
        for c, n, more in init
    ]
    uid = pool.kube.api.create(body)["metadata"]["uid"]
    taken = []
    wait(
        lambda: taken.append(pool.claim(NODE, total, uid, f"default/{name}")) or taken[-1],
        20,
        "room",
    )
    claim = taken[-1]
    pool.claims[name] = Claimed(name, uid, NODE, claim.job_id, claim.gpus)
    pool.bind(claim)
    last = pool.marks / "start" / f"{name}-{apps[-1][0]}"
    wait(last.exists, 30, "last container", pool.get, name)
    time.sleep(0.1)
    allowed = {pool.uuid(NODE, i) for i in claim.gpus}
    seen = {}
    for c, n, *_ in [*init, *apps]:
        text = (pool.marks / "start" / f"{name}-{c}").read_text().strip()
        seen[c] = set(text.split(",")) - {""}
        assert len(seen[c]) == n, (c, text)
        assert seen[c] <= allowed
    together = [seen[c] for c, _ in apps] + [seen[c] for c, _, more in init if more]
    assert sum(map(len, together)) == len(set().union(*together))
    figures.count(starts=1)
    pool.delete(name)
    wait(lambda: not pool.get(name), 30, "gone")


def test_metrics_and_report_name_the_owner_of_each_gpu(pool):
    name = unique("owner")
    taken = []
    wait(lambda: taken.append(pool.place(pool.pod(name, 2), NODE)) or taken[-1], 20, "room")
    claim = taken[-1]
    pool.wait_running(name)
    job = pool.native(1, node=NODE, run_s=3)
    wait((pool.marks / "start" / f"job-{job}").exists, 20, "job")
    time.sleep(0.6)
    text = pool.metrics(NODE)
    owners = [line for line in text.splitlines() if line.startswith("slurmbridge_node_gpu_owner{")]
    mine = [line for line in owners if f'pod="{name}"' in line]
    assert len(mine) == 2
    assert all(f'job="{claim.job_id}"' in line for line in mine)
    native = [line for line in owners if f'job="{job}"' in line]
    assert len(native) == 1
    assert 'user="root"' in native[0]
    report = pool.snapshot(NODE)["report"]
    assert report["is_whole"]
    assert [tuple(p["gpus"]) for p in report["pods"] if p["ref"] == f"default/{name}"] == [
        claim.gpus
    ]
    pool.delete(name)


def test_a_gres_conf_that_does_not_match_closes_the_node(pool):
    wait(lambda: pool.is_registered(NODE), 30, "registered")
    path = pool.run_folder(NODE) / "devices.json"
    text = path.read_text()
    path.write_text(text.replace('"minor": 7', '"minor": 9').replace("nvidia7", "nvidia9"))
    try:
        wait(lambda: not pool.is_registered(NODE), 30, "closed")
        fault = pool.snapshot(NODE)["report"]["fault"]
        assert "nvidia7 of gres.conf (index 7) is no GPU here" in fault
    finally:
        path.write_text(text)
    wait(lambda: pool.is_registered(NODE), 30, "open again")
    pool.wait_gpus(NODE)


def restart_slurmd(pool, node):
    pool.slurm.kill9_slurmd(node)
    pool.slurm.start_slurmd(node)


def test_a_new_order_in_gres_conf_closes_the_node_until_slurmd_has_loaded_it(pool, figures):
    for name in pool.names:
        wait(lambda n=name: pool.is_registered(n), 30, "registered")
    path = pool.slurm.conf_path.with_name("gres.conf")
    text = path.read_text()
    line = next(one for one in text.splitlines() if one.startswith("NodeName="))
    kind = line.partition("Name=gpu")[2].partition("File=")[0]
    dev = pool.device(0).parent
    mine = f"NodeName={NODE} Name=gpu{kind}File={dev}/nvidia[7,6,5,4,3,2,1,0]"
    other = f"NodeName=gpu001 Name=gpu{kind}File={dev}/nvidia[0-7]"
    path.write_text(text.replace(line, f"{other}\n{mine}"))
    fault = lambda: pool.snapshot(NODE)["report"].get("fault", "")  # noqa: E731
    try:
        wait(lambda: not pool.is_registered(NODE), 30, "closed")
        assert "restart slurmd on this node" in fault()

        def told():
            return [e["message"] for e in events(pool, NODE) if e["reason"] == "NodeAgentClosed"]

        wait(lambda: any("restart slurmd" in text for text in told()), 20, "the event", told)
        assert pool.is_registered("gpu001"), "a node whose lines say the same is not touched"
        restart_slurmd(pool, NODE)
        wait(lambda: pool.is_registered(NODE), 30, "open again", fault)
        pool.wait_gpus(NODE)
        name = unique("turned")
        taken = []
        wait(lambda: taken.append(pool.place(pool.pod(name, 2), NODE)) or taken[-1], 20, "room")
        pool.wait_running(name)
        given = (pool.marks / "start" / name).read_text().split()
        # The file of index i is nvidia(7 - i) now: the pod has what a native job would have.
        assert sorted(given) == sorted(pool.uuid(NODE, 7 - i) for i in taken[-1].gpus)
        # Back again while the pod runs: its numbers must not come to mean other GPUs.
        path.write_text(text)
        restart_slurmd(pool, NODE)
        wait(lambda: "while pods have it" in fault(), 30, "closed for the pod's sake", fault)
        figures.count(starts=1)
        pool.delete(name)
        wait(lambda: pool.is_registered(NODE), 60, "open once the pod is gone", fault)
    finally:
        if path.read_text() != text:
            path.write_text(text)
            restart_slurmd(pool, NODE)
    wait(lambda: pool.is_registered(NODE), 60, "as before", fault)
    pool.wait_gpus(NODE)


def test_a_finding_of_the_audit_is_an_event_on_the_pod_that_it_is_about(pool):
    name = unique("loose")
    body = pool.pod(name, 0, spec={"nodeName": NODE})
    # Where NVIDIA's runtime gives out devices this pod gets all of them, past Slurm and kubelet.
    body["spec"]["containers"][0]["env"].append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})
    uid = pool.kube.api.create(body)["metadata"]["uid"]

    def told():
        return [e for e in events(pool, name) if e["reason"] == "LoosePod"]

    wait(told, 40, "the pod's event", events, pool, name)
    event = told()[0]
    assert event["involvedObject"]["kind"] == "Pod"
    assert event["involvedObject"]["uid"] == uid
    assert event["type"] == "Warning"
    assert "NVIDIA_VISIBLE_DEVICES=all" in event["message"]
    assert event["source"]["component"] == "slurmbridge-node"
    assert 'slurmbridge_node_findings{kind="loose_pod"} 1.0' in pool.metrics(NODE)
    pool.delete(name, grace_s=0)
    wait(lambda: not pool.get(name), 30, "gone")
