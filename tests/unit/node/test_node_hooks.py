"""What Epilog and Prolog understand by themselves, without an agent."""

import json

import pytest

from slurmbridge.node import slurm_script as script

UID = "d47a0a28-e567-4794-9f2d-6c38d3f13c99"
COMMENT = f"slurmbridge/1 cluster=lab pod={UID} ref=a/b"
CGROUPS = {
    f"/kubepods/burstable/pod{UID}/abc": UID,
    f"/site/kubepods/pod{UID}": UID,
    f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID.replace('-', '_')}.slice/cri-containerd-1.scope": UID,
    "/kubepods/besteffort/pod0123456789abcdef0123456789abcdef/x": "0123456789abcdef0123456789abcdef",
    "/system.slice/slurmd.service": "",
    "/kubepods/burstable": "",
    "/slurm/uid_0/job_7/step_0": "",
}


@pytest.mark.parametrize("path", CGROUPS)
def test_the_pod_of_a_cgroup_is_known_with_both_drivers(path):
    assert script.pod_of_cgroup(path) == CGROUPS[path]


def conf(tmp_path, pods=None):
    made = {**script.DEFAULTS, "cluster": "lab", "state": str(tmp_path / "node.json")}
    if pods is not None:
        body = {"version": 1, "gpus": [], "pods": pods}
        (tmp_path / "node.json").write_text(json.dumps(body))
    return made


def job(comment=COMMENT, uid="0", job_id="7", gpus="0"):
    return {"id": job_id, "comment": comment, "uid": uid, "gpus": gpus}


NOTED = [{"uid": "u-1", "job_id": 7, "gpus": [0]}, {"uid": "u-2", "job_id": 8, "gpus": [1]}]
GROUP = "slurmbridge/1 cluster=lab group=g-1 ref=a/b"
CLAIMED = {
    "a claim": (job(), NOTED, {UID, "u-1"}),
    "without a file": (job(), None, {UID}),
    "of another cluster": (job(COMMENT.replace("=lab", "=other"), job_id="99"), NOTED, set()),
    "forged by a user": (job(uid="1000", job_id="99"), NOTED, set()),
    "a filler": (job(f"slurmbridge/1 cluster=lab filler={UID}", job_id="99"), NOTED, set()),
    "a native job": (job("my experiment", job_id="99"), NOTED, set()),
    "its cluster's name was changed since": (
        job(COMMENT.replace("=lab", "=other")),
        NOTED,
        {"u-1"},
    ),
    "its owner was changed since": (job(uid="1000"), NOTED, {"u-1"}),
    "its comment was made a filler's": (
        job(f"slurmbridge/1 cluster=lab filler={UID}"),
        NOTED,
        {"u-1"},
    ),
    "its comment was changed": (job("my experiment"), NOTED, {"u-1"}),
    "its comment was changed, its GPUs are not told": (job("x", gpus=""), NOTED, {"u-1"}),
    "a native job with the id of a forgotten claim": (job("x", gpus="2-3"), NOTED, set()),
    "a native job without comment": (job("", job_id="99"), NOTED, set()),
    "a claim whose comment slurmctld forgot": (job(""), NOTED, {"u-1"}),
    "a group": (job(GROUP), NOTED, {"u-1"}),
    "a group, and nobody knows its pods": (job(GROUP), None, None),
}


@pytest.mark.parametrize("case", CLAIMED)
def test_whose_claim_ends_is_read_from_the_comment_and_the_file(case, tmp_path):
    given, pods, expected = CLAIMED[case]
    assert script.claimed_pods(given, conf(tmp_path, pods)) == expected


def test_pods_are_found_in_a_tree_of_cgroups(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("")
    folder = tmp_path / "site/kubepods/burstable" / f"pod{UID}" / "container"
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text("0\n17\n")
    found = script.pod_cgroups("", str(tmp_path))
    assert list(found) == [UID]
    assert script.cgroup_processes(found[UID]) == {17}
    assert script.pod_cgroups("/site", str(tmp_path)) == found
    with pytest.raises(OSError, match="no cgroups here"):
        script.pod_cgroups("/elsewhere", str(tmp_path))


def test_an_empty_cgroup_still_holds(tmp_path, monkeypatch):
    (tmp_path / "cgroup.controllers").write_text("")
    (tmp_path / "kubepods" / f"pod{UID}").mkdir(parents=True)
    monkeypatch.setattr(
        script, "pod_cgroups", lambda root: {UID: [str(tmp_path / "kubepods" / f"pod{UID}")]}
    )
    assert script.left_of_pods([UID], script.DEFAULTS) == f"pod {UID} has a cgroup with 0 processes"


def test_index_lists_of_slurm_are_read():
    assert script.expand("0,2-3") == {0, 2, 3}
    assert script.expand("") == set()


def test_mounts_of_a_pod_are_told_from_those_of_the_node():
    inside = f"1 2 254:0 /kubelet/pods/{UID}/etc-hosts /etc/hosts rw - ext4 /dev/vda rw\n"
    volume = f"1 2 0:40 / /var/lib/kubelet/pods/{UID}/volumes/x rw - tmpfs tmpfs rw\n"
    assert list(script._pods_of_mounts([inside, volume])) == [UID]


def test_a_device_is_known_under_any_name(tmp_path):
    (tmp_path / "nvidia0").write_text("")
    (tmp_path / "link").symlink_to("nvidia0")
    (tmp_path / "nvidia1").write_text("")
    assert script.file_identity(str(tmp_path / "nvidia0")) == script.file_identity(
        str(tmp_path / "link")
    )
    assert script.file_identity(str(tmp_path / "nvidia0")) != script.file_identity(
        str(tmp_path / "nvidia1")
    )
    assert script.file_identity(str(tmp_path / "none")) is None
    assert script.file_identity("/dev/null")[0] == "c"


FOR_PODS = {
    "a claim": (job(), True),
    "a claim of another cluster": (job(COMMENT.replace("=lab", "=other")), False),
    "a filler": (job(f"slurmbridge/1 cluster=lab filler={UID}"), True),
    "a user's job with a claim's comment": (job(uid="1000"), False),
    "a user's job with a filler's comment": (
        job(f"slurmbridge/1 cluster=lab filler={UID}", uid="1000"),
        False,
    ),
    "a native job": (job("my experiment"), False),
}


@pytest.mark.parametrize("case", FOR_PODS)
def test_only_the_bridges_own_user_walks_past_the_prolog(case, tmp_path):
    given, expected = FOR_PODS[case]
    assert script.is_for_pods(given, conf(tmp_path)) is expected


@pytest.mark.parametrize("text", [None, "{", "[1]", "[" * 100_000])
def test_without_a_configuration_claims_are_held_and_nobody_but_root_walks_past(
    text, tmp_path, monkeypatch
):
    path = tmp_path / "hooks.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv("SLURMBRIDGE_HOOKS", str(path))
    made = script.read_conf() | {"state": str(tmp_path / "node.json")}
    assert script.claimed_pods(job(uid="64030"), made) == {UID}
    assert not script.is_for_pods(job(uid="64030"), made)
    assert script.is_for_pods(job(uid="0"), made)


def test_a_claim_of_unknown_pods_is_held_while_there_are_pods_that_nobody_knows(
    tmp_path, monkeypatch
):
    made = conf(tmp_path, [{"uid": UID, "job_id": 8, "gpus": [1]}])
    assert script.claimed_pods(job(GROUP), made) is None
    for here, held in (({UID: []}, False), ({UID: [], "u-9": []}, True)):
        monkeypatch.setattr(script, "pod_cgroups", lambda _root, here=here: here)
        assert bool(script.unknown_left(made)) is held
