"""A hundred thousand held jobs, or jobs of an app whose broker is away, do not slow down others.

The database counts the rows that a turn of the drain reads.
"""

from __future__ import annotations

import pytest
from django.db import connections, transaction

from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import StagedJob
from tests import tasks
from tests.mysql import numbers

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True),
]

MANY = 100_000
BLANK = "app, shard, ordering_key, task, task_id, queue, body, envelope, available_at"


def insert_many(alias, *, app, available_at):
    values = f"'{app}', n %% 128, '', 'note', 'x', 'q', '[]', '{{}}', {available_at}"
    with connections[alias].cursor() as cursor:
        if connections[alias].vendor == "postgresql":
            source = f"generate_series(1, {MANY}) AS s(n)"
        else:
            source = f"{numbers(1, MANY, 'n')} AS s"
        cursor.execute(
            f"INSERT INTO outbox_stagedjob ({BLANK}) SELECT {values} FROM {source}".replace(
                "%%", "%"
            )
        )


def rows_read(alias):
    """Rows and index entries that this connection has had read so far."""
    with connections[alias].cursor() as cursor:
        if connections[alias].vendor == "postgresql":
            cursor.execute("SELECT pg_stat_force_next_flush()")
            cursor.execute(
                "SELECT sum(i.idx_tup_read)::int + max(t.seq_tup_read)::int "
                "FROM pg_stat_user_indexes i JOIN pg_stat_user_tables t USING (relid) "
                "WHERE t.relname = 'outbox_stagedjob'"
            )
            return cursor.fetchone()[0]
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read%'")
        return sum(int(value) for _, value in cursor.fetchall())


@pytest.mark.parametrize("what", ["held", "of an app whose broker is away"])
def test_a_turn_reads_as_much_as_without_them(alias, make_app, monkeypatch, what):
    app = make_app()
    note = app.task(name="note")(tasks.note)
    if what == "held":
        insert_many(alias, app=app.main, available_at="'2100-01-01'")
    else:
        away = make_app("redis://127.0.0.1:1/0")
        insert_many(alias, app=away.main, available_at="NULL")
    drain = Drain(using=alias, lease_seconds=600)
    while drain.run_once():
        pass
    # Once a minute somebody counts what is held: tests/process/counters.
    monkeypatch.setattr(drain._counters, "keep", lambda: None)
    with transaction.atomic(using=alias):
        for i in range(50):
            note.delay("", i)
    for app in drain._apps.values():
        app.backoff._until += 600 if app.backoff.text else 0  # it rests
    before = rows_read(alias)
    while drain.run_once():
        pass
    read = rows_read(alias) - before

    assert drain.tally.published == 50
    assert StagedJob.objects.using(alias).count() == MANY
    # 50 rows, read and deleted by several statements, and some entries to find the ends.
    assert 50 <= read < 2000
    drain.holder.leave()
