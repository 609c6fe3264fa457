"""Removing an app: ``migrate LABEL zero`` refuses while its tables have rows found nowhere else.

The operation is the last one of a migration, so it is the first one of its way back, and nothing
has changed when it refuses. ``--fake`` and ``sqlmigrate`` do not ask it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandError
from django.db import router
from django.db.migrations.operations.base import Operation

from ..database.tables import Tables
from .counting import counted, shown_count


class KeepRows(Operation):
    """Let the migration be unapplied only if there are no rows of these models.

    Args:
        rows: By name of a model of the migration's app, the conditions of rows that are kept.
        advice: What a person does with the rows before they remove the tables.
    """

    reversible = True
    reduces_to_sql = False

    def __init__(self, rows: Mapping[str, Mapping[str, Any]], advice: str) -> None:
        self.rows, self.advice = rows, advice

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change no model."""

    def database_forwards(self, *args: Any) -> None:
        """Change no table."""

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        """Refuse if there are rows.

        Raises:
            CommandError: There are. The message says which, and how to go on.
        """
        connection = schema_editor.connection
        there = Tables(connection)
        found, tables = [], []
        for name, conditions in self.rows.items():
            model = from_state.apps.get_model(app_label, name)
            options = model._meta
            if options.db_table not in there or not router.allow_migrate_model(
                connection.alias, model
            ):
                continue
            if count := counted(model._base_manager.using(connection.alias).filter(**conditions)):
                named = options.verbose_name if count == 1 else options.verbose_name_plural
                found.append(f"{shown_count(count)} {named}")
                tables.append(f"DELETE FROM {options.db_table};")
        if found:
            raise CommandError(
                f"The tables of {app_label} on {connection.alias!r} stay as they are: they hold "
                f"{' and '.join(found)}, found nowhere else. {self.advice} To lose the rows, "
                f"delete them ({' '.join(tables)}), and repeat the command."
            )

    def describe(self) -> str:
        return f"Keep rows of {', '.join(self.rows)}"
