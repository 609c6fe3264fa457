"""Compares rows of a log with those of its archive, value by value, before they are deleted.

Rows are equal if all columns are that both have, except ``txid``, which ``outbox_rebase`` changes.
Of an erased version, the columns that an erasure empties are not compared.
Each file is checked as a whole before a row of it counts. Memory is bounded: only parts of files
that have some of the rows are decoded, and few of these parts are kept for the next rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from ..parquet import File, check, opened
from ..schema import ERASED, REBASED, arrow_types

if TYPE_CHECKING:
    from ..table import Archive

#: The most bytes of decoded rows that are kept. One part of a file is kept in any case.
MEMORY = 128 * 2**20
#: The columns that an erasure empties.
EMPTIED = {"data", "metadata", "request_hash", "response", "state"}
#: How many columns of a row that differs are named.
NAMED = 3


class ArchivedRows:
    """The rows of an archive. Ask for them in the order of their positions."""

    def __init__(self, archive: Archive) -> None:
        self._store = archive.store
        self._files = archive.files()
        #: Of the files that were reached and are not passed: the first and last position of parts.
        self._parts: dict[File, list[tuple[int, int]]] = {}
        #: Parts of files by file, number, and whether all columns were read; the latest at the end.
        self._kept: dict[tuple[str, int, bool], pa.Table] = {}

    def of(self, ids: pa.Array) -> Iterator[pa.Table]:
        """Yield the rows with these positions, those of each part of a file together.

        Raises ``ArchiveRefused``, ``OSError``.
        """
        first, last = pc.min(ids).as_py(), pc.max(ids).as_py()
        self._reach(first, last)
        for file, parts in self._parts.items():
            for number, (low, high) in enumerate(parts):
                if low <= last and high >= first:
                    wanted = pc.is_in(self._read(file, number, ["id"])["id"], value_set=ids)
                    if pc.any(wanted).as_py():
                        yield self._read(file, number).filter(wanted)

    def _reach(self, first: int, last: int) -> None:
        self._parts = {file: parts for file, parts in self._parts.items() if file.last >= first}
        while self._files and self._files[0].first <= last:
            file = self._files.pop(0)
            if file.last >= first:
                check(self._store, file)
                with opened(self._store, file) as reader:
                    self._parts[file] = list(_ends(reader.metadata, file))

    def _read(self, file: File, number: int, columns: list[str] | None = None) -> pa.Table:
        key = (file.name, number, columns is None)
        table = self._kept.pop(key, None)
        if table is None:
            with opened(self._store, file) as reader:
                table = reader.read_row_group(number, columns=columns)
        self._kept[key] = table
        while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > MEMORY:
            del self._kept[next(iter(self._kept))]
        return table


def _ends(metadata: Any, file: File) -> Iterator[tuple[int, int]]:
    place = metadata.schema.names.index("id")
    for number in range(metadata.num_row_groups):
        ends = metadata.row_group(number).column(place).statistics
        yield (ends.min, ends.max) if ends and ends.has_min_max else (file.first, file.last)


def compared(columns: Mapping[str, str], archived: pa.Schema) -> tuple[pa.Schema, list[str]]:
    """Return what is compared of the columns of a log, and the archive's other columns, with why.

    ``columns`` are those of ``Database.schema``.
    """
    logged = arrow_types(columns)
    fields, left_out = [], []
    for each in archived:
        place = logged.get_field_index(each.name)
        if place < 0:
            left_out.append(f"{each.name}, which the log has no more")
        elif logged.field(place).type != each.type:
            left_out.append(f"{each.name}, which was {each.type}")
        elif each.name != REBASED:
            fields.append(each)
    return pa.schema(fields), left_out


def compare(logged: pa.RecordBatch, archived: pa.Table) -> tuple[list[int], dict[int, str]]:
    """Return the positions of equal rows, and for other positions in what the rows differ.

    All positions of ``archived`` must be in ``logged``.
    """
    here = logged.take(pc.index_in(archived["id"].combine_chunks(), value_set=logged["id"]))
    erased = pc.and_(pc.equal(here["data"], "{}"), pc.starts_with(here["metadata"], ERASED))
    there = set(archived.schema.names)
    same = {}
    for name in here.schema.names:
        if name in there:
            equal = _equal(here[name], archived[name].combine_chunks())
            same[name] = pc.or_(equal, erased) if name in EMPTIED else equal
    alike = reduce(pc.and_, same.values())
    differing = {}
    for row in pc.indices_nonzero(pc.invert(alike)).to_pylist():
        names = [name for name, each in same.items() if not each[row].as_py()]
        texts = [f"{n} ({_digest(here[n][row])}, archived {_digest(archived[n][row])})"
                 for n in names[:NAMED]]  # fmt: skip
        more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
        id = archived["id"][row].as_py()
        differing[id] = f"differs from the archived row in {', '.join(texts + more)}"
    return archived["id"].filter(alike).to_pylist(), differing


def _equal(one: pa.Array, other: pa.Array) -> pa.Array:
    equal = pc.equal(one, other).fill_null(False)
    if pa.types.is_floating(one.type):
        equal = pc.or_(equal, pc.and_(pc.is_nan(one), pc.is_nan(other)).fill_null(False))
    return pc.or_(equal, pc.and_(pc.is_null(one), pc.is_null(other)))


def _digest(value: pa.Scalar) -> str:
    """Return a digest of a value: values may be personal, and messages are logged."""
    if not value.is_valid:
        return "NULL"
    return hashlib.sha256(str(value.as_py()).encode()).hexdigest()[:12]
