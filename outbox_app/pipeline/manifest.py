"""The manifest of an archive: which files hold which rows of the log, batch after batch.

It is the only truth. A batch is archived when its entry is there, as one file that appears whole;
each entry begins with the offset that the one before ends with. It is a JSON file with its own
checksum, and names each Parquet file by its hash. What no entry names does not count:
leftovers of a killed process are removed, and a file that its entry names and that was not moved to
its place is moved there, when the next process begins. A file in ``data`` that only a lost entry
can have named is no leftover: nothing is removed then.

::

    _manifest/archive.json                 which log of which database
    _manifest/00000000-00000000.json       an entry: batches from … to …
    data/date=2026-01-31/…-….parquet       rows, by the day on which they were recorded (UTC)
    _incoming/                             what is being written
    _replaced/1767225600-…-….parquet       rows that were put together with others then
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..exceptions import ArchiveRefused, DamagedCursor
from ..failpoints import failpoint
from .offset import Offset
from .store import Store

MANIFEST = "_manifest"
_IDENTITY = f"{MANIFEST}/archive.json"
#: Files that are being written.
INCOMING = "_incoming"
#: Files that were merged into others, for those who are still reading them.
REPLACED = "_replaced"
DATA = "data"

#: Errors that an invalid file of a manifest raises.
NONSENSE = (ValueError, LookupError, TypeError, AttributeError, DamagedCursor)

_DATA_FILE = re.compile(rf"{DATA}/date=[\d-]+/(?:\d+-)?(\d+)-[0-9a-f]{{12}}\.parquet", re.ASCII)
FORMAT = 1
#: Seconds for which a file is kept that others were made of, for those who are reading it.
REPLACED_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class File:
    name: str
    rows: int
    bytes: int
    sha256: str
    #: First and last position in it.
    first: int
    last: int

    @property
    def base(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def incoming(self) -> str:
        return f"{INCOMING}/{self.base}"


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
        object.__setattr__(self, "rows", sum(file.rows for file in self.files))

    @property
    def name(self) -> str:
        return f"{MANIFEST}/{self.first:08d}-{self.last:08d}.json"

    def dump(self) -> bytes:
        values = asdict(self)
        return json.dumps({"sha256": _digest(values), **values}, indent=1).encode()

    @classmethod
    def load(cls, content: bytes) -> Entry:
        """Return the entry of a file. Raises one of ``NONSENSE``."""
        values = json.loads(content)
        if values.pop("sha256") != _digest(values):
            raise ValueError("its checksum does not fit")
        del values["rows"]
        values |= {name: Offset.load(values[name]) for name in ("start", "end")}
        files = tuple(File(**each) for each in values["files"])
        for file in files:
            if last_batch(file.name) is None:  # others could lie outside the archive
                raise ValueError(f"{file.name!r:.100} is no name of a file of an archive")
        return cls(**{**values, "files": files})


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
        except NONSENSE as error:
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
        manifest.entries = manifest._read()
        return manifest

    def again(self) -> Manifest:
        """Read it again, as others may have written to it. Raises ``ArchiveRefused``."""
        return self.load(self.store, self.log)

    @classmethod
    def make(cls, store: Store, log: str) -> Manifest:
        """Make an archive of an empty folder, or read the one there. Raises ``ArchiveRefused``."""
        if not cls.is_made(store):
            store.write(_IDENTITY, json.dumps({"format": FORMAT, "log": log}).encode())
        return cls.load(store, log)

    @staticmethod
    def is_made(store: Store) -> bool:
        """Say whether the folder is an archive; False: it is empty. Raises ``ArchiveRefused``."""
        files = [name for name in store.list() if name != "_lock" and not name.endswith(".tmp")]
        if files and _IDENTITY not in files:
            raise ArchiveRefused(
                f"{store.folder} is no archive, and not empty (it has {sorted(files)[0]!r}). "
                "Name an empty folder, or a new one."
            )
        return bool(files)

    @property
    def end(self) -> Offset | None:
        return self.entries[-1].end if self.entries else None

    @property
    def next(self) -> int:
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
        kept = [each for each in self.entries if each not in old]
        self.entries = sorted([*kept, entry], key=lambda each: each.first)
        for each in old:
            if each.name != entry.name:
                self.store.delete(each.name)
        self._replace(file.name for each in old for file in each.files)
        for file in entry.files:
            self.store.move(file.incoming, file.name)

    def tidy(self) -> None:
        """Finish what a killed process began, remove its leftovers. Raises ``ArchiveRefused``."""
        there = self.store.list()
        kept = {_IDENTITY, *(entry.name for entry in self.entries)}
        for file in self.files():
            kept.add(file.name)
            if file.name not in there and there.get(file.incoming) == file.bytes:
                self.store.move(file.incoming, file.name)
                del there[file.incoming]
            elif there.get(file.name) != file.bytes:
                raise self.missing(file)
        left = [name for name in there if name not in kept]
        replaced = [name for name in left if last_batch(name) is not None]
        for name in replaced:
            if (last_batch(name) or 0) >= self.next:
                raise self._damaged(name, LookupError("its entry in _manifest is missing"))
        self._replace(replaced)
        for name in left:
            if name.startswith((f"{INCOMING}/", f"{MANIFEST}/")):
                self.store.delete(name)

    def places(self, file: File) -> Iterator[str]:
        """Yield where a file may be: it is moved there, and away, while others read."""
        yield from (file.name, file.incoming, file.name)
        yield from (name for name in self.store.list(REPLACED) if name.endswith(f"-{file.base}"))

    def missing(self, file: File) -> ArchiveRefused:
        return ArchiveRefused(
            f"The archive {self.store.folder} is damaged: {file.name} is not there, or not as it "
            f"was written ({file.bytes} bytes, sha256 {file.sha256}). Put it back from a copy. "
            f"It has positions {file.first} to {file.last}; as long as the log has them, a new "
            "folder can be archived to."
        )

    def _replace(self, names: Iterable[str]) -> None:
        """Move superseded files to ``_replaced``; delete those older than an hour."""
        now = int(time.time())
        for name in names:
            self.store.move(name, f"{REPLACED}/{now}-{name.rpartition('/')[2]}")
        for name in self.store.list(REPLACED):
            if name < f"{REPLACED}/{now - REPLACED_SECONDS}":
                self.store.delete(name)

    def _read(self) -> list[Entry]:
        while True:
            # While entries are put together a listing may lack the old ones and the new one; the
            # next one has it. And they may go between the listing and the reading.
            names = self._names()
            if self._names() != names:
                continue
            try:
                return list(self._chain(names))
            except (ArchiveRefused, FileNotFoundError):
                if self._names() == names:
                    raise

    def _names(self) -> list[str]:
        names = (name for name in self.store.list(MANIFEST) if not name.endswith(".tmp"))
        return sorted(name for name in names if name != _IDENTITY)

    def _chain(self, names: Iterable[str]) -> Iterator[Entry]:
        """Yield the entries in order, without those whose batches another one holds."""
        number, end = 0, None
        for entry in _outermost(self._load_all(names)):
            if entry.first != number or (end is not None and entry.start != end):
                raise self._damaged(entry.name, ValueError(f"batch {number} should follow here"))
            number, end = entry.last + 1, entry.end
            yield entry

    def _load_all(self, names: Iterable[str]) -> Iterator[Entry]:
        for name in names:
            try:
                entry = Entry.load(self.store.read(name))
                if entry.name != name:
                    raise ValueError(f"it holds the entry {entry.name}")
            except NONSENSE as error:
                raise self._damaged(name, error) from error
            yield entry

    def _damaged(self, name: str, error: Exception) -> ArchiveRefused:
        return ArchiveRefused(
            f"The archive {self.store.folder} is damaged: {name} is invalid ({error!r:.200}). "
            "Put it back from a copy, or archive to a new folder. Nothing was written."
        )


def _outermost(entries: Iterable[Entry]) -> list[Entry]:
    found: list[Entry] = []
    for entry in sorted(entries, key=lambda each: (each.first, -each.last)):
        if not found or not _is_within(entry, found[-1]):
            found.append(entry)
    return found


def _is_within(entry: Entry, other: Entry) -> bool:
    return other.first <= entry.first and entry.last <= other.last


def last_batch(name: str) -> int | None:
    """Return the last batch in a file of ``data``, as its name says; None: it is not ours."""
    match = _DATA_FILE.fullmatch(name)
    return int(match[1]) if match else None


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
