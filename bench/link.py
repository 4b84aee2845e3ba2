"""The link at 5,000 nodes: encodings, first delivery, cost of a change, claim round trip.

`python -m bench.link [NODES]` prints a table; ADR 0004 quotes it. Server and clients share one
process and one event loop, so that latencies are upper bounds. Protobuf is measured with messages
built at run time, field by field the same as `NodeView`.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import statistics
import sys
import time
import zlib

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from slurmbridge import log
from slurmbridge.clock import SystemClock
from slurmbridge.link import codec
from slurmbridge.link.client import LinkClient
from slurmbridge.link.delta import difference
from slurmbridge.link.message import ClaimAsk, ClaimGrant
from slurmbridge.link.server import LinkServer
from slurmbridge.pool.policy import Policy
from slurmbridge.pool.record import GpuCount
from slurmbridge.pool.view import HeldClaim, NodeView, View, ViewDelta, Window, apply_delta

NODES = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
POLICY = Policy(cluster="prod")


def node(number, free=None):
    name = f"gpu-node-{number:05d}"
    free = number % 9 if free is None else free
    return NodeView(
        kube_node=f"{name}.cluster.example.com",
        slurm_node=name,
        total=(GpuCount("h100", 8),),
        free=(GpuCount("h100", free),) if free else (),
        cpus_free=number % 128,
        memory_free_mib=1000 * (number % 1000),
        native_jobs=number % 3,
        claimed=number % 5,
        plan_start=1.8e9 + number if number % 10 == 0 else None,
        windows=(Window("maint", 1.8e9, 1.8e9 + 3600),) if number % 50 == 0 else (),
    )


def view_of(nodes, generation=1):
    return View(
        term="7-bridge-0",
        generation=generation,
        as_of=time.time(),  # noqa: TID251 - a benchmark
        interval_s=1.0,
        nodes=nodes,
        held={f"uid-{n}": HeldClaim(f"uid-{n}", "n", n) for n in range(50)},
    )


def all_nodes():
    return {n.kube_node: n for n in map(node, range(NODES))}


def ms(work, repeat=25):
    """Median milliseconds, and what the last call gave."""
    took, value = [], None
    for _ in range(repeat):
        began = time.perf_counter()
        value = work()
        took.append(time.perf_counter() - began)
    return 1e3 * statistics.median(took), value


def spread(seconds):
    ordered = sorted(seconds)
    at = lambda share: 1e3 * ordered[min(int(len(ordered) * share), len(ordered) - 1)]  # noqa: E731
    return f"p50 {at(0.5):.2f} ms, p99 {at(0.99):.2f} ms, n {len(ordered)}"


def proto_messages():
    kind = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="bench.proto", package="bench", syntax="proto3")
    shapes = {
        "Gpu": [("type", "STRING"), ("count", "UINT32")],
        "Window": [("reservation", "STRING"), ("start", "DOUBLE"), ("end", "DOUBLE")],
        "Node": [
            ("kube_node", "STRING"), ("slurm_node", "STRING"), ("total", "*Gpu"), ("free", "*Gpu"),
            ("cpus_free", "UINT32"), ("memory_free_mib", "UINT64"), ("blocked", "STRING"),
            ("native_jobs", "UINT32"), ("claimed", "UINT32"), ("plan_start", "DOUBLE"),
            ("windows", "*Window"), ("agent", "BOOL"),
        ],
        "Whole": [("nodes", "*Node")],
    }  # fmt: skip
    for name, fields in shapes.items():
        message = file.message_type.add(name=name)
        for number, (field, what) in enumerate(fields, 1):
            if what.startswith("*"):
                message.field.add(
                    name=field, number=number, label=kind.LABEL_REPEATED, type=kind.TYPE_MESSAGE,
                    type_name=f".bench.{what[1:]}",
                )  # fmt: skip
            else:
                message.field.add(
                    name=field, number=number, label=kind.LABEL_OPTIONAL,
                    type=getattr(kind, f"TYPE_{what}"),
                )  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("bench.Whole"))


def to_proto(whole, view):
    out = whole()
    for one in view.nodes.values():
        to = out.nodes.add()
        to.kube_node, to.slurm_node, to.blocked = one.kube_node, one.slurm_node, one.blocked
        for gpu in one.total:
            to.total.add(type=gpu.type, count=gpu.count)
        for gpu in one.free:
            to.free.add(type=gpu.type, count=gpu.count)
        to.cpus_free, to.memory_free_mib = one.cpus_free, one.memory_free_mib
        to.native_jobs, to.claimed, to.agent = one.native_jobs, one.claimed, one.agent
        to.plan_start = one.plan_start or 0.0
        for window in one.windows:
            to.windows.add(reservation=window.reservation, start=window.start, end=window.end or 0)
    return out.SerializeToString()


def from_proto(whole, body):
    return {
        one.kube_node: NodeView(
            one.kube_node,
            one.slurm_node,
            tuple(GpuCount(gpu.type, gpu.count) for gpu in one.total),
            tuple(GpuCount(gpu.type, gpu.count) for gpu in one.free),
            one.cpus_free,
            one.memory_free_mib,
            one.blocked,
            one.native_jobs,
            one.claimed,
            one.plan_start or None,
            tuple(Window(w.reservation, w.start, w.end) for w in one.windows),
            one.agent,
        )
        for one in whole.FromString(body).nodes
    }


def encodings():
    view = view_of(all_nodes())
    print(f"\nwhole view of {NODES} nodes: encode ms, decode ms, bytes, bytes after zlib -1")
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(View).decode
    for name, enc, dec in (
        ("MessagePack", lambda: codec.encode(view), codec.decode_view),
        ("JSON", lambda: encode(view), decode),
    ):
        cost, body = ms(enc)
        back, got = ms(lambda dec=dec, body=body: dec(body))
        assert got == view
        print(f"  {name:12} {cost:7.2f} {back:7.2f} {len(body):9} {len(zlib.compress(body, 1)):8}")
    whole = proto_messages()
    cost, body = ms(lambda: to_proto(whole, view))
    back, got = ms(lambda: from_proto(whole, body))
    assert got == view.nodes
    print(f"  {'proto':12} {cost:7.2f} {back:7.2f} {len(body):9} {len(zlib.compress(body, 1)):8}")
    body = codec.encode(view)
    cost, packed = ms(lambda: zlib.compress(body, 1))
    print(f"  zlib -1 itself: {cost:.2f} ms, back {ms(lambda: zlib.decompress(packed))[0]:.2f} ms")


def deltas():
    print("\na change: difference, encode, decode, apply in ms, bytes")
    nodes = all_nodes()
    old = view_of(nodes)
    for count in (0, 1, 50, 500):
        changed = nodes | {n.kube_node: n for n in (node(i, free=7 - i % 7) for i in range(count))}
        new = view_of(changed, 2)
        diff, delta = ms(lambda new=new: difference(old, new))
        enc, body = ms(lambda delta=delta: codec.encode(delta))
        dec, got = ms(lambda body=body: codec.decode_delta(body))
        app, made = ms(lambda got=got: apply_delta(old, got))
        assert isinstance(got, ViewDelta)
        assert made == new
        print(f"  {count:4} nodes: {diff:.3f} {enc:.3f} {dec:.3f} {app:.3f} {len(body)}")
    rebuilt = view_of(all_nodes(), 2)
    cost, _ = ms(lambda: difference(old, rebuilt))
    print(f"  every node built anew, none changed: difference {cost:.3f}")


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


async def link(clients):
    async def grant(_ask, _deadline_s):
        return ClaimGrant(job_id=1, gpus="0-3", generation=1)

    async def nothing(*_):
        return b""

    server = LinkServer(
        "127.0.0.1:0",
        on_claim=grant,
        on_release_unbound=nothing,
        queries=nothing,
        clock=SystemClock(),
    )
    await server.start()
    server.set_leader(True, term="7-bridge-0")
    nodes = all_nodes()
    server.publish(view_of(nodes), POLICY)
    began = time.perf_counter()
    made = [
        LinkClient([server.address], clock=SystemClock(), rng=lambda: 0.5) for _ in range(clients)
    ]
    tasks = [asyncio.create_task(client.run()) for client in made]
    await until(lambda: all(client.view for client in made))
    first = time.perf_counter() - began
    publish, arrive, stalls = [], [], []
    for generation in range(2, 302):
        number = generation % NODES
        nodes = nodes | {(n := node(number, free=generation % 8 + 1)).kube_node: n}
        view = view_of(nodes, generation)
        began = time.perf_counter()
        server.publish(view, POLICY)
        publish.append(time.perf_counter() - began)
        await until(lambda g=generation: all(client.generation == g for client in made))
        arrive.append(time.perf_counter() - began)
    print(f"\n{clients} client(s): connect and first whole view {1e3 * first:.1f} ms (all of them)")
    print(f"  publish, one node changed: {spread(publish)}")
    print(f"  publish until in the last client's view: {spread(arrive)}")
    if clients == 1:
        ask = ClaimAsk("uid", "ns", "pod", "node", "cause")
        for lanes in (1, 16):

            async def work(count):
                for _ in range(count):
                    began = time.perf_counter()
                    await made[0].claim(ask, 5.0)
                    stalls.append(time.perf_counter() - began)

            stalls.clear()
            began = time.perf_counter()
            await asyncio.gather(*(work(1600 // lanes) for _ in range(lanes)))
            rate = 1600 / (time.perf_counter() - began)
            print(f"  claim round trip, {lanes} at a time: {spread(stalls)}, {rate:.0f}/s")
    for client in made:
        await client.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.stop()


async def main():
    log.configure("warning")
    gc.collect()
    encodings()
    deltas()
    for clients in (1, 3, 10):
        await link(clients)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\npeak memory of this process {peak:.0f} MiB")


if __name__ == "__main__":
    asyncio.run(main())
