"""Groups by the conventions that people use."""

from __future__ import annotations

import msgspec
import pytest

from slurmbridge.pool.group import group_of, read_group
from slurmbridge.pool.raw import RawPod

OWNER = {"controller": True, "apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u1"}
MPI = {
    "training.kubeflow.org/operator-name": "mpi-operator",
    "training.kubeflow.org/job-name": "m",
    "training.kubeflow.org/replica-index": "2",
}
MPI_JOB = OWNER | {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "name": "m"}
TORCH = OWNER | {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob"}


def pod(labels=None, notes=None, owner=None, spec=None):
    ours = {f"slurmbridge.dev/{k}": v for k, v in (notes or {}).items() if "/" not in k}
    others = {k: v for k, v in (notes or {}).items() if "/" in k}
    body = {
        "metadata": {
            "name": "p", "namespace": "d", "uid": "x", "labels": labels or {},
            "annotations": ours | others, "ownerReferences": [owner] if owner else [],
        },
        "spec": spec or {},
    }  # fmt: skip
    return msgspec.convert(body, RawPod)


CASES = {
    "a single pod": (pod(), None),
    "a pod of a Job that says no size": (pod(owner=OWNER), None),
    "our annotations": (
        pod(notes={"group": "g", "group-size": "4", "rank": "2"}),
        ("own", "g", "", 4, (2,)),
    ),
    "our annotations, made by a Job": (
        pod(notes={"group": "g", "group-size": "4"}, owner=OWNER),
        ("own", "g", "u1", 4, ()),
    ),
    "an Indexed Job": (
        pod({"batch.kubernetes.io/job-completion-index": "3"}, {"group-size": "4"}, OWNER),
        ("job", "j", "u1", 4, (3,)),
    ),
    "coscheduling": (
        pod({"scheduling.x-k8s.io/pod-group": "pg"}),
        ("podgroup", "pg", "", None, ()),
    ),
    "coscheduling before there was a PodGroup": (
        pod(
            {
                "pod-group.scheduling.sigs.k8s.io/name": "pg",
                "pod-group.scheduling.sigs.k8s.io/min-available": "3",
            }
        ),
        ("podgroup", "pg", "", 3, ()),
    ),
    "the built-in one": (
        pod(spec={"schedulingGroup": {"podGroupName": "pg"}}),
        ("schedulinggroup", "pg", "", None, ()),
    ),
    "LeaderWorkerSet": (
        pod(
            {
                "leaderworkerset.sigs.k8s.io/name": "l",
                "leaderworkerset.sigs.k8s.io/group-index": "1",
                "leaderworkerset.sigs.k8s.io/group-key": "k1",
                "leaderworkerset.sigs.k8s.io/worker-index": "2",
            },
            {"leaderworkerset.sigs.k8s.io/size": "4"},
        ),
        ("lws", "l-1", "k1", 4, (2,)),
    ),
    "JobSet, second try": (
        pod(
            {
                "jobset.sigs.k8s.io/jobset-name": "s",
                "jobset.sigs.k8s.io/jobset-uid": "su",
                "jobset.sigs.k8s.io/restart-attempt": "1",
                "jobset.sigs.k8s.io/job-global-index": "2",
                "batch.kubernetes.io/job-completion-index": "5",
            },
            owner=OWNER,
        ),
        ("jobset", "s", "su.1", None, (2, 5)),
    ),
    "Kubeflow, a worker": (
        pod(
            {
                "training.kubeflow.org/job-name": "t",
                "training.kubeflow.org/replica-type": "worker",
                "training.kubeflow.org/replica-index": "1",
            },
            owner=TORCH,
        ),
        ("kubeflow", "t", "u1", None, (1, 1)),
    ),
    "a worker of an MPIJob v2": (
        pod(MPI | {"training.kubeflow.org/job-role": "worker"}, owner=MPI_JOB),
        ("kubeflow", "m", "u1", None, (1, 2)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_pod_is_of_the_group_that_its_convention_names(case):
    raw, expected = CASES[case]
    group = group_of(raw)
    if expected is None:
        assert group is None
        return
    assert group is not None
    assert group.fault == ""
    assert (group.kind, group.name, group.owner, group.size, group.rank) == expected


def test_two_groups_of_one_name_are_two_groups():
    one = group_of(pod(notes={"group": "g", "group-size": "2"}, owner=OWNER))
    two = group_of(pod(notes={"group": "g", "group-size": "2"}, owner=OWNER | {"uid": "u2"}))
    assert one.key != two.key


@pytest.mark.parametrize("size", ["0", "-1", "many", "10001", "", "4 ", "٤"])
def test_a_size_that_is_none_is_a_fault_and_no_exception(size):
    assert "group-size" in group_of(pod(notes={"group": "g", "group-size": size})).fault


def test_a_group_whose_size_nobody_tells_is_a_fault():
    assert "size of the group is not known" in group_of(pod(notes={"group": "g"})).fault


def test_the_annotation_wins_over_the_object():
    group = group_of(pod({"scheduling.x-k8s.io/pod-group": "pg"}, {"group-size": "7"}))
    assert (group.size, group.size_from) == (7, None)


@pytest.mark.parametrize(
    ("path", "spec", "size"),
    [
        ("apis/scheduling.x-k8s.io/v1alpha1/x", {"minMember": 5}, 5),
        (
            "apis/scheduling.k8s.io/v1beta1/x",
            {"schedulingPolicy": {"gang": {"minCount": 4}}},
            4,
        ),
        (
            "apis/jobset.x-k8s.io/v1alpha2/x",
            {
                "replicatedJobs": [
                    {"replicas": 2, "template": {"spec": {"parallelism": 4}}},
                    {"template": {"spec": {"parallelism": 4, "completions": 2}}},
                    {"template": {"spec": {}}},
                ]
            },
            11,
        ),
        (
            "apis/kubeflow.org/v1/x",
            {"pytorchReplicaSpecs": {"Master": {}, "Worker": {"replicas": 3}}},
            4,
        ),
        (
            "apis/kubeflow.org/v2beta1/x",
            {"mpiReplicaSpecs": {"Launcher": {"replicas": 1}, "Worker": {"replicas": 3}}},
            3,
        ),
        ("apis/kubeflow.org/v2beta1/x", {"mpiReplicaSpecs": {"Launcher": {}}}, None),
        ("apis/scheduling.x-k8s.io/v1alpha1/x", {}, None),
        ("apis/scheduling.x-k8s.io/v1alpha1/x", {"minMember": "many"}, None),
        ("apis/jobset.x-k8s.io/v1alpha2/x", {"replicatedJobs": [3]}, None),
        ("apis/kubeflow.org/v1/x", {"runPolicy": {}}, None),
    ],
)
def test_the_size_stands_in_the_object(path, spec, size):
    found = read_group(path, {"spec": spec})
    assert (found and found.size) == size


@pytest.mark.parametrize("value", [None, [], {}, {"spec": 3}, "x"])
def test_an_object_of_another_form_tells_no_size(value):
    assert read_group("apis/scheduling.x-k8s.io/v1alpha1/x", value) is None


def test_an_object_tells_when_it_was_made():
    spec, made = {"minMember": 2}, {"creationTimestamp": "2026-11-30T12:00:00Z"}
    found = read_group("apis/scheduling.x-k8s.io/v1alpha1/x", {"spec": spec, "metadata": made})
    assert found.made == 1796040000.0


def test_the_built_in_group_is_looked_for_in_the_versions_of_both_releases():
    group = group_of(pod(spec={"schedulingGroup": {"podGroupName": "pg"}}))
    assert [p.split("/")[2] for p in group.size_from.paths] == ["v1beta1", "v1alpha2"]


def test_the_launcher_of_an_mpi_job_v2_waits_for_nobody_and_nobody_for_it():
    job = OWNER | {"apiVersion": "batch/v1", "kind": "Job", "name": "m-launcher"}
    assert group_of(pod(MPI | {"training.kubeflow.org/job-role": "launcher"}, owner=job)) is None
    worker = group_of(pod(MPI | {"training.kubeflow.org/job-role": "worker"}, owner=MPI_JOB))
    assert worker.size_from.paths == ("apis/kubeflow.org/v2beta1/namespaces/d/mpijobs/m",)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("../../pods/x", "kubeflow.org/v1"),
        ("x?a=b", "kubeflow.org/v1"),
        ("x", "../v1"),
        ("x", "v1"),
    ],
)
def test_an_owner_that_nobody_could_have_made_leads_to_no_path(name, version):
    owner = TORCH | {"name": name, "apiVersion": version}
    found = group_of(pod({"training.kubeflow.org/job-name": "t"}, owner=owner))
    assert found.size_from is None
    assert "size of the group is not known" in found.fault


def test_the_pods_of_a_job_that_names_a_group_are_counted_by_the_job():
    found = group_of(pod(notes={"group": "g"}, owner=OWNER))
    assert (found.fault, found.size) == ("", None)
    assert found.size_from.paths == ("apis/batch/v1/namespaces/d/jobs/j",)
    spec = {"parallelism": 4, "completions": 3}
    assert read_group(found.size_from.paths[0], {"spec": spec}).size == 3


@pytest.mark.parametrize(
    ("spec", "in_order"),
    [
        ({}, False),
        ({"startupPolicy": {"startupPolicyOrder": "AnyOrder"}}, False),
        ({"startupPolicy": {"startupPolicyOrder": "InOrder"}}, True),
        ({"dependsOn": True}, True),
    ],
)
def test_a_jobset_that_starts_in_order_says_so(spec, in_order):
    depends = {"dependsOn": [{"name": "a", "status": "Ready"}]} if "dependsOn" in spec else {}
    jobs = [
        {"name": "a", "template": {"spec": {"parallelism": 2}}},
        {"name": "b", "replicas": 3, "template": {"spec": {}}} | depends,
    ]
    path = "apis/jobset.x-k8s.io/v1alpha2/x"
    value = {"spec": {"replicatedJobs": jobs} | spec}
    assert read_group(path, value).in_order is in_order
    assert [read_group(path, value, part).size for part in ("", "a", "b")] == [5, 2, 3]


def test_a_pod_that_was_told_so_is_of_its_replicated_job():
    labels = {
        "jobset.sigs.k8s.io/jobset-name": "s",
        "jobset.sigs.k8s.io/jobset-uid": "su",
        "jobset.sigs.k8s.io/replicatedjob-name": "b",
    }
    found = group_of(pod(labels, {"part": "replicated-job"}, OWNER))
    assert (found.name, found.size_from.part) == ("s/b", "b")
    assert group_of(pod(labels, owner=OWNER)).name == "s"
