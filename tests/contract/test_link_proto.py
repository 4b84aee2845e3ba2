"""The committed code of the link is what its .proto gives, and the .proto keeps its promises."""

import re
import sys

from slurmbridge.link._gen import pool_pb2 as pb
from tests.support.proto import ROOT, generate

GEN = ROOT / "slurmbridge/link/_gen"
KUBELET_GEN = ROOT / "slurmbridge/node/_gen"


def without_version(text):
    """The version of the generator stands in a comment and in a check of the runtime.

    Newer generators write `_Optional[bool]` in stubs where older ones write `bool`.
    """
    text = text.replace("_Optional[bool]", "bool")
    text = re.sub(r"# Protobuf Python Version: .*", "", text)
    return re.sub(r"(Domain\.PUBLIC,)(\s*\d+,){3}", r"\1", text)


def test_generating_again_gives_the_same(tmp_path):
    for fresh in generate(sys.executable, tmp_path):
        committed = ROOT / fresh.relative_to(tmp_path)
        assert without_version(fresh.read_text()) == without_version(committed.read_text())


def test_the_generated_code_asks_for_no_newer_runtime_than_the_project_allows():
    allowed = re.search(r'"protobuf>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    for path in (*GEN.glob("*_pb2.py"), *KUBELET_GEN.glob("*_pb2.py")):
        asked = re.search(r"Domain\.PUBLIC,\s*(\d+),\s*(\d+),\s*(\d+)", path.read_text())
        assert tuple(map(int, asked.groups()[:2])) <= tuple(map(int, allowed.groups()))


FIELDS = {
    "WatchRequest": {"version": 1, "client": 2},
    "ViewMessage": {
        "version": 1, "term": 2, "sent_s": 3, "age_s": 4, "generation": 5, "whole": 6, "delta": 7,
        "policy": 8,
    },
    "ClaimRequest": {"uid": 1, "namespace": 2, "name": 3, "kube_node": 4, "cause": 5, "term": 6},
    "ClaimReply": {"job_id": 1, "gpus": 2, "generation": 3},
    "ReleaseUnboundRequest": {"uid": 1, "namespace": 2, "name": 3, "job_id": 4, "cause": 5},
    "ReleaseUnboundReply": {},
    "QueryRequest": {"name": 1, "args": 2},
    "QueryReply": {"answer": 1},
    "NodeReportMessage": {
        "version": 1, "node": 2, "run": 3, "sequence": 4, "age_s": 5, "report": 6, "after": 7,
    },
    "NodeAck": {"sequence": 1, "orders": 2},
}  # fmt: skip


def test_no_field_of_a_released_message_changes_its_number():
    found = {
        name: {field.name: field.number for field in message.fields}
        for name, message in pb.DESCRIPTOR.message_types_by_name.items()
    }
    assert found == FIELDS
    service = pb.DESCRIPTOR.services_by_name["Bridge"]
    assert service.full_name == "slurmbridge.link.v1.Bridge"
    assert [method.name for method in service.methods] == [
        "Watch",
        "Claim",
        "ReleaseUnbound",
        "Query",
    ]
    service = pb.DESCRIPTOR.services_by_name["Node"]
    assert service.full_name == "slurmbridge.link.v1.Node"
    assert [method.name for method in service.methods] == ["Report"]
