"""Parquet files of an archive: writes them by day, reads them with checks, and compares rows.

The name of a file ends with the hash of its bytes, so a file can be checked as long as the table
names it. A reader that bases decisions on rows reads the whole file and compares the hash; other
readers, of any engine, have the checksum of each page.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from .exceptions import ArchiveRefused, InvalidSchema
from .store import Store

#: The column by which the table is partitioned: the day of ``recorded_at`` in UTC.
DAY = "recorded_date"
#: Rows of a row group, which a reader skips or reads as a whole …
ROW_GROUP = 100_000
#: … and its size in memory, in bytes.
ROW_GROUP_BYTES = 64 * 2**20
#: Columns in which almost no value occurs twice: a dictionary would be useless.
_UNIQUE = ("id", "data", "message_id")


@dataclass(frozen=True, slots=True)
class File:
    name: str
    rows: int
    bytes: int
    #: The first and last position in the file.
    first: int
    last: int
    #: The least and greatest values of columns, by which other readers skip files.
    ends: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def day(self) -> str:
        return self.name.partition("/")[0].removeprefix(f"{DAY}=")

    @property
    def digest(self) -> str:
        return self.name.removesuffix(".parquet").rpartition("-")[2]

    @property
    def statistics(self) -> str:
        """The statistics of the file in the form of a Delta log, as JSON."""
        statistics = {
            "numRecords": self.rows,
            "minValues": {name: ends[0] for name, ends in self.ends.items()},
            "maxValues": {name: ends[1] for name, ends in self.ends.items()},
            "nullCount": dict.fromkeys(self.ends, 0),
        }
        return json.dumps(statistics, default=lambda time: time.isoformat(timespec="microseconds"))


def write_days(
    batches: Iterable[pa.RecordBatch], store: Store, prefix: str, schema: pa.Schema
) -> list[File]:
    table, files = pa.Table.from_batches(batches, schema), []
    years = pc.year(table["recorded_at"])
    has_day = pc.and_(pc.greater(years, 0), pc.less(years, 10_000)).fill_null(False)
    if (odd := pc.index(has_day, False).as_py()) >= 0:
        raise InvalidSchema(
            "Column recorded_at has a value that is not a time in years 1 to 9999, at position "
            f"{table['id'][odd]}. Correct it."
        )
    days = table["recorded_at"].cast(pa.date32())
    found = pc.unique(days)
    for day in found:
        rows = table if len(found) == 1 else table.filter(pc.equal(days, day))
        files.append(_written(rows, store, f"{DAY}={day.as_py()}/{prefix}"))
    return files


def _written(rows: pa.Table, store: Store, prefix: str) -> File:
    """Write a file as a whole, under a name that ends with the hash of its bytes."""
    buffer = io.BytesIO()
    parquet.write_table(
        rows,
        buffer,
        row_group_size=min(ROW_GROUP, ROW_GROUP_BYTES * rows.num_rows // rows.nbytes + 1),
        compression="zstd",
        write_page_checksum=True,
        use_dictionary=[name for name in rows.schema.names if name not in _UNIQUE],
    )
    content = buffer.getvalue()
    name = f"{prefix}-{hashlib.sha256(content).hexdigest()[:32]}.parquet"
    store.write(name, content)
    found = {each: pc.min_max(rows[each]).as_py() for each in ("id", "recorded_at", "stream")}
    ends = {each: (found[each]["min"], found[each]["max"]) for each in found}
    return File(name, rows.num_rows, len(content), *ends["id"], ends)


def read_checked(store: Store, file: File, schema: pa.Schema | None = None) -> pa.Table:
    """Return the rows of a file. Raises ``ArchiveRefused`` if its bytes have changed."""
    try:
        content = store.read(file.name)
    except FileNotFoundError:
        content = b""
    if not hashlib.sha256(content).hexdigest().startswith(file.digest):
        raise damaged(store, file)
    return parquet.read_table(io.BytesIO(content), schema=schema)


def read_all(store: Store, files: Iterable[File], schema: pa.Schema) -> pa.Table:
    return pa.concat_tables(
        [schema.empty_table(), *(read_checked(store, each, schema) for each in files)]
    )


def read_batches(store: Store, file: File, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the position and the columns, if the file has them. Raises ``ArchiveRefused``."""
    try:
        with store.open(file.name) as opened:
            reader = parquet.ParquetFile(opened, page_checksum_verification=True)
            there = set(reader.schema_arrow.names)
            names = [name for name in dict.fromkeys([*columns, "id"]) if name in there]
            for group in range(reader.num_row_groups):  # else a batch may span groups
                yield from reader.iter_batches(row_groups=[group], columns=names)
    except (pa.ArrowInvalid, OSError):
        read_checked(store, file)
        raise  # the file is intact, so its transfer failed


def read_stream(
    store: Store, files: Iterable[File], columns: Sequence[str], name: str
) -> list[dict[str, Any]]:
    """Return the rows of a stream, by position. Files that cannot have any are not opened.

    Raises ``ArchiveRefused``.
    """
    rows: list[dict[str, Any]] = []
    for file in files:
        first, last = file.ends["stream"]
        if first <= name <= last:
            for batch in read_batches(store, file, columns):
                rows += batch.filter(pc.equal(batch["stream"], name)).to_pylist()
    return sorted(rows, key=itemgetter("id"))


def damaged(store: Store, file: File) -> ArchiveRefused:
    return ArchiveRefused(
        f"The archive {store.folder} is damaged: {file.name} is missing, or not as it was written "
        f"({file.bytes} bytes, sha256 {file.digest}…). Put it back from a copy. The file has "
        f"positions {file.first} to {file.last}: as long as the log has them, you can archive to "
        "a new folder instead."
    )


def first_difference(one: pa.Table, other: pa.Table) -> int | None:
    """Return the lowest position at which two sets of rows differ; None if they are equal."""
    if not (_is_sorted(one) and _is_sorted(other)):
        one, other = (table.cast(_large(table.schema)).sort_by("id") for table in (one, other))
    if one.equals(other):
        return None
    for left, right in zip_longest(_rows(one), _rows(other)):
        if left != right:
            return min(int(row["id"]) for row in (left, right) if row)
    return None  # the rows are equal; the tables were not, because of NaN


def _is_sorted(table: pa.Table) -> bool:
    ids = table.column("id")
    return bool(pc.all(pc.less(ids.slice(0, max(len(ids) - 1, 0)), ids.slice(1))).as_py())


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=1000):
        for row in batch.to_pylist():
            # NaN equals nothing, but dictionaries take values that are the same object for equal.
            yield {n: value if value == value else math.nan for n, value in row.items()}


def _large(schema: pa.Schema) -> pa.Schema:
    """Return a schema without types that end at 2 GiB a column: sorting copies the columns."""
    larger = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    return pa.schema([(each.name, larger.get(each.type, each.type)) for each in schema])
