"""The objects that make groups of pods: minimal definitions of other projects' kinds, and pods.

Of each definition only names and scope are as in the project; the schema takes anything. Pods of a
Job are made by the real Job controller; those of LeaderWorkerSet and Kubeflow are written as their
controllers write them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slurmbridge.pool import keys
from tests.e2e.scene import wait_for
from tests.support.kube_api import KubeError
from tests.support.kube_objects import pod

if TYPE_CHECKING:
    from tests.support.kube_api import KubeApi, Object

COSCHEDULING = ("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup")
JOBSET = ("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet")
LWS = ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
PYTORCH = ("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob")
MPI = ("kubeflow.org", "v2beta1", "mpijobs", "MPIJob")
KINDS = (COSCHEDULING, JOBSET, LWS, PYTORCH, MPI)
JOBS = "/apis/batch/v1/namespaces/default/jobs"
BUILT_IN_ARGS = (
    "--feature-gates=GenericWorkload=true",
    "--runtime-config=scheduling.k8s.io/v1beta1=true",
)
"""Flags of kube-apiserver 1.37 that turn the built-in PodGroup on."""


def definition(group: str, version: str, plural: str, kind: str) -> Object:
    """A CustomResourceDefinition without a schema."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": anything},
                }
            ],
        },
    }


def define_all(api: KubeApi) -> None:
    """Define the kinds that are not Kubernetes' own."""
    # The groups approved by the Kubernetes community want an annotation that says so.
    for kind in KINDS:
        body = definition(*kind)
        body["metadata"]["annotations"] = {"api-approved.kubernetes.io": "unapproved, for a test"}
        api.create(body)
    for kind in KINDS:
        wait_for(f"{kind} is served", lambda kind=kind: is_served(api, place_of(kind)), 20, 0.2)


def is_served(api: KubeApi, collection: str) -> bool:
    """Whether objects of a kind can be listed by now."""
    try:
        return api.find(collection) is not None
    except KubeError as error:
        if error.status != 429:  # its storage is being made ready
            raise
        return False


def place_of(kind: tuple[str, str, str, str]) -> str:
    """Path of a kind's collection in the default namespace."""
    group, version, plural, _ = kind
    return f"/apis/{group}/{version}/namespaces/default/{plural}"


def make(api: KubeApi, kind: tuple[str, str, str, str], name: str, spec: Any) -> Object:
    """Create an object of such a kind."""
    group, version, _, word = kind
    body = {"apiVersion": f"{group}/{version}", "kind": word, "metadata": {"name": name}}
    return api.request("POST", place_of(kind), body | {"spec": spec})


def delete_all(api: KubeApi, *more: str) -> None:
    """Delete all Jobs and all objects of these kinds in the default namespace; their pods follow.

    more: paths of further collections.
    """
    options = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
    for where in (JOBS, *(place_of(kind) for kind in KINDS), *more):
        for made in api.items(where):
            api.request("DELETE", f"{where}/{made['metadata']['name']}", options)


def owner(made: Object) -> Object:
    """The controller reference of an object."""
    return {
        "apiVersion": made["apiVersion"],
        "kind": made["kind"],
        "name": made["metadata"]["name"],
        "uid": made["metadata"]["uid"],
        "controller": True,
    }


def job(
    name: str, pods: int, gpus: int, notes: dict[str, str], labels: dict[str, str] | None = None
) -> Object:
    """An Indexed Job whose pods run until they are deleted."""
    template = pod("x", gpus=gpus, annotations=notes, labels=labels)
    template["spec"]["restartPolicy"] = "Never"
    meta = {k: template["metadata"][k] for k in ("annotations", "labels")}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimit": 100,
            "template": {"metadata": meta, "spec": template["spec"]},
        },
    }


def jobs_of_jobset(made: Object, gpus: dict[str, int]) -> list[Object]:
    """The Jobs of a JobSet, as its controller makes them. gpus: per pod, by replicated job."""
    name, uid, number = made["metadata"]["name"], made["metadata"]["uid"], 0
    jobs = []
    for replicated in made["spec"]["replicatedJobs"]:
        for i in range(replicated["replicas"]):
            labels = {
                "jobset.sigs.k8s.io/jobset-name": name,
                "jobset.sigs.k8s.io/jobset-uid": uid,
                "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
                "jobset.sigs.k8s.io/job-index": str(i),
                "jobset.sigs.k8s.io/job-global-index": str(number),
                "jobset.sigs.k8s.io/restart-attempt": "0",
            }
            pods = replicated["template"]["spec"]["parallelism"]
            which = f"{name}-{replicated['name']}-{i}"
            jobs.append(job(which, pods, gpus[replicated["name"]], {}, labels))
            number += 1
    return jobs


def lws_pods(made: Object, gpus: int) -> list[Object]:
    """Leader and workers of one group of a LeaderWorkerSet."""
    name, size = made["metadata"]["name"], made["spec"]["leaderWorkerTemplate"]["size"]
    pods = []
    for worker in range(size):
        labels = {
            "leaderworkerset.sigs.k8s.io/name": name,
            "leaderworkerset.sigs.k8s.io/group-index": "0",
            "leaderworkerset.sigs.k8s.io/group-key": f"key-{made['metadata']['uid'][:8]}",
            "leaderworkerset.sigs.k8s.io/worker-index": str(worker),
        }
        notes = {"leaderworkerset.sigs.k8s.io/size": str(size)}
        which = f"{name}-0" if worker == 0 else f"{name}-0-{worker}"
        pods.append(pod(which, gpus=gpus, annotations=notes, labels=labels))
    return pods


def kubeflow_pods(made: Object, gpus: dict[str, int]) -> list[Object]:
    """Pods of a PyTorchJob. gpus: per pod, by role as the job's spec writes it."""
    name = made["metadata"]["name"]
    pods = []
    for role, replicas in made["spec"]["pytorchReplicaSpecs"].items():
        for i in range(replicas["replicas"]):
            labels = {
                "training.kubeflow.org/job-name": name,
                "training.kubeflow.org/replica-type": role.lower(),
                "training.kubeflow.org/replica-index": str(i),
            }
            body = pod(f"{name}-{role.lower()}-{i}", gpus=gpus[role], labels=labels)
            body["metadata"]["ownerReferences"] = [owner(made)]
            pods.append(body)
    return pods


def mpi_workers(made: Object, gpus: int) -> list[Object]:
    """Workers of an MPIJob v2, as mpi-operator makes them."""
    pods = []
    for i in range(made["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]):
        labels = _mpi_labels(made, "worker") | {"training.kubeflow.org/replica-index": str(i)}
        body = pod(f"{made['metadata']['name']}-worker-{i}", gpus=gpus, labels=labels)
        body["metadata"]["ownerReferences"] = [owner(made)]
        pods.append(body)
    return pods


def mpi_launcher(made: Object, gpus: int) -> Object:
    """The Job of the launcher of an MPIJob v2; its pod is made by the Job controller."""
    name = f"{made['metadata']['name']}-launcher"
    body = pod(name, gpus=gpus, labels=_mpi_labels(made, "launcher"))
    template = {"metadata": {"labels": body["metadata"]["labels"]}, "spec": body["spec"]}
    template["spec"]["restartPolicy"] = "Never"
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": "default", "ownerReferences": [owner(made)]},
        "spec": {"template": template},
    }


def _mpi_labels(made: Object, role: str) -> dict[str, str]:
    return {
        "training.kubeflow.org/operator-name": "mpi-operator",
        "training.kubeflow.org/job-name": made["metadata"]["name"],
        "training.kubeflow.org/job-role": role,
    }


def own_pods(name: str, size: int, gpus: int, notes: dict[str, str] | None = None) -> list[Object]:
    """Pods with our own annotations."""
    pods = []
    for i in range(size):
        said = {keys.GROUP: name, keys.GROUP_SIZE: str(size), keys.RANK: str(i)}
        pods.append(pod(f"{name}-{i}", gpus=gpus, annotations=said | (notes or {})))
    return pods
