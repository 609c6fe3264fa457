"""The columns of a log as Spark and Parquet see them.

The same on every database: JSON is its text, ids of messages are written with hyphens, times are in
UTC. Whoever reads some columns only names them in a schema of their own, with these types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from ..exceptions import InvalidSchema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: Column, type in Spark's SQL, type in Arrow.
_COLUMNS = (
    ("id", "bigint", pa.int64()),
    ("txid", "bigint", pa.int64()),
    ("topic", "string", pa.string()),
    ("stream", "string", pa.string()),
    ("version", "bigint", pa.int64()),
    ("type", "string", pa.string()),
    ("data", "string", pa.string()),
    ("metadata", "string", pa.string()),
    ("slice", "int", pa.int32()),
    ("message_id", "string", pa.string()),
    ("recorded_at", "timestamp", pa.timestamp("us", tz="UTC")),
)

#: All columns of a log, in order.
COLUMNS = tuple(name for name, _, _ in _COLUMNS)
#: The schema of a log, as Spark's SQL writes it.
SCHEMA = ", ".join(f"{name} {kind}" for name, kind, _ in _COLUMNS)
#: The schema of ``outbox_stream``: the latest version of each stream.
HEADS_SCHEMA = "log string, stream string, version bigint"

_SPARK = {name: kind for name, kind, _ in _COLUMNS} | {"log": "string"}
_ARROW = {name: kind for name, _, kind in _COLUMNS} | {"log": pa.string()}


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema of the columns that a reader asks for.

    Args:
        schema: Some columns of a log, in any order.

    Raises:
        InvalidSchema: A column does not exist, or has another type.
    """
    fields = []
    for field in schema.fields:
        kind = field.dataType.simpleString()
        if field.name not in _SPARK:
            raise InvalidSchema(
                f"A log has no column {field.name!r}. Known: {', '.join(COLUMNS)}. Leave the "
                "schema out to read all of them."
            )
        if kind != _SPARK[field.name]:
            raise InvalidSchema(
                f"Column {field.name} is {_SPARK[field.name]}, not {kind}. Read it as that, and "
                f'cast: .withColumn("{field.name}", col("{field.name}").cast("{kind}")).'
            )
        fields.append(pa.field(field.name, _ARROW[field.name], nullable=field.nullable))
    return pa.schema(fields)
