"""The error tree.

Adapters turn whatever a library or a peer raises into one of these, with the original chained,
so that the core can tell "it said no" from "nobody answered": only the first is an answer.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises of bytes that are not what they should be; some nest thousands deep."""

SAMPLE_CHARS = 256
"""How much of a faulty text an error keeps: enough to find it, too little to flood a log."""


class SlurmBridgeError(Exception):
    """Root of all errors that this program raises on purpose."""


class ParseError(SlurmBridgeError):
    """A text of a peer, a user or a file does not have the expected form.

    Attributes:
        part: the faulty part, at most `SAMPLE_CHARS` characters.
        text: what is wrong with it, and what was expected.

    """

    def __init__(self, part: str, text: str) -> None:
        self.part = part[:SAMPLE_CHARS]
        self.text = text
        super().__init__(f"{text}: {self.part!r}")


class Problem(NamedTuple):
    """One fault of a configuration: where (`$.pool.groups[0].nodes`), and what to do about it."""

    path: str
    text: str


class ConfigError(SlurmBridgeError):
    """A configuration has faults; all of them are listed."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{p.path}: {p.text}" for p in problems))


class PeerError(SlurmBridgeError):
    """Something is wrong between us and a peer (`slurmctld`, `kube-apiserver`, `bridge`).

    Attributes:
        peer: who.
        op: what we asked, in the peer's own words.

    """

    def __init__(self, peer: str, op: str, text: str) -> None:
        self.peer = peer
        self.op = op
        self.text = text[: 4 * SAMPLE_CHARS]
        super().__init__(f"{peer}: {op}: {self.text}")


class PeerUnavailable(PeerError):
    """No answer, or an answer that says nothing about the question (down, overloaded, cut).

    The state of the world is unknown: nothing may be freed, nothing may be deleted.

    Attributes:
        retry_after_s: how long the peer asks us to wait (HTTP Retry-After); None: it did not say.

    """

    def __init__(self, peer: str, op: str, text: str, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(peer, op, text)


class PeerTimeout(PeerUnavailable):
    """The deadline passed. The request may have been carried out."""


class PeerBusy(PeerUnavailable):
    """The peer is there, and asks us to come again later (HTTP 429)."""


class ClaimUncertain(PeerUnavailable):
    """A claim was asked for, and nobody could say what became of it: it may exist.

    Look for it by name and comment before asking again.

    Attributes:
        job_id: the Slurm job, when slurmctld had named it.

    """

    def __init__(self, peer: str, op: str, text: str, job_id: int | None = None) -> None:
        self.job_id = job_id
        super().__init__(peer, op, text)


class PeerRejected(PeerError):
    """A definite no.

    Attributes:
        reason: a short stable word of ours (`busy`, `priority`, `account`, ...), for metrics.

    """

    def __init__(self, peer: str, op: str, text: str, reason: str = "rejected") -> None:
        self.reason = reason
        super().__init__(peer, op, text)


class PeerProtocolError(PeerUnavailable):
    """The peer answered in a form that we cannot read; like no answer, but worth a bug report."""


class AnswerTooLong(PeerProtocolError):
    """The peer's answer is longer than we take; a question for less of it may be answered."""


class Conflict(PeerRejected):
    """Someone else wrote in between (HTTP 409)."""


class CoreFault(SlurmBridgeError):
    """The core has failed over one object, which is set aside: it is started anew without it."""


class InvariantError(SlurmBridgeError):
    """A bug of ours. Carries the story: the last events that led here."""

    def __init__(self, text: str, story: list[str]) -> None:
        self.story = story
        super().__init__(text + "".join(f"\n  {line}" for line in story))
