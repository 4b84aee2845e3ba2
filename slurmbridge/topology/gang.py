"""What is asked of the packing, and what it answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.policy import parse_wish

_LEVEL = r"([A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)"
_WISH_RE = re.compile(rf"(?:(required):{_LEVEL}|(preferred):{_LEVEL}(?:@(\S+))?)")
_SEGMENT_RE = re.compile(rf"([1-9][0-9]{{0,4}})(?::{_LEVEL})?", re.ASCII)


class Wish(msgspec.Struct, frozen=True):
    """How close a gang must stand. level: a level's name; "" with mode none.

    required: in one domain of that level or a lower one, or not at all. preferred: the same, until
    its time limit is over. none: in the lowest domain that holds it, whatever its level.
    climb_s: seconds for which a preferred wish holds; None: as long as the site says.
    """

    mode: Literal["required", "preferred", "none"] = "none"
    level: str = ""
    climb_s: int | None = None


class SegmentWish(msgspec.Struct, frozen=True):
    """Pieces of `pods` neighbours by rank, each in one domain of `level`; 0 pods: no such wish."""

    pods: int = 0
    level: str = ""


def parse_topology_wish(text: str) -> Wish:
    """Read the topology annotation: `required:rack`, `preferred:zone[@10m]` or `none`.

    The time after `@` is written as durations are, as in Slurm's `--switches=1@10`.

    Raises:
        ParseError: any other form.

    """
    stripped = text.strip()
    if stripped == "none":
        return Wish()
    match = _WISH_RE.fullmatch(stripped)
    if match is None:
        wanted = "expected none, required:LEVEL, preferred:LEVEL or preferred:LEVEL@TIME"
        raise ParseError(text, wanted)
    if match[1]:
        return Wish("required", match[2])
    return Wish("preferred", match[4], None if match[5] is None else parse_wish(match[5]))


def parse_segment(text: str) -> SegmentWish:
    """Read the segment annotation: `4` or `4:rack`; "" is no wish.

    Raises:
        ParseError: any other form.

    """
    stripped = text.strip()
    if not stripped:
        return SegmentWish()
    match = _SEGMENT_RE.fullmatch(stripped)
    if match is None:
        raise ParseError(text, "expected a number of pods, or NUMBER:LEVEL")
    return SegmentWish(int(match[1]), match[2] or "")


class Gang(msgspec.Struct, frozen=True):
    """Pods that start together.

    gpus: GPUs of each pod, >= 1, by rank. Pods without GPUs are not part of it: they need no place
    in the pool.
    segment: so many pods, neighbours by rank, share a domain of `segment_level` (as Slurm's
    `--segment` for blocks); 0: no such wish. A gang larger than a segment must be a whole number of
    them. segment_level "": the closest level above the node.
    types: by rank, the row of `pack`'s `free` that a pod takes from: 0 GPUs of any type, t those of
    one type; () for a gang that asks for one type.
    """

    gpus: tuple[int, ...]
    segment: int = 0
    segment_level: str = ""
    types: tuple[int, ...] = ()


class Short(msgspec.Struct, frozen=True):
    """Why no domain of a level holds the gang.

    domain: the one that comes closest. pods: how many of the gang's pods it has no room for, at
    least (for one size exactly), the largest counted out first. gpus: what these ask for.
    """

    level: str
    domain: str
    pods: int
    gpus: int

    def __str__(self) -> str:
        """`no rack holds it: r7 comes closest and lacks room for 2 pods (16 GPUs)`."""
        pods = f"{self.pods} pod{'' if self.pods == 1 else 's'}"
        gpus = f"{self.gpus} GPU{'' if self.gpus == 1 else 's'}"
        return (
            f"no {self.level} holds it: "
            f"{self.domain} comes closest and lacks room for {pods} ({gpus})"
        )


class Placement(msgspec.Struct, frozen=True):
    """Where a gang goes.

    rows: row of each pod, by rank. level, domain: the lowest that holds the gang.
    spread: level -> how many of its domains are used, for the levels below `level`, top first.
    shorts: why it is not lower, closest level first.
    exact: whether the spread is proven to be the least (see `pack`).
    """

    rows: tuple[int, ...]
    level: str
    domain: str
    spread: Mapping[str, int]
    shorts: tuple[Short, ...] = ()
    exact: bool = True


class Refusal(msgspec.Struct, frozen=True):
    """Why a gang has no place now.

    reason: `room` (it may have one later), or `level`, `segment`, `gang` (it never will as it is
    asked for). level: the level that was short, "" without one. shorts: all levels that were looked
    at, closest first. exact: False if the search was cut short, so that there may be a place.
    """

    reason: Literal["room", "level", "segment", "gang"]
    text: str
    level: str = ""
    shorts: tuple[Short, ...] = ()
    exact: bool = True

    @property
    def short_by(self) -> int:
        """Pods that the best domain of the widest level allowed has no room for; 0: not known."""
        return self.shorts[-1].pods if self.shorts else 0
