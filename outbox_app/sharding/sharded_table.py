"""Splits a table into partitions of its database, in a migration.

An empty table is split at once. The rows of a full one are copied, and no session can use the table
meanwhile. If the migration is killed at any point, the table is either as it was or split: migrate
again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.db import models
from django.db.migrations.operations.base import Operation
from django.db.models.fields import AutoFieldMixin

from ..exceptions import InvalidArgument
from ..ids import SnowflakeField
from ..ids.generator import SHARDS
from .partitions import MOST_SHARDS, MysqlPartitions, Partitions, PostgresPartitions


class TableOperation(Operation):
    """Changes the table of a model, in transactions of its own; does nothing on SQLite."""

    atomic = False
    reduces_to_sql = False
    model: str
    forwards: Callable[[Any, Any], None]
    backwards: Callable[[Any, Any], None]

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Nothing to do: the model does not change."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        self._run(self.forwards, app_label, schema_editor.connection, to_state)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        self._run(self.backwards, app_label, schema_editor.connection, from_state)

    def _run(
        self, step: Callable[[Any, Any], None], app_label: str, connection: Any, state: Any
    ) -> None:
        label, _, name = self.model.rpartition(".")
        model = state.apps.get_model(label or app_label, name)
        if not self.allow_migrate_model(connection.alias, model) or connection.vendor == "sqlite":
            return
        if connection.in_atomic_block:
            raise InvalidArgument(
                f"{type(self).__name__} has its own transaction: give its migration atomic = False."
            )
        step(model, connection)


class ShardedTable(TableOperation):
    """Split the table of a model into partitions, by the hash of a column.

    Args:
        model: The name of the model, or ``"app_label.Name"`` for another app.
        by: The field by which most look-ups filter: each of these reads one partition.
        shards: The number of partitions, 2 to 1024.
        giving_up: Names of fields or constraints that need not stay unique in the database.
    """

    reversible = False

    def __init__(
        self, model: str, *, by: str, shards: int = SHARDS, giving_up: Sequence[str] = ()
    ) -> None:
        if type(shards) is not int or not 2 <= shards <= MOST_SHARDS:
            raise InvalidArgument(
                f"shards must be a whole number from 2 to {MOST_SHARDS}; it is {shards!r}."
            )
        if isinstance(giving_up, str):
            raise InvalidArgument(f"giving_up must be a list of names; it is {giving_up!r}.")
        self.model, self.by, self.shards, self.giving_up = model, by, shards, list(giving_up)

    def describe(self) -> str:
        return f"Split the table of {self.model} into {self.shards} partitions by {self.by}"

    def forwards(self, model: Any, connection: Any) -> None:
        kind = {"postgresql": PostgresPartitions, "mysql": MysqlPartitions}[connection.vendor]
        partitions = kind(model, field_of(model, self.by), self.shards, connection)
        with partitions.alone():
            if not partitions.is_split():
                self._check(model, partitions)
                partitions.split()

    def _check(self, model: Any, partitions: Partitions) -> None:
        """Refuse a split that would break something; note the unique indexes that become plain."""
        meta = model._meta
        generated = isinstance(meta.pk, AutoFieldMixin | SnowflakeField)
        left, broken = set(self.giving_up), []
        for name, columns, primary in partitions.unique_indexes():
            fields = [field.name for field in meta.concrete_fields if [field.column] == columns]
            names = {name, *fields}
            if partitions.by in columns or (primary and generated):
                continue
            if names & left:
                partitions.given_up.add(name)
                left -= names
            else:
                broken.append(f"{name} ({', '.join(map(str, columns))})")
        if broken:
            raise InvalidArgument(
                f"{meta.db_table} cannot be split by {partitions.by}: unique constraints of a "
                "partitioned table must contain this column, so it would lose "
                f"{'; '.join(broken)}. Split it by another column, or name these in giving_up. "
                "A KeyIndex can keep a value unique."
            )
        if left:
            raise InvalidArgument(
                f"giving_up names {', '.join(sorted(left))}, but a split by {partitions.by} takes "
                f"no such unique constraint from {meta.db_table}."
            )
        if obstacles := partitions.obstacles():
            raise InvalidArgument(
                f"{meta.db_table} cannot be split: {', '.join(obstacles)} would be lost or "
                "broken. Remove them first; triggers and policies can be created again afterwards."
            )


def field_of(model: Any, name: str) -> Any:
    """Return a field by which a table can be split. Raises ``InvalidArgument``."""
    label, fields = model._meta.label, {each.name: each for each in model._meta.concrete_fields}
    if name not in fields:
        text = f"{label} has no column {name!r}; it has {', '.join(fields)}."
    elif fields[name].null:
        text = f"{label}.{name} may be null: a table is split, and looked up, by NOT NULL columns."
    elif isinstance(model._meta.pk, models.CompositePrimaryKey):
        text = f"{label} has a primary key of several columns; a table is split that has one."
    else:
        return fields[name]
    raise InvalidArgument(text)
