"""The id of the transaction that writes a row. Windows of the log are bounded by such ids.

The system column ``xmin`` cannot be used: under a savepoint it is the subtransaction's id. The ids
have 64 bits and are never reused inside one PostgreSQL cluster. Migrations refer to this class by
path: do not move it.
"""

from __future__ import annotations

from typing import Any

from django.db.models import BigIntegerField, Func


class CurrentTransaction(Func):
    """``pg_current_xact_id()`` as a number on PostgreSQL; 0 elsewhere, where no window needs it."""

    template = "0"
    arity = 0
    output_field = BigIntegerField()

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Cast through text: before PostgreSQL 18 there is no cast from ``xid8`` to ``bigint``."""
        template = "(pg_current_xact_id()::text::bigint)"
        return self.as_sql(compiler, connection, template=template, **context)
