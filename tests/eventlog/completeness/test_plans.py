"""The look-up of the predecessors uses indexes, however long the log is."""

from __future__ import annotations

import pytest
from django.db import connections

from outbox_app.eventlog.newevent import slice_of
from outbox_app.models import Event
from tests.eventlog.sessions import execute

pytestmark = pytest.mark.django_db(transaction=True)

ROWS = 20_000


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_predecessors_come_from_indexes(alias, reading):
    reader = reading().poll()
    streams = [f"s{n}" for n in range(200)]
    events = (
        Event(stream=stream, version=version, type="made", slice=slice_of(stream))
        for version in range(1, ROWS // len(streams) + 1)
        for stream in streams
    )
    Event.objects.using(alias).bulk_create(events, batch_size=5000)
    analyze = "ANALYZE outbox_event" if alias == "postgres" else "ANALYZE TABLE outbox_event"
    execute(alias, analyze)
    statements = []

    def note(run, sql, params, many, context):
        statements.append((sql, params))
        return run(sql, params, many, context)

    with connections[alias].execute_wrapper(note):
        reader.partition.run_once()
    [(sql, params)] = [each for each in statements if "beside_id" in each[0]]
    plan = execute(alias, f"EXPLAIN {sql}", *params)
    if alias == "postgres":
        text = "\n".join(line for (line,) in plan)
        assert "Seq Scan on outbox_event" not in text, text
        assert "_version" in text
    else:
        tables = [row for row in plan if row[2] in ("p", "e", "t")]
        assert {row[2] for row in tables} == {"p", "e", "t"}
        assert all(row[3] not in ("ALL", "index") for row in tables), plan
