"""What the device plugin answers on its socket, in each of the ways that a site can choose."""

import grpc
import grpc.aio
import pytest

from slurmbridge.clock import SystemClock
from slurmbridge.node._gen import deviceplugin_pb2 as pb
from slurmbridge.node.book import Book
from slurmbridge.node.device import DeviceMap, Gpu
from slurmbridge.node.identity import Listed, PodFacts, Want
from slurmbridge.node.plugin import SERVICE, DevicePlugin, Response

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


async def allocate(tmp_path, response, ids):
    """The answer to one Allocate, over the socket as the kubelet asks."""
    plugin = DevicePlugin(
        devices=lambda: DeviceMap(gpus=GPUS),
        healthy=lambda: [g.uuid for g in GPUS],
        pods=Pods(),
        lister=Kubelet(),
        book=Book(str(tmp_path / "book.json")),
        verify=nothing,
        busy=nothing,
        response=response,
        clock=SystemClock(),
    )
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
            answer = await call(request, timeout=5)
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


async def test_devices_outside_the_claim_are_refused_with_the_reason(tmp_path):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await allocate(tmp_path, Response(), ["GPU-0", "GPU-1"])
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "GPU 0 is outside its claim 7" in refused.value.details()
