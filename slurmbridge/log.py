"""Logging: one JSON line per event on one stream, with the cause id of what led to it.

A line has `ts` (UTC, RFC 3339), `level`, `event` (a stable phrase; what varies is in fields),
`logger`, `cause` (follows one stimulus through both daemons) and the fields of the caller. Lines
of libraries that use stdlib logging come out in the same form. Logging never raises and never
prints a secret: fields named like one and texts that look like one are replaced.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Final, Literal, cast

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

Level = Literal["debug", "info", "warning", "error", "critical"]

REDACTED: Final = "[redacted]"
TEXT_CHARS: Final = 8192
"""Longest text in a field; a traceback fits, a whole listing of a peer does not."""
NESTING: Final = 6
"""How deep fields are looked through; below, they are replaced by their repr, cut and redacted."""

_NAME: Final = "_name"
"""Carries the logger's name to the renderer: structlog keeps the word `logger` for itself."""

_SECRET_KEY: Final = re.compile(
    r"(?:^|[-_.])(?:token|password|passwd|authorization|secret|jwt|cookie|api[-_]?key"
    r"|private[-_]?key)s?$",
    re.IGNORECASE,
)
_SECRET_TEXT: Final = re.compile(
    r"(?P<keep>\b(?:token|password|authorization|slurm_jwt)[\"']?\s*[=:]\s*[\"']?(?:(?:bearer|basic)\s+)?"
    r"|\bbearer\s+(?=\S{8}))[^\s\"',;&}]{4,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*",
    re.IGNORECASE,
)


def configure(level: Level = "info", stream: BinaryIO | None = None, **fixed: str) -> None:
    """Send all logging of this process as JSON lines to `stream`; may be called again at reload.

    Args:
        level: lowest level that is printed; of libraries nothing below `warning` is.
        stream: None: stderr. One write per line.
        fixed: fields of every line (`component="extender"`).

    """
    out = sys.stderr.buffer if stream is None else stream
    first: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        _with(fixed),
        structlog.processors.format_exc_info,
        redact,
    ]
    threshold = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*first, _render],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.BytesLoggerFactory(file=out),
        # A cached logger would keep the level of before a reload.
        cache_logger_on_first_use=False,
    )
    handler = _LineHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *first],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                lambda logger, name, event: _render(logger, name, event).decode(),
            ],
        )
    )
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old, _LineHandler):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(threshold, logging.WARNING))
    logging.captureWarnings(capture=True)


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger; `name` (the module) becomes the field `logger`."""
    return cast("FilteringBoundLogger", structlog.get_logger(**{_NAME: name}))


@contextmanager
def cause_scope(cause: str, **fields: Any) -> Iterator[None]:
    """Put `cause` (and further fields) on every line written inside, in this task and its children.

    An empty cause leaves the one of outside.
    """
    bound = {**fields, "cause": cause} if cause else fields
    with structlog.contextvars.bound_contextvars(**bound):
        yield


def current_cause() -> str:
    """The cause id of what runs now, or empty."""
    return str(structlog.contextvars.get_contextvars().get("cause", ""))


def redact(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """The event without secrets: by key name (`token`, `x-slurm-user-token`), and inside texts."""
    return _clean_mapping(event, 0)


def _clean_mapping(fields: Mapping[Any, Any], depth: int) -> MutableMapping[str, Any]:
    return {
        str(key): REDACTED
        if value and isinstance(key, str) and _SECRET_KEY.search(key)
        else _clean(value, depth)
        for key, value in fields.items()
    }


def _clean(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _clean_text(value)
    if depth < NESTING:
        if isinstance(value, Mapping):
            return _clean_mapping(value, depth + 1)
        if isinstance(value, list | tuple | set | frozenset):
            return [_clean(item, depth + 1) for item in value]
        if isinstance(value, msgspec.Struct):
            return _clean_mapping(msgspec.structs.asdict(value), depth + 1)
    return _clean_text(_safe_repr(value))


def _clean_text(text: str) -> str:
    if len(text) > TEXT_CHARS:
        text = f"{text[:TEXT_CHARS]}... ({len(text)} characters)"
    return _SECRET_TEXT.sub(lambda m: (m["keep"] or "") + REDACTED, text)


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a faulty __repr__ must not stop the daemon
        return f"<{type(value).__name__}: repr failed: {type(error).__name__}>"


def _with(fixed: Mapping[str, str]) -> Processor:
    def add(_logger: Any, _method: str, event: EventDict) -> EventDict:
        name = event.pop(_NAME, None)
        return {**fixed, **event} if name is None else {**fixed, "logger": name, **event}

    return add


_encoder: Final = msgspec.json.Encoder(enc_hook=_safe_repr)


def _render(_logger: Any, _method: str, event: EventDict) -> bytes:
    try:
        return _encoder.encode(event)
    except (TypeError, ValueError, OverflowError, RecursionError):
        # Lone surrogates (undecodable file names) and the like: escaped instead of lost.
        return json.dumps(event, default=_safe_repr).encode()


class _LineHandler(logging.Handler):
    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._stream.write(self.format(record).encode() + b"\n")
            self._stream.flush()
        except Exception:  # noqa: BLE001 - stdlib logging's own contract
            self.handleError(record)
