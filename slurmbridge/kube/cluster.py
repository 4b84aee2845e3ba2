"""Which cluster answers: what another one does not know is no loss of ours.

A cluster has no name of its own. What it has for good is the UID of its namespace kube-system.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from slurmbridge.kube.session import resource_path
from slurmbridge.kube.status import PEER
from slurmbridge.pool.errors import UNREADABLE, PeerProtocolError

if TYPE_CHECKING:
    from slurmbridge.kube.reflector import Asked

PATH: Final = resource_path("api", "v1", "namespaces", "kube-system")
DEADLINE_S: Final = 5.0


class ClusterPin:
    """Holds on to one cluster: the one that is named, else the first that answers.

    Args:
        api: the session.
        uid: of the namespace kube-system of our cluster; "": of the first answer.

    """

    def __init__(self, api: Asked, uid: str = "") -> None:
        self._api = api
        self._uid = uid

    async def check(self) -> None:
        """Is it still the same cluster?

        Raises:
            PeerProtocolError: another one answers.
            PeerError: none does.

        """
        body = await self._api.request("GET", PATH, deadline_s=DEADLINE_S)
        try:
            uid = _NAMESPACE.decode(body).metadata.uid
        except UNREADABLE as error:
            raise PeerProtocolError(PEER, f"GET {PATH}", str(error)) from error
        self._uid = self._uid or uid
        if uid != self._uid:
            text = f"another cluster answers: its kube-system is {uid[:64]}, ours {self._uid}"
            raise PeerProtocolError(PEER, f"GET {PATH}", text)


class _Meta(msgspec.Struct, frozen=True):
    uid: str


class _Namespace(msgspec.Struct, frozen=True):
    metadata: _Meta


_NAMESPACE: Final = msgspec.json.Decoder(_Namespace)
