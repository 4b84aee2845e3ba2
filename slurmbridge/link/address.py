"""Addresses of the link, and when a connection to one may go without TLS: pure.

Forms: `host:port`, `dns:///host:port`, `192.0.2.1:7443`, `[2001:db8::1]:7443`, `unix:/path`.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final, NamedTuple

from slurmbridge.pool.errors import ConfigError, ParseError, Problem

_HOST_RE: Final = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?"
)
_PORT_RE: Final = re.compile(r"[0-9]{1,5}")
UNIX_CHARS: Final = 107
"""Longest path of a unix socket (sockaddr_un less its final zero)."""


class Address(NamedTuple):
    """Where a server listens. path: of a unix socket; else host (name or IP) and port."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_ip(self) -> bool:
        """Whether the host is a number, to be used without asking DNS."""
        return _ip(self.host) is not None

    @property
    def is_this_host(self) -> bool:
        """Whether nothing sent there leaves this host."""
        if self.path or self.host == "localhost":
            return True
        ip = _ip(self.host)
        return ip is not None and ip.is_loopback

    @property
    def target(self) -> str:
        """The form that gRPC takes, without its own resolver for names and numbers."""
        if self.path:
            return f"unix:{self.path}"
        ip = _ip(self.host)
        if ip is None:
            return f"dns:///{self.host}:{self.port}"
        return f"ipv{ip.version}:{self}"


def parse_address(text: str) -> Address:
    """An address from a configuration or from a peer's hint.

    Raises:
        ParseError: it has none of the forms above.

    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path.startswith("/") or len(path.encode()) > UNIX_CHARS or "\0" in path:
            raise ParseError(text, f"expected unix:/absolute/path of at most {UNIX_CHARS} bytes")
        return Address(path=path)
    host, _, port = text.removeprefix("dns:///").rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        is_host = (ip := _ip(host)) is not None and ip.version == 6
    else:
        is_host = _HOST_RE.fullmatch(host) is not None
    if not is_host or not _PORT_RE.fullmatch(port) or int(port) > 65535:
        raise ParseError(text, "expected host:port, [IPv6]:port or unix:/path")
    return Address(host=host, port=int(port))


def check_security(address: Address, *, has_tls: bool, insecure: bool, path: str) -> None:
    """Refuse plain text over a network, unless it was asked for.

    Args:
        address: where a server is to listen or a client to connect.
        has_tls: whether certificates are configured.
        insecure: the site said `insecure: true`.
        path: where in the configuration, for the message.

    Raises:
        ConfigError: plain text, not on this host, not asked for; or both at once.

    """
    if has_tls and insecure:
        raise ConfigError([Problem(path, "insecure and tls exclude each other")])
    if not has_tls and not insecure and not address.is_this_host:
        text = f"{address} is not on this host: configure tls, or say insecure: true"
        raise ConfigError([Problem(path, text)])


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
