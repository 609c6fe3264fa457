"""The id of the transaction that writes a row: what a window of the log is made of.

The system column ``xmin`` will not do: under a savepoint it is the subtransaction's id. The ids are
64 bits wide and never come again inside one PostgreSQL cluster. Migrations refer to this class by
path: it stays here.
"""

from __future__ import annotations

from typing import Any

from django.db.models import BigIntegerField, Func


class CurrentTransaction(Func):
    """``pg_current_xact_id()`` as a number on PostgreSQL, 0 where windows need no such thing."""

    template = "0"
    arity = 0
    output_field = BigIntegerField()

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Through text: there is no cast from ``xid8`` to ``bigint`` before PostgreSQL 18."""
        template = "(pg_current_xact_id()::text::bigint)"
        return self.as_sql(compiler, connection, template=template, **context)
