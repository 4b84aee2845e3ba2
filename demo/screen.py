"""How the demo is told: plain lines, colours and a moving line only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

COLOURS = {"J": "\x1b[34m", "P": "\x1b[32m", ".": "\x1b[2m"}
END = "\x1b[0m"


class Screen:
    """Writes to stdout; every line carries the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._moving = sys.stdout.isatty()

    def act(self, title: str) -> None:
        """A new part of the story."""
        self._line("")
        self._line(f"== {title}")

    def say(self, text: str) -> None:
        """One line of it."""
        self._line(f"   {text}")

    def wait(self, what: str, seconds: float) -> None:
        """Progress of a wait; only where a line can be overwritten."""
        if self._moving:
            sys.stdout.write(f"\r\x1b[K   ... {what} ({seconds:.0f} s)")
            sys.stdout.flush()

    def done(self, what: str, seconds: float) -> None:
        """The end of a wait."""
        self._line(f"   ok: {what} ({seconds:.1f} s)")

    def pool(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """The pool, one letter a GPU."""
        self._line("   GPU     01234567    J: native Slurm job, P: pod (its claim), .: free")
        for row in rows:
            self._line(f"   {row['node']}  {self._colour(row['gpus'])}")

    def _colour(self, letters: str) -> str:
        if not self._moving:
            return letters
        return "".join(f"{COLOURS[letter]}{letter}{END}" for letter in letters)

    def _line(self, text: str) -> None:
        clear = "\r\x1b[K" if self._moving else ""
        stamp = f"[{time.monotonic() - self._began:5.1f}] " if text else ""
        sys.stdout.write(f"{clear}{stamp}{text}\n")
        sys.stdout.flush()
