"""A large table costs what is due, whatever statistics say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from django.db import connections

from outbox_app.models import PreparedEvent
from outbox_app.prepared import NewPrepared, keeper
from outbox_app.prepared.asking import CheckBack, SenderWorker
from outbox_app.prepared.keeper import Decision
from outbox_app.prepared.request import checked
from tests.faults.tools import on

ROWS = 20_000
#: Of the large sender: nearly all rows are decided; 300 are open, and 200 of them due.
SENDER, SMALL = "alias:large", "alias:small"


@pytest.fixture(params=["empty", "fresh"])
def statistics(request: Any, alias: str) -> None:
    postgres = connections[alias].vendor == "postgresql"
    analyze = "ANALYZE outbox_prepared" if postgres else "ANALYZE TABLE outbox_prepared"
    for name in (SENDER, SMALL):
        keeper.prepare(name, [checked(NewPrepared("s", "t", immune=0))], using=alias)
    with connections[alias].cursor() as cursor:
        if request.param == "empty" and postgres:
            cursor.execute(analyze)
        numbers = f"(SELECT seq AS i FROM seq_1_to_{ROWS}) AS numbers"
        hour = "prepared_at + INTERVAL 1 HOUR"
        id = "lpad(hex(i), 32, '0')"
        if postgres:
            numbers = f"generate_series(1, {ROWS}) AS numbers (i)"
            hour = "prepared_at + interval '1 hour'"
            id = "lpad(to_hex(i), 32, '0')::uuid"
        given = {
            "event_id": id,
            "state": "CASE WHEN i <= 300 THEN 'prepared' ELSE 'confirmed' END",
            "next_check_at": f"CASE WHEN i <= 200 THEN prepared_at WHEN i <= 300 THEN {hour} END",
            "decided_at": "CASE WHEN i > 300 THEN prepared_at END",
        }
        names = [f.column for f in PreparedEvent._meta.concrete_fields if f.name != "id"]
        values = ", ".join(given.get(name, name) for name in names)
        cursor.execute(
            f"INSERT INTO outbox_prepared ({', '.join(names)}) SELECT {values} "
            f"FROM outbox_prepared, {numbers} WHERE sender = '{SENDER}'"
        )
        if request.param == "fresh":
            cursor.execute(analyze)


class Explainer:
    """Looks at the plan of each statement that reads or updates prepared events."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if re.match(r"SELECT|UPDATE", sql) and "outbox_prepared" in sql:
            postgres = context["connection"].vendor == "postgresql"
            execute(f"EXPLAIN {postgres * '(FORMAT JSON) '}{sql}", params, many, context)
            rows = context["cursor"].fetchall()
            self.check(sql, rows)
            self.seen.append(sql)
        return execute(sql, params, many, context)

    def check(self, sql: str, rows: Any) -> None:
        if len(rows[0]) == 1:
            plan = rows[0][0] if isinstance(rows[0][0], str) else json.dumps(rows[0][0])
            assert '"Seq Scan"' not in plan, f"{sql}\n{plan}"
        else:
            assert not {row[3] for row in rows} & {"ALL", "index"}, f"{sql}\n{rows}"
            few = max(int(row[8] or 0) for row in rows) < 1000 or " LIMIT 1" in sql
            assert few, f"{sql}\n{rows}"


@on("postgres", "mariadb")
@pytest.mark.django_db
def test_each_statement_is_an_index_lookup(alias: str, statistics: None) -> None:
    explainer = Explainer()
    with connections[alias].execute_wrapper(explainer):
        assert CheckBack(using=alias)._senders() == [SENDER, SMALL]
        worker = SenderWorker(SENDER, using=alias)
        rows = worker._claim()
        assert len(rows) == 100
        worker.settle(rows[:50], {row.event_id: "in_progress" for row in rows})
        worker.expire()
        requests = [checked(NewPrepared("s", "t")) for _ in range(20)]
        keeper.prepare(SENDER, requests, using=alias)
        cancel = [Decision(row.event_id, "cancelled") for row in rows]
        keeper.decide(SENDER, cancel, by=keeper.CALL, using=alias)
    assert len(explainer.seen) >= 10
