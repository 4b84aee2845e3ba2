"""gres.conf, read for one node: which device file has which GRES index. Pure.

Slurm numbers a node's GPUs (the `IDX` of `scontrol show job -d`) in the order in which gres.conf
names their files: line after line, each hostlist as it is written, not sorted (`nvidia[4-7,0-3]`
gives IDX 0 to nvidia4; read from slurmd's debug log, 22.05.8). Only that way of naming GPUs can be
checked, so anything else (AutoDetect, which may order GPUs otherwise whatever the files say, or a
count alone) is refused with a text that says what to write instead. Source: gres.conf(5).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.gres import MAX_GPUS
from slurmbridge.pool.hostlist import expand

_PAIR: Final = re.compile(r'(\w+)\s*=\s*("[^"]*"|\S+)')
_INCLUDE: Final = re.compile(r"include\s+(\S+)\s*\Z", re.IGNORECASE)
MOST_INCLUDES: Final = 16


class GresFile(msgspec.Struct, frozen=True):
    """One GPU as gres.conf names it: its GRES index, type ("" for none) and device file.

    files: all of its files, where it has several (`MultipleFiles=`: a MIG device); path is then the
    last one, that of its compute instance.
    """

    index: int
    type: str
    path: str
    files: tuple[str, ...] = ()


def read_gres_conf(
    text: str, node: str, include: Callable[[str], str] | None = None
) -> tuple[GresFile, ...]:
    """The GPUs of a node, in the order of their indices.

    Args:
        text: of gres.conf.
        node: Slurm node name; lines without NodeName are for every node.
        include: gives the text of an included file; None: includes are refused.

    Raises:
        ParseError: a line of this node cannot be read, or its GPUs have no files.

    """
    found: list[GresFile] = []
    detects: dict[bool, str] = {}
    for line in _lines(text, include, 0):
        pairs = {key.lower(): value.strip('"') for key, value in _PAIR.findall(line)}
        names = pairs.get("nodename")
        if names is not None and node not in expand(names):
            continue
        auto = pairs.get("autodetect", "").lower()
        if auto:
            # On a node's own line it counts for that node whatever is said for all.
            detects[names is not None] = "" if auto == "off" else line
        if pairs.get("name", "").lower() != "gpu":
            continue
        kind = pairs.get("type", "")
        first = len(found)
        if "multiplefiles" in pairs:
            files = tuple(_paths(pairs["multiplefiles"]))
            found.append(GresFile(first, kind, files[-1], files))
            continue
        if "file" not in pairs:
            raise ParseError(line, "GPUs without File= have no index that can be checked")
        found += [GresFile(first + at, kind, path) for at, path in enumerate(_paths(pairs["file"]))]
    if detecting := detects.get(True, detects.get(False, "")):
        raise ParseError(
            detecting,
            "AutoDetect leaves the order of the GPUs open: write AutoDetect=off and File= lines",
        )
    if len(found) > MAX_GPUS:
        raise ParseError(node, f"more than {MAX_GPUS} GPUs")
    paths = [gpu.path for gpu in found]
    if len(set(paths)) != len(paths):
        raise ParseError(node, "gres.conf names a device file of this node twice")
    return tuple(found)


def _paths(text: str) -> list[str]:
    """Paths of a `File=`: `/dev/nvidia[0-1],/dev/nvidia7`; only the last part has ranges."""
    paths: list[str] = []
    for element in re.split(r",(?![^\[]*\])", text):
        folder, slash, name = element.rpartition("/")
        if "[" in folder or not name:
            raise ParseError(element, "not a device file of gres.conf")
        paths.extend(folder + slash + one for one in expand(name))
    return paths


def _lines(text: str, include: Callable[[str], str] | None, depth: int) -> list[str]:
    lines: list[str] = []
    for raw in text.replace("\\\n", " ").splitlines():
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        match = _INCLUDE.match(line)
        if match is None:
            lines.append(line)
            continue
        if include is None or depth >= MOST_INCLUDES:
            raise ParseError(line, "include cannot be followed")
        lines.extend(_lines(include(match[1]), include, depth + 1))
    return lines
