"""TLS of the extender's port, from files that may change at any time (cert-manager, Secrets).

kube-scheduler's only means to show who it is is a client certificate (`tlsConfig` of the
extender), so that with a client CA nobody else can ask or bind. The files are looked at with each
handshake; new ones that do not fit together are reported once, and the old ones stay.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import msgspec

from slurmbridge.log import get_logger
from slurmbridge.pool.errors import ConfigError, Problem

_log = get_logger(__name__)


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files: certificate chain, its key, CA of clients ("": clients show none)."""

    cert: str
    key: str
    client_ca: str = ""


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """A context that follows its files.

    Raises:
        ConfigError: a file is missing, is not PEM, or key and certificate do not match.

    """
    current, seen = _load(files), _signature(files)

    def renew(connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _: Any) -> None:
        nonlocal current, seen
        now = _signature(files)
        if now != seen:
            seen = now
            try:
                current = _load(files)
            except ConfigError as error:
                _log.warning("new TLS files refused; the old ones stay", error=str(error))
        connection.context = current

    front = _load(files)
    front.sni_callback = renew  # called for each handshake, with or without a server name
    return front


def _load(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.cert, files.key)
        if files.client_ca:
            context.load_verify_locations(files.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        text = f"certificate, key and client CA cannot be used: {error}"
        raise ConfigError([Problem("--tls-cert", text)]) from error
    return context


def _signature(files: TlsFiles) -> tuple[Any, ...]:
    """What changes when a file does; a missing file is a change too."""
    found: list[Any] = []
    for path in (files.cert, files.key, files.client_ca):
        try:
            stat = Path(path).stat()
        except OSError:
            found.append(None)
        else:
            found.append((stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(found)
