"""A shadow table: the columns of another table, without its indexes, constraints and foreign keys.

It exists while the block runs. The next call removes the table that a killed process has left. It
also removes the table of a process that is still running, whose next statement then fails.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4
from zlib import crc32

from django.apps.registry import Apps
from django.db import connections, models


@contextmanager
def shadow_table(model: type[models.Model], *, using: str) -> Iterator[type[models.Model]]:
    connection, table = connections[using], model._meta.db_table
    name = table.encode()  # PostgreSQL cuts names at 63 bytes
    prefix = f"{name[:32].decode(errors='ignore')}_{crc32(name):08x}__rebuild_"
    # Tables of killed rebuilds. A rebuild that is still running ends with an error.
    for left in connection.introspection.table_names():
        if left.lower().startswith(prefix.lower()):  # MySQL may list names in lower case
            _drop(left, using=using)
    shadow = _shadow_model(model, f"{prefix}{uuid4().hex[:8]}", _collations(table, using=using))
    with connection.schema_editor() as editor:
        editor.create_model(shadow)
    try:
        yield shadow
    finally:
        _drop(shadow._meta.db_table, using=using)


def _collations(table: str, *, using: str) -> dict[str, str]:
    """Return the collations of a table's columns on MySQL: they may not be those of the model."""
    if connections[using].vendor != "mysql":
        return {}
    with connections[using].cursor() as cursor:
        cursor.execute(
            "SELECT column_name, collation_name FROM information_schema.columns WHERE table_schema "
            "= DATABASE() AND table_name = %s AND collation_name IS NOT NULL",
            [table],
        )
        return dict(cursor.fetchall())


def _drop(table: str, *, using: str) -> None:
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(f"DROP TABLE IF EXISTS {connection.ops.quote_name(table)}")


def _shadow_model(
    model: type[models.Model], table: str, collations: dict[str, str]
) -> type[models.Model]:
    body: dict[str, Any] = {}
    for field in model._meta.local_concrete_fields:
        twin: Any = copy.deepcopy(field)
        for name in ("cached_col", "path_infos", "reverse_path_infos", "related_fields"):
            twin.__dict__.pop(name, None)  # they refer to the other table
        twin.db_index = False
        twin._unique = field.primary_key
        if isinstance(field, models.CharField | models.TextField):
            twin.db_collation = collations.get(str(field.column))
        if field.is_relation:
            twin.db_constraint = False
            twin.remote_field.related_name = "+"
        body[field.name] = twin
    options = {"app_label": model._meta.app_label, "db_table": table, "apps": Apps()}
    body |= {"Meta": type("Meta", (), options), "__module__": model.__module__}
    return type(f"{model.__name__}Shadow", (models.Model,), body)
