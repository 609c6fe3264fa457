"""The lines of a history: JSON, one record each.

A record says what was done, by whom, when that was invoked, and when and how it ended. A process
that does not know how it ended writes ``unknown``: a COMMIT whose reply was lost, say. Times are
seconds of one clock for all processes, or any numbers that grow; a record of what is found at the
end, such as the rows of a table, needs none.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: How something ended.
OUTCOMES = OK, FAILED, UNKNOWN = "ok", "failed", "unknown"

#: What a record may be about, with the facts that it must have; in comments, those it may have.
FACTS: dict[str, tuple[str, ...]] = {
    # Transactions, as their processes heard of them; and those that the database has.
    "transaction": ("id",),
    "commit": ("transaction",),
    # Jobs. Without a transaction, a staged job was found in the database, and so is committed.
    # stage: transaction, key and app; order, a number, if a lock gave the jobs of a key an order;
    # apart, true if the job takes its key out of order; receipt, true if it has one. publish:
    # sender ("": who committed).
    "stage": ("job", "row", "shard"),
    "undo": ("job",),
    "publish": ("job",),
    "execute": ("job",),
    # run: a worker's, of a job with a receipt: settled, when its end was committed; kept, until
    # when its lease was, if that was before its end.
    "run": ("job",),
    "discard": ("job",),
    "row": ("job",),
    "dead": ("job", "reason"),
    "incident": ("kind", "shards", "first", "last"),  # drainer
    # Events. event: log, transaction. subscription: partitions. handle: log.
    "event": ("position", "stream", "version"),
    "subscription": ("name",),
    "handle": ("subscription", "position"),
    # Entities: commands, as their callers heard of them (expected, version, answer, rejected); and
    # the versions that the database has.
    "command": ("entity", "id"),
    "version": ("entity", "version", "command"),
    # Prepared events: decisions, as the keeper has answered them; and published ones.
    "prepare": ("event", "transaction"),
    "decide": ("event", "wanted"),
    "undecided": ("event",),
    "published": ("event",),
    # Ids that were made; faults that were injected, and other things to count (count).
    "id": ("id",),
    "happening": ("name",),
}


_INTEGERS = ("row", "shard", "first", "last", "position", "version", "partitions", "count")


class DamagedHistory(ValueError):
    """A line of a history is no record."""


@dataclass(frozen=True, slots=True)
class Record:
    """A line of a history.

    Args:
        what: A key of ``FACTS``.
        facts: What it is about.
        who: The process, a name of any form.
        began: When it was invoked.
        ended: When it ended.
        outcome: ``"ok"``, ``"failed"`` (it had no effect), or ``"unknown"``.
    """

    what: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    who: str = ""
    began: float | None = None
    ended: float | None = None
    outcome: str = OK

    def __post_init__(self) -> None:
        needed = FACTS.get(self.what)
        if needed is None:
            raise DamagedHistory(f"{self.what!r} is none of {', '.join(FACTS)}.")
        if missing := [name for name in needed if name not in self.facts]:
            raise DamagedHistory(f"{self.what!r} needs {', '.join(missing)}: {self.facts!r:.200}")
        if self.outcome not in OUTCOMES:
            raise DamagedHistory(f"The outcome {self.outcome!r} is none of {', '.join(OUTCOMES)}.")
        for name, value in {"began": self.began, "ended": self.ended, **self.facts}.items():
            if name in _INTEGERS and type(value) is not int:
                raise DamagedHistory(f"{name} must be a whole number: {value!r:.100}")
            if name in ("began", "ended") and not isinstance(value, int | float | None):
                raise DamagedHistory(f"{name} must be a number or null: {value!r:.100}")
            if name in needed and name != "shards" and not isinstance(value, Hashable):
                raise DamagedHistory(f"{name} must be a text or a number: {value!r:.100}")
        if "shards" in needed and not {*map(type, self["shards"])} <= {int}:
            raise DamagedHistory(f"shards must be whole numbers: {self['shards']!r:.100}")

    def __getitem__(self, name: str) -> Any:
        return self.facts[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.facts.get(name, default)

    def dump(self) -> str:
        own = {"what": self.what, "who": self.who, "began": self.began, "ended": self.ended}
        return json.dumps({**own, "outcome": self.outcome, **self.facts}, default=_plain)

    @classmethod
    def load(cls, line: str) -> Record:
        """Read a line. Raises ``DamagedHistory``."""
        try:
            values = dict(json.loads(line))
            names = ("what", "who", "began", "ended", "outcome")
            own = {name: values.pop(name) for name in names if name in values}
            return cls(facts=values, **own)
        except (TypeError, ValueError) as error:
            raise DamagedHistory(f"{line!r:.200} is no record: {error}") from error


class Writer:
    """Appends records to a file, each by one write: a killed process loses none.

    Args:
        file: The file. A last line without its newline is removed: its process was killed.
        who: The process.
    """

    def __init__(self, file: Path, who: str) -> None:
        if file.exists() and not (written := file.read_bytes()).endswith(b"\n"):
            os.truncate(file, written.rfind(b"\n") + 1)
        self.file = file
        self.who = who

    def write(
        self, what: str, *, began: float | None = None, outcome: str = OK, **facts: Any
    ) -> None:
        """Write what has just ended. ``began``: when it was invoked, by ``time.time()``."""
        now = time.time()
        record = Record(what, facts, self.who, now if began is None else began, now, outcome)
        with self.file.open("ab", buffering=0) as opened:
            opened.write(record.dump().encode() + b"\n")


def read(files: Iterable[Path]) -> Iterator[Record]:
    """Read the records of several files. Raises ``DamagedHistory`` with the file and the line.

    A last line without its newline is left out: its process was killed while it wrote.
    """
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n")[:-1], 1):
            try:
                yield Record.load(line)
            except DamagedHistory as error:
                raise DamagedHistory(f"{file}, line {number}: {error}") from error


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
