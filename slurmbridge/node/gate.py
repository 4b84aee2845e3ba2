"""The agent's side of Epilog and Prolog: answers whether GPUs may change their owner.

A unix socket for root, one JSON line each way. The answer's `why` is "" when nothing stands in the
way. The hooks ask again by themselves, so every answer is short and nothing waits in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final, Protocol

from slurmbridge.log import get_logger
from slurmbridge.node.book import Book, NativeJob
from slurmbridge.node.identity import PodFacts
from slurmbridge.node.look import NodeLook
from slurmbridge.node.plugin import Verify
from slurmbridge.pool.errors import ParseError, SlurmBridgeError
from slurmbridge.pool.gres import parse_indices

_log = get_logger(__name__)

MOST_BYTES: Final = 65536
ANSWER_S: Final = 4.0
"""Shorter than the hooks wait, so that they hear a reason and not silence."""
ASKED_S: Final = 30.0
"""A hook asks some times a second: one that has not for so long has ended."""


class Known(Protocol):
    """The pods of this node by the API server."""

    def known(self) -> Collection[PodFacts]:
        """All that the watch has brought."""


class Gate:
    """Answers the hooks.

    Args:
        path: of the socket.
        look: at the node.
        book: who was given what.
        pods: of the API server.
        verify: whether slurmctld runs a pod's claim here.
        alarm: called with (job id, its GPUs, text) when a hook had to drain the node.
        monotonic: seconds of the clock.

    """

    def __init__(
        self,
        path: str,
        look: NodeLook,
        book: Book,
        pods: Known,
        verify: Verify,
        alarm: Callable[[int, tuple[int, ...], str], None],
        monotonic: Callable[[], float],
    ) -> None:
        self._path = path
        self._look = look
        self._book = book
        self._pods = pods
        self._verify = verify
        self._alarm = alarm
        self._monotonic = monotonic
        self._server: asyncio.Server | None = None
        self._held: dict[int, tuple[str, float]] = {}
        self.counts: dict[str, int] = {}

    @property
    def held(self) -> dict[int, str]:
        """Slurm job ids whose end is held up now -> why."""
        late = self._monotonic() - ASKED_S
        self._held = {job: seen for job, seen in self._held.items() if seen[1] > late}
        return {job: why for job, (why, _) in self._held.items()}

    async def start(self) -> None:
        """Listen; a socket that a dead agent has left is replaced."""
        self._remove()
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(
                self._serve, path=self._path, limit=MOST_BYTES
            )
        finally:
            os.umask(before)

    def _remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            Path(self._path).unlink()

    async def stop(self) -> None:
        """Stop listening; may be called twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                question = json.loads(await reader.readline())
                try:
                    why = await self._answer(question)
                except SlurmBridgeError as error:
                    why = f"not known: {error}"
                writer.write(json.dumps({"why": why}).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            _log.warning("a hook was not answered", error=f"{type(error).__name__}: {error}")
        finally:
            writer.close()

    async def _answer(self, question: dict[str, Any]) -> str:
        ask, job = str(question["ask"]), question["job"]
        job_id = int(job["id"])
        self.counts[ask] = self.counts.get(ask, 0) + 1
        if ask == "hold":
            uids = question["uids"]
            asked = None if uids is None else {str(uid) for uid in uids}
            why = await self._hold(job_id, asked, parse_indices(str(job.get("gpus", ""))))
            self._note(job_id, why)
            return why
        if ask == "handover":
            return await self._hand_over(job_id, job)
        if ask == "ended":
            self._book.ended(job_id)
            return ""
        if ask == "alarm":
            gpus = parse_indices(str(job.get("gpus", ""))) if job.get("gpus") else ()
            self._alarm(job_id, gpus, str(question.get("text", ""))[:500])
            return ""
        raise ParseError(ask, "no question of a hook")

    async def _hold(self, job_id: int, asked: set[str] | None, gpus: Collection[int]) -> str:
        """Why the end of a claim must wait. asked: UIDs of its pods, None: the hook knows none."""
        uids = set(asked or ())
        uids |= {entry.uid for entry in self._book.pods.values() if entry.job_id == job_id}
        for pod in self._pods.known():
            if pod.job_id == job_id:
                uids.add(pod.uid)
            elif (
                pod.uid in uids
                and pod.job_id is not None
                and not pod.is_over
                and await self._verify(pod) == ""
            ):
                # Covered anew since (a claim that slurmctld had forgotten): this end frees nothing.
                # slurmctld is asked, since whoever may patch a pod can write any claim on it.
                uids.discard(pod.uid)
        why = ""
        if asked is None:
            known = {pod.uid for pod in self._pods.known()} | set(self._book.pods)
            why = await self._look.strangers(known)
        why = why or await self._look.left(uids)
        if why or (asked is not None and not uids):
            return why
        # Also without a pod (a gang's are forgotten by now): their contexts may outlive them.
        # Nobody but this claim may be on its GPUs yet, but a job that came after a lost claim.
        native = {index for one in self._book.native.values() for index in one.gpus}
        return await self._look.contexts(set(gpus) - native)

    def _note(self, job_id: int, why: str) -> None:
        if why:
            if job_id not in self._held:
                _log.info("end of a claim is held", job=job_id, why=why)
            self._held[job_id] = (why, self._monotonic())
        elif self._held.pop(job_id, None) is not None:
            _log.info("end of a claim is let go", job=job_id)

    async def _hand_over(self, job_id: int, job: dict[str, Any]) -> str:
        gpus = parse_indices(str(job["gpus"]))
        why = await self._look.busy("", gpus)
        if not why:
            self._book.started(
                NativeJob(
                    job_id=job_id,
                    user=str(job.get("user", "")),
                    account=str(job.get("account", "")),
                    partition=str(job.get("partition", "")),
                    gpus=gpus,
                )
            )
        return why
