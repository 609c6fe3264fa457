"""The look-up of predecessors uses indexes, for a log of any length."""

from __future__ import annotations

import pytest
from django.db import connections, transaction

from outbox_app.events.log.newevent import slice_of
from outbox_app.events.models import Event
from tests.events.log.sessions import execute
from tests.mysql import explain, numbers, plan_of
from tests.servers.mysql import MARIADB

pytestmark = pytest.mark.django_db(transaction=True)

ROWS, STREAMS = 20_000, 200
LAST = ROWS // STREAMS
#: The further versions of all streams, in the order in which they would be published.
COLUMNS = "stream, version, type, topic, data, metadata, slice, message_id"
COPIED = (
    f"INSERT INTO outbox_event ({COLUMNS}) "
    "SELECT stream, n, type, topic, data, metadata, slice, {} FROM outbox_event, {} ORDER BY n, id"
)
FURTHER = {
    "postgres": COPIED.format("gen_random_uuid()", f"generate_series(2, {LAST}) AS s (n)"),
    MARIADB: COPIED.format("REPLACE(UUID(), '-', '')", f"{numbers(2, LAST, 'n')} AS s"),
}


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_predecessors_come_from_indexes(alias, reading):
    reader = reading().poll()
    streams = [f"s{n}" for n in range(STREAMS)]
    with transaction.atomic(using=alias):
        Event.objects.using(alias).bulk_create(
            Event(stream=stream, version=1, type="made", slice=slice_of(stream))
            for stream in streams
        )
        execute(alias, FURTHER[alias])
    assert Event.objects.using(alias).count() == ROWS
    analyze = "ANALYZE outbox_event" if alias == "postgres" else "ANALYZE TABLE outbox_event"
    execute(alias, analyze)
    statements = []

    def note(run, sql, params, many, context):
        statements.append((sql, params))
        return run(sql, params, many, context)

    with connections[alias].execute_wrapper(note):
        reader.partition.run_once()
    [(sql, params)] = [each for each in statements if "beside_id" in each[0]]
    with connections[alias].cursor() as cursor:
        cursor.execute(f"EXPLAIN {sql}" if alias == "postgres" else explain(sql), params)
        plan = plan_of(cursor)
    if alias == "postgres":
        text = "\n".join(line for row in plan for line in row.values())
        assert "Seq Scan on outbox_event" not in text, text
        assert "_version" in text
    else:
        tables = [row for row in plan if row["table"] in ("p", "e", "t")]
        assert {row["table"] for row in tables} == {"p", "e", "t"}
        assert all(row["type"] not in ("ALL", "index") for row in tables), plan
