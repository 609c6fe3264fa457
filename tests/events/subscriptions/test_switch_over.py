"""A primary of MySQL or MariaDB becomes a replica, and stays connected."""

from __future__ import annotations

import pytest
from django.db import connections, transaction

from outbox_app.events import publish, subscriber
from outbox_app.events.models import Cursor, Event
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from tests.faults.tools import outbox_on
from tests.servers.mysql import MARIADB, MARIADB_SERVER

pytestmark = pytest.mark.django_db(databases=[])


@pytest.mark.parametrize("kind", ["mariadb"])
def test_no_gap_is_closed_and_the_connection_is_made_anew(kind, django_db_blocker, settings):
    """The user may write to a replica. What is applied late there must be handled all the same."""
    if MARIADB not in connections:
        pytest.skip(f"no {MARIADB}")
    seen = []
    subscriber("all")(lambda events: seen.extend(event.stream for event in events))
    settings.OUTBOX = {**settings.OUTBOX, "SETTLE_SECONDS": 0}
    with MARIADB_SERVER() as server, outbox_on(server.url, django_db_blocker, settings) as alias:
        connections[alias].close()
        connections[alias].settings_dict["CONN_MAX_AGE"] = None  # it may live for ever
        runner = Runner([subscriber_named("all")], lease_seconds=600)

        def run(sql=""):
            if sql:
                with connections[alias].cursor() as cursor:
                    cursor.execute(sql)
            Cursor.objects.using(alias).update(retry_at=None)
            for partition in runner.workers[0].partitions.values():
                partition._rest_until = 0
            runner.run_once()

        with transaction.atomic(using=alias):
            publish("a", "made")
        run()
        with transaction.atomic(using=alias):
            publish("late", "made")
            publish("b", "made")
        late = Event.objects.using(alias).filter(stream="late")
        kept = late.values().get()
        late.delete()
        run("SET GLOBAL read_only = ON")
        assert "(outbox.E011)" in Cursor.objects.using(alias).get().error
        assert seen == ["a"]
        before = connections[alias].connection.thread_id()
        run()
        assert connections[alias].connection is None
        Event.objects.using(alias).create(**kept)  # the replica applies it
        assert connections[alias].connection.thread_id() != before
        run("SET GLOBAL read_only = OFF")
        assert sorted(seen) == ["a", "b", "late"]
