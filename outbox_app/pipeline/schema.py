"""The columns of a log as Spark and Parquet see them; of an entity type's log there are more.

The same on every database: JSON is its text, ids of messages are written with hyphens, times are in
UTC. A reader of some columns names them in a schema of its own, with these types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from ..exceptions import InvalidSchema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

#: The schema of a log, as Spark's SQL writes it.
SCHEMA = (
    "id bigint, txid bigint, topic string, stream string, version bigint, type string, "
    "data string, metadata string, slice int, message_id string, recorded_at timestamp"
)
#: All columns of a log, in order.
COLUMNS = tuple(column.split()[0] for column in SCHEMA.split(", "))
#: What the log of an entity type has besides.
ANSWERS = (
    "command_id string, command string, request_hash string, rejected boolean, response string, "
    "state string"
)
ANSWER_COLUMNS = {column.split()[0] for column in ANSWERS.split(", ")}
#: What can be read, and its schema.
SCHEMAS = {
    "events": SCHEMA,
    "versions": f"{SCHEMA}, {ANSWERS}",
    "heads": "log string, stream string, version bigint",
    "inbox": "job_id string, task string, handled_at timestamp",
}

_ARROW = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", tz="UTC"),
}


def some(*names: str) -> str:
    kinds = dict(column.split() for column in SCHEMAS["versions"].split(", "))
    return ", ".join(f"{name} {kinds[name]}" for name in names)


def arrow_types(schema: str) -> pa.Schema:
    columns = (column.split() for column in schema.split(", "))
    return pa.schema([(name, _ARROW[kind]) for name, kind in columns])


def arrow_schema(schema: StructType, read: str = "events") -> pa.Schema:
    """Return the Arrow schema of the columns that a reader asks for. Raises ``InvalidSchema``."""
    kinds = dict(column.split() for column in SCHEMAS[read].split(", "))
    fields = []
    for field in schema.fields:
        kind = field.dataType.simpleString()
        if field.name not in kinds:
            raise InvalidSchema(
                f"There is no column {field.name!r} in {read}. Known: {', '.join(kinds)}. Leave "
                "the schema out to read all of them."
            )
        if kind != kinds[field.name]:
            raise InvalidSchema(
                f"Column {field.name} is {kinds[field.name]}, not {kind}. Read it as that, and "
                f'cast: .withColumn("{field.name}", col("{field.name}").cast("{kind}")).'
            )
        fields.append(pa.field(field.name, _ARROW[kind], nullable=field.nullable))
    if not fields:
        raise InvalidSchema(f"The schema has no column. Columns of {read}: {', '.join(kinds)}.")
    return pa.schema(fields)
