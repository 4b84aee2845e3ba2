"""Mutual TLS from files that may change at any time (cert-manager, mounted Secrets).

The server looks at its files at each handshake, a client at each connection; connections that
stand are not touched. New files that do not fit together are reported and the old ones kept.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import grpc
import msgspec

from slurmbridge.log import get_logger
from slurmbridge.pool.errors import ConfigError, Problem

_log = get_logger(__name__)

_TRIES: Final = 3
_NAME_KEYS: Final = ("x509_subject_alternative_name", "x509_common_name")


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Paths of PEM files: our certificate chain and key, and the CA that our peers must be of.

    also_ca: another CA that they may be of, "" for none.
    """

    cert: str
    key: str
    ca: str
    also_ca: str = ""

    @property
    def authorities(self) -> tuple[str, ...]:
        """All CAs."""
        return (self.ca, self.also_ca) if self.also_ca else (self.ca,)


class _Pem(NamedTuple):
    cert: bytes
    key: bytes
    ca: bytes


class _Reader:
    """Reads all files as one: never a new certificate with an old key."""

    def __init__(self, tls: Tls, path: str) -> None:
        self._tls = tls
        self._path = path
        self._seen: tuple[Any, ...] | None = None
        self._complaint = ""
        self._lock = threading.Lock()

    def read(self) -> _Pem:
        """The files, checked against each other.

        Raises:
            ConfigError: a file is missing, is not PEM, or key and certificate do not match.

        """
        for _ in range(_TRIES):
            before = self._signature()
            try:
                # Says whether the key belongs to the certificate, which gRPC tells nobody.
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                # An empty password: a locked key is an error, not a question on the terminal.
                context.load_cert_chain(self._tls.cert, self._tls.key, password="")
                for authority in self._tls.authorities:
                    context.load_verify_locations(authority)
                pem = _Pem(
                    cert=Path(self._tls.cert).read_bytes(),
                    key=Path(self._tls.key).read_bytes(),
                    ca=b"\n".join(Path(path).read_bytes() for path in self._tls.authorities),
                )
            except (OSError, ssl.SSLError, ValueError) as error:
                if self._signature() != before:
                    continue
                text = f"certificate, key and CA cannot be used: {error}"
                raise ConfigError([Problem(self._path, text)]) from error
            if self._signature() == before:
                self._seen = before
                return pem
        raise ConfigError([Problem(self._path, "the files change faster than they can be read")])

    def read_if_changed(self) -> _Pem | None:
        """New files if there are, None when they are the same or cannot be used (logged once)."""
        with self._lock:
            try:
                if self._signature() == self._seen:
                    return None
                pem = self.read()
            except ConfigError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    _log.warning("new TLS files refused; the old ones stay", error=str(error))
                return None
            self._complaint = ""
            return pem

    def _signature(self) -> tuple[Any, ...]:
        try:
            files = (self._tls.cert, self._tls.key, *self._tls.authorities)
            stats = [Path(path).stat() for path in files]
        except OSError as error:
            text = f"cannot read {error.filename}: {error.strerror}"
            raise ConfigError([Problem(self._path, text)]) from error
        return tuple((s.st_dev, s.st_ino, s.st_mtime_ns, s.st_size) for s in stats)


def server_credentials(tls: Tls, path: str) -> grpc.ServerCredentials:
    """Credentials of a server: clients must show a certificate of the CA.

    Args:
        tls: the files.
        path: where in the configuration, for the message.

    Raises:
        ConfigError: the files cannot be used.

    """
    reader = _Reader(tls, path)

    def configuration(pem: _Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(pem.key, pem.cert)], root_certificates=pem.ca
        )

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        # Called by gRPC's own threads at the beginning of each handshake.
        pem = reader.read_if_changed()
        return None if pem is None else configuration(pem)

    return grpc.dynamic_ssl_server_credentials(
        configuration(reader.read()),
        # None means "no change"; the stubs do not say so.
        cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch),
        require_client_authentication=True,
    )


def channel_credentials(tls: Tls, path: str) -> grpc.ChannelCredentials:
    """Credentials of one connection, from the files as they are now.

    Raises:
        ConfigError: the files cannot be used.

    """
    pem = _Reader(tls, path).read()
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)


def peer_is_allowed(context: grpc.aio.ServicerContext[Any, Any], patterns: tuple[str, ...]) -> bool:
    """Whether a name in the client's certificate matches one of the patterns (none: any does)."""
    if not patterns:
        return True
    auth = context.auth_context()
    names = [name.decode(errors="replace") for key in _NAME_KEYS for name in auth.get(key, ())]
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
