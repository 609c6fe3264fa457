"""The judge: compares a history with the promises, as far as the history shows them.

The promises are those of docs/explanation/promises.md. Nothing is guessed: what ended ``unknown``
may have happened or not, and breaks no promise either way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from . import runs  # noqa: F401  # its rules are entered
from .record import Record
from .rules import RULES, Books

#: The promises that a history can show.
PROMISES = tuple(sorted(RULES, key=lambda name: int(name[1:])))


@dataclass
class Verdict:
    """What the judge has found.

    Attributes:
        findings: Sentences, by the promise that is broken.
        happened: How often each hard thing has happened.
        missing: The required hard things that have not: the run was too easy to prove anything.
    """

    findings: dict[str, list[str]] = field(default_factory=dict)
    happened: Counter[str] = field(default_factory=Counter)
    missing: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether no promise is broken."""
        return not self.findings

    @property
    def is_too_easy(self) -> bool:
        return bool(self.missing)


def judge(
    records: Iterable[Record],
    *,
    promises: Collection[str] | None = None,
    required: Collection[str] = (),
    sends_of_an_attempt: int = 1,
) -> Verdict:
    """Judge a history.

    Args:
        records: The records, those of one process in their order.
        promises: The promises to judge, by default all of ``PROMISES``. Leave out P6 if the history
            has no executions, and P3 while jobs may still be on their way.
        required: Names of hard things that must have happened, such as ``"takeover"``.
        sends_of_an_attempt: How often one attempt may publish a job: 2 if the drainer sends a batch
            as one pipeline, and its jobs one by one if the broker has refused one.

    Raises:
        ValueError: A promise is none of ``PROMISES``.
    """
    if unknown := {*(promises or ())} - {*PROMISES}:
        raise ValueError(f"{min(unknown)!r} is none of the promises {', '.join(PROMISES)}.")
    books = Books(records, sends_of_an_attempt)
    chosen = PROMISES if promises is None else promises
    found = {name: [text for rule in RULES[name] for text in rule(books)] for name in chosen}
    happened = books.happened()
    return Verdict(
        {name: texts for name, texts in found.items() if texts},
        happened,
        [name for name in required if not happened[name]],
    )
