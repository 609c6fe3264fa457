"""Unsettled deletes and incidents come first: before reading, releasing a shard, or ending."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import OperationalError, connections, transaction

from outbox_app import cancel
from outbox_app.database.clock import DatabaseNow
from outbox_app.database.transactions import own_connection
from outbox_app.failpoints import set_failpoint
from outbox_app.jobs.drain import batch, dead_rows
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.drain.unsettled import Unsettled
from outbox_app.models import DeadJob, Incident, Lease, Process, StagedJob
from outbox_app.signals import incident_recorded
from tests import tasks
from tests.jobs.dead.rows import dead_jobs

from .test_main_path import received

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def note(make_app):
    return make_app().task(name="note")(tasks.note)


@pytest.fixture
def staged(alias, note):
    with transaction.atomic(using=alias):
        for i in range(100):
            note.delay("", i)
    return note


class Failing:
    """Lets statements fail that begin with a word, as an unreachable database would."""

    def __init__(self, word):
        self.word = word
        self.failed = 0

    def __call__(self, execute, sql, *args):
        if sql.startswith(self.word) and "outbox_stagedjob" in sql:
            self.failed += 1
            raise OperationalError(f"{self.word} failed on purpose")
        return execute(sql, *args)


def test_shards_are_not_given_up_while_published_rows_are_there(alias, staged):
    one, other = Drain(using=alias), Drain(using=alias)
    with connections[alias].execute_wrapper(Failing("DELETE")) as _:
        with pytest.raises(OperationalError):
            one.run_once()
        assert one.tally.published
        other.holder.join()
        one.holder._shared_at = float("-inf")
        # It would give up half of its shards now, with rows in them that were published.
        with pytest.raises(OperationalError):
            one.run_once()
        assert len(one.holder.owned) == 128
    for drain in (one, other, one, other):
        drain.holder._shared_at = float("-inf")
        drain.run_once()
    while one.run_once() or other.run_once():
        pass
    assert len(received(staged.app)) == 100
    assert not Incident.objects.using(alias).exists()


def test_nothing_is_read_while_anything_is_owed(alias, staged):
    drain = Drain(using=alias)
    failing = Failing("DELETE")
    with connections[alias].execute_wrapper(failing):
        for _ in range(3):
            with pytest.raises(OperationalError):
                drain.run_once()
    assert failing.failed == 3
    assert len(received(staged.app)) == drain.tally.published < 129
    drain.run(once=True)
    assert len(received(staged.app)) == 0
    assert drain.tally.published == 100


def test_shards_are_not_handed_back_with_debts(alias, staged):
    """A duplicate without an incident would follow; a takeover is recorded."""
    drain = Drain(using=alias)
    set_failpoint("published_not_deleted", drain.stop)
    try:
        with connections[alias].execute_wrapper(Failing("DELETE")):
            drain.run()
    finally:
        set_failpoint("published_not_deleted", None)
    assert drain.tally.published
    assert Process.objects.using(alias).exists()
    assert not Lease.objects.using(alias).filter(owner=None).exists()


def test_a_receiver_of_incidents_undoes_no_takeover(alias, staged):
    """On PostgreSQL its statement would undo the transaction, whose COMMIT raises nothing."""
    heard = []

    def receiver(incident, **kwargs):
        heard.append(incident.kind)
        connections[alias].cursor().execute("SELECT * FROM there_is_no_such_table")

    dead = Drain(using=alias)
    dead.holder.join()
    Process.objects.using(alias).update(heartbeat_at=DatabaseNow() - timedelta(hours=1))
    incident_recorded.connect(receiver)
    try:
        assert Drain(using=alias).run(once=True).published == 100
    finally:
        incident_recorded.disconnect(receiver)
    assert heard == ["takeover"]
    assert Incident.objects.using(alias).get().drainer == str(dead)


def test_what_ends_a_drainer_between_two_sends_is_an_incident(alias, staged):
    """Its shards are handed back, so that no takeover tells of what it has sent."""
    left = [10]

    def end():
        left[0] -= 1
        if not left[0]:
            raise SystemExit

    set_failpoint("checked", end)
    try:
        with pytest.raises(SystemExit):
            Drain(using=alias).run()
    finally:
        set_failpoint("checked", None)
    twice = len(received(staged.app))
    assert twice
    incident = Incident.objects.using(alias).get()
    assert (incident.kind, incident.detail) == ("unknown", "SystemExit()")
    assert not Lease.objects.using(alias).exclude(owner=None).exists()
    rows = list(StagedJob.objects.using(alias).order_by("id"))
    assert len(rows) == 100
    assert (incident.first_id, incident.last_id) == (rows[0].id, rows[-1].id)
    assert incident.shards == sorted({row.shard for row in rows})
    assert Drain(using=alias).run(once=True).published == 100


def test_shards_are_handed_back_at_the_second_attempt(alias, staged):
    """A connection may have died while it was idle."""
    drain = Drain(using=alias)

    class Once(Failing):
        def __call__(self, execute, sql, *args):
            return execute(sql, *args) if self.failed else super().__call__(execute, sql, *args)

    def fail(execute, sql, *args):
        if sql.startswith("UPDATE") and "outbox_lease" in sql and drain._stop.is_set():
            failed.append(sql)
            if len(failed) == 1:
                raise OperationalError("failed on purpose")
        return execute(sql, *args)

    failed = []
    set_failpoint("deleted", drain.stop)
    try:
        with connections[alias].execute_wrapper(fail):
            drain.run()
    finally:
        set_failpoint("deleted", None)
    assert len(failed) == 2
    assert not Process.objects.using(alias).exists()


BOUND = {"postgresql": "SET lock_timeout = 1000", "mysql": "SET innodb_lock_wait_timeout = 1"}


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_a_transaction_that_cancels_a_job_holds_up_no_other(alias, staged, end):
    """A drainer that waited for its row would lose its lease, and others would wait as well."""
    job = StagedJob.objects.using(alias).order_by("id")[50]
    drain, other = Drain(using=alias, batch_size=20), Drain(using=alias)
    with transaction.atomic(using=alias):
        assert cancel(job.task_id, using=alias, app=staged.app)
        with own_connection(alias, seconds=1), connections[alias].cursor() as cursor:
            cursor.execute(BOUND[connections[alias].vendor])
            while drain.run_once():
                pass
            assert drain.tally.published == 100
            assert StagedJob.objects.using(alias).get() == job
            # Who gets its shard may publish it again.
            incident = Incident.objects.using(alias).get()
            assert (incident.first_id, incident.last_id) == (job.id, job.id)
            assert incident.shards == [job.shard]
            other.holder.join()
            drain.holder._shared_at = float("-inf")
            assert not drain.run_once()
            assert len(drain.holder.owned) == 64
            assert Incident.objects.using(alias).count() == 1
        if end == "rollback":
            transaction.set_rollback(True, using=alias)
    drain.run_once()
    assert not StagedJob.objects.using(alias).exists()
    assert len(received(staged.app)) == 100


def test_an_incident_is_owed_until_it_is_written(alias, redis_url, make_app):
    """The broker's answer is unknown, and so is the database's: the incident is written later."""
    app = make_app(redis_url)
    note = app.task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        for i in range(10):
            note.delay("", i)
    drain = Drain(using=alias)
    rows = list(StagedJob.objects.using(alias).all())
    drain._unsettled.record_unknown(rows, drainer=str(drain), detail="not known")
    with connections[alias].execute_wrapper(_fail_incidents):
        for _ in range(2):
            with pytest.raises(OperationalError):
                drain.run_once()
    assert not received(app)
    assert drain.run(once=True).published == 10
    incident = Incident.objects.using(alias).get()
    assert (incident.first_id, incident.last_id) == (rows[0].id, rows[-1].id)
    assert incident.shards == sorted({row.shard for row in rows})


def _fail_incidents(execute, sql, *args):
    if sql.startswith("INSERT") and "outbox_incident" in sql:
        raise OperationalError("failed on purpose")
    return execute(sql, *args)


def test_incidents_are_written_before_anything_is_deleted(alias, staged):
    """Or a drainer that is killed in between leaves a duplicate without its cause."""
    unsettled, rows = Unsettled(using=alias), list(StagedJob.objects.using(alias).all())
    unsettled.sent(rows)
    unsettled.record_unknown(rows, drainer="one", detail="not known")
    with connections[alias].execute_wrapper(_fail_incidents), pytest.raises(OperationalError):
        unsettled.flush()
    assert StagedJob.objects.using(alias).count() == 100
    unsettled.flush()
    assert not StagedJob.objects.using(alias).exists()


def test_a_loss_covers_every_batch_since_the_last_heartbeat_and_is_recorded_once(alias, staged):
    unsettled, rows = Unsettled(using=alias), list(StagedJob.objects.using(alias).order_by("id"))
    for start in (60, 20, 40):
        unsettled.sent(rows[start : start + 20])
    for _ in range(2):
        unsettled.record_loss(drainer="one")
        unsettled.flush()
    incident = Incident.objects.using(alias).get()
    assert (incident.first_id, incident.last_id) == (rows[20].id, rows[79].id)
    assert incident.shards == sorted({row.shard for row in rows[20:80]})


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_many_locked_rows_are_found_without_comparing_each_with_each(alias, staged):
    """A transaction may cancel thousands: with the square of that a drainer loses its lease."""
    compared = []

    class Id(int):
        def __eq__(self, other):
            compared.append(other)
            return int(self) == other

        __hash__ = int.__hash__

    rows = list(StagedJob.objects.using(alias).order_by("id"))
    for row in rows:
        row.id = Id(row.id)
    unsettled = Unsettled(using=alias)
    unsettled.sent(rows)
    with transaction.atomic(using=alias):
        list(StagedJob.objects.using(alias).select_for_update())
        with own_connection(alias, seconds=1):
            unsettled.flush()
    assert unsettled.locked == {row.id: row.shard for row in rows}
    assert len(compared) < 10 * len(rows)


@pytest.fixture
def block(alias, staged, settings, monkeypatch):
    """``block(4, 9)``: a dead job blocks the key of the jobs at these places, which it returns."""
    settings.OUTBOX = {**settings.OUTBOX, "DEAD_KEY": "block"}
    monkeypatch.setattr(dead_rows, "LOCK_SECONDS", 0.1)

    def make(*places):
        jobs = StagedJob.objects.using(alias).order_by("id")
        blocked = [jobs[place] for place in places]
        jobs.filter(pk__in=[job.pk for job in blocked]).update(ordering_key="k")
        dead_jobs(1, using=alias, ordering_key="k", staged_id=0)
        return blocked

    return make


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_a_blocked_job_that_is_being_cancelled_holds_up_no_other(alias, staged, block):
    """It cannot be moved to dead yet; it was the first of each batch, of which nothing left."""
    [job] = block(50)
    drain = Drain(using=alias)
    with transaction.atomic(using=alias):
        StagedJob.objects.using(alias).select_for_update().get(pk=job.pk)
        with own_connection(alias, seconds=1):
            drain.run_once()
            assert drain.tally.published == 99
    drain.run_once()
    assert drain.tally.dead == 1
    drain.holder.leave()


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_blocked_jobs_that_are_being_cancelled_hold_up_no_batch_of_blocked_ones(
    alias, staged, block
):
    """They stayed with the first of them, and batches of them alone came again and again."""
    first = [job.pk for job in block(*range(40))]
    drain = Drain(using=alias, batch_size=20)
    with transaction.atomic(using=alias):
        list(StagedJob.objects.using(alias).select_for_update().filter(pk__in=first[:5]))
        with own_connection(alias, seconds=1):
            for _ in range(7):
                drain.run_once()
            assert (drain.tally.dead, drain.tally.published) == (35, 60)
    drain.run_once()
    assert drain.tally.dead == 40
    drain.holder.leave()


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_a_blocked_job_that_stayed_is_not_overtaken_once_its_key_is_free(
    alias, staged, block, monkeypatch
):
    """The next batch comes from a new look, or the ids of the last one would pass the job over."""
    monkeypatch.setattr(batch, "SERVES", 100_000)
    first, second = block(10, 60)
    drain = Drain(using=alias, batch_size=50)
    with transaction.atomic(using=alias):
        StagedJob.objects.using(alias).select_for_update().get(pk=first.pk)
        with own_connection(alias, seconds=1):
            drain.run_once()
            assert drain.tally.published == 49
            DeadJob.objects.using(alias).all().delete()
            drain.run_once()
    drain.run(once=True)
    sent = [message.headers["id"] for message in received(staged.app)]
    assert len(sent) == 100
    assert sent.index(first.task_id) < sent.index(second.task_id)
