"""What the device plugin answers on its socket, in each of the ways that a site can choose."""

import grpc
import grpc.aio
import pytest

from slurmbridge.clock import SystemClock
from slurmbridge.node._gen import deviceplugin_pb2 as pb
from slurmbridge.node.book import Book, NativeJob
from slurmbridge.node.device import DeviceMap, Gpu
from slurmbridge.node.identity import Listed, PodFacts, Want
from slurmbridge.node.plugin import PRESTART_S, SERVICE, DevicePlugin, Response
from slurmbridge.pool.errors import PeerUnavailable

GPUS = tuple(
    Gpu(index=i, uuid=f"GPU-{i}", minor=7 - i, path=f"/dev/nvidia{7 - i}") for i in range(4)
)
POD = PodFacts("u-1", "a", "b", (Want("main", 2),), job_id=7, indices=(1, 3))


class Pods:
    def known(self):
        return [POD]

    async def fetch(self, namespace, name):
        return POD


class Kubelet:
    async def list(self, deadline_s=1.0):
        return [Listed("a", "b", {})]


async def nothing(*_):
    return ""


def plugin_of(tmp_path, gpus=GPUS, response=None, kind="", **more):
    parts = {
        "lister": Kubelet(),
        "verify": nothing,
        "busy": nothing,
        "clock": SystemClock(),
        **more,
    }
    return DevicePlugin(
        devices=lambda: DeviceMap(gpus=gpus),
        healthy=lambda: [g.uuid for g in gpus],
        pods=Pods(),
        book=Book(str(tmp_path / "book.json")),
        response=response or Response(),
        kind=kind,
        **parts,
    )


async def allocate(tmp_path, response, ids, gpus=GPUS):
    """The answer to one Allocate, over the socket as the kubelet asks."""
    plugin = plugin_of(tmp_path, gpus, response)
    path = tmp_path / "p.sock"
    await plugin.serve(str(path))
    try:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            call = channel.unary_unary(
                f"/{SERVICE}/Allocate",
                pb.AllocateRequest.SerializeToString,
                pb.AllocateResponse.FromString,
            )
            request = pb.AllocateRequest(
                container_requests=[pb.ContainerAllocateRequest(devices_ids=ids)]
            )
            answer = await call(request, timeout=20)
    finally:
        await plugin.stop()
    return answer.container_responses[0]


async def test_env_names_the_claims_gpus_by_uuid_in_the_order_of_their_indices(tmp_path):
    answer = await allocate(tmp_path, Response(styles=("env",)), ["GPU-3", "GPU-1"])
    assert dict(answer.envs) == {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-3"}
    assert not answer.devices
    assert not answer.cdi_devices


async def test_cdi_names_them_as_the_toolkits_specs_do(tmp_path):
    answer = await allocate(tmp_path, Response(styles=("cdi",)), ["GPU-1", "GPU-3"])
    assert [d.name for d in answer.cdi_devices] == ["nvidia.com/gpu=GPU-1", "nvidia.com/gpu=GPU-3"]
    assert not answer.envs
    other = Response(styles=("cdi",), cdi_kind="example.org/accelerator")
    answer = await allocate(tmp_path, other, ["GPU-1"])
    assert [d.name for d in answer.cdi_devices] == ["example.org/accelerator=GPU-1"]


async def test_devices_are_the_drivers_files_and_what_all_containers_need(tmp_path):
    also = tmp_path / "nvidiactl"
    also.touch()
    response = Response(styles=("devices", "env"), also=(str(also), "/dev/not-here"))
    answer = await allocate(tmp_path, response, ["GPU-1", "GPU-3"])
    files = [(d.container_path, d.host_path, d.permissions) for d in answer.devices]
    assert files == [
        ("/dev/nvidia6", "/dev/nvidia6", "rw"),
        ("/dev/nvidia4", "/dev/nvidia4", "rw"),
        (str(also), str(also), "rw"),
    ]
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == "GPU-1,GPU-3"


MIG = tuple(
    Gpu(
        index=i,
        uuid=f"MIG-{i}",
        minor=0,
        path=f"/dev/nvidia-caps/nvidia-cap{22 + 2 * i}",
        type="1g.10gb" if i < 3 else "3g.40gb",
        files=(
            "/dev/nvidia0",
            f"/dev/nvidia-caps/nvidia-cap{21 + 2 * i}",
            f"/dev/nvidia-caps/nvidia-cap{22 + 2 * i}",
        ),
    )
    for i in range(4)
)


async def test_mig_devices_come_with_all_their_files_and_the_gpus_once(tmp_path):
    response = Response(styles=("devices", "env"), also=())
    answer = await allocate(tmp_path, response, ["MIG-1", "MIG-3"], MIG)
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == "MIG-1,MIG-3"
    assert [d.container_path for d in answer.devices] == [
        "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap23",
        "/dev/nvidia-caps/nvidia-cap24",
        "/dev/nvidia-caps/nvidia-cap27",
        "/dev/nvidia-caps/nvidia-cap28",
    ]


@pytest.mark.parametrize(("kind", "offered"), [("", 4), ("1g.10gb", 3), ("3g.40gb", 1)])
async def test_a_resource_offers_the_gpus_of_its_type(tmp_path, kind, offered):
    plugin = plugin_of(tmp_path, MIG, kind=kind)
    path = tmp_path / "p.sock"
    await plugin.serve(str(path))
    try:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            call = channel.unary_stream(
                f"/{SERVICE}/ListAndWatch",
                pb.Empty.SerializeToString,
                pb.ListAndWatchResponse.FromString,
            )(pb.Empty(), timeout=20)
            first = await call.read()
            call.cancel()
    finally:
        await plugin.stop()
    assert len(first.devices) == offered
    assert all(d.health == "Healthy" for d in first.devices)


async def test_devices_outside_the_claim_are_refused_with_the_reason(tmp_path):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await allocate(tmp_path, Response(), ["GPU-0", "GPU-1"])
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "GPU 0 is outside its claim 7" in refused.value.details()


class Lister:
    """The kubelet once the pod is admitted."""

    async def list(self, deadline_s=1.0):
        return [Listed("a", "b", {"main": frozenset({"GPU-1", "GPU-3"})})]


class QuickClock(SystemClock):
    """A second of it takes ten milliseconds: deadlines are those of the product."""

    def monotonic(self):
        return super().monotonic() * 100

    async def sleep(self, seconds):
        await super().sleep(seconds / 100)


class Told:
    """What the node says, one answer after the other; the last one for ever."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    async def __call__(self, *question):
        self.asked.append(question)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


async def prestart(tmp_path, **parts):
    """PreStartContainer over the socket, and its status code and text."""
    plugin = plugin_of(tmp_path, clock=QuickClock(), lister=Lister(), **parts)
    path = tmp_path / "p.sock"
    await plugin.serve(str(path))
    try:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            call = channel.unary_unary(
                f"/{SERVICE}/PreStartContainer",
                pb.PreStartContainerRequest.SerializeToString,
                pb.PreStartContainerResponse.FromString,
            )
            try:
                await call(pb.PreStartContainerRequest(devices_ids=["GPU-1", "GPU-3"]), timeout=20)
            except grpc.aio.AioRpcError as error:
                return plugin, error.code(), error.details()
    finally:
        await plugin.stop()
    return plugin, grpc.StatusCode.OK, ""


BUSY = "process 12 (python) of no pod uses GPU 3"


async def test_a_container_starts_once_nothing_else_uses_its_gpus(tmp_path):
    busy = Told(BUSY, BUSY, BUSY, "")
    plugin, code, _ = await prestart(tmp_path, busy=busy)
    assert code is grpc.StatusCode.OK
    assert busy.asked == [("u-1", [1, 3])] * 4
    assert (plugin.counts["waited"], plugin.counts["started"]) == (3, 1)


@pytest.mark.parametrize(("why", "left"), [("", {10}), ("job 7 is COMPLETED", {9, 10})])
async def test_a_native_job_is_forgotten_whose_gpus_slurmctld_says_are_the_pods(
    tmp_path, why, left
):
    book = Book(str(tmp_path / "book.json"))
    book.started(NativeJob(9, "alice", "ml", "main", (3,)))
    book.started(NativeJob(10, "alice", "ml", "main", (0, 2)))
    await prestart(tmp_path, verify=Told(why))
    assert set(Book(str(tmp_path / "book.json")).native) == left


async def test_the_wait_for_idle_gpus_ends_before_the_kubelet_gives_up_and_says_why(tmp_path):
    clock = QuickClock()
    began = clock.monotonic()
    plugin, code, text = await prestart(tmp_path, busy=Told(BUSY))
    # Not for good: the kubelet tries again.
    assert code is grpc.StatusCode.UNAVAILABLE
    assert text == f"slurmbridge: pod a/b: its GPUs are still in use: {BUSY}"
    assert clock.monotonic() - began >= PRESTART_S
    assert plugin.counts["refused_busy"] == 1
    assert "started" not in plugin.counts
    assert PRESTART_S < 30.0, "the kubelet's own limit"


async def test_a_claim_that_ended_before_or_while_the_container_waited_starts_nothing(tmp_path):
    busy = Told("")
    _, code, text = await prestart(tmp_path, verify=Told("job 7 is CANCELLED"), busy=busy)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "claim 7 does not cover it any more: job 7 is CANCELLED" in text
    assert busy.asked == []
    verify = Told("", "job 7 is CANCELLED")
    plugin, code, text = await prestart(tmp_path, verify=verify, busy=Told(*[BUSY] * 30, ""))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "claim 7 has ended: job 7 is CANCELLED" in text
    assert len(verify.asked) == 2
    assert "started" not in plugin.counts


async def test_where_nobody_can_say_whether_gpus_are_idle_nothing_starts(tmp_path):
    async def dark(*_):
        raise PeerUnavailable("nvml", "usage", "driver is being replaced")

    for part in ("busy", "verify"):
        _, code, text = await prestart(tmp_path, **{part: dark})
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "driver is being replaced" in text
