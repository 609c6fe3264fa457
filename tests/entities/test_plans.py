"""Each statement of a command is an index lookup, with many versions and any statistics."""

from __future__ import annotations

import json
import re
from datetime import date
from uuid import uuid4

import pytest
from django.db import connections

from outbox_app.entities import Command
from outbox_app.entities.batch import Batch
from outbox_app.entities.models import PrunedCommand, log_number
from outbox_app.entities.request import Call, deadline_after
from tests.entities.models import Account, AccountVersion
from tests.faults.tools import on
from tests.mysql import explain, numbers, plan_of

ROWS = 20_000


@pytest.fixture(params=["empty", "fresh"])
def statistics(request, alias, ask):
    """Account a has many versions, and there are as many other accounts."""
    analyze = {"postgresql": "ANALYZE", "mysql": "ANALYZE TABLE"}[connections[alias].vendor]
    tables = ("account", "account_version", "outbox_stream", "outbox_prunedcommand")
    with connections[alias].cursor() as cursor:
        if analyze == "ANALYZE":  # no autovacuum comes between
            cursor.execute(f"LOCK {', '.join(tables)} IN SHARE UPDATE EXCLUSIVE MODE")
        if request.param == "empty" and analyze == "ANALYZE":
            for table in tables:
                cursor.execute(f"{analyze} {table}")
        ask("open", {"owner": "ann", "balance": 10}, command_id="open")
        PrunedCommand.objects.using(alias).create(
            log=log_number("account_version"), key=uuid4(), version=1, executed_on=date(2000, 1, 1)
        )
        further = f"{numbers(2, ROWS, 'i')} AS further"
        if analyze == "ANALYZE":
            further = f"generate_series(2, {ROWS}) AS further (i)"
        hash = "REPLACE(UUID(), '-', '')" if analyze != "ANALYZE" else "gen_random_uuid()"
        new = {"version": "i", "command_id": "concat('c', i)", "message_id": hash}
        names = [f.column for f in AccountVersion._meta.concrete_fields if f.name != "id"]
        for table, columns, given in (
            ("account_version", names, new),
            (
                "account",
                ["id", "version", "state", "changed_at"],
                {"id": "concat('o', i)", "version": "1"},
            ),
            (
                "outbox_stream",
                ["log", "stream", "version"],
                {"stream": "concat('o', i)", "version": "1"},
            ),
            (
                "outbox_prunedcommand",
                ["log", "key", "version", "executed_on"],
                {"key": hash, "version": "i"},
            ),
        ):
            quoted = {name: connections[alias].ops.quote_name(name) for name in columns}
            values = ", ".join(given.get(name, f"{table}.{quoted[name]}") for name in columns)
            into = f"{table} ({', '.join(quoted.values())})"
            cursor.execute(f"INSERT INTO {into} SELECT {values} FROM {table}, {further}")
        cursor.execute(f"UPDATE account SET version = {ROWS} WHERE id = 'a'")
        cursor.execute(f"UPDATE outbox_stream SET version = {ROWS} WHERE stream = 'a'")
        if request.param == "fresh" and analyze == "ANALYZE":  # it commits on MariaDB
            for table in tables:
                cursor.execute(f"{analyze} {table}")


class Explainer:
    """Looks at the plan of each statement that reads or updates."""

    def __init__(self):
        self.seen = []

    def __call__(self, execute, sql, params, many, context):
        if re.match(r"SELECT|UPDATE|WITH", sql) and " FROM " in sql.replace("UPDATE", " FROM "):
            postgres = context["connection"].vendor == "postgresql"
            plan = f"EXPLAIN (FORMAT JSON) {sql}" if postgres else explain(sql)
            execute(plan, params, many, context)
            self.check(sql, plan_of(context["cursor"]))
            self.seen.append(sql)
        return execute(sql, params, many, context)

    def check(self, sql, rows):
        if len(rows[0]) == 1:
            [plan] = rows[0].values()
            plan = plan if isinstance(plan, str) else json.dumps(plan)
            assert '"Seq Scan"' not in plan, f"{sql}\n{plan}"
            if "command_id =" in sql:
                assert re.search(r'"Index Cond": "[^"]*command_id', plan), f"{sql}\n{plan}"
        else:
            assert not {row["type"] for row in rows} & {"ALL", "index"}, f"{sql}\n{rows}"
            assert max(int(row["rows"] or 0) for row in rows) < 1000, f"{sql}\n{rows}"


@on("postgres", "mariadb")
@pytest.mark.django_db
@pytest.mark.parametrize("count", [1, 300])
@pytest.mark.parametrize("locked", [False, True])
def test_each_statement_is_an_index_lookup(alias, statistics, count, locked):
    names = [f"c{ROWS - count // 2 + number}" for number in range(1, count + 1)]
    asked = [Command("a", "withdraw", {"amount": 0}, command_id=name) for name in names]
    calls = [Call(each, deadline_after(None, Account.timeout)) for each in asked]
    explainer = Explainer()
    with connections[alias].execute_wrapper(explainer):
        Batch(Account, calls, using=alias, locked=locked, wait=None).run()
    assert any(sql.startswith("SELECT") for sql in explainer.seen)
    assert any("outbox_prunedcommand" in sql for sql in explainer.seen)
    updated = re.findall(r"UPDATE \W?(outbox_stream|account)\b", " ".join(explainer.seen))
    assert updated == ["outbox_stream", "account"]
