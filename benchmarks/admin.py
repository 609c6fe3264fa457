"""Every page of the admin over millions of rows: the cost of its statements, and how it grows.

Each page is requested at two sizes of the tables. The database reports for every statement on a
table of the outbox how many rows it has read (``EXPLAIN ANALYZE``, ``ANALYZE FORMAT=JSON``), and
whether it has scanned a large table without an index. Times are reported as a ratio only.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Iterator
from typing import Any

import django

from tests.mysql import is_mysql

from . import losses, planted

ASKED = {
    "pages_with_other_statements": "0: as many statements at both sizes",
    "scans_of_large_tables": "0",
    "most_rows_of_a_statement": "at most 3 x MANY",
    "growth_of_the_slowest_page": "at most 2",
}
#: How often a page is timed; its time is the median.
TIMES = 5


def run(*, quick: bool) -> dict[str, Any]:
    """Plant rows, request every page, plant the rest, request every page again.

    Returns:
        ``ratios``, ``asked``, and ``pages``: for each page and size the number of statements, the
        rows that the costliest statement reads, the scans, and the seconds.
    """
    django.setup()
    sizes = planted.sizes(quick)
    with losses.scratch_database():
        client = _superuser()
        measured: list[dict[str, Any]] = []
        done = dict.fromkeys(sizes, 0)
        planted.plant_counters(48 * 60)
        for step in (0, 1):
            for table, goal in sizes.items():
                _fill(table, done[table], goal[step])
                done[table] = goal[step]
            planted.analyze()
            measured.append({name: _measured(client, url) for name, url in _pages()})
    return {
        "ratios": _ratios(*measured),
        "asked": ASKED,
        "sizes": sizes,
        "pages": {name: [each[name] for each in measured] for name in measured[0]},
    }


def _pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the URL of every page."""
    from django.urls import reverse

    from outbox_app.events.models import Event
    from outbox_app.models import DeadJob, StagedJob

    yield from lists()
    for model in (StagedJob, DeadJob, Event):
        row = model._default_manager.order_by("id")[1000:1001].get()
        name = model._meta.model_name
        yield f"{name} page", reverse(f"admin:{model._meta.app_label}_{name}_change", args=[row.pk])


def lists() -> Iterator[tuple[str, str]]:
    """Yield the name and the URL of the overview and of every list."""
    from django.contrib import admin
    from django.urls import reverse

    rare = planted.RARE
    models = [model._meta for model in admin.site._registry]
    labels = {each.model_name: each.app_label for each in models}
    queries_of = {
        **{each.model_name: [""] for each in models if each.app_label.startswith("outbox_")},
        "stagedjob": ["", "state=ready", "state=held", "state=due", f"task={rare}",
                      f"queue={rare}", "ordering_key=key-7", f"q={rare}", "q=task-77777",
                      "before=200000", "p=900", "o=1"],
        "deadjob": ["", "died=1h", "died=7d", f"task={rare}", f"error={rare}",
                    f"task={rare}&error={rare}", "error=kombu.exceptions.E3&died=24h",
                    f"queue={rare}", f"q={rare}", "q=task-77777", "before=200000", "o=5"],
        "event": ["", f"type={rare}", f"topic={rare}", f"stream={rare}", "stream=order-7",
                  "before=200000"],
        "statistic": ["", "name=published"],
        "gap": ["", "state=open"],
    }  # fmt: skip
    yield "overview", reverse("admin:outbox_app_overview")
    yield "overview live", reverse("admin:outbox_app_overview") + "?part=live"
    yield "index", reverse("admin:app_list", args=["outbox_app"])
    for name, queries in queries_of.items():
        for query in queries:
            address = reverse(f"admin:{labels[name]}_{name}_changelist")
            yield f"{name} {query}".strip(), f"{address}?{query}"


def _measured(client: Any, url: str) -> dict[str, Any]:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    seconds = []
    for _ in range(TIMES):
        started = time.perf_counter()
        with CaptureQueriesContext(connection) as captured:
            response = client.get(url)
            response.render() if hasattr(response, "render") else None
        seconds.append(time.perf_counter() - started)
        if response.status_code != 200:
            raise RuntimeError(f"{url} was answered with {response.status_code}.")
    ours = [q["sql"] for q in captured.captured_queries if _is_ours(q["sql"])]
    costs = [_cost(sql) for sql in ours]
    return {
        "statements": len(ours),
        "rows": max((rows for rows, _ in costs), default=0),
        "costliest": max(zip(costs, ours, strict=True), default=((0, []), ""))[1][:500],
        "scans": sorted({scan for _, scans in costs for scan in scans}),
        "seconds": statistics.median(seconds),
    }


def _is_ours(sql: str) -> bool:
    return "outbox_" in sql and sql.lstrip("( ").upper().startswith(("SELECT", "WITH"))


def _cost(sql: str) -> tuple[int, list[str]]:
    """Return how many rows a statement reads, and which large tables it scans."""
    from django.db import connection

    explain = "ANALYZE FORMAT=JSON" if connection.vendor == "mysql" else (
        "EXPLAIN (ANALYZE, FORMAT JSON)"
    )  # fmt: skip
    with connection.cursor() as cursor:
        if is_mysql(connection.alias):
            explain = "EXPLAIN ANALYZE FORMAT=JSON"
            cursor.execute("SET explain_json_format_version = 2")
        cursor.execute(f"{explain} {sql}".replace("%", "%%"), [])
        [found] = cursor.fetchone()
    looks = list(_looks(plan_of(found) if isinstance(found, str) else found))
    # Scans of other tables do not count: planners prefer to scan small tables.
    whole = [table for table, _, is_scan in looks if is_scan and table in planted.TABLES]
    return int(sum(rows for _, rows, _ in looks)), whole


def plan_of(text: str) -> Any:
    """Parse a plan without its conditions: MariaDB does not escape the quotes in them."""
    return json.loads(re.sub(r'("\w+_condition": ).*?(,?)$', r'\1""\2', text, flags=re.MULTILINE))


def _looks(node: Any) -> Iterator[tuple[str, float, bool]]:
    """Yield for each table access of a plan: table, rows read, and whether it was a full scan."""
    if isinstance(node, list):
        for each in node:
            yield from _looks(each)
    elif isinstance(node, dict):
        if "Relation Name" in node:
            rows = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
            rows += node.get("Rows Removed by Index Recheck", 0)
            is_scan = node["Node Type"].endswith("Seq Scan")
            yield node["Relation Name"], rows * node["Actual Loops"], is_scan
        elif "operation" in node and "table_name" in node:  # MySQL
            rows = node["actual_rows"] * node["actual_loops"]
            yield node["table_name"], rows, node["access_type"] == "table"
        elif "table_name" in node:
            rows = (node.get("r_rows") or 0) * (node.get("r_loops") or 0)
            yield node["table_name"], rows, node.get("access_type") == "ALL"
        for each in node.values():
            yield from _looks(each)


def _ratios(small: dict[str, Any], large: dict[str, Any]) -> dict[str, float]:
    from outbox_app.models.counting import MANY

    growth = {name: large[name]["seconds"] / small[name]["seconds"] for name in small}
    for name in sorted(large, key=lambda name: -large[name]["seconds"]):
        page = large[name]
        print(
            f"{name:40} {page['statements']:3} statements, at most {page['rows']:8} rows, "
            f"time x {growth[name]:.2f} {' '.join(page['scans'])}",
            flush=True,
        )
    slowest = max(large, key=lambda name: large[name]["seconds"])
    return {
        "pages_with_other_statements": sum(
            small[name]["statements"] != large[name]["statements"] for name in small
        ),
        "scans_of_large_tables": sum(len(page["scans"]) for page in large.values()),
        "most_rows_of_a_statement": max(page["rows"] for page in large.values()) / MANY,
        "growth_of_the_slowest_page": growth[slowest],
    }


def _fill(table: str, first: int, last: int, step: int = 500_000) -> None:
    for start in range(first, last, step):
        planted.plant(start + 1, min(start + step, last), table)
        print(f"{table}: {min(start + step, last)} rows", flush=True)


def _superuser() -> Any:
    from django.contrib.auth.models import User
    from django.test import Client

    client = Client()
    client.force_login(User.objects.create_superuser("benchmark"))
    return client
