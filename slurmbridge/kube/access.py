"""How to reach the API server and as whom: address, TLS and the Authorization header.

The configuration (a pod's service account, or a kubeconfig with tokens, files, client certificates,
exec plugins or OIDC) is read by the official client's loaders; only its requests are ours. What we
add to them, each for a reason that has hurt others:

- the header is checked to be there when a token is expected. kubernetes 36.0 loaded the token under
  one name and looked for it under another, so that every call was anonymous
  (kubernetes-client/python#2582).
- a token file is read again every minute by the monotonic clock (the loader compares wall times,
  which a stepped clock can stop), and everything is read again after a 401, so that a rotated
  token or CA and an expired exec credential heal by themselves (kubernetes-client/python#1768).
- the token is stripped: a line feed at the end of a token file is no lawful header.

Importing the loaders costs about 20 MiB and 0.2 s beyond aiohttp (measured with 37.0.2); they are
imported here and nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import yaml
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import incluster_config

from slurmbridge.pool.errors import ConfigError, Problem

if TYPE_CHECKING:
    from slurmbridge.clock import Clock

REREAD_S: Final = 60.0
"""How often a service account's token file is read again; the kubelet rotates it after 80 % of its
life (about 48 minutes of an hour), and the old one stays valid for the rest."""
RELOAD_S: Final = 5.0
"""Shortest time between two reloads because of refusals (401), so that they cannot become a storm
of exec plugins."""
LOAD_S: Final = 30.0
"""Deadline of reading it all; an exec plugin or an OIDC provider may hang."""

# What the loaders raise; the last three where YAML has another shape than they think.
_FAULTS: Final = (
    kube_config.ConfigException,
    OSError,
    ValueError,
    yaml.YAMLError,
    TypeError,
    KeyError,
    AttributeError,
)
# They carry no type annotations.
_InClusterLoader: Any = incluster_config.InClusterConfigLoader
_load_kubeconfig: Any = kube_config.load_kube_config


class Access:
    """Address and credentials of one API server; made by `in_cluster` or `from_kubeconfig`.

    Attributes:
        server: base URL without a trailing slash.
        proxy: HTTP proxy to go through, from the kubeconfig; None: none.
        server_name: TLS server name where it differs from the host; None: the host.

    """

    def __init__(self, source: _Source, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._read_at = float("-inf")
        self._configuration: Configuration | None = None
        self._context: ssl.SSLContext | None = None
        self._header: str | None = None
        self.server = ""
        self.proxy: str | None = None
        self.server_name: str | None = None

    @classmethod
    def choose(cls, kubeconfig: str, clock: Clock, context: str | None = None) -> Access:
        """As a kubeconfig file says; kubeconfig "": as the pod's own service account."""
        if kubeconfig:
            return cls.from_kubeconfig(kubeconfig, clock, context)
        return cls.in_cluster(clock)

    @classmethod
    def in_cluster(
        cls,
        clock: Clock,
        token_file: str = incluster_config.SERVICE_TOKEN_FILENAME,
        ca_file: str = incluster_config.SERVICE_CERT_FILENAME,
    ) -> Access:
        """As the pod's own service account, at the address in KUBERNETES_SERVICE_HOST and _PORT."""
        return cls(_InCluster(token_file, ca_file), clock)

    @classmethod
    def from_kubeconfig(cls, path: str, clock: Clock, context: str | None = None) -> Access:
        """As a kubeconfig file says; context None: its current context."""
        return cls(_KubeconfigFile(path, context), clock)

    async def load(self) -> None:
        """Read everything anew.

        Raises:
            ConfigError: something is missing or cannot be read; what was loaded before stays.

        """
        configuration = Configuration()
        try:
            async with asyncio.timeout(LOAD_S):
                await self._source.read_into(configuration)
            header = await _header_of(configuration)
            context = _context_of(configuration)
        except _FAULTS as error:
            text = str(error) or f"not read within {LOAD_S:.0f} s"
            raise ConfigError([Problem(self._source.path, text)]) from error
        if header is None and configuration.cert_file is None:
            text = "no credentials: neither a token nor a client certificate was found"
            raise ConfigError([Problem(self._source.path, text)])
        self._configuration = configuration
        self._context = context
        self._header = header
        self.server = str(configuration.host).rstrip("/")
        self.proxy = configuration.proxy
        self.server_name = configuration.tls_server_name
        self._read_at = self._clock.monotonic()

    async def reload_after_refusal(self, used: dict[str, str]) -> bool:
        """Read everything anew because the server refused credentials (401) or we refused its.

        Args:
            used: the headers of the refused request.

        Returns:
            Whether there is anything new to try with: False when we reloaded just before and the
            refused credentials are still all we have.

        """
        if used != await self.headers():
            return True  # someone else's refusal has led to a reload meanwhile
        if self._clock.monotonic() - self._read_at < RELOAD_S:
            return False
        try:
            await self.load()
        except ConfigError:
            self._read_at = self._clock.monotonic()
            return False
        # Without a token it is a client certificate, which cannot be compared: try once.
        return not used or used != await self.headers()

    async def headers(self) -> dict[str, str]:
        """Authorization header of the next request; empty only with a client certificate."""
        if self._configuration is None:
            await self.load()
        elif self._source.rotates and self._clock.monotonic() - self._read_at >= REREAD_S:
            try:
                await self.load()
            except ConfigError:
                # Half a rotation: keep the old token, look again in a minute or after a 401.
                self._read_at = self._clock.monotonic()
        return {} if self._header is None else {"Authorization": self._header}

    @property
    def context(self) -> ssl.SSLContext | None:
        """TLS settings; None before `load` and for plain HTTP."""
        return self._context


class _Source(Protocol):
    """Where a configuration comes from."""

    path: str
    rotates: bool

    async def read_into(self, configuration: Configuration) -> None:
        """Fill in the address and the credentials."""


class _InCluster:
    rotates = True

    def __init__(self, token_file: str, ca_file: str) -> None:
        self.path = token_file
        self._ca_file = ca_file

    async def read_into(self, configuration: Configuration) -> None:
        _InClusterLoader(
            token_filename=self.path,
            cert_filename=self._ca_file,
            try_refresh_token=False,  # the hook compares wall times; we reread by ourselves
            environ=os.environ,
        ).load_and_set(configuration)


class _KubeconfigFile:
    rotates = False

    def __init__(self, path: str, context: str | None) -> None:
        self.path = path
        self._context = context

    async def read_into(self, configuration: Configuration) -> None:
        self._check()
        await _load_kubeconfig(
            config_file=self.path,
            context=self._context,
            client_configuration=configuration,
            persist_config=False,
        )

    def _check(self) -> None:
        if not Path(self.path).is_file():
            raise kube_config.ConfigException(f"there is no file {self.path}")


async def _header_of(configuration: Configuration) -> str | None:
    """The Authorization header that the loaders have prepared; None without a token.

    Raises:
        ValueError: a token was loaded but does not come out as a usable header.

    """
    if not configuration.api_key:
        return None
    settings = await configuration.auth_settings()
    header = str(settings.get("BearerToken", {}).get("value") or "").strip()
    scheme, _, token = header.partition(" ")
    if scheme.lower() not in ("bearer", "basic") or not token.strip():
        raise ValueError("a token was configured but no Authorization header comes of it")
    if not (token.isascii() and token.isprintable()):
        raise ValueError("the token has characters that a header cannot hold")
    return f"{scheme.capitalize()} {token.strip()}"


def _context_of(configuration: Configuration) -> ssl.SSLContext | None:
    if not str(configuration.host).startswith("https:"):
        return None
    context = ssl.create_default_context(
        cafile=configuration.ssl_ca_cert, cadata=configuration.ca_cert_data
    )
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, keyfile=configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
