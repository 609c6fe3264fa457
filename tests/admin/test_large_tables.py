"""No list counts, sorts or reads a large table: the server's plans of all statements show it.

``ADMIN_ROWS`` is the number of rows planted in each table. With a million or more, counting stops
at the same limit as in production. The filters look for rare, old values, which cost the most.
"""

from __future__ import annotations

import json
import os
import re

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from outbox_app.admin import actions
from outbox_app.events.models import Event
from outbox_app.models import DeadJob, StagedJob, counting
from tests.mysql import is_mysql, numbers

from .pages import DEAD, STAGED, hidden, page, selection

ROWS = int(os.environ.get("ADMIN_ROWS", "80000"))
EVENTS = reverse("admin:outbox_events_event_changelist")
BITMAP = "Bitmap Index Scan"
LARGE = ("outbox_stagedjob", "outbox_deadjob", "outbox_event")

LISTS = [
    *(
        f"{STAGED}{query}"
        for query in (
            "", "?queue=rare", "?task=rare", "?task=", "?ordering_key=rare", "?p=20",
            "?state=ready", "?state=held", "?state=due", "?state=held&task=rare", "?o=4",
            "?q=id-5", "?q=nobody", "?q=id-5&ordering_key=rare", "?task=rare&before=BEFORE",
            "?task=t1&before=50",
        )
    ),
    *(
        f"{DEAD}{query}"
        for query in (
            "", "?error=rare&task=rare", "?error=E1&task=t1", "?task=rare", "?queue=rare", "?p=20",
            "?died=1h", "?died=7d", "?task=t1&error=E1&died=1h", "?q=id-5", "?q=nobody", "?o=5",
            "?o=-4", "?task=rare&before=BEFORE",
        )
    ),
    *(
        f"{EVENTS}{query}"
        for query in (
            "", "?type=rare", "?topic=rare", "?stream=big", "?stream=big&type=rare", "?q=big",
            "?stream=nobody", "?stream=big&topic=rare&before=BEFORE", "?type=rare&before=BEFORE",
            "?q=00000000-0000-4000-8000-000000000000", "?p=20",
        )
    ),
]  # fmt: skip
#: Lists and the decisions that are asked about on them.
QUESTIONS = [
    (STAGED, ("cancel_selected",)),
    (DEAD, ("requeue_selected", "discard_selected")),
]


def rare(usual):
    return f"CASE WHEN n = 5 THEN 'rare' ELSE {usual} END"


JOB = {
    "shard": "MOD(n, 128)",
    "ordering_key": rare("''"),
    "app": "'shop'",
    "task": rare("CONCAT('t', MOD(n, 20))"),
    "task_id": "CONCAT('id-', n)",
    "queue": rare("CONCAT('q', MOD(n, 3))"),
    "body": "BINARY",
    "envelope": "'{}'",
    "staged_at": "CURRENT_TIMESTAMP",
}
PLANTED = {
    "outbox_stagedjob": {
        **JOB,
        "available_at": "CASE WHEN MOD(n, 20) = 0 THEN CURRENT_TIMESTAMP END",
    },
    "outbox_deadjob": {
        **JOB,
        "staged_id": "n",
        "died_at": "CURRENT_TIMESTAMP",
        "error": rare("CONCAT('E', MOD(n, 7))"),
        "reason": "'no'",
    },
    "outbox_event": {
        "txid": "1",
        "topic": rare("''"),
        "stream": f"CASE WHEN n <= {ROWS // 2} THEN 'big' ELSE CONCAT('s', MOD(n, 999)) END",
        "version": "n",
        "type": rare("'made'"),
        "data": "JSON",
        "metadata": "JSON",
        "slice": "MOD(n, 1024)",
        "message_id": "UUID",
        "recorded_at": "CURRENT_TIMESTAMP",
    },
}


def plant(alias):
    """Fill the three tables, by one statement each."""
    connection = connections[alias]
    own = {
        "BINARY": "'[]'::bytea",
        "JSON": "'{}'::jsonb",
        "UUID": "gen_random_uuid()",
        "numbers": f"generate_series(1, {ROWS}) AS s(n)",
        "ANALYZE": "ANALYZE",
    }
    if connection.vendor == "mysql":
        own = {
            "BINARY": "'[]'",
            "JSON": "'{}'",
            "UUID": "REPLACE(UUID(), '-', '')",
            "numbers": f"{numbers(1, ROWS, 'n')} AS s",
            "ANALYZE": "ANALYZE TABLE",
        }
        if connection.features.has_native_uuid_field:
            own["UUID"] = "UUID()"
    for table, columns in PLANTED.items():
        names = ", ".join(map(connection.ops.quote_name, columns))
        values = ", ".join(own.get(value, value) for value in columns.values())
        with connection.cursor() as cursor:
            cursor.execute(f"INSERT INTO {table} ({names}) SELECT {values} FROM {own['numbers']}")
            cursor.execute(f"{own['ANALYZE']} {table}")


def read(alias, sql):
    """How many rows of large tables a statement has looked at, and how it got to them."""
    connection = connections[alias]
    prefix = "ANALYZE FORMAT=JSON " if connection.vendor == "mysql" else (
        "EXPLAIN (ANALYZE, FORMAT JSON) "
    )  # fmt: skip
    with connection.cursor() as cursor:
        if is_mysql(alias):
            prefix = "EXPLAIN ANALYZE FORMAT=JSON "
            cursor.execute("SET explain_json_format_version = 2")
        cursor.execute(prefix + sql)
        plan = cursor.fetchone()[0]
    if isinstance(plan, str):  # MariaDB escapes no quotes of a condition
        plan = re.sub('("attached_condition"): ".*"', r'\1: ""', plan)
    found = []
    waiting = [json.loads(plan) if isinstance(plan, str) else plan]
    while waiting:
        each = waiting.pop()
        if isinstance(each, list):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
            found += _node(each)
    # A bitmap of an index and the rows that it leads to are one look.
    bitmaps = sum(rows for rows, how in found if how == BITMAP)
    others = sum(rows for rows, how in found if how != BITMAP)
    return max(bitmaps, others), [how for _, how in found]


def _node(plan):
    if plan.get("Relation Name") in LARGE:
        rows = sum(
            plan.get(name, 0)
            for name in ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")
        )
        return [(rows * plan["Actual Loops"], plan["Node Type"])]
    if plan.get("Node Type") == BITMAP:
        return [(plan["Actual Rows"] * plan["Actual Loops"], BITMAP)]
    if "operation" in plan and plan.get("table_name") in LARGE:  # MySQL
        how = {"table": "ALL"}.get(plan["access_type"], plan["access_type"])
        return [(plan["actual_rows"] * plan["actual_loops"], how)]
    if plan.get("table_name", "") in LARGE or (
        "access_type" in plan and not plan.get("table_name", "<").startswith("<")
    ):
        return [((plan.get("r_rows") or 0) * (plan.get("r_loops") or 0), plan["access_type"])]
    return []


def examined(alias, sent):
    """Run what a page sends again, with the server's account of it."""
    for sql in sent:
        if sql.startswith("SELECT") and any(table in sql for table in LARGE):
            rows, how = read(alias, sql)
            yield sql, rows, how


# MySQL scans a table of this size where a range is a tenth of it, and counts by another index.
@pytest.mark.mariadb_only
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_every_statement_of_every_page_reads_a_range_of_an_index(alias, superuser, monkeypatch):
    plant(alias)
    monkeypatch.setattr(counting, "MANY", min(counting.MANY, ROWS // 10))
    monkeypatch.setattr(actions, "SECONDS", 0)
    before = {STAGED: StagedJob, DEAD: DeadJob, EVENTS: Event}
    pages = []
    for url in LISTS:
        model = before[url.partition("?")[0]]
        middle = model.objects.using(alias).order_by("id").values_list("id", flat=True)[ROWS // 2]
        pages.append((url.replace("BEFORE", str(middle)), None))
    for model in before.values():
        pages.append((page(model.objects.using(alias).order_by("id").first()), None))
    for url, asked in QUESTIONS:
        first = before[url].objects.using(alias).order_by("id").first()
        for action in asked:
            for query in ("", "?task=rare", "?task=nobody"):
                question = selection(action, first, select_across=1)
                pages.append((f"{url}{query}", question))
                if query == "?task=nobody":
                    answer = superuser.post(f"{url}{query}", question)
                    pages.append(
                        (f"{url}{query}", {**hidden(answer), "confirmed": "y", "reason": "why"})
                    )
    faults = []
    most = {}
    for url, form in pages:
        with CaptureQueriesContext(connections[alias]) as queries:
            response = superuser.get(url) if form is None else superuser.post(url, form)
        assert response.status_code == 200, (url, form, response)
        sent = [query["sql"] for query in queries]
        assert len([sql for sql in sent if "outbox_" in sql]) <= 24, (url, sent)
        for sql, rows, how in examined(alias, sent):
            most[url] = max(most.get(url, 0), rows)
            if rows > 1.2 * counting.MANY + 5000 or {"Seq Scan", "ALL"} & set(how):
                faults.append(
                    f"{url} {'' if form is None else form['action']}: {rows} {how}\n{sql}"
                )
    assert not faults, "\n\n".join(faults)
    assert max(most.values()) >= counting.MANY  # the account is one
