"""The API server, as the binder needs it: posts Bindings, looks at a pod.

The only place of the extender that uses the bridge's Kubernetes adapter (docs/adr/0003).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from extender.wire import Bind
from slurmbridge.kube.session import KubeSession
from slurmbridge.kube.write import fetch_pod, post_binding
from slurmbridge.pool.errors import PeerRejected


class ApiServer:
    """Implements `PostBinding` and `AsksForGpus`.

    Args:
        session: an entered session.
        resources: the pool's resources as of now, by `Policy.resources`; None: not known.

    """

    def __init__(
        self, session: KubeSession, resources: Callable[[], Mapping[str, str] | None]
    ) -> None:
        self._session = session
        self._resources = resources

    async def post(self, bind: Bind, annotations: Mapping[str, str], deadline_s: float, /) -> None:
        """Bind; see `slurmbridge.kube.write.post_binding`."""
        await post_binding(
            self._session,
            bind.namespace,
            bind.name,
            bind.uid,
            bind.node,
            annotations,
            deadline_s=deadline_s,
        )

    async def asks_for_gpus(self, bind: Bind, deadline_s: float, /) -> bool:
        """Whether the pod names a pool GPU, readable or not.

        Raises:
            PeerRejected: there is no such pod.
            PeerUnavailable: no answer.

        """
        resources = self._resources()
        if resources is None:
            return True
        pod = await fetch_pod(
            self._session, bind.namespace, bind.name, resources, bind.uid, deadline_s
        )
        if pod is None:
            raise PeerRejected("kube-apiserver", "GET pod", f"there is no {bind.ref}", "notfound")
        return pod.gpu is not None or bool(pod.fault)
