import msgspec
import pytest

from slurmbridge.link import codec
from slurmbridge.link.delta import difference
from slurmbridge.pool.errors import PeerProtocolError
from slurmbridge.pool.policy import Granularity, IdentityRule, Policy
from tests.support.pool_view import make_node, make_view, window

FULL = make_view(
    make_node(
        "a", free={"a100": 2, "h100": 1}, total={"a100": 4, "h100": 4}, plan_start=1.8e9 + 0.25
    ),
    make_node("b", free=0, blocked="DRAIN", native_jobs=2, claimed=3, agent=False),
    make_node("c", windows=(window(10), window(20, 30, name="école"))),
    held=[("u-1", "a", 4_000_000_000)],
    generation=2**40,
)
POLICY = Policy(
    cluster="prod",
    granularity=Granularity.GPU,
    resources={"nvidia.com/gpu": "", "nvidia.com/h100": "h100"},
    identities=(IdentityRule(namespaces=("team-*",), accounts=("a", "b")),),
)


def test_views_deltas_and_policies_survive_the_way():
    assert codec.decode_view(codec.encode(FULL)) == FULL
    delta = difference(
        make_view(make_node("z"), *(make_node(n) for n in "defgh")),
        make_view(*(make_node(n) for n in "defgh"), generation=2),
    )
    assert codec.decode_delta(codec.encode(delta)) == delta
    assert codec.decode_policy(codec.encode(POLICY)) == POLICY


@pytest.mark.parametrize("decode", [codec.decode_view, codec.decode_delta, codec.decode_policy])
@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", codec.encode(FULL)[:-1], msgspec.msgpack.encode([1])]
)
def test_bytes_that_are_something_else_are_a_protocol_error(decode, body):
    with pytest.raises(PeerProtocolError):
        decode(body)


def test_fields_of_a_newer_bridge_are_ignored():
    raw = msgspec.msgpack.decode(codec.encode(FULL))
    raw["colour"] = "blue"
    raw["nodes"]["a"]["shape"] = "round"
    assert codec.decode_view(msgspec.msgpack.encode(raw)) == FULL
    raw = msgspec.msgpack.decode(codec.encode(POLICY))
    raw["colour"] = "blue"
    raw["identities"][0]["shape"] = "round"
    assert codec.decode_policy(msgspec.msgpack.encode(raw)) == POLICY


def test_a_value_that_the_policy_forbids_is_a_protocol_error():
    raw = msgspec.msgpack.decode(codec.encode(POLICY))
    for key, value in (("granularity", "rack"), ("candidates", 0), ("identities", [3])):
        with pytest.raises(PeerProtocolError):
            codec.decode_policy(msgspec.msgpack.encode(raw | {key: value}))
