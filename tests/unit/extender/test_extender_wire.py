import json

import pytest

from extender import wire
from slurmbridge.pool.errors import ParseError

POD = {"metadata": {"name": "p", "namespace": "ns", "uid": "u1"}, "spec": {"containers": []}}


def body(**fields):
    return json.dumps({"Pod": POD} | fields).encode()


def full(*names):
    return {"metadata": {}, "items": [{"metadata": {"name": n}, "x": [1, n]} for n in names]}


CHOICES = {
    "names": (body(Nodes=None, NodeNames=["a", "b"]), ["a", "b"], False),
    "no names": (body(Nodes=None, NodeNames=[]), [], False),
    "whole nodes": (body(Nodes=full("a", "b"), NodeNames=None), ["a", "b"], True),
    "whole nodes, none": (body(Nodes={"metadata": {}, "items": None}), [], True),
    "lower case": (
        json.dumps({"pod": POD, "nodenames": ["a"], "nodes": None}).encode(),
        ["a"],
        False,
    ),
    "camel case": (json.dumps({"pod": POD, "nodeNames": ["a"]}).encode(), ["a"], False),
    "upper case": (json.dumps({"POD": POD, "NODES": full("a")}).encode(), ["a"], True),
    "mixed: Pod as Go writes it, the rest not": (body(nodeNames=["a"]), ["a"], False),
    "names and nodes": (body(NodeNames=["a"], Nodes=full("b")), ["a"], False),
    "fields we do not know": (body(NodeNames=["a"], Future={"x": [1]}), ["a"], False),
    "odd names": (
        body(NodeNames=['a"b', "a\nb", "\u2028", "", "x" * 253]),
        ['a"b', "a\nb", "\u2028", "", "x" * 253],
        False,
    ),
}


@pytest.mark.parametrize(("data", "names", "is_full"), CHOICES.values(), ids=CHOICES.keys())
def test_a_choice_in_any_form(data, names, is_full):
    choice = wire.read_choice(data)
    assert names == choice.names
    assert is_full == (choice.nodes is not None)
    assert "u1" == choice.pod.metadata.uid


@pytest.mark.parametrize(("data", "names", "is_full"), CHOICES.values(), ids=CHOICES.keys())
def test_the_answer_has_the_form_of_the_request(data, names, is_full):
    choice = wire.read_choice(data)
    for answer, expected in (
        (wire.write_all(choice), names),
        (wire.write_passed(choice, range(len(names))[:1]), names[:1]),
        (wire.write_refused(choice, dict.fromkeys(names, "why")), []),
    ):
        told = json.loads(answer)
        assert is_full == (told["Nodes"] is not None)
        assert is_full == (told["NodeNames"] is None)
        items = told["Nodes"]["items"] if is_full else told["NodeNames"]
        assert expected == ([n["metadata"]["name"] for n in items] if is_full else items)
        assert "" == told["Error"]
    assert dict.fromkeys(names, "why") == told["FailedAndUnresolvableNodes"]
    assert {} == told["FailedNodes"]


def test_whole_nodes_come_back_as_they_were():
    data = body(Nodes=full("a", "b"))
    told = json.loads(wire.write_passed(wire.read_choice(data), [1]))
    assert full("a", "b")["items"][1:] == told["Nodes"]["items"]


NOT_JSON = {
    "nothing": b"",
    "text": b"hello",
    "cut off": body(NodeNames=["a"])[:-3],
    "two values": b"{} {}",
    "not UTF-8": b'{"Pod":{"metadata":{"name":"\xff\xfe"}},"NodeNames":["\xff"]}',
    "nested without end": b"[" * 100_000,
    "nested in a field": b'{"Pod":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
}


@pytest.mark.parametrize("data", NOT_JSON.values(), ids=NOT_JSON.keys())
def test_what_is_not_json_is_said_to_be_none(data):
    for read in (wire.read_choice, wire.read_bind, wire.read_preempt):
        with pytest.raises(ParseError):
            read(data)
    if not data.startswith(b"["):
        with pytest.raises(wire.NotJson):
            wire.read_choice(data)


WRONG = {
    "an array": b"[]",
    "null": b"null",
    "empty object": b"{}",
    "pod is null": b'{"Pod":null,"NodeNames":["a"]}',
    "pod is text": b'{"Pod":"x","NodeNames":["a"]}',
    "neither names nor nodes": body(),
    "both null": body(Nodes=None, NodeNames=None),
    "a name is a number": body(NodeNames=["a", 5]),
    "names are an object": body(NodeNames={"a": 1}),
    "a name too long": body(NodeNames=["x" * 254]),
    "too many names": body(NodeNames=["x"] * (wire.MAX_NODES + 1)),
    "a node without a name": body(Nodes={"items": [{}]}),
    "a node is a number": body(Nodes={"items": [5]}),
    "a quantity is an object": json.dumps(
        {
            "Pod": {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": {}}}}]}},
            "NodeNames": ["a"],
        }
    ).encode(),
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_what_is_not_the_protocol_is_a_fault_but_json(data):
    with pytest.raises(ParseError) as caught:
        wire.read_choice(data)
    assert not isinstance(caught.value, wire.NotJson)
    assert caught.value.text


GOOD = {"PodName": "p-0", "PodNamespace": "ns", "PodUID": "u-1", "Node": "gpu1.example"}


class TestBind:
    def read(self, **change):
        return wire.read_bind(json.dumps(GOOD | change).encode())

    def test_all_four_are_read_in_any_case(self):
        assert wire.Bind("p-0", "ns", "u-1", "gpu1.example") == self.read()
        lower = {key.lower(): value for key, value in GOOD.items()}
        assert self.read() == wire.read_bind(json.dumps(lower).encode())

    @pytest.mark.parametrize(
        "change",
        [
            {"Node": ""},
            {"Node": "../../nodes/x"},
            {"Node": "a\nb"},
            {"Node": "UPPER"},
            {"Node": "x" * 254},
            {"Node": None},
            {"Node": 5},
            {"PodName": "a/b"},
            {"PodName": "a?b=c"},
            {"PodName": "a%2fb"},
            {"PodName": ".."},
            {"PodNamespace": "a.b"},
            {"PodNamespace": "x" * 64},
            {"PodNamespace": ""},
            {"PodUID": ""},
            {"PodUID": "a b"},
            {"PodUID": "u\n"},
            {"PodUID": "x" * 200},
        ],
        ids=str,
    )
    def test_what_kubernetes_never_allows_goes_into_no_path_and_no_comment(self, change):
        with pytest.raises(ParseError):
            self.read(**change)

    def test_a_missing_part_is_a_fault(self):
        for key in GOOD:
            rest = {k: v for k, v in GOOD.items() if k != key}
            with pytest.raises(ParseError):
                wire.read_bind(json.dumps(rest).encode())


class TestPreempt:
    def read(self, **fields):
        return wire.read_preempt(body(**fields)).victims

    def test_both_forms_and_nulls(self):
        meta = {"a": {"Pods": [{"UID": "v1"}], "NumPDBViolations": 2}, "b": None}
        assert {"a": wire.Victims(("v1",), 2), "b": wire.Victims((), 0)} == self.read(
            NodeNameToVictims=None, NodeNameToMetaVictims=meta
        )
        whole = {"a": {"Pods": [{"metadata": {"uid": "v1"}}], "NumPDBViolations": 0}}
        assert {"a": wire.Victims(("v1",), 0)} == self.read(NodeNameToVictims=whole)
        assert {"a": wire.Victims((), 0)} == self.read(NodeNameToMetaVictims={"a": {"Pods": None}})
        assert {} == self.read(NodeNameToVictims=None, NodeNameToMetaVictims=None)
        assert {"a": wire.Victims((), 0)} == self.read(nodenametometavictims={"a": None})

    def test_the_answer_is_short_and_keeps_what_it_got(self):
        told = json.loads(wire.write_victims({"a": wire.Victims(("v1", "v2"), 1)}))
        pods = [{"UID": "v1"}, {"UID": "v2"}]
        assert {"NodeNameToMetaVictims": {"a": {"Pods": pods, "NumPDBViolations": 1}}} == told


def test_scores_are_a_bare_list_of_whole_numbers():
    assert b'[{"Host":"a\\"b","Score":10},{"Host":"b","Score":0}]' == wire.write_scores(
        ['a"b', "b"], [10, 0]
    )


def test_bind_answers():
    assert {"Error": ""} == json.loads(wire.write_bound())
    assert {"Error": 'no "way"\n'} == json.loads(wire.write_error('no "way"\n'))
