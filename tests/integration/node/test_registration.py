"""Registered is who is listened to: the agent's registration against a kubelet played by the test.

The played kubelet is a real gRPC server on a real socket, with the habits of real ones: it says yes
and then opens a stream, or never does, or ends the one that it has just opened.
"""

import asyncio

import grpc
import grpc.aio
import pytest

from slurmbridge.clock import SystemClock
from slurmbridge.node import kubelet
from slurmbridge.node._gen import deviceplugin_pb2 as pb
from slurmbridge.node.foldersight import FolderSight
from slurmbridge.node.kubelet import Registration
from slurmbridge.node.plugin import SERVICE
from tests.integration.node.test_plugin_answers import plugin_of


class Kubelet:
    """Takes registrations. listens: opens a stream. tires: ends so many streams after one list.

    slow: so many times it says that it has not taken the devices yet.
    """

    def __init__(self, folder, *, listens=True, tires=0, slow=0):
        self.folder, self.listens, self.tires, self.slow = folder, listens, tires, slow
        self.endpoints, self.lists, self.streams = [], [], []

    async def __aenter__(self):
        (self.folder / "kubelet.sock").unlink(missing_ok=True)
        self.server = grpc.aio.server()
        register = grpc.unary_unary_rpc_method_handler(
            self.register, pb.RegisterRequest.FromString, pb.Empty.SerializeToString
        )
        service = grpc.method_handlers_generic_handler(
            "v1beta1.Registration", {"Register": register}
        )
        self.server.add_generic_rpc_handlers((service,))
        self.server.add_insecure_port(f"unix:{self.folder}/kubelet.sock")
        await self.server.start()
        return self

    async def register(self, request, context):
        if request.endpoint in self.endpoints:
            await context.abort(grpc.StatusCode.UNKNOWN, "device plugin already connected")
        self.endpoints.append(request.endpoint)
        if self.listens:
            self.streams.append(asyncio.ensure_future(self.watch(request.endpoint)))
        return pb.Empty()

    async def watch(self, endpoint):
        async with grpc.aio.insecure_channel(f"unix:{self.folder}/{endpoint}") as channel:
            stream = channel.unary_stream(
                f"/{SERVICE}/ListAndWatch",
                pb.Empty.SerializeToString,
                pb.ListAndWatchResponse.FromString,
            )(pb.Empty())
            async for answer in stream:
                self.lists.append([device.ID for device in answer.devices])
                if self.tires:
                    self.tires -= 1
                    return

    async def __aexit__(self, *_):
        for stream in self.streams:
            stream.cancel()
        await asyncio.gather(*self.streams, return_exceptions=True)
        await self.server.stop(0)


@pytest.fixture
async def started(tmp_path, monkeypatch):
    """The plugin with its registration, running; call it for the pair."""
    monkeypatch.setattr(kubelet, "LISTEN_S", 0.1)
    monkeypatch.setattr(kubelet, "UNHEARD_S", 0.02)
    monkeypatch.setattr(kubelet, "SETTLE_S", 0.0)
    running = []

    def start(run="a", taker=None, clock=None):
        plugin = plugin_of(tmp_path)
        told = []

        async def has_devices():
            if taker is not None and taker.slow:
                taker.slow -= 1
                return False
            return True

        registration = Registration(
            str(tmp_path),
            "nvidia.com/gpu",
            run,
            plugin.serve,
            lambda: plugin.listed,
            has_devices,
            clock or SystemClock(),
            lambda: told.append(registration.registered),
        )
        registration.told = told
        plugin.on_stream = registration.heard
        task = asyncio.ensure_future(registration.run())
        running.append((plugin, task))
        return plugin, registration

    yield start
    for plugin, task in running:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await plugin.stop()


async def until(reached, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not reached():
            await asyncio.sleep(0.005)


async def test_registered_is_told_once_the_devices_were_sent_and_not_before(tmp_path, started):
    async with Kubelet(tmp_path, listens=False) as taker:
        _, registration = started()
        # It says yes and opens no stream: that is asked again, each time with more patience.
        await until(lambda: len(taker.endpoints) >= 3)
        assert registration.registered is False
        assert registration.told == []
        taker.listens = True
        await until(lambda: registration.registered)
        assert taker.lists[-1] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
        count = registration.count
        await asyncio.sleep(0.5)
        assert registration.count == count, "one that is listened to registers no more"
        assert registration.told == [True]


async def test_devices_that_were_sent_and_not_taken_yet_are_no_registration(tmp_path, started):
    async with Kubelet(tmp_path, slow=3) as taker:
        plugin, registration = started(taker=taker)
        await until(lambda: taker.lists)
        await until(lambda: taker.slow == 1)
        assert plugin.listed
        assert not registration.registered
        await until(lambda: registration.registered)
        assert (taker.slow, registration.count) == (0, 1)
        assert registration.told == [True]


class LaterClock(SystemClock):
    """An hour on: what was made just now is old."""

    def wall(self):
        return super().wall() + 3600.0


async def test_a_kubelet_that_has_just_started_is_registered_with_at_once_and_given_time(
    tmp_path, started, monkeypatch
):
    monkeypatch.setattr(kubelet, "SETTLE_S", 0.4)
    async with Kubelet(tmp_path) as taker:
        plugin, registration = started()
        await until(lambda: plugin.listed)
        assert not registration.registered
        await until(lambda: registration.told)
        assert registration.told == [True]
        assert len(taker.endpoints) == 1


async def test_one_that_has_run_for_long_needs_none(tmp_path, started, monkeypatch):
    monkeypatch.setattr(kubelet, "SETTLE_S", 600.0)
    async with Kubelet(tmp_path):
        _, registration = started(clock=LaterClock())
        await until(lambda: registration.told == [True])


async def test_a_kubelet_that_ends_the_new_stream_for_the_old_ones_sake_is_asked_again(
    tmp_path, started
):
    async with Kubelet(tmp_path, tires=3) as taker:
        _, registration = started()
        await until(lambda: registration.registered and len(taker.lists) == 4)
        await asyncio.sleep(0.2)
        assert registration.registered
        assert len(set(taker.endpoints)) == len(taker.endpoints) == 4
        assert registration.told[-1] is True


async def test_a_stream_that_ends_ends_the_word_and_another_kubelet_is_registered_with_at_once(
    tmp_path, started
):
    async with Kubelet(tmp_path):
        plugin, registration = started()
        await until(lambda: registration.registered)
    await until(lambda: not registration.registered)
    assert not plugin.listed
    # While it is away the tries grow rarer, and none of that is laid to the charge of the next one.
    await asyncio.sleep(0.5)
    async with Kubelet(tmp_path) as second:
        await until(lambda: registration.registered)
        assert len(second.endpoints) == 1
        assert registration.told == [True, False, True]


async def test_no_two_registrations_of_any_process_share_a_socket_name(tmp_path, started):
    async with Kubelet(tmp_path) as taker:
        for run in ("a", "b"):
            _, registration = started(run)
            await until(lambda one=registration: one.registered)
            if run == "a":
                registration.clean()
                await until(lambda one=registration: one.count == 2 and one.registered)
        assert len(set(taker.endpoints)) == len(taker.endpoints) >= 3


async def test_a_change_of_the_folder_ends_the_wait(tmp_path):
    clock = SystemClock()
    with FolderSight(str(tmp_path)) as sight:
        assert sight.sees
        waiting = asyncio.ensure_future(sight.wait(clock, 60.0))
        await asyncio.sleep(0.01)
        (tmp_path / "kubelet.sock").touch()
        async with asyncio.timeout(10):
            await waiting
    with FolderSight(str(tmp_path / "not-here")) as blind:
        assert not blind.sees
        async with asyncio.timeout(10):
            await blind.wait(clock, 0.01)
