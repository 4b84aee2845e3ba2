import grpc
import grpc.aio
import msgspec
import pytest

from slurmbridge.link import fault as faults
from slurmbridge.link.client import BACK_OFF_CAP_S, back_off_s
from slurmbridge.link.fault import FAULT_KEY, Fault, error_of, fault_of, read_fault
from slurmbridge.pool.errors import (
    Conflict,
    InvariantError,
    ParseError,
    PeerProtocolError,
    PeerRejected,
    PeerTimeout,
    PeerUnavailable,
)


class Context:
    """As much of a ServicerContext as `abort` uses; keeps what a client would see."""

    async def abort(self, code, details, trailing_metadata):
        metadata = grpc.aio.Metadata(*trailing_metadata)
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)


async def over_the_wire(fault):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await faults.abort(Context(), fault)
    return caught.value


SAME = {
    "a definite no": PeerRejected("slurmctld", "job/allocate", "no such account", "account"),
    "someone wrote in between": Conflict("kube-apiserver", "PATCH pod", "version", "conflict"),
    "no answer": PeerUnavailable("slurmctld", "job/allocate", "connection refused"),
    "too late": PeerTimeout("slurmctld", "job/allocate", "no answer in 5 s"),
}


@pytest.mark.parametrize("error", SAME.values(), ids=SAME.keys())
async def test_an_error_comes_out_as_it_went_in(error):
    got = error_of("Claim", await over_the_wire(fault_of(error)))
    assert type(got) is type(error)
    assert str(got) == str(error)
    assert getattr(got, "reason", None) == getattr(error, "reason", None)


OTHER = {
    "an unreadable ask is a definite no": (ParseError("x", "bad uid"), PeerRejected, "bad uid"),
    "an unreadable answer of a peer is no answer": (
        PeerProtocolError("slurmctld", "jobs", "no JSON"),
        PeerUnavailable,
        "no JSON",
    ),
    "a passed deadline": (TimeoutError(), PeerTimeout, "deadline"),
    "a bug is no answer, and keeps its text": (
        InvariantError("GPU owned twice: token=x", []),
        PeerProtocolError,
        "InvariantError in the bridge; see its log",
    ),
    "any other exception": (KeyError("secret"), PeerProtocolError, "KeyError in the bridge"),
}


@pytest.mark.parametrize(("error", "kind", "text"), OTHER.values(), ids=OTHER.keys())
async def test_an_error_means_this_to_the_client(error, kind, text):
    got = error_of("Claim", await over_the_wire(fault_of(error)))
    assert type(got) is kind
    assert text in str(got)
    assert "secret" not in str(got)
    assert "token" not in str(got)


BARE = {
    grpc.StatusCode.FAILED_PRECONDITION: PeerProtocolError,
    grpc.StatusCode.PERMISSION_DENIED: PeerProtocolError,
    grpc.StatusCode.NOT_FOUND: PeerProtocolError,
    grpc.StatusCode.UNIMPLEMENTED: PeerProtocolError,
    grpc.StatusCode.UNKNOWN: PeerProtocolError,
    grpc.StatusCode.UNAVAILABLE: PeerUnavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: PeerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: PeerTimeout,
}


@pytest.mark.parametrize(("code", "kind"), BARE.items(), ids=lambda x: getattr(x, "name", ""))
def test_no_status_without_our_trailer_is_a_definite_no(code, kind):
    for trailer in ((), ((FAULT_KEY, b"{"),), ((FAULT_KEY, b'{"kind": 3}'),), (("x", "y"),)):
        error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), "text")
        got = error_of("Claim", error)
        assert type(got) is kind
        assert not isinstance(got, PeerRejected)


async def test_a_follower_says_who_leads_and_that_is_no_refusal():
    error = await over_the_wire(Fault(faults.NOT_LEADER, text="not me", leader="10.0.0.1:7443"))
    assert read_fault(error).leader == "10.0.0.1:7443"
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    got = error_of("Claim", error)
    assert type(got) is PeerUnavailable
    assert "10.0.0.1:7443" in str(got)


async def test_an_unknown_kind_of_a_newer_bridge_is_no_answer():
    trailer = msgspec.json.encode({"kind": "tired", "text": "zzz", "mood": 1})
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.ABORTED, grpc.aio.Metadata(), grpc.aio.Metadata((FAULT_KEY, trailer)), ""
    )
    assert type(error_of("Claim", error)) is PeerUnavailable


def test_the_longest_error_fits_into_the_metadata():
    error = PeerRejected("slurmctld", "\U0001f4a9" * 5000, "\U0001f4a9" * 5000)
    # gRPC refuses metadata above 8 KiB; base64 adds a third.
    assert len(msgspec.json.encode(fault_of(error))) < 6000


def test_the_wait_doubles_up_to_the_cap_and_never_is_nothing():
    assert [round(back_off_s(n, 0.999999), 2) for n in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert [back_off_s(n, 0.0) for n in (0, 1, 50, 10_000)] == [0.05, 0.1, 1.0, 1.0]
    assert back_off_s(10_000, 0.999999) <= BACK_OFF_CAP_S
