"""Several questions to one scontrol: a script for its stdin, and the answers taken apart again.

A process for each question costs 5 to 10 ms on our side, more than slurmctld needs to answer. So
`scontrol -o -d -a` reads many `show ...` lines from its stdin. Its output does not say where one
answer ends, and answers hold text of users; therefore a mark that is new at every call
(`slurm.queue.make_mark`) stands between them: `show hostlist MARK` prints MARK, without asking
slurmctld, in 22.05 to 26.05.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from slurmbridge.pool.errors import ParseError

BATCH_ARGV: Final = ("scontrol", "--oneliner", "--details", "--all")

_QUESTION = re.compile(r"show [a-z]+(?: [0-9]+)?\Z")


def write_batch(questions: Sequence[str], mark: str) -> str:
    """Write the script: each question between two marks.

    Raises:
        ParseError: a question is not `show THING` or `show THING NUMBER`.

    """
    for question in questions:
        if _QUESTION.match(question) is None:
            raise ParseError(question, "not a question for scontrol")
    between = f"show hostlist {mark}\n"
    return between + "".join(f"{question}\n{between}" for question in questions)


def read_batch(text: str, questions: Sequence[str], mark: str) -> list[str]:
    """Take the answers apart: one text for each question, "" where scontrol had only an error.

    scontrol's line editor (where it was built with one) prints a prompt and repeats each line.

    Raises:
        ParseError: an answer is missing: scontrol ended before the script did.

    """
    if f"show hostlist {mark}" in text:
        repeated = rf"(?:scontrol: *show hostlist {mark} *\n)?^{mark}\n"
        parts = re.split(repeated, text, flags=re.MULTILINE)
    else:
        parts = text.split(f"{mark}\n")  # 5,000 nodes: 1 ms instead of 100
    if len(parts) != len(questions) + 2 or parts[0].strip():
        raise ParseError(text[-256:], f"{len(parts) - 2} answers to {len(questions)} questions")
    answers = []
    for question, part in zip(questions, parts[1:-1], strict=True):
        found = re.match(rf"scontrol: *{question} *\n", part)
        answers.append(part[found.end() :] if found else part)
    return answers
