"""Slurm's generic resource (GRES) texts, read for GPUs.

Four dialects, Slurm 17.11 to 26.05 (gres.conf(5), scontrol(1), and real output):

- a node's `Gres`: `gpu:a100:4(S:0,1),shard:a100:16,nsight:no_consume:1` (`parse_gres`);
- a node's `GresUsed`: `gpu:a100:2(IDX:0,3),shard:8(-/5,5/5,3/5,0/5)` (`parse_gres_used`);
- a job's `GRES` per node: `gpu:a100:2(IDX:0-1)`, `gpu(IDX:0,2-3,5)` (`parse_job_gres`);
- TRES and requests: `cpu=4,gres/gpu=2,gres/gpu:h100=2`, `gres:gpu:1` (`parse_tres`, `tres_gpus`).

Only GRES named `gpu` are GPUs; a MIG slice is a GPU of its own type (`1g.10gb`). The index numbers
count over all types of a node, in the order of gres.conf, not in that of NVML or CUDA. A type may
be digits only (`gpu:1080:7`), or the text `(null)`, which means no type.

Whatever contradicts itself is refused: a caller must then treat the GPUs as unknown, never free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from slurmbridge.pool.errors import ParseError
from slurmbridge.pool.record import GpuCount, GpuUse

NO_GRES: Final = frozenset({"", "(null)", "N/A", "n/a", "None", "none"})
"""What Slurm prints where there is no GRES at all, or where it does not say."""

MAX_TEXT_CHARS: Final = 65_536
"""Longest GRES text: 250 characters are common (many `no_consume` entries), this is far above."""

MAX_GPUS: Final = 4_096
"""Most GPUs (or MIG slices) of one node: 16 boards of 7 slices are real, this is far above."""

_GPU: Final = frozenset({"gpu"})
_SHARED: Final = frozenset({"shard", "mps"})
_UNITS: Final = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4, "P": 1024**5}
_COUNT = re.compile(r"([0-9]{1,18})([KMGTP]?)\Z", re.IGNORECASE)
_TYPE = re.compile(r"[A-Za-z0-9_.+@-]{1,128}\Z|\(null\)\Z")
_INDEX_RANGE = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?\Z")
_SHARE = re.compile(r"(?:(-)|([0-9]{1,18}))/[0-9]{1,18}\Z")
_AMOUNT = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,9}))?([KMGTP]?)B?\Z", re.IGNORECASE)
_REQUEST = re.compile(r"(?:gres[/:])?gpu(?::([^:=]+))?(?:[:=]([0-9]+[KMGTPkmgtp]?))?\Z")


class _Entry(NamedTuple):
    """One GRES of a text. amount None: not written. detail: what stood in the last parentheses."""

    text: str
    name: str
    kind: str
    amount: int | None
    no_consume: bool
    detail: str | None


def parse_gres(text: str) -> tuple[GpuCount, ...]:
    """Read a node's `Gres`: the GPUs that Slurm may give out, by type, in the order of the text.

    A GRES with `no_consume` is left out: Slurm never counts it, so it can't be shared by counting.

    Returns:
        One `GpuCount` per type, counts > 0; () where the node has no GPUs.

    Raises:
        ParseError: a `gpu` entry cannot be read (cut text, no count). Faulty entries of other
            names don't matter and are passed over.

    """
    counts: dict[str, int] = {}
    for entry in _entries(text, _GPU):
        if entry.no_consume:
            continue
        if entry.amount is None:
            raise ParseError(entry.text, "GPU entry of a node without a count (cut text?)")
        counts[entry.kind] = counts.get(entry.kind, 0) + entry.amount
    return _counts(counts, text)


def parse_gres_used(text: str) -> GpuUse | None:
    """Read a node's `GresUsed`.

    Untyped GPUs print no indices here (`gpu:3`), even where the jobs' own records have them
    (measured, 22.05.8 and 26.05.5).

    Returns:
        The use; `indices` is () where Slurm numbers the GPUs and none is used (`IDX:N/A`), None
        where it does not number them. None in place of a `GpuUse` when the text says nothing
        about GPUs: unknown, not zero.

    Raises:
        ParseError: it contradicts itself (count against indices, whole GPU against shards), or
            shared GPUs cannot be told apart.

    """
    entries = list(_entries(text, _GPU | _SHARED))
    if not any(e.name == "gpu" for e in entries):
        return None
    return _use(entries, text, indices_when_unused=False)


def parse_job_gres(text: str) -> GpuUse:
    """Read the `GRES` (or `GRES_IDX`) of one node of a job (`scontrol show job -d`).

    An empty text is no GPU, except for a job that is COMPLETING: slurmctld has cleared the
    details then (22.05.8, 26.05.5) and the caller must not take it for zero.

    Returns:
        The use. `gpu(IDX:0,2-3)` of Slurm 18.08 counts by its indices.

    Raises:
        ParseError: an entry cannot be read or contradicts itself.

    """
    entries = list(_entries(text, _GPU | _SHARED))
    return _use(entries, text, indices_when_unused=True)


def parse_indices(text: str) -> tuple[int, ...]:
    """Read an index list: `0,2-3` is (0, 2, 3); `""` and `N/A` are ().

    Returns:
        The indices in ascending order, at most `MAX_GPUS`.

    Raises:
        ParseError: not an index list, an index twice, or more than `MAX_GPUS`.

    """
    if text in ("", "N/A"):
        return ()
    found: list[int] = []
    for part in text[:MAX_TEXT_CHARS].split(","):
        match = _INDEX_RANGE.match(part)
        if match is None:
            raise ParseError(text, f"bad part {part[:20]!r} in a list of GPU indices")
        first = int(match.group(1))
        last = first if match.group(2) is None else int(match.group(2))
        if last < first or last >= 16 * MAX_GPUS or len(found) + last - first >= MAX_GPUS:
            raise ParseError(text, f"bad range {part[:20]!r} in a list of GPU indices")
        found.extend(range(first, last + 1))
    if len(set(found)) != len(found):
        raise ParseError(text, "a GPU index is listed twice")
    return tuple(sorted(found))


def format_indices(indices: Iterable[int]) -> str:
    """Write an index list as Slurm does: (0, 2, 3) is `0,2-3`; nothing is `""`."""
    runs: list[list[int]] = []
    for index in sorted(set(indices)):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def parse_tres(text: str) -> dict[str, int]:
    """Read a TRES text: `cpu=4,mem=80G,gres/gpu=2` is {"cpu": 4, "mem": 81920, "gres/gpu": 2}.

    Memory (`mem`, `vmem`) is in MiB (Slurm prints `2000M`, `1280.50G`; without a unit it is MiB),
    other units are powers of 1024. The key of a GRES is what stands before `=`, with the type
    (`gres/gpu:h100`): **a typed entry repeats the untyped one**, so never add them up.

    Raises:
        ParseError: an entry has no `=`, or its amount is no number.

    """
    amounts: dict[str, int] = {}
    for part in _split(text):
        key, equals, value = part.partition("=")
        match = _AMOUNT.match(value)
        if not equals or not key or match is None:
            raise ParseError(part, "not a TRES amount (name=number)")
        whole, fraction, unit = match.groups()
        scale = _UNITS[unit.upper()]
        amount = int(whole) * scale
        if fraction:
            amount += int(fraction) * scale // 10 ** len(fraction)
        if key in ("mem", "vmem") and unit:
            amount //= _UNITS["M"]
        amounts[key] = amount
    return amounts


def tres_gpus(text: str) -> int:
    """Count the GPUs in a TRES text or in a request, in any spelling.

    `gres/gpu=2,gres/gpu:h100=2` is 2, `gres/gpu:1`, `gres:gpu:1`, `gpu:rtx2080` and `gres/gpu` are
    1, `gres:gpu:a100:2,gres:gpu:h100:1` is 3; a text without GPUs is 0. Whether it is per job,
    node, socket or task, the text does not say.

    Raises:
        ParseError: an entry that names GPUs cannot be read.

    """
    untyped: int | None = None
    typed = 0
    for part in _split(text):
        name = part.removeprefix("gres/").removeprefix("gres:")
        if re.match(r"gpu(?![A-Za-z0-9_.-])", name) is None:
            continue
        match = _REQUEST.match(part)
        if match is None:
            raise ParseError(part, "not a GPU request")
        kind, amount = match.groups()
        if kind is not None and amount is None and kind.isdigit():
            kind, amount = None, kind
        count = 1 if amount is None else _number(amount, part)
        if kind is None:
            untyped = (untyped or 0) + count
        else:
            typed += count
    return typed if untyped is None else max(untyped, typed)


def _entries(text: str, names: frozenset[str]) -> Iterator[_Entry]:
    """Give the entries of some names; those of others have free forms and are not ours to judge."""
    for part in _split(text):
        body, detail = part, None
        if body.endswith(")") and not body.endswith("(null)"):
            body, opened, detail = body[:-1].rpartition("(")
            if not opened:
                raise ParseError(part, "parenthesis not opened in a GRES text")
        name, *words = body.removeprefix("gres/").removeprefix("gres:").split(":")
        if name not in names:
            continue
        no_consume = "no_consume" in words
        words = [word for word in words if word != "no_consume"]
        count: int | None = None
        if words and _COUNT.match(words[-1]):
            count = _number(words.pop(), part)
        kind = ":".join(words)
        if len(words) > 1 or (words and not _TYPE.match(kind)):
            raise ParseError(part, "GRES type cannot be read")
        yield _Entry(part, name, "" if kind == "(null)" else kind, count, no_consume, detail)


def _split(text: str) -> list[str]:
    """Split at the commas outside parentheses: `gpu:a100:4(S:0,1),shard:16` is two parts."""
    text = text.strip()
    if text in NO_GRES:
        return []
    if len(text) > MAX_TEXT_CHARS:
        raise ParseError(text, f"GRES text is longer than {MAX_TEXT_CHARS} characters")
    if "(" not in text and ")" not in text:
        return text.split(",")
    parts: list[str] = []
    depth = start = 0
    for at, char in enumerate(text):
        if char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if depth < 0:
                raise ParseError(text[start : at + 1], "parenthesis not opened in a GRES text")
        elif char == "," and not depth:
            parts.append(text[start:at])
            start = at + 1
    if depth:
        raise ParseError(text[start:], "parenthesis not closed in a GRES text (cut text?)")
    return [*parts, text[start:]]


def _use(entries: list[_Entry], text: str, *, indices_when_unused: bool) -> GpuUse:
    """Add up the entries of one node, and check that they agree."""
    counts: dict[str, int] = {}
    indices: list[int] = []
    numbered = indices_when_unused
    unnumbered = False
    shared: list[int] = []
    whole_in_shares: list[int] = []
    boards = 0  # GPUs that a list of shares counts
    for entry in entries:
        if entry.name in _SHARED:
            marks = _shares(entry)
            shared.extend(marks.shared)
            whole_in_shares.extend(marks.whole)
            boards = max(boards, marks.boards)
            continue
        if entry.no_consume:
            continue
        found = _listed(entry)
        count = entry.amount if entry.amount is not None else _counted_by_detail(entry, found)
        if found is None:
            unnumbered = unnumbered or count > 0
        else:
            numbered = True
            if len(found) != count:
                raise ParseError(entry.text, f"{count} GPUs in use but {len(found)} indices")
            indices.extend(found)
        counts[entry.kind] = counts.get(entry.kind, 0) + count
    use = _counts(counts, text)
    total = sum(c.count for c in use)
    known = numbered and not unnumbered
    if len(set(indices)) != len(indices) or len(set(shared)) != len(shared):
        raise ParseError(text, "a GPU index is listed twice")
    if known and set(indices) & set(shared):
        raise ParseError(text, "a GPU is in use as a whole and by shards at once")
    if known and not set(whole_in_shares) <= set(indices):
        raise ParseError(text, "whole GPUs and shards in use do not agree")
    if boards and not known and max(len(whole_in_shares), total) + len(shared) > boards:
        raise ParseError(text, "more GPUs in use, as a whole and by shards, than there are")
    return GpuUse(use, tuple(sorted(indices)) if known else None, tuple(sorted(shared)))


def _listed(entry: _Entry) -> tuple[int, ...] | None:
    """Give the indices of a gpu entry; None where it has no `IDX`."""
    if entry.detail is None or not entry.detail.startswith("IDX:"):
        return None
    return parse_indices(entry.detail.removeprefix("IDX:"))


def _counted_by_detail(entry: _Entry, found: tuple[int, ...] | None) -> int:
    """Count an entry that has no number of its own: `gpu(IDX:5)`, `gpu:a100(CNT:2)`."""
    if found is not None:
        return len(found)
    if entry.detail is not None and entry.detail.startswith("CNT:"):
        return _number(entry.detail.removeprefix("CNT:"), entry.text)
    raise ParseError(entry.text, "GPU entry without a count (cut text?)")


class _Marks(NamedTuple):
    whole: list[int]
    shared: list[int]
    boards: int


def _shares(entry: _Entry) -> _Marks:
    """Tell which GPUs an entry of `shard` or `mps` uses.

    22.05: `shard:a100:3(IDX:1-3)`; later: `shard:a100:9(-/4,3/4,4/4,2/4)`, one share per GPU, `-`
    where the whole GPU is taken (24.11.5 leaves that out for untyped GPUs).
    """
    if entry.detail is not None and entry.detail.startswith("IDX:"):
        return _Marks([], list(parse_indices(entry.detail.removeprefix("IDX:"))), 0)
    if entry.detail is None or "/" not in entry.detail:
        if entry.amount:
            raise ParseError(entry.text, "shared GPUs in use, but not which")
        return _Marks([], [], 0)
    whole: list[int] = []
    shared: list[int] = []
    for at, share in enumerate(entry.detail.split(",")):
        match = _SHARE.match(share)
        if match is None or at >= MAX_GPUS:
            raise ParseError(entry.text, f"bad share {share[:20]!r}")
        if match.group(1):
            whole.append(at)
        elif int(match.group(2)):
            shared.append(at)
    if bool(entry.amount) != bool(shared):
        raise ParseError(entry.text, "shares in use do not agree with their count")
    return _Marks(whole, shared, len(entry.detail.split(",")))


def _number(text: str, part: str) -> int:
    match = _COUNT.match(text)
    if match is None:
        raise ParseError(part, "not a count")
    return int(match.group(1)) * _UNITS[match.group(2).upper()]


def _counts(counts: dict[str, int], text: str) -> tuple[GpuCount, ...]:
    if sum(counts.values()) > MAX_GPUS:
        raise ParseError(text, f"more than {MAX_GPUS} GPUs on one node")
    return tuple(GpuCount(kind, count) for kind, count in counts.items() if count)
