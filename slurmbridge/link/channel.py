"""From an address to a connection: name resolution, TLS, keep-alive, all with deadlines.

Names are resolved here and each of their addresses is tried by itself: behind one name are all
replicas of the bridge, and only one of them leads.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final, NamedTuple

import grpc
import grpc.aio

from slurmbridge.link.address import Address
from slurmbridge.link.tls import Tls, channel_credentials
from slurmbridge.pool.errors import PeerUnavailable

RESOLVE_S: Final = 2.0
CONNECT_S: Final = 2.0
"""For TCP and TLS handshake; a host that is gone costs this much of a round."""
MESSAGE_BYTES: Final = 64 * 1024 * 1024

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # A peer that is silent for 2 s is asked, and given up 1.5 s later.
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 1500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # No connection, and no back-off of one, is shared with a channel that was given up.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


class Endpoint(NamedTuple):
    """One place to connect to. name: what the server's certificate must be for."""

    address: Address
    name: str


async def resolve(address: Address, server_name: str = "") -> list[Endpoint]:
    """All endpoints behind an address, in the order of the resolver; empty when it has none.

    Args:
        address: of the configuration, or a hint.
        server_name: name to expect in the certificate; "": the host of the address.

    """
    name = server_name or address.host
    if address.path or address.is_ip:
        return [Endpoint(address, name)]
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await asyncio.get_running_loop().getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM
            )
    except (OSError, TimeoutError, UnicodeError):
        return []
    hosts = dict.fromkeys(str(entry[4][0]) for entry in found)
    return [Endpoint(Address(host=host, port=address.port), name) for host in hosts]


def open_channel(endpoint: Endpoint, tls: Tls | None) -> grpc.aio.Channel:
    """A channel to one endpoint; nothing is sent yet.

    Raises:
        ConfigError: the certificate files cannot be used.

    """
    target = endpoint.address.target
    if tls is None or endpoint.address.path:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    options = (*_OPTIONS, ("grpc.ssl_target_name_override", endpoint.name))
    return grpc.aio.secure_channel(target, channel_credentials(tls, "$.link.tls"), options=options)


async def connect(channel: grpc.aio.Channel, endpoint: Endpoint) -> None:
    """Wait until the connection stands.

    Raises:
        PeerUnavailable: refused, or not within `CONNECT_S`.

    """
    ready = grpc.ChannelConnectivity.READY
    try:
        async with asyncio.timeout(CONNECT_S):
            while (state := channel.get_state(try_to_connect=True)) is not ready:
                if state in (
                    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
                    grpc.ChannelConnectivity.SHUTDOWN,
                ):
                    text = f"{endpoint.address}: refused, unreachable or not the expected peer"
                    raise PeerUnavailable("bridge", "connect", text)
                await channel.wait_for_state_change(state)
    except TimeoutError as error:
        text = f"{endpoint.address}: no connection within {CONNECT_S:g} s"
        raise PeerUnavailable("bridge", "connect", text) from error
