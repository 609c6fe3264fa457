"""The table of an archive: a Delta table, whose log is the only truth.

Each commit says how far the log is archived, and follows exactly the version that was checked
before, or fails. So nothing was written between two of our commits. If other programs have
committed after the newest one, the table must still have the same files.

::

    _delta_log/00000000000000000007.json                     a commit
    recorded_date=2026-01-31/00000007-5be1c0de-….parquet     rows, by the day (UTC) of recorded_at
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from ..events.exceptions import DamagedCursor
from ..failpoints import failpoint
from .exceptions import ArchiveRefused
from .mark import Mark
from .offset import Offset
from .parquet import DAY, File, check, damaged, read_checked
from .store import Store, message_of

#: The key of the ``Mark`` in the metadata of our commits.
MARK = "outbox"
#: The key, there, of an id that only this commit has.
ATTEMPT = "outbox_attempt"
#: Only commits have a ``Mark``, checkpoints have none, so only our ``vacuum`` removes commits.
_CONFIGURATION = {"delta.enableExpiredLogCleanup": "false"}
#: The highest versions of the protocol that readers and writers may need.
_PROTOCOL = (1, 2)
#: The names of our files. Other names could lead out of the folder.
_NAME = re.compile(rf"{DAY}=[\d-]+/(\d+)-(\w+)-[0-9a-f]{{32}}\.parquet", re.ASCII)
#: Characters that Delta or Spark does not allow in the name of a column.
_UNFIT = re.compile(r"[ ,;{}()\n\t=]")


class Archive:
    """An archive at one version of its table. See ``load`` and ``make``."""

    def __init__(self, store: Store, log: str, table: DeltaTable) -> None:
        self.store = store
        self.log = log
        self._table = table
        self.mark: Mark
        self._files: list[File] = []

    @classmethod
    def load(cls, folder: str, log: str, end: Offset | None = None) -> Archive:
        """Read the table of an archive.

        Args:
            folder: A path or an address.
            log: The table of the log that must be in the archive.
            end: Load the version at which the archive ended there. Default: the newest one.

        Raises:
            ArchiveRefused: The folder is not an archive, or one of another log, or damaged, or
                another program has written to it.
        """
        store = Store(folder)
        try:
            with _explained(store):
                archive = cls(store, log, DeltaTable(store.folder))
        except TableNotFoundError:
            raise ArchiveRefused(
                f"{store.folder} is no archive: it is no Delta table. Name the folder that you "
                "gave to manage.py outbox_pipeline archive --to, which creates it."
            ) from None
        archive.refresh()
        if end not in (None, archive.end):  # else all commits would be read, for nothing
            archive._go_back(end)
        return archive

    @classmethod
    def make(cls, folder: str, log: str, start: Offset, schema: pa.Schema) -> Archive:
        """Create an archive in an empty folder, or load its archive. Raises ``ArchiveRefused``."""
        store = Store(folder)
        if store.is_local:
            os.makedirs(store.folder, exist_ok=True)
        with _explained(store):
            if not DeltaTable.is_deltatable(store.folder):
                # The remains of a killed process's first commit do not count.
                names = [n for n in store.list() if not re.match("_delta_log/(_|.*#)", n)]
                if names and not DeltaTable.is_deltatable(store.folder):  # created meanwhile
                    raise ArchiveRefused(
                        f"{store.folder} is no archive, and not empty (it has {min(names)!r}). "
                        "Name an empty folder, or a new one."
                    )
                mark = Mark(log, start.text)
                with suppress(CommitFailedError):  # another process has just made it
                    DeltaTable.create(
                        store.folder,
                        Schema.from_arrow(_with_day(schema)),
                        mode="ignore",
                        partition_by=[DAY],
                        configuration=_CONFIGURATION,
                        commit_properties=_properties(mark),
                    )
        return cls.load(folder, log)

    @property
    def end(self) -> Offset:
        return Offset.load(self.mark.end)

    @property
    def rows(self) -> int:
        """The number of events in the archive."""
        return self.mark.rows

    @property
    def schema(self) -> pa.Schema:
        """The columns of the archive's files."""
        columns = pa.schema(self._table.schema().to_arrow())
        return columns.remove(columns.get_field_index(DAY))

    def files(self) -> list[File]:
        """Return all files."""
        return list(self._files)

    def read(self, file: File) -> pa.Table:
        """Return the rows of a file. Raises ``ArchiveRefused`` if its bytes have changed.

        A column that was added to the log later is null.
        """
        return read_checked(self.store, file, self.schema)

    def refresh(self) -> None:
        """Load the newest version. Raises ``ArchiveRefused`` if it is not ours."""
        with _explained(self.store):
            self._table.update_incremental()
            version, self.mark = self._newest()
            # The process that committed may have been killed before the commit was on disk.
            self.store.sync(f"_delta_log/{self._table.version():020d}.json")
            if version < self._table.version():
                self._require_unchanged(version)
            self._require_ours()

    def verify(self, has: Callable[[int], bool]) -> None:
        """Check that all files are there, and that no commit is missing whose rows were pruned.

        ``has`` returns whether the log has a position. Raises ``ArchiveRefused``.
        """
        there, known = self.store.list(), {file.name for file in self._files}
        for file in self._files:
            if there.get(file.name) != file.bytes:
                raise damaged(self.store, file)
        found = [match for name in there.keys() - known if (match := _NAME.fullmatch(name))]
        # A merged file only has rows of batches below its number.
        left = [m[0] for m in found if int(m[1]) - (m[2] == "merged") >= self.mark.batches]
        for name in sorted(left):
            first = pc.min(self.read(File(name, 0, there[name], 0, 0))["id"]).as_py()
            if not has(first):
                raise ArchiveRefused(
                    f"The archive {self.store.folder} is damaged: no commit names {name}, and "
                    f"the log no longer has its position {first}. Put _delta_log back from a "
                    "copy; if the log was pruned without --archived, delete the file."
                )

    def add_columns(self, schema: pa.Schema) -> None:
        """Add the columns that the log has and the table lacks. Raises ``ArchiveRefused``."""
        known = {each.name: each.type for each in self.schema}
        for each in schema:
            if known.get(each.name, each.type) != each.type:
                raise ArchiveRefused(
                    f"Column {each.name} of {self.log} is {each.type} now, but in the archive "
                    f"{self.store.folder} it is {known[each.name]}, which cannot be changed there. "
                    "Archive to a new folder, or give the column its type back."
                )
        if new := [each for each in schema if each.name not in known]:
            fields = Schema.from_arrow(_with_day(pa.schema(new))).fields[:-1]
            with self._committing(self.mark) as properties:
                self._table.alter.add_columns(fields, commit_properties=properties)

    def commit(self, files: Sequence[File], end: Offset, since: str = "") -> None:
        """Add a batch. Raises ``ArchiveRefused`` if another process has written meanwhile.

        The log has no rows of days before ``since`` any more: see ``Mark.after``.
        """
        mark = self.mark.after(files, end, since, {file.day for file in self._files})
        identity = f"outbox_app {self.log} {end.database}"
        self._write(files, [], mark, app_transactions=[Transaction(identity, mark.batches)])

    def replace(self, old: Sequence[File], new: Sequence[File]) -> None:
        """Replace files by others with the same rows. Raises as ``commit``."""
        self._write(new, old, self.mark)

    def vacuum(self) -> int:
        """Delete our files that the table has not named for a week; return their number.

        The files that may have replaced them are checked first. Other files in the folder stay,
        such as another archive. Commits older than a month are deleted, too, except the newest:
        each reader and each commit lists all commits. Raises ``ArchiveRefused``.
        """
        with _explained(self.store):
            if self._newest()[0] == self._table.version():  # else it might be deleted
                self._table.cleanup_metadata()
            names = self._table.vacuum(full=True, dry_run=True)
        # Files that are gone already are named each time.
        there = self.store.list() if names else {}
        names = [name for name in names if name in there and name.startswith(f"{DAY}=")]
        days = {name.partition("/")[0] for name in names}
        for file in self._files:
            if f"{DAY}={file.day}" in days:
                check(self.store, file)
        for name in names:
            with suppress(FileNotFoundError):  # another process does the same
                self.store.delete(name)
        return len(names)

    def _write(self, new: Sequence[File], old: Sequence[File], mark: Mark, **options: Any) -> None:
        now = int(time.time() * 1000)
        actions: list[Any] = [
            AddAction(each.name, each.bytes, {DAY: each.day}, now, not old, each.statistics)
            for each in new
        ]
        actions += [RemoveAction(f.name, False, now, f.bytes, {DAY: f.day}) for f in old]
        with self._committing(mark, **options) as properties:
            self._table.create_write_transaction(
                actions, "append", self._table.schema(), [DAY], commit_properties=properties
            )
            failpoint("archive_committed")

    @contextmanager
    def _committing(self, mark: Mark, **options: Any) -> Iterator[CommitProperties]:
        before, attempt = self._table.version(), uuid4().hex
        try:
            with _explained(self.store):
                yield _properties(mark, attempt, **options)
        except CommitFailedError as error:
            self.refresh()
            if self._table.version() == before:
                raise OSError(f"{self.store.folder}: {message_of(error)}") from error
            with _explained(self.store):
                made = self._table.history(self._table.version() - before)
            # If an answer of the store was lost, delta-rs has sent the commit a second time.
            if attempt not in [commit.get(ATTEMPT) for commit in made]:
                raise ArchiveRefused(
                    f"Another process has written to {self.store.folder} meanwhile. Its commit "
                    "counts, and this process has committed nothing. Run only one archiver."
                ) from error
        self.refresh()

    def _newest(self) -> tuple[int, Mark]:
        """Return the newest version whose commit says how far the log is archived."""
        newest = next(self._marks(1), None) or next(self._marks(), None)
        if newest is not None:
            return newest
        raise ArchiveRefused(
            f"{self.store.folder} is a Delta table, but none of its commits says how far a log is "
            "archived: another program has written it, or commits were removed. Put _delta_log "
            "back from a copy, or name an empty folder, or a new one."
        )

    def _marks(self, limit: int | None = None) -> Iterator[tuple[int, Mark]]:
        """Yield the marks of the last commits, the newest first, each with its version."""
        version = -1
        while version != self._table.version():
            version, found = self._table.version(), self._table.history(limit)
            # With commits after that version the history numbers all too low: read it again.
            self._table.update_incremental()
        if not found or found[0]["version"] != version:
            raise _damaged(self.store, f"the commit of version {version} is empty")
        for commit in found:
            if MARK in commit:
                try:
                    yield commit["version"], Mark.load(commit[MARK])
                except (TypeError, DamagedCursor) as error:
                    raise _damaged(self.store, f"{commit[MARK]!r:.100}: {error}") from error

    def _require_unchanged(self, version: int) -> None:
        """Check that commits of others after a version of ours have changed no row."""
        if _paths(DeltaTable(self.store.folder, version=version)) != _paths(self._table):
            commit = next(c for c in reversed(self._table.history()) if c["version"] > version)
            raise ArchiveRefused(
                f"Another program has changed the archive {self.store.folder}: version "
                f"{commit['version']} ({commit.get('operation')!s:.50}). Only outbox_pipeline may "
                f"write it. Undo this within a week, by DeltaTable({self.store.folder!r})"
                f".restore({version}), or archive to a new folder."
            )

    def _require_ours(self) -> None:
        folder, protocol = self.store.folder, self._table.protocol()
        if self.mark.log != self.log:
            raise ArchiveRefused(
                f"{folder} is the archive of the log {self.mark.log!r:.128}, not of {self.log}. "
                "Use one folder for each log."
            )
        if (protocol.min_reader_version, protocol.min_writer_version) > _PROTOCOL:
            raise ArchiveRefused(
                f"Another program has raised the protocol of the archive {folder} to "
                f"{protocol.min_reader_version} and {protocol.min_writer_version}; this release "
                "knows 1 and 2. Put the folder back from a copy, or archive to a new one."
            )
        self._files = sorted(_files(self._table, self.store), key=lambda file: file.first)
        if (found := sum(file.rows for file in self._files)) != self.rows:
            raise _damaged(self.store, f"{found} rows, but {self.rows} by its newest commit")

    def _go_back(self, end: Offset) -> None:
        with _explained(self.store):
            for version, mark in self._marks():
                if mark.end == end.text:
                    self._table.load_as_version(version)
                    self.mark = mark
                    return self._require_ours()
        raise ArchiveRefused(
            f"No batch of the archive {self.store.folder} ends at the offset of the option end. "
            "Leave the option out, or use the end of a commit of the archive's table."
        )


def _with_day(schema: pa.Schema) -> pa.Schema:
    """Return the columns of a log and the column of the day. Raises ``ArchiveRefused``."""
    for name in schema.names:
        if name.lower() == DAY or _UNFIT.search(name):
            raise ArchiveRefused(
                f"A Delta table cannot have the log's column {name!r}: "
                f"{DAY} is the archive's own, and blanks and ,;{{}}()= are invalid. Rename it."
            )
    return schema.append(pa.field(DAY, pa.date32()))


def _properties(mark: Mark, attempt: str = "", **options: Any) -> CommitProperties:
    # Without retries a commit follows the version that was checked, or fails.
    metadata = {MARK: asdict(mark), ATTEMPT: attempt}
    return CommitProperties(custom_metadata=metadata, max_commit_retries=0, **options)


def _files(table: DeltaTable, store: Store) -> Iterator[File]:
    columns = ("path", "num_records", "size_bytes", "min.id", "max.id", "min.stream", "max.stream")
    found = pa.table(table.get_add_actions(flatten=True))
    if not found.num_rows:
        return
    for row in zip(*(found[name].to_pylist() for name in columns), strict=True):
        if not _NAME.fullmatch(row[0]) or None in row:
            raise _damaged(store, f"{row[0]!r:.200} is no file of an archive")
        yield File(*row[:5], ends={"stream": row[5:]})  # type: ignore[misc]


def _paths(table: DeltaTable) -> set[str]:
    return set(pa.table(table.get_add_actions()).column("path").to_pylist())


@contextmanager
def _explained(store: Store) -> Iterator[None]:
    try:
        yield
    except (TableNotFoundError, CommitFailedError):
        raise
    except (DeltaError, OSError) as error:
        store.require_reached(error)
        raise _damaged(store, message_of(error)) from error


def _damaged(store: Store, reason: str) -> ArchiveRefused:
    return ArchiveRefused(
        f"The archive {store.folder} is damaged: its Delta log is invalid ({reason}). Put "
        "_delta_log back from a copy, or archive to a new folder. Nothing was written."
    )
