"""Spoilt input for every parser: a value or an error of ours, at once, and never anything else.

Real listings and objects are cut, doubled, mixed and sprinkled with bytes; short texts are made of
the characters that matter to their grammar, numbers that would blow up a naive reader among them.
"""

from __future__ import annotations

import json
import time
import tracemalloc

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurmbridge import config
from slurmbridge.kube import status
from slurmbridge.link import address, codec
from slurmbridge.node.gresconf import read_gres_conf
from slurmbridge.node.podfacts import read_facts
from slurmbridge.pool import gres, hostlist, nodestate, quantity, slurmtime
from slurmbridge.pool.claim import read_comment
from slurmbridge.pool.errors import SlurmBridgeError
from slurmbridge.pool.group import group_of, read_group
from slurmbridge.pool.podspec import read_node, read_pod
from slurmbridge.pool.policy import Policy, resolve
from slurmbridge.pool.raw import RawNode, RawPod
from slurmbridge.slurm import batch, jobtext, queue, refusal
from slurmbridge.slurm import text as listing
from slurmbridge.topology.slurm_text import read_slurm_text
from slurmbridge.topology.slurm_yaml import read_topology_yaml
from tests.support.kube_objects import node, pod
from tests.unit.slurm.listings import MARK, VERSIONS, answers, text

MOST_S = 15.0
"""One parse of a small spoilt text; a reader that expands or backtracks without bound takes longer
by orders of magnitude."""
FEW = settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
BITS = st.sampled_from(
    (
        *("", "=", "\n", " ", ",", "(", ")", "[", "]", "(null)", "NodeName=", "JobId=", "N/A"),
        *(
            "-1",
            "99999999999999999999",
            "gpu:8(IDX:0-7)",
            "[1-99999999]",
            "\udce9",
            "é",
            MARK,
            "\x00",
        ),
    )
)
HOW = st.lists(
    st.tuples(
        st.floats(0, 1), st.floats(0, 0.2), st.sampled_from("cut drop double put".split()), BITS
    ),
    min_size=1,
    max_size=4,
)


def spoilt(whole: str, how: list[tuple[float, float, str, str]]) -> str:
    """Change a text at some places."""
    for at, length, way, bit in how:
        start = int(at * len(whole))
        end = start + int(length * len(whole))
        match way:
            case "cut":
                whole = whole[:start]
            case "drop":
                whole = whole[:start] + whole[end:]
            case "double":
                whole = whole[:end] + whole[start:]
            case "put":
                whole = whole[:start] + bit + whole[start:]
    return whole


def survive(parse, value, errors=(SlurmBridgeError,)):
    """Parse, within the time; what it gave, or None where it refused."""
    began = time.monotonic()
    try:
        return parse(value)
    except errors:
        return None
    finally:
        assert time.monotonic() - began < MOST_S


NESTED = {
    "API status": (status.read_status, b'{"kind":' + b"[" * 100_000),
    "whole view": (codec.decode_view, b"\x91" * 100_000),
    "delta": (codec.decode_delta, b"\x91" * 100_000),
    "policy": (codec.decode_policy, b"\x91" * 100_000),
    "configuration": (config.parse, b"a: " + b"[" * 5000),
    "topology.yaml": (read_topology_yaml, "[" * 5000),
}


@pytest.mark.parametrize("what", NESTED)
def test_what_is_nested_without_end_is_refused(what):
    """Decoders let out a RecursionError, which is no error of decoding."""
    parse, value = NESTED[what]
    survive(parse, value)


HELD = {j.id: j for j in queue.read_queue(text("22.05.8", "queue"), MARK)}
LISTINGS = {
    "nodes": ("show node", listing.read_nodes),
    "partitions": ("show partition", listing.read_partitions),
    "reservations": ("show reservation", listing.read_reservations),
    "configuration": ("show config", listing.read_config),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("what", LISTINGS)
def test_a_spoilt_listing_is_read_or_refused(version, what):
    question, parse = LISTINGS[what]
    whole = answers(version)[question]

    @FEW
    @given(HOW)
    def check(how):
        survive(parse, spoilt(whole, how))

    check()


@pytest.mark.parametrize("version", VERSIONS)
def test_spoilt_jobs_and_queues_are_read_or_refused(version):
    jobs, rows = text(version, "jobs"), text(version, "queue")

    @FEW
    @given(HOW)
    def check(how):
        survive(jobtext.read_jobs, spoilt(jobs, how))
        survive(lambda t: jobtext.read_held(t, HELD), spoilt(jobs, how))
        survive(lambda t: queue.read_queue(t, MARK), spoilt(rows, how))

    check()


@FEW
@given(HOW)
def test_a_spoilt_batch_of_answers_is_taken_apart_or_refused(how):
    questions = ["show node", "show config"]
    survive(lambda t: batch.read_batch(t, questions, MARK), spoilt(text("22.05.8", "batch"), how))


SHORT = {
    "hostlist": (hostlist.expand, "gn[]0123456789-,. "),
    "gres": (gres.parse_gres, "gpu:a1(),S-0 null"),
    "gres used": (gres.parse_gres_used, "gpu:a1(IDX),-0N/ null"),
    "gres of a job": (gres.parse_job_gres, "gpu:a1(IDXCNT),-0 "),
    "indices": (gres.parse_indices, "0123456789-,N/A "),
    "tres": (gres.parse_tres, "cpu=gres/gpu:a1,MG0.9 "),
    "GPUs in tres": (gres.tres_gpus, "gres/gpu:a=,19 "),
    "count": (quantity.parse_count, "0123456789eE.+-kMGiTm "),
    "amount": (quantity.amount, "0123456789eE.+-kMGiTm "),
    "CPUs": (quantity.cpus, "0123456789eE.+-kMGiTm "),
    "MiB": (quantity.mib, "0123456789eE.+-kMGiTm "),
    "time": (slurmtime.parse_time, "0123456789-T:Unkow N/A"),
    "duration": (slurmtime.parse_duration, "0123456789-:UNLIMTED INVA"),
    "node state": (nodestate.parse_node_state, "IDLEMXDOWN+*~#!%$@^-"),
    "job state": (nodestate.parse_job_state, "RUNIGCOMPLET+ ,"),
    "comment": (read_comment, "slurmbridge/1 cluster=pod group ref"),
    "refusal": (refusal.reason_of, "sallocerror:Requestdnbuy "),
    "address": (address.parse_address, "unix:/tcp[]:.0123456789abc"),
    "topology.conf": (read_slurm_text, "SwitchName=s[]0-9,Nodes BlockSizes#\n\\"),
    "topology.yaml": (read_topology_yaml, "-topology: {}[]&*a\n tree switches"),
    "gres.conf": (lambda t: read_gres_conf(t, "n1"), "NodeName=[]n1 GreTypFl/dv0-9\n#Count"),
}
HUGE = (
    *("[1-999999999]", "n[0-9999999]x[0-9999999]", "0-99999999999", "1e999999999", "9" * 5000),
    *("((((((((((" * 200, "[" * 2000, "n[" + ",".join(["1"] * 50_000) + "]", "gpu:" * 20_000),
    *("1e-999999999", "n[1-3],,", "IDLE+" * 10_000, "a: &a [*a, *a]\n" * 50, "=" * 50_000),
)


@pytest.mark.parametrize("what", SHORT)
def test_a_strange_text_is_read_or_refused_at_once(what):
    parse, letters = SHORT[what]

    @FEW
    @given(st.text(letters, max_size=60) | st.text(max_size=30))
    def check(value):
        survive(parse, value)

    check()
    for value in HUGE:
        survive(parse, value)


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | BITS
trees = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(BITS, inner, max_size=3)
)


def packed(value):
    """A tree as bytes of the link; texts and numbers that cannot be encoded are left out."""
    if isinstance(value, dict):
        value = {key: msgspec.Raw(packed(item)) for key, item in value.items() if key.isascii()}
    elif isinstance(value, list):
        value = [msgspec.Raw(packed(item)) for item in value]
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return b"\xc0"


def paths(value, here=()):
    """Every place in an object."""
    yield here
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*here, key))
    elif isinstance(value, list):
        for at in range(len(value)):
            yield from paths(value[at], (*here, at))


def replaced(value, path, by):
    """A copy of an object with another value at one place."""
    if not path:
        return by
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(copy[path[0]], path[1:], by)
    return copy


POD = pod(
    "a",
    gpus=2,
    annotations={
        "slurmbridge.dev/group": "g",
        "slurmbridge.dev/group-size": "3",
        "slurmbridge.dev/rank": "0",
        "slurmbridge.dev/duration": "2h",
        "slurmbridge.dev/topology": "required:rack",
        "slurmbridge.dev/claim": "12/u",
        "slurmbridge.dev/gpus": "0-1",
    },
    labels={"jobset.sigs.k8s.io/jobset-name": "j", "jobset.sigs.k8s.io/job-global-index": "0"},
    gates=["slurmbridge.dev/claim"],
)
POD["spec"]["initContainers"] = [POD["spec"]["containers"][0] | {"restartPolicy": "Always"}]
POD["metadata"]["ownerReferences"] = [
    {"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u", "controller": True}
]
NODE = node("n1", labels={"rack": "r1"})
OBJECT_ERRORS = (SlurmBridgeError, msgspec.DecodeError, UnicodeError)


def read_whole_pod(body):
    """As the bridge does with every pod that the API server tells of."""
    raw = msgspec.json.decode(body, type=RawPod)
    record = read_pod(raw, {"nvidia.com/gpu": ""})
    if record.gpu is not None:
        resolve(record, Policy("c"))
    group_of(raw)
    return record


@FEW
@given(st.sampled_from(list(paths(POD))), trees)
def test_a_pod_with_anything_anywhere_is_read_or_refused(path, tree):
    body = json.dumps(replaced(POD, path, tree)).encode()
    record = survive(read_whole_pod, body, OBJECT_ERRORS)
    assert record is None or record.gpu is None or record.gpu.count > 0
    survive(lambda b: read_facts(b, "nvidia.com/gpu"), body, OBJECT_ERRORS)


@FEW
@given(st.sampled_from(list(paths(NODE))), trees)
def test_a_node_with_anything_anywhere_is_read_or_refused(path, tree):
    body = json.dumps(replaced(NODE, path, tree)).encode()

    def parse(data):
        return read_node(msgspec.json.decode(data, type=RawNode), {"nvidia.com/gpu"})

    found = survive(parse, body, OBJECT_ERRORS)
    assert found is None or all(count >= 0 for count in found.gpus.values())


@FEW
@given(
    trees,
    st.text(max_size=40)
    | st.sampled_from(["apis/batch/v1/jobs/j", "apis/scheduling.k8s.io/v1/podgroups/p"]),
)
def test_the_object_of_a_group_is_read_or_refused(tree, where):
    survive(lambda t: read_group(where, t), tree)


@FEW
@given(st.binary(max_size=80) | trees.map(packed))
def test_any_bytes_on_the_link_and_from_the_api_server_are_read_or_refused(data):
    for parse in (codec.decode_view, codec.decode_delta, codec.decode_policy, status.read_status):
        survive(parse, data)


@FEW
@given(st.binary(max_size=80) | trees.map(lambda t: json.dumps(t).encode()))
def test_any_configuration_is_read_or_refused_with_its_problems(data):
    survive(config.parse, data)


def test_a_huge_configuration_is_read_or_refused_at_once():
    for value in HUGE:
        survive(config.parse, value.encode())
        survive(config.parse, f"policy: {value}".encode())


@FEW
@given(st.sampled_from(["policy", "slurm", "kube", "link", "pool", "rules", "freshness"]), trees)
def test_any_section_of_a_configuration_is_read_or_refused(section, tree):
    whole = {"apiVersion": "slurmbridge.dev/v1", "policy": {"cluster": "c"}, section: tree}
    survive(config.parse, json.dumps(whole).encode())


def test_a_listing_of_30_mb_is_read_in_a_few_times_its_size():
    """900 jobs whose user has written much into them, some of it like fields."""
    whole = text("22.05.8", "queue")
    cells = whole.split(MARK)
    width = len(queue.FIELDS)
    header, row = MARK.join(cells[:width]), cells[width : 2 * width]
    noise = "NodeList=gpu001 GRES=gpu:8(IDX:0-7) "
    rows = []
    for number in range(900):
        own = [f"\n{number + 1}", *row[1:]]
        own[queue.FIELDS.index("Name")] = noise * (33_000 // len(noise))
        rows.append(MARK.join(own))
    listing = MARK.join([header, *rows]) + MARK + "\n"
    assert len(listing) > 28_000_000
    tracemalloc.start()
    jobs = queue.read_queue(listing, MARK)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [job.id for job in jobs] == list(range(1, 901))
    assert most < 4 * len(listing)
