"""The contract of a database: statements for the driver, which plans; Arrow batches for the tasks.

Each process has its own connections, in autocommit. Connecting waits for a database that is
unavailable. Nothing else is retried here, because rows may have been yielded already. Messages
never contain a password. ``databases`` has a module for each vendor.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pkgutil import resolve_name
from typing import Any, ClassVar, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from .exceptions import InvalidSchema, NoSpark, Unreachable
from .options import EVENTS, Options
from .schema import COLUMNS, SCHEMA, SCHEMAS, kind_of, kinds

T = TypeVar("T")

#: Rows that become columns at once: few enough to stay in the processor's cache meanwhile …
ROWS = 2_000
#: … and about how many bytes of large values: Spark holds a whole batch in memory.
BYTES = 4_000_000
#: Rows fetched at once.
FETCHED = 50

_CLASSES = {
    "postgresql": "outbox_app.pipeline.databases.postgres:Postgres",
    "mysql": "outbox_app.pipeline.databases.mysql:Mysql",
    "sqlite": "outbox_app.pipeline.databases.sqlite:Sqlite",
}


def connect(options: Options) -> Database:
    return database_class(options)(options)


def database_class(options: Options) -> type[Database]:
    try:
        kind: type[Database] = resolve_name(_CLASSES[options.vendor])
    except ImportError as error:
        raise NoSpark(
            f"{error.name}, with which Spark reads {options.vendor}, cannot be imported: pip "
            "install 'outbox-app[spark]', for MySQL and MariaDB 'outbox-app[mysql]', too."
        ) from error
    return kind


def column_types(options: Options) -> dict[str, str]:
    """Return the readable columns with their types. A project's own log is queried for them."""
    if options.read != "events" or options.log == EVENTS:
        return kinds(SCHEMAS[options.read])
    with closing(connect(options)) as database:
        return database.schema()


class Database(ABC):
    #: The class that scans the log. It is also a window.
    scan: ClassVar[Any]
    #: The exceptions if a statement fails or the connection is lost.
    errors: ClassVar[tuple[type[Exception], ...]]

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def run(self, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement, with ``%s`` parameters, and return its rows."""

    @abstractmethod
    def batches(self, sql: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Run a query without parameters and yield its rows as batches with this schema."""

    @abstractmethod
    def literal(self, text: str) -> str:
        """Return a text as an SQL literal."""

    @abstractmethod
    def columns(self, table: str) -> dict[str, str]:
        """Return the columns of a table in order, each with the type that the database declares.

        Generated columns are left out. If there is no such table, the result is empty.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections."""

    def dirty(self, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Run a statement at READ UNCOMMITTED, if the vendor's window needs that."""
        raise NotImplementedError

    def schema(self) -> dict[str, str]:
        """Return the types of the log's columns: those of every log, and then its own."""
        found = self.columns(self.options.log)
        own = {name: kind_of(text) for name, text in found.items() if name not in COLUMNS}
        return kinds(SCHEMA) | own

    def identity(self) -> str:
        """Return an identifier of this database; empty if the vendor has none."""
        return ""

    def column(self, name: str) -> str:
        """Return a column of the log as SQL, in the type of ``schema``."""
        return name if name in COLUMNS else self.quoted(name)

    def quoted(self, name: str) -> str:
        quote = self.scan.quote
        return f"{quote}{name.replace(quote, quote * 2)}{quote}"

    def has(self, position: int) -> bool:
        """Return whether the log has a position. If so, no higher position was pruned."""
        sql = f"SELECT 1 FROM {self.quoted(self.options.log)} WHERE id = {position}"
        return bool(self.run(sql))

    def log(self) -> Any:
        """Return the scan of the log that the options name."""
        options = self.options
        settle = float("inf") if options.tombstones else options.settle_seconds
        return self.scan(options.log, self.run, dirty=self.dirty, settle=settle)


def connected(
    options: Options,
    connect: Callable[[], T],
    errors: tuple[type[Exception], ...],
    hopeless: Callable[[Exception], object],
) -> T:
    """Connect; wait for a database that is unavailable. Raises ``Unreachable``."""
    started, pause = time.monotonic(), 0.1
    while True:
        try:
            return connect()
        except errors as error:
            away = time.monotonic() - started + pause
            if away > options.connect_timeout or hopeless(error):
                text, secret = str(error).strip(), options.secret()
                if secret:
                    text = text.replace(secret, "****")
                raise Unreachable(f"Connecting to {options.url} failed: {text}") from None
        time.sleep(pause)
        pause = min(pause * 2, 2.0)


def batches_of(
    cursor: Any, schema: pa.Schema, zone: str, kind: pa.DataType | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a cursor in batches. ``kind`` is the type that all values have, if any."""
    large = {"data", "metadata"}
    if kind is not None:  # all values are bytes, and have a length
        large |= set(schema.names) - set(COLUMNS)
    while rows := _fetched(cursor, [n for n, name in enumerate(schema.names) if name in large]):
        columns = [pa.array([row[n] for row in rows], kind) for n in range(len(schema))]
        yield conformed(pa.RecordBatch.from_arrays(columns, names=schema.names), schema, zone)


def _fetched(cursor: Any, large: Sequence[int]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    size = 0
    while len(rows) < ROWS and size < BYTES and (more := cursor.fetchmany(min(FETCHED, ROWS))):
        rows += more
        for n in large:
            size += sum([len(row[n] or "") for row in more])
    return rows


def conformed(batch: pa.RecordBatch, schema: pa.Schema, zone: str = "UTC") -> pa.RecordBatch:
    """Return a batch with exactly these types; naive times are in ``zone``.

    Raises ``InvalidSchema`` if a value does not fit the type of its column.
    """
    columns = [_converted(batch.column(n), field, zone) for n, field in enumerate(schema)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _converted(column: Any, field: pa.Field, zone: str) -> Any:
    kind = field.type
    is_number = pa.types.is_decimal(kind) and pa.types.is_integer(column.type)
    if is_number or (pa.types.is_binary(column.type) and not pa.types.is_binary(kind)):
        column = _cast(column, field.with_type(pa.string()))
    if field.name == "message_id" and len(column) and len(column[0].as_py() or "") == 32:
        cuts = ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
        pieces = [pc.utf8_slice_codeunits(column, a, b) for a, b in cuts]
        column = pc.binary_join_element_wise(*pieces, "-")
    if pa.types.is_date32(kind) and pa.types.is_integer(column.type):
        column = column.cast(pa.int32())
    if pa.types.is_timestamp(kind) and not pa.types.is_timestamp(column.type):
        column = _cast(column, field.with_type(pa.timestamp("us")))
        if zone != "UTC":  # an hour that occurs twice is ambiguous
            column = pc.assume_timezone(column, zone, ambiguous="earliest", nonexistent="earliest")
    return column if column.type == kind else _cast(column, field)


def _cast(column: Any, field: pa.Field) -> Any:
    try:
        return column.cast(field.type)
    except pa.ArrowInvalid as error:
        if not pa.types.is_temporal(field.type):
            raise InvalidSchema(
                f"Column {field.name} has a value that is no {field.type}: {error}. Correct it, or "
                "give the column a type that holds it."
            ) from error
        # MySQL stores dates that do not exist, such as 0000-00-00. Django reads them as None.
        there = pc.if_else(pc.match_substring_regex(column, "^0000-|-00"), None, column)
        return there.cast(field.type)
