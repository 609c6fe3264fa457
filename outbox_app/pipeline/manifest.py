"""The manifest of an archive: which files hold which rows of the log, batch after batch.

It is the only truth. A batch is archived when its entry is there, as one file that appears whole;
each entry begins with the offset that the one before ends with. What no entry names does not count:
leftovers of a killed process are removed, and a file that its entry names and that was not moved to
its place is moved there, when the next process begins. ::

    _manifest/archive.json                 which log of which database
    _manifest/00000000-00000000.json       an entry: batches from … to …
    data/date=2026-01-31/…-….parquet       rows, by the day on which they were recorded (UTC)
    _incoming/                             what is being written
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..exceptions import ArchiveRefused, DamagedCursor
from ..failpoints import failpoint
from .offset import Offset
from .store import Store

FORMAT = 1
INCOMING = "_incoming"
DATA = "data"
_MANIFEST = "_manifest"
_IDENTITY = f"{_MANIFEST}/archive.json"


@dataclass(frozen=True, slots=True)
class File:
    """A Parquet file."""

    name: str
    rows: int
    bytes: int
    sha256: str
    #: First and last position in it.
    first: int
    last: int

    @property
    def incoming(self) -> str:
        """Where it was written."""
        return f"{INCOMING}/{self.name.rpartition('/')[2]}"


@dataclass(frozen=True, slots=True)
class Entry:
    """Batches of the log, one after the other."""

    #: Numbers of the first and the last batch.
    first: int
    last: int
    start: Offset
    end: Offset
    files: Sequence[File]
    #: When it was compared with the log, row by row: seconds since 1970.
    verified: float
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        """Count."""
        object.__setattr__(self, "rows", sum(file.rows for file in self.files))

    @property
    def name(self) -> str:
        """Its file."""
        return f"{_MANIFEST}/{self.first:08d}-{self.last:08d}.json"

    def dump(self) -> bytes:
        """Return what its file holds."""
        values = asdict(self)
        return json.dumps({"sha256": _digest(values), **values}, indent=1).encode()

    @classmethod
    def load(cls, content: bytes) -> Entry:
        """Return the entry of a file. Raises one of ``_NONSENSE``."""
        values = json.loads(content)
        if values.pop("sha256") != _digest(values):
            raise ValueError("its checksum does not fit")
        del values["rows"]
        values |= {name: Offset.load(values[name]) for name in ("start", "end")}
        return cls(**{**values, "files": tuple(File(**each) for each in values["files"])})


_NONSENSE = (ValueError, LookupError, TypeError, AttributeError, DamagedCursor)


class Manifest:
    """What an archive holds.

    Args:
        store: Its folder.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.log = ""
        self.entries: list[Entry] = []

    @classmethod
    def load(cls, store: Store, log: str) -> Manifest:
        """Read the manifest of an archive.

        Args:
            store: Its folder.
            log: Table of the log that it has to be of.

        Raises:
            ArchiveRefused: It is no archive, one of another log, or a damaged one.
        """
        manifest = cls(store)
        try:
            identity = json.loads(store.read(_IDENTITY))
            found, version = identity["log"], identity["format"]
        except FileNotFoundError:
            raise ArchiveRefused(
                f"{store.folder} is no archive: it has no {_IDENTITY}. Name the folder that "
                "manage.py outbox_pipeline archive --to was given."
            ) from None
        except _NONSENSE as error:
            raise manifest._damaged(_IDENTITY, error) from error
        if version != FORMAT:
            raise ArchiveRefused(
                f"The archive {store.folder} has format {version!r:.20}; this release knows "
                f"{FORMAT}."
            )
        if found != log:
            raise ArchiveRefused(
                f"{store.folder} is the archive of the log {found!r:.128}, not of {log}. Take a "
                "folder for each log."
            )
        manifest.log = log
        manifest.entries = list(manifest._chain())
        return manifest

    def again(self) -> Manifest:
        """Read it again, as others may have written to it. Raises ``ArchiveRefused``."""
        return self.load(self.store, self.log)

    @classmethod
    def make(cls, store: Store, log: str) -> Manifest:
        """Make an archive of an empty folder, or read the one that is there.

        Raises:
            ArchiveRefused: The folder holds something else, or what ``load`` refuses.
        """
        files = [name for name in store.list() if name != "_lock" and not name.endswith(".tmp")]
        if _IDENTITY not in files:
            if files:
                raise ArchiveRefused(
                    f"{store.folder} is no archive, and not empty (it has {sorted(files)[0]!r}). "
                    "Name an empty folder, or a new one."
                )
            store.write(_IDENTITY, json.dumps({"format": FORMAT, "log": log}).encode())
        return cls.load(store, log)

    @property
    def end(self) -> Offset | None:
        """Where the archive ends; None where it is empty."""
        return self.entries[-1].end if self.entries else None

    @property
    def next(self) -> int:
        """The number of the next batch."""
        return self.entries[-1].last + 1 if self.entries else 0

    @property
    def rows(self) -> int:
        """How many events it holds."""
        return sum(entry.rows for entry in self.entries)

    def files(self) -> list[File]:
        """Return all files."""
        return [file for entry in self.entries for file in entry.files]

    def commit(self, entry: Entry) -> None:
        """Add an entry, or put it in the place of those whose batches it holds."""
        self.store.write(entry.name, entry.dump())
        failpoint("archive_committed")
        old = [each for each in self.entries if _is_within(each, entry)]
        self.entries = sorted(
            [each for each in self.entries if each not in old] + [entry],
            key=lambda each: each.first,
        )
        for each in old:
            if each.name != entry.name:
                self.store.delete(each.name)
        for file in (file for each in old for file in each.files):
            self.store.delete(file.name)
        for file in entry.files:
            self.store.move(file.incoming, file.name)

    def tidy(self) -> None:
        """End what a killed process began, and remove what it left.

        Raises:
            ArchiveRefused: A file of an entry is missing, or has another size.
        """
        there = self.store.list()
        kept = {_IDENTITY, "_lock"}
        for entry in self.entries:
            kept.add(entry.name)
            for file in entry.files:
                kept.add(file.name)
                if file.name not in there and there.get(file.incoming) == file.bytes:
                    self.store.move(file.incoming, file.name)
                elif there.get(file.name) != file.bytes:
                    raise self.missing(file)
                kept.add(file.incoming)
        for name in there:
            if name not in kept and name.partition("/")[0] in (INCOMING, DATA, _MANIFEST):
                self.store.delete(name)

    def missing(self, file: File) -> ArchiveRefused:
        """Return the error of a file that is not as its entry says."""
        return ArchiveRefused(
            f"The archive {self.store.folder} is damaged: {file.name} is not there, or not as it "
            f"was written ({file.bytes} bytes, sha256 {file.sha256}). Put it back from a copy. "
            f"It has positions {file.first} to {file.last}; as long as the log has them, a new "
            "folder can be archived to."
        )

    def _chain(self) -> Iterator[Entry]:
        """Yield the entries in order; those whose batches another one holds count no more."""
        number, end = 0, None
        for entry in _outermost(self._load_all()):
            if entry.first != number or (end is not None and entry.start != end):
                raise self._damaged(entry.name, ValueError(f"batch {number} should follow here"))
            number, end = entry.last + 1, entry.end
            yield entry

    def _load_all(self) -> Iterator[Entry]:
        for name in sorted(self.store.list(_MANIFEST)):
            if name == _IDENTITY or name.endswith(".tmp"):
                continue
            try:
                entry = Entry.load(self.store.read(name))
                if entry.name != name:
                    raise ValueError(f"it holds the entry {entry.name}")
            except _NONSENSE as error:
                raise self._damaged(name, error) from error
            yield entry

    def _damaged(self, name: str, error: Exception) -> ArchiveRefused:
        return ArchiveRefused(
            f"The archive {self.store.folder} is damaged: {name} makes no sense ({error!r:.200}). "
            "Put it back from a copy, or archive to a new folder. Nothing was written."
        )


def _outermost(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries whose batches no other entry holds, in order."""
    found: list[Entry] = []
    for entry in sorted(entries, key=lambda each: (each.first, -each.last)):
        if not found or not _is_within(entry, found[-1]):
            found.append(entry)
    return found


def _is_within(entry: Entry, other: Entry) -> bool:
    return other.first <= entry.first and entry.last <= other.last


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
