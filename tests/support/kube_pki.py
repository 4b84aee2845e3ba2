"""Certificates of a test cluster: one authority, and what it signs, by the openssl command.

Elliptic keys, valid three days, with the extensions that strict verifiers (Python 3.13) ask for.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificate:
    """Two PEM files."""

    crt: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """A certificate authority in `folder`; `create` makes it."""

    folder: Path

    @property
    def crt(self) -> Path:
        """What clients verify against (PEM)."""
        return self.folder / "ca.crt"

    def create(self) -> None:
        """Make the authority's key and certificate."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _openssl(
            *("req", "-x509", *NEW_KEY, "-days", "3", "-subj", "/CN=slurmbridge-test-ca"),
            *("-keyout", str(self.folder / "ca.key"), "-out", str(self.crt)),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        )

    def issue(
        self,
        name: str,
        *hosts: str,
        organisation: str = "",
        client: bool = False,
        both: bool = False,
    ) -> Certificate:
        """A certificate with common name `name`.

        Args:
            hosts: subject alternative names as openssl writes them: `IP:127.0.0.1`, `DNS:a.b`.
            organisation: a Kubernetes group, for client certificates.
            client: for a client instead of a server.
            both: for a daemon that is server and client.

        """
        usage = "serverAuth,clientAuth" if both else "clientAuth" if client else "serverAuth"
        certificate = Certificate(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        subject = (f"/O={organisation}" if organisation else "") + f"/CN={name}"
        names = ("-addext", f"subjectAltName={','.join(hosts)}") if hosts else ()
        _openssl(
            *("req", "-x509", *NEW_KEY, "-days", "3", "-subj", subject),
            *("-CA", str(self.crt), "-CAkey", str(self.folder / "ca.key")),
            *("-keyout", str(certificate.key), "-out", str(certificate.crt)),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-addext", "keyUsage=critical,digitalSignature"),
            *("-addext", f"extendedKeyUsage={usage}"),
            *names,
        )
        return certificate

    def signing_key(self, name: str) -> Path:
        """A bare key pair (PEM) to sign service account tokens with."""
        path = self.folder / f"{name}.key"
        # Kubernetes reads elliptic keys in SEC 1 form, which only this command writes.
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(path))
        return path


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {arguments[0]}: {done.stderr.strip()}")
