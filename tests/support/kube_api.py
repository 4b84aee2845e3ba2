"""A small blocking client of the API server for tests, with verified TLS and nothing to install.

Objects are plain dicts. Tests of our own adapters use the adapters; this is the other side, the one
that sets scenes and looks at results.
"""

from __future__ import annotations

import copy
import http.client
import json
import ssl
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote, urlencode, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Object: TypeAlias = dict[str, Any]

MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"
TIMEOUT_S = 30.0


class KubeError(RuntimeError):
    """The API server refused; `status` is the HTTP status, `reason` Kubernetes' word for it."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


class KubeApi:
    """Requests to one API server as one user. Thread-safe; idle connections are kept for reuse.

    `close` when done: afterwards it still works, with new connections.
    """

    def __init__(self, url: str, token: str, ca_crt: str) -> None:
        self.url = url
        self.token = token
        self.ssl = ssl.create_default_context(cafile=ca_crt)
        self._host = urlsplit(url).netloc
        self._idle: deque[http.client.HTTPSConnection] = deque()
        self._resources: dict[tuple[str, str], tuple[str, bool]] = {}
        self._acting: dict[str, str] = {}

    def acting_as(self, user: str, group: str = "") -> KubeApi:
        """Requests by this administrator in the name of a user (impersonation)."""
        other = copy.copy(self)
        other._acting = {"Impersonate-User": user}
        if group:
            other._acting["Impersonate-Group"] = group
        return other

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    # Any request

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Object:
        """One request, its decoded answer; `{"text": ...}` when that is no JSON.

        Raises:
            KubeError: an HTTP status of 400 or more.
            OSError: no connection.

        """
        target = path + ("?" + urlencode(query) if query else "")
        payload = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": content_type}
        headers |= self._acting
        status, kind, data = self._exchange(method, target, payload, headers)
        answer = json.loads(data) if kind == "application/json" else {"text": data.decode()}
        if status >= 400:
            message = str(answer.get("message") or answer.get("text", ""))
            raise KubeError(status, str(answer.get("reason", "")), message)
        return dict(answer)

    # Objects by path

    def get(self, path: str) -> Object:
        """GET."""
        return self.request("GET", path)

    def find(self, path: str) -> Object | None:
        """GET, or None when the answer is 404."""
        try:
            return self.request("GET", path)
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    def items(self, path: str, **query: str) -> list[Object]:
        """Items of a listing, a consistent read of the newest state."""
        return list(self.request("GET", path, query=query)["items"])

    def patch(self, path: str, body: Any, content_type: str = MERGE) -> Object:
        """PATCH, a merge patch when not told otherwise."""
        return self.request("PATCH", path, body, content_type=content_type)

    def delete(self, path: str, grace_s: int | None = None, uid: str = "") -> None:
        """DELETE; no error when the object is gone already."""
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid:
            options["preconditions"] = {"uid": uid}
        try:
            self.request("DELETE", path, options)
        except KubeError as error:
            if error.status != 404:
                raise

    # Objects by what they are

    def path(self, kind: str, name: str, namespace: str = "", api: str = "v1") -> str:
        """Path of one object, or of the collection when `name` is empty."""
        plural, namespaced = self._resource(api, kind)
        base = f"/api/{api}" if "/" not in api else f"/apis/{api}"
        if namespaced:
            base += f"/namespaces/{quote(namespace or 'default')}"
        return f"{base}/{plural}" + (f"/{quote(name)}" if name else "")

    def create(self, obj: Object) -> Object:
        """POST an object to where its apiVersion, kind and namespace say."""
        meta = obj["metadata"]
        where = self.path(obj["kind"], "", meta.get("namespace", ""), obj["apiVersion"])
        return self.request("POST", where, obj)

    def create_all(self, objects: Iterable[Object], threads: int = 16) -> list[Object]:
        """POST many at once, in no order; the answers in the order of `objects`."""
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(self.create, objects))

    def apply(self, obj: Object, manager: str = "test") -> Object:
        """Server-side apply, taking over what others own: what `kubectl apply` does to a manifest.

        A custom resource's definition must be established before its objects are applied.
        """
        meta = obj["metadata"]
        where = self.path(obj["kind"], meta["name"], meta.get("namespace", ""), obj["apiVersion"])
        query = {"fieldManager": manager, "force": "true"}
        return self.request("PATCH", where, obj, content_type=APPLY, query=query)

    # Inside

    def _resource(self, api: str, kind: str) -> tuple[str, bool]:
        if (api, kind) not in self._resources:
            listing = self.get(f"/api/{api}" if "/" not in api else f"/apis/{api}")
            for resource in listing["resources"]:
                if "/" not in resource["name"]:
                    found = (resource["name"], bool(resource["namespaced"]))
                    self._resources[api, resource["kind"]] = found
        try:
            return self._resources[api, kind]
        except KeyError:
            raise KubeError(404, "NotFound", f"no kind {kind} in {api}") from None

    def _exchange(
        self, method: str, target: str, payload: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, str, bytes]:
        while self._idle:
            try:
                kept = self._idle.pop()
            except IndexError:
                # Another thread was faster.
                break
            try:
                return self._once(kept, method, target, payload, headers)
            except (http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError):
                # The server closed it while it was idle: try again on another.
                continue
        fresh = http.client.HTTPSConnection(self._host, context=self.ssl, timeout=TIMEOUT_S)
        return self._once(fresh, method, target, payload, headers)

    def _once(
        self,
        connection: http.client.HTTPSConnection,
        method: str,
        target: str,
        payload: bytes | None,
        headers: Mapping[str, str],
    ) -> tuple[int, str, bytes]:
        try:
            connection.request(method, target, payload, dict(headers))
            answer = connection.getresponse()
            data = answer.read()
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
        return answer.status, answer.headers.get_content_type(), data
