"""Any bytes to the extender's HTTP port and to the bridge's gRPC port: an answer or an end in time.

The servers run in a thread of their own, so that Hypothesis may drive them over real sockets.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import asynccontextmanager, contextmanager

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurmbridge.link._gen import pool_pb2 as pb
from slurmbridge.link.server import SERVICE
from tests.support.extender import bind_body, choice, served
from tests.support.link import bridges
from tests.support.pool_view import make_node

WAIT_S = 20.0
"""Longer than any deadline of ours: to read a body, to decide, to claim."""
FEW = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@contextmanager
def in_thread(manager):
    """Enter an async context manager in a loop of its own; gives its value and the loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def do(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    value = do(manager.__aenter__())
    try:
        yield value
    finally:
        do(manager.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module", name="extender")
def _extender():
    with in_thread(served(make_node("a"), make_node("b"))) as here:
        yield here


@pytest.fixture(scope="module", name="bridge")
def _bridge():
    @asynccontextmanager
    async def leading():
        async with bridges() as (bridge,):
            bridge.lead()
            yield bridge

    with in_thread(leading()) as bridge:
        yield bridge


def exchange(port: int, *parts: bytes, whole: bool = False) -> bytes:
    """Send parts; all that comes back until the other side has ended.

    whole: it is a whole request that asks for the end. Else we say that no more will come.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as line:
        try:
            for part in parts:
                line.sendall(part)
            if not whole:
                line.shutdown(socket.SHUT_WR)
        except OSError:
            return b""  # it has had enough
        got = b""
        try:
            while data := line.recv(65536):
                got += data
        except ConnectionError:
            pass
        return got


def ask(port: int, verb: str, body: object) -> tuple[int, object]:
    data = json.dumps(body).encode()
    head = f"POST /{verb} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}"
    answer = exchange(port, head.encode() + b"\r\n\r\n", data, whole=True)
    status, _, rest = answer.partition(b"\r\n\r\n")
    code = int(status.split()[1])
    return code, json.loads(rest) if code == 200 else None


words = st.sampled_from(
    [
        *(b"POST /filter HTTP/1.1\r\n", b"POST /bind HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n"),
        *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"Host: x\r\n", b"Content-Length: 5\r\n"),
        *(b"Content-Length: -1\r\n", b"Content-Length: 99999999999\r\n", b"\r\n", b"5\r\n", b"0\r\n"),
        *(b"Transfer-Encoding: chunked\r\n", b"Content-Encoding: gzip\r\n", b"Expect: 100-continue\r\n"),
        *(b"x" * 9000, b"{" * 2000, b"\x00", b"\xff\xfe", b'{"Pod":{},"NodeNames":["a"]}'),
        *(b"FFFFFFFFFFFFFFFF\r\n", b"Connection: upgrade\r\nUpgrade: h2c\r\n", b"\r\n\r\n"),
    ]
)  # fmt: skip


def test_any_bytes_on_the_http_port_end_in_time_and_hurt_nobody(extender):
    port = extender.extender.server.port

    @FEW
    @given(st.lists(words | st.binary(max_size=40), max_size=8))
    def check(parts):
        answer = exchange(port, *parts)
        assert answer == b"" or answer.startswith(b"HTTP/1.")
        assert b" 500 " not in answer.partition(b"\r\n")[0]

    check()
    assert ask(port, "filter", choice(["a", "b"]))[0] == 200


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=10)
    | st.floats(allow_nan=False, allow_infinity=False)
)
trees = st.recursive(
    leaves, lambda t: st.lists(t, max_size=4) | st.dictionaries(st.text(max_size=6), t, max_size=4)
)
GOOD = {"filter": choice(["a", "b"]), "prioritize": choice(["a"]), "bind": bind_body()}
PLACES = [
    *(("Pod",), ("Pod", "metadata"), ("Pod", "metadata", "name"), ("Pod", "metadata", "annotations")),
    *(("Pod", "spec"), ("Pod", "spec", "containers"), ("NodeNames",), ("Nodes",)),
    *(("PodName",), ("PodNamespace",), ("PodUID",), ("Node",)),
]  # fmt: skip


def test_anything_anywhere_in_a_request_is_an_answer_and_never_a_claim_for_a_fault(extender):
    port = extender.extender.server.port

    @FEW
    @given(
        st.sampled_from(["filter", "prioritize", "bind", "preempt"]), st.sampled_from(PLACES), trees
    )
    def check(verb, place, tree):
        body = json.loads(json.dumps(GOOD.get(verb, GOOD["filter"])))
        at = body
        for key in place[:-1]:
            at = at.setdefault(key, {})
        at[place[-1]] = tree
        status, answer = ask(port, verb, body)
        assert status in (200, 400, 413, 503)
        if status == 200:
            assert isinstance(answer, list if verb == "prioritize" else dict)

    check()
    for claim, _ in extender.bridge.claims:
        assert claim.name and claim.uid and claim.kube_node
        assert "/" not in claim.name + claim.namespace + claim.kube_node


def test_any_bytes_on_the_grpc_port_end_in_time_and_hurt_nobody(bridge):
    port = int(bridge.address.rpartition(":")[2])
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

    @FEW
    @given(st.booleans(), st.lists(words | st.binary(max_size=60), max_size=6))
    def check(starts_well, parts):
        exchange(port, *([preface] if starts_well else []), *parts)

    check()
    assert _call(bridge, "Query", pb.QueryRequest(name="status").SerializeToString()) is None


def test_any_message_to_any_method_is_an_answer_or_a_status_in_time(bridge):
    @FEW
    @given(
        st.sampled_from(["Claim", "ReleaseUnbound", "Query", "Nothing"]), st.binary(max_size=200)
    )
    def check(method, message):
        code = _call(bridge, method, message)
        assert code is not grpc.StatusCode.DEADLINE_EXCEEDED

    check()
    huge = b"\x0a" + b"\xff\xff\xff\x7f" + b"x" * (8 << 20)
    assert _call(bridge, "Claim", huge) is not None
    assert _call(bridge, "Query", pb.QueryRequest(name="status").SerializeToString()) is None


def _call(bridge, method, message):
    """Status of a call with raw bytes; None: it was answered."""
    with grpc.insecure_channel(bridge.address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/{method}", lambda m: m, lambda m: m)
        try:
            call(message, timeout=WAIT_S)
        except grpc.RpcError as error:
            return error.code()
    return None
