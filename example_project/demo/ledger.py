"""The writers' ledgers: one file for each writer, one line for each order.

The writer adds the line after COMMIT or ROLLBACK has returned. The ledger is a file and not a
table, so that it does not depend on anything that the demo wants to prove.
"""

import json
from dataclasses import asdict, dataclass, field

COMMITTED = "committed"
ROLLED_BACK = "rolled back"
#: The connection broke at COMMIT: the order may be committed or not.
UNKNOWN = "unknown"


@dataclass
class Entry:
    """An order and its outcome."""

    order: str
    outcome: str = UNKNOWN
    by_savepoint: bool = False
    #: The outbox rows of the order: the name of each staged task, with the row's id and shard.
    staged: dict = field(default_factory=dict)


class Ledger:
    """Writes entries to a file, and flushes it after each entry."""

    def __init__(self, path):
        self._file = path.open("a", encoding="utf-8")

    def note(self, entry):
        self._file.write(json.dumps(asdict(entry)) + "\n")
        self._file.flush()


def read(folder):
    """Return the entries of all ledgers in a folder."""
    return [
        Entry(**json.loads(line))
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def count(folder):
    """Return the number of entries without parsing them; a half-written one does not count."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl"))
