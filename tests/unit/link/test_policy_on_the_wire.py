"""No field of the policy may be lost on the way: an extender with a default in its place decides
differently from the bridge, and nobody is told."""

import msgspec

from slurmbridge.link import codec
from slurmbridge.pool.policy import Granularity, IdentityRule, Policy

RULE = IdentityRule(("a*",), ("b",), ("c",), ("d",), ("e",), ("f",))
POLICY = Policy(
    cluster="other",
    granularity=Granularity.GPU,
    resources={"example.com/gpu": "h100"},
    partition="claims",
    default_minutes=7,
    max_minutes=8,
    plan_horizon_minutes=9,
    grace_minutes=0,
    identities=(RULE,),
    candidates=3,
    stray="evict",
)


def test_every_field_of_the_policy_survives_the_wire():
    default = Policy(cluster="a")
    for field in Policy.__struct_fields__:
        assert getattr(POLICY, field) != getattr(default, field), f"{field} would prove nothing"
    assert codec.decode_policy(codec.encode(POLICY)) == POLICY


def test_a_field_of_a_newer_bridge_is_passed_over():
    raw = msgspec.msgpack.decode(codec.encode(POLICY))
    newer = msgspec.msgpack.encode(raw | {"fromTheFuture": 1})
    assert codec.decode_policy(newer) == POLICY
