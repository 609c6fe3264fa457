"""The columns of a log in Spark and Parquet. A project's log may have further columns.

They are the same on every database: JSON is text, message ids have hyphens, times are in UTC. A
reader of only some columns passes a schema of its own, with these types.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from .exceptions import InvalidSchema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: The schema of a log, in Spark's SQL.
SCHEMA = (
    "id bigint, txid bigint, topic string, stream string, version bigint, type string, "
    "data string, metadata string, slice int, message_id string, recorded_at timestamp"
)
#: The further columns of the log of an entity type.
ANSWERS = (
    "command_id string, command string, request_hash string, rejected boolean, response string, "
    "state string"
)
#: The tables that can be read, each with the columns that it always has.
SCHEMAS = {
    "events": SCHEMA,
    "heads": "log string, stream string, version bigint",
    "inbox": "job_id string, task string, handled_at timestamp",
}


def kinds(schema: str) -> dict[str, str]:
    return dict(column.split() for column in schema.split(", "))


#: All columns of every log, in order.
COLUMNS = tuple(kinds(SCHEMA))

#: The column that ``outbox_rebase`` changes, so that it tells nothing about a row.
REBASED = "txid"
#: The beginning of an erased version's metadata. Its data are ``{}``.
ERASED = '{"erased": '

_ARROW = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ltz": pa.timestamp("us", tz="UTC"),
}
#: Types that need another name in Spark's SQL: a setting may give ``timestamp`` no time zone.
_SPELLED = {"timestamp": "timestamp_ltz"}
#: Types that databases declare for a log's own columns, with our types. Others become text.
_DECLARED = {
    r"bool(ean)?|tinyint\(1\)": "boolean",
    r"(tiny|small|medium|big)?int(eger)?(\(\d+\))?( unsigned)?": "bigint",
    r"double( precision)?|real|float": "double",
    r"bytea|(tiny|medium|long)?blob|(var)?binary\(\d+\)": "binary",
    r"date": "date",
    r"timestamp(\(\d\))? with time zone|datetime(\(\d\))?": "timestamp",
}
_DECIMAL = re.compile(r"(?:numeric|decimal)\((\d+),\s*(\d+)\)")


def kind_of(declared: str) -> str:
    """Return our type for the type of a column that a database declares."""
    text = declared.lower()
    if (decimal := _DECIMAL.fullmatch(text)) and int(decimal[2]) <= int(decimal[1]) <= 38:
        return f"decimal({decimal[1]},{decimal[2]})"
    return next((kind for each, kind in _DECLARED.items() if re.fullmatch(each, text)), "string")


def ddl(columns: Mapping[str, str]) -> str:
    """Return the declarations of columns in Spark's SQL."""
    return ", ".join(f"{quoted(name)} {_SPELLED.get(k, k)}" for name, k in columns.items())


def quoted(name: str) -> str:
    plain = re.fullmatch(r"[a-z_][a-z0-9_]*", name, re.ASCII)
    return name if plain else "`{}`".format(name.replace("`", "``"))


def some(*names: str) -> str:
    known = kinds(f"{SCHEMA}, {ANSWERS}")
    return ddl({name: known[name] for name in names})


def arrow_types(columns: str | Mapping[str, str]) -> pa.Schema:
    types = kinds(columns) if isinstance(columns, str) else columns
    return pa.schema([(name, _arrow(kind)) for name, kind in types.items()])


def arrow_schema(schema: StructType, columns: Mapping[str, str], read: str = "events") -> pa.Schema:
    """Return the Arrow schema of the columns that a reader asks for. Raises ``InvalidSchema``."""
    fields = []
    for field in schema.fields:
        kind = field.dataType.simpleString()
        if field.name not in columns:
            raise InvalidSchema(
                f"There is no column {field.name!r} in {read}. Known: {', '.join(columns)}. Leave "
                "the schema out to read all of them."
            )
        if kind != columns[field.name]:
            expected = _SPELLED.get(columns[field.name], columns[field.name])
            raise InvalidSchema(
                f"Column {field.name} is {expected}, not {kind}. Read it so, and "
                f'cast: .withColumn("{field.name}", col("{field.name}").cast("{kind}")).'
            )
        fields.append(pa.field(field.name, _arrow(kind), nullable=field.nullable))
    if not fields:
        raise InvalidSchema(f"The schema has no column. Columns of {read}: {', '.join(columns)}.")
    return pa.schema(fields)


def _arrow(kind: str) -> pa.DataType:
    decimal = re.fullmatch(r"decimal\((\d+),(\d+)\)", kind)
    return pa.decimal128(int(decimal[1]), int(decimal[2])) if decimal else _ARROW[kind]
