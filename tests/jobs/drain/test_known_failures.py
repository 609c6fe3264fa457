"""Four failures of the best-known user of this design; none of them happens here.

medusajs/medusa #12054, #4848, #4080 and #6016: the loop died for good on one failed delete; it
never recovered after the database had been away; a backlog hung start-up; a row was deleted before
its work was done.
"""

from __future__ import annotations

from contextlib import closing

import pytest
from django.db import connections, transaction

from outbox_app import stage_many
from outbox_app.failpoints import set_failpoint
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import Incident, StagedJob
from tests import tasks
from tests.servers import free_port

from .test_main_path import received

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("alias", [pytest.param("postgres", id="postgres")], indirect=True),
]


def stage(app, alias, count):
    note = app.tasks.get("note") or app.task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        stage_many((note.s("", i) for i in range(count)), using=alias)


def end_connection(alias):
    """End this thread's connection from the server's side."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        [pid] = cursor.fetchone()
    with closing(connections.create_connection(alias)) as other, other.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])


def test_one_failed_delete_does_not_end_the_loop(alias, make_app, redis_url):
    app = make_app(redis_url)
    stage(app, alias, 50)

    def fail_once():
        set_failpoint("published_not_deleted", None)
        end_connection(alias)

    set_failpoint("published_not_deleted", fail_once)
    try:
        tally = Drain(using=alias).run(once=True)
    finally:
        set_failpoint("published_not_deleted", None)

    assert tally.published == 50
    assert len(received(app)) == 50  # what was published is owed a deletion, not sent again
    assert not StagedJob.objects.using(alias).exists()
    assert not Incident.objects.using(alias).exists()


def test_it_recovers_when_the_database_was_away(alias, make_app, redis_url):
    app = make_app(redis_url)
    stage(app, alias, 10)
    staged_more = []

    def lose_connection_then_stage(drain):
        if drain.tally.published == 10 and not staged_more:
            stage(app, alias, 10)
            staged_more.append(True)
            end_connection(alias)
        if drain.tally.published == 20:
            drain.stop()

    tally = Drain(using=alias, interval=0.05, on_turn=lose_connection_then_stage).run()

    assert tally.published == 20
    assert len(received(app)) == 20


def test_a_backlog_does_not_hang_its_start(alias, make_app, redis_url):
    app = make_app(redis_url)
    stage(app, alias, 5_000)
    drain = Drain(using=alias, batch_size=100)

    turns = 0
    while not drain.tally.published:
        drain.run_once()
        turns += 1

    assert turns <= 2  # the first finds the app, the second publishes
    assert drain.tally.published <= 128  # a batch, not the backlog
    drain.holder.leave()


def test_no_row_is_deleted_before_the_broker_has_its_job(alias, make_app):
    app = make_app(f"redis://127.0.0.1:{free_port()}/0")  # nobody is there
    stage(app, alias, 10)
    drain = Drain(using=alias)

    for _ in range(4):
        drain.run_once()

    assert drain.tally.published == 0
    assert "cannot be reached" in drain.trouble
    assert StagedJob.objects.using(alias).count() == 10
    drain.holder.leave()
