"""Whether alias and tables are there: said before the work begins, with what to do.

A database that is away is no answer: drainers wait for it, and other commands fail by themselves.
"""

from __future__ import annotations

import django.db
from django.db import connections

from ..exceptions import InvalidArgument, NotMigrated
from ..models import StagedJob


def require_alias(using: str) -> None:
    """Check that the project has an alias.

    Raises:
        InvalidArgument: It has not.
    """
    if using not in connections:
        known = ", ".join(connections)
        raise InvalidArgument(f"--database {using!r}: no such alias. Known: {known}.")


def require_tables(using: str) -> None:
    """Check that the outbox's tables exist on an alias.

    Raises:
        NotMigrated: They do not.
    """
    connection = connections[using]
    try:
        tables = connection.introspection.table_names()
    except django.db.Error:
        connection.close()
        return
    if StagedJob._meta.db_table not in tables:
        raise NotMigrated(
            f"Database {using!r} has no table {StagedJob._meta.db_table}. Run: "
            f"manage.py migrate outbox_app --database {using}"
        )
