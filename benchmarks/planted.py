"""Millions of rows for ``admin``, made by the database: staged and dead jobs, events, counters.

Half of the staged jobs have an ordering key, one in twenty is held. The oldest row has a task, an
error, a key and a type that no other row has, so a filter for one of them matches no other row.
"""

from __future__ import annotations

from datetime import timedelta

from tests.mysql import numbers as mysql_numbers

STAGED, DEAD, EVENTS = "outbox_stagedjob", "outbox_deadjob", "outbox_event"
#: The large tables.
TABLES = (STAGED, DEAD, EVENTS)
#: Values that only the oldest row has.
RARE = "rare"
BODY = b'[[1, "two"], {"total": "12.50"}, {"callbacks": null}]'
_ENVELOPE = (
    '{"headers": {"lang": "py", "task": "shop.tasks.mail", "id": "1"}, "properties": {}, '
    '"content_type": "application/json", "content_encoding": "utf-8", "routing_key": "celery"}'
)


def plant(first: int, last: int, table: str) -> None:
    """Write the rows with the numbers ``first`` to ``last`` of a table.

    Args:
        first, last: Numbers of rows; the first row has number 1.
        table: One of TABLES.
    """
    from django.db import connection

    mysql = connection.vendor == "mysql"
    numbers = f"generate_series({first}, {last}) AS n(seq)"
    if mysql:
        numbers = f"{mysql_numbers(first, last, 'seq')} AS n"
    names, values = zip(*_columns(table, mysql=mysql), strict=True)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(names)}) SELECT {', '.join(values)} FROM {numbers}"
        )


def plant_counters(minutes: int, processes: int = 4) -> None:
    """Write the counters that drainers would have written in so many minutes."""
    from outbox_app.models import Statistic
    from outbox_app.monitoring.series import _now
    from outbox_app.process import counters

    newest = _now("default").replace(second=0, microsecond=0)
    names = (counters.PUBLISHED, counters.READY, counters.NEWEST_ID)
    rows = [
        Statistic(
            source=f"drainer-{each}",
            minute=newest - timedelta(minutes=ago),
            name=name,
            value=1000 * (minutes - ago),
        )
        for ago in range(minutes)
        for each in range(processes)
        for name in names
    ]
    Statistic.objects.bulk_create(rows, batch_size=2000)


def analyze() -> None:
    """Gather the planner's statistics, as the server does by itself within a minute."""
    from django.db import connection

    tables = ", ".join([*TABLES, "outbox_statistic"])
    with connection.cursor() as cursor:
        cursor.execute(f"ANALYZE {'TABLE ' if connection.vendor == 'mysql' else ''}{tables}")


def _columns(table: str, *, mysql: bool) -> list[tuple[str, str]]:
    def text(prefix: str, number: str) -> str:
        joined = f"CONCAT('{prefix}', {number})" if mysql else f"'{prefix}' || ({number})::text"
        return f"CASE WHEN seq = 1 THEN '{RARE}' ELSE {joined} END"

    body = f"x'{BODY.hex()}'" if mysql else f"'\\x{BODY.hex()}'::bytea"
    now = "UTC_TIMESTAMP(6)" if mysql else "now()"
    hour = "INTERVAL 1 HOUR" if mysql else "interval '1 hour'"
    hex_id = "LPAD(HEX(seq), 32, '0')"
    if not mysql:
        hex_id = "lpad(to_hex(seq), 32, '0')::uuid"
    if table == EVENTS:
        return [
            ("topic", text("topic-", "seq % 20")),
            ("stream", text("order-", "seq % 100000")),
            ("version", "1 + (seq - 1) / 100000" if not mysql else "1 + (seq - 1) DIV 100000"),
            ("type", text("order.", "seq % 50")),
            ("data", '\'{"total": "12.50"}\''),
            ("metadata", "'{}'"),
            ("slice", "seq % 1024"),
            ("message_id", hex_id),
        ]
    key = "'' " if table == DEAD else text("key-", "seq % 100000")
    job = [
        ("shard", "seq % 128"),
        ("ordering_key", f"CASE WHEN seq % 2 = 0 THEN '' ELSE {key} END"),
        ("app", "'shop'"),
        ("task", text("shop.tasks.", "seq % 40")),
        ("task_id", text("task-", "seq")),
        ("queue", text("queue-", "seq % 10")),
        ("body", body),
        ("envelope", f"'{_ENVELOPE}'"),
        ("staged_at", f"{now} - {hour}"),
    ]
    if table == DEAD:
        since = f"{hour} * (seq % 200)" if not mysql else "INTERVAL (seq % 200) HOUR"
        return [
            *job,
            ("staged_id", "seq"),
            ("died_at", f"{now} - {since}"),
            ("error", text("kombu.exceptions.E", "seq % 15")),
            ("reason", "'NO_ROUTE'"),
        ]
    return [*job, ("available_at", f"CASE WHEN seq % 20 = 0 THEN {now} + {hour} END")]


def sizes(quick: bool) -> dict[str, tuple[int, int]]:
    """Return for each table its number of rows in the first measurement, and in the second."""
    counts = {STAGED: 5_000_000, DEAD: 1_000_000, EVENTS: 10_000_000}
    if quick:
        counts = {STAGED: 600_000, DEAD: 500_000, EVENTS: 800_000}
    part = 2 if quick else 5
    return {table: (total // part, total) for table, total in counts.items()}
