"""In a large table only rows that are due are read, with any statistics."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connections
from django.utils import timezone

from outbox_app.prepared import NewPrepared, keeper
from outbox_app.prepared.checking_back import CheckBack, SenderWorker
from outbox_app.prepared.models import PreparedEvent
from outbox_app.prepared.request import checked
from tests.faults.tools import on
from tests.mysql import explain, numbers, plan_of

from .conftest import FULL

ROWS = 1_000_000 if FULL else 20_000
#: Of the large sender: nearly all rows are decided; 300 are open, and 200 of them due.
LARGE, SMALL = "alias:large", "alias:small"
#: Rows that the server makes: numbers, ids, and what is the same in each.
NUMBERS = {
    "postgresql": (f"generate_series(300, {ROWS}) AS numbers (n)", "gen_random_uuid()"),
    "mysql": (f"{numbers(300, ROWS, 'n')} AS numbers", "REPLACE(UUID(), '-', '')"),
}


@pytest.fixture(params=["empty", "fresh"])
def statistics(request: Any, alias: str) -> None:
    connection = connections[alias]
    postgres = connection.vendor == "postgresql"
    analyze = "ANALYZE outbox_prepared" if postgres else "ANALYZE TABLE outbox_prepared"
    now = timezone.now() - timedelta(minutes=1)
    times = {"prepared_at": now, "decide_by": now + timedelta(days=1)}
    rows = [PreparedEvent(sender=SMALL, event_id=uuid4(), next_check_at=now, **times)]
    for n in range(300):
        due = now + timedelta(hours=n >= 200)
        rows.append(PreparedEvent(sender=LARGE, event_id=uuid4(), next_check_at=due, **times))
    decided = PreparedEvent(sender=LARGE, state="confirmed", decided_at=now, **times)
    fields = [f for f in PreparedEvent._meta.concrete_fields if f.name not in ("id", "event_id")]
    values = [f.get_db_prep_save(f.pre_save(decided, add=True), connection) for f in fields]
    numbers, new_id = NUMBERS[connection.vendor]
    with connection.cursor() as cursor:
        if request.param == "empty" and postgres:
            cursor.execute(analyze)
        PreparedEvent.objects.using(alias).bulk_create(rows)
        cursor.execute(
            f"INSERT INTO outbox_prepared (event_id, {', '.join(f.column for f in fields)}) "
            f"SELECT {new_id}, {', '.join(['%s'] * len(fields))} FROM {numbers}",
            values,
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
            plan = f"EXPLAIN (FORMAT JSON) {sql}" if postgres else explain(sql)
            execute(plan, params, many, context)
            self.check(sql, plan_of(context["cursor"]))
            self.seen.append(sql)
        return execute(sql, params, many, context)

    def check(self, sql: str, rows: Any) -> None:
        if len(rows[0]) == 1:
            [plan] = rows[0].values()
            plan = plan if isinstance(plan, str) else json.dumps(plan)
            assert '"Seq Scan"' not in plan, f"{sql}\n{plan}"
        else:
            assert not {row["type"] for row in rows} & {"ALL", "index"}, f"{sql}\n{rows}"
            few = max(int(row["rows"] or 0) for row in rows) < 1000 or " LIMIT 1" in sql
            assert few, f"{sql}\n{rows}"


@on("postgres", "mariadb")
@pytest.mark.django_db(transaction=True)  # ANALYZE commits on MariaDB
@pytest.mark.timeout(600)
def test_each_statement_is_an_index_lookup(alias: str, statistics: None) -> None:
    explainer = Explainer()
    with connections[alias].execute_wrapper(explainer):
        assert CheckBack(using=alias)._senders() == [LARGE, SMALL]
        worker = SenderWorker(LARGE, using=alias)
        rows = worker._claim()
        assert len(rows) == 100
        worker.settle(rows[:50], {row.event_id: "in_progress" for row in rows})
        worker.expire()
        requests = [checked(NewPrepared("s", "t")) for _ in range(20)]
        keeper.prepare(LARGE, requests, using=alias)
        cancel = {row.event_id: "cancelled" for row in rows}
        keeper.decide(LARGE, cancel, by=keeper.CALL, using=alias)
    assert len(explainer.seen) >= 10
