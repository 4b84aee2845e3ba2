"""Reads the tables of tests/unit/data/vectors: tab-separated, a comment line, columns may end early."""

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "data" / "vectors"


def rows(name: str, columns: int) -> list[list[str]]:
    lines = (FOLDER / name).read_text().splitlines()[1:]
    return [(line.split("\t") + [""] * columns)[:columns] for line in lines]
