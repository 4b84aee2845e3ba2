"""Everything that happens to pods, in the order of the API server: a watch beside the product's."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from tests.support.kube import KubeCluster

PODS = "/api/v1/namespaces/default/pods"


class Moment(NamedTuple):
    """One change. at: when we heard of it, Unix seconds."""

    at: float
    kind: str
    pod: dict[str, Any]


class PodHistory:
    """Collects the changes of all pods of the default namespace while it is open."""

    def __init__(self, kube: KubeCluster) -> None:
        self._kube = kube
        self._seen: list[Moment] = []
        self._connection: http.client.HTTPSConnection | None = None
        self._version = ""
        self._closed = False
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        api = self._kube.api
        self._version = api.get(PODS)["metadata"]["resourceVersion"]
        self._open()
        self._thread.start()
        return self

    def _open(self) -> None:
        api = self._kube.api
        if self._connection is not None:
            self._connection.close()
        host = urlsplit(self._kube.url).netloc
        self._connection = http.client.HTTPSConnection(host, context=api.ssl, timeout=600)
        path = f"{PODS}?watch=1&resourceVersion={self._version}&timeoutSeconds=3600"
        self._connection.request("GET", path, headers={"Authorization": f"Bearer {api.token}"})
        self._answer = self._connection.getresponse()

    def __exit__(self, *_: object) -> None:
        self._closed = True
        assert self._connection is not None
        if self._connection.sock is not None:
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._answer.close()
        self._connection.close()

    @property
    def moments(self) -> list[Moment]:
        """All changes so far."""
        return list(self._seen)

    def _read(self) -> None:
        while not self._closed:
            try:
                while line := self._answer.readline():
                    told = json.loads(line)
                    now = time.time()  # noqa: TID251 - to be compared with Slurm's times
                    self._seen.append(Moment(now, told["type"], told["object"]))
                    self._version = told["object"]["metadata"]["resourceVersion"]
                if not self._closed:
                    self._open()  # from where it ended
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                if not self._closed:
                    time.sleep(0.2)
                    with contextlib.suppress(OSError, http.client.HTTPException):
                        self._open()
