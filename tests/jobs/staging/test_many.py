"""``stage_many()``, groups and single jobs in the database: few statements, all or nothing."""

from __future__ import annotations

import json
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from math import ceil
from threading import Thread
from zlib import crc32

import pytest
from celery import chord, group
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils.connection import ConnectionDoesNotExist
from kombu.exceptions import EncodeError

from outbox_app import stage, stage_many
from outbox_app.exceptions import InvalidJob
from outbox_app.jobs.staging import insert
from outbox_app.jobs.staging.insert import CHUNK_BYTES, CHUNK_ROWS
from outbox_app.models import StagedJob
from outbox_app.signals import jobs_staged
from tests.jobs.staging import tasks
from tests.jobs.staging.transactions import rolled_back

pytestmark = pytest.mark.django_db(transaction=True)
on_sqlite = pytest.mark.parametrize("alias", ["default"])


def test_staging_one_job_is_one_insert(alias, add):
    connection = connections[alias]
    with transaction.atomic(using=alias):
        add.delay(0, 0)
        for call in (
            partial(add.delay, 1, 1),
            partial(add.apply_async, (1, 1), countdown=9, ordering_key="k"),
            partial(stage, add, (1, 1)),
            (add.s(1, 1) | add.s(2)).delay,
        ):
            with CaptureQueriesContext(connection) as queries:
                call()
            assert [q["sql"].split("(")[0] for q in queries] == [_insert(connection)]


def test_the_shard_is_that_of_the_key_or_else_of_the_task_id():
    assert insert.shard_of_job("k", "a") == crc32(b"k") % 128
    assert insert.shard_of_job("", "a") == crc32(b"a") % 128


def _insert(connection):
    return f"INSERT INTO {connection.ops.quote_name('outbox_stagedjob')} "


def _writes(connection):
    return _insert(connection), f"COPY {connection.ops.quote_name('outbox_stagedjob')} "


#: What an INSERT leaves to the database.
GIVEN = ("id", "staged_at", "is_immediate", "receipt", "sent_at", "publishes")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 1001])
def test_staging_many_is_an_insert_a_thousand(count, alias, add):
    connection = connections[alias]
    # SQLite takes fewer parameters in one statement.
    fields = [f for f in StagedJob._meta.concrete_fields if f.name not in GIVEN]
    rows = min(CHUNK_ROWS, connection.ops.bulk_batch_size(fields, range(CHUNK_ROWS)))
    full, rest = divmod(count, CHUNK_ROWS)
    with transaction.atomic(using=alias):
        for call, expected in (
            (group(add.s(i, i) for i in range(count)).delay, ceil(count / rows)),
            (
                partial(stage_many, [add.s(i, i) for i in range(count)]),
                full * ceil(CHUNK_ROWS / rows) + ceil(rest / rows),
            ),
        ):
            with CaptureQueriesContext(connection) as queries:
                call()
            statements = [q["sql"] for q in queries]
            inserts = [sql for sql in statements if sql.startswith(_writes(connection))]
            others = {sql.split(" ")[0] for sql in statements if sql not in inserts}
            assert len(inserts) == expected
            # A savepoint, and a question for MariaDB's packet where the bytes are many.
            assert others <= {"SAVEPOINT", "RELEASE", "SELECT"}
            assert len(statements) <= len(inserts) + 4
    assert StagedJob.objects.using(alias).count() == 2 * count


def test_a_chunk_ends_at_a_mebibyte(alias, add):
    connection = connections[alias]
    third = "x" * (CHUNK_BYTES // 3)
    with transaction.atomic(using=alias), CaptureQueriesContext(connection) as queries:
        stage_many(add.s(third, i) for i in range(7))
    assert sum(q["sql"].startswith(_writes(connection)) for q in queries) == 4


@pytest.mark.slow
@on_sqlite
def test_a_generator_is_taken_bit_by_bit(alias, add):
    most = 0

    def jobs():
        nonlocal most
        for i in range(3 * CHUNK_ROWS):
            waiting = i - StagedJob.objects.using(alias).count() if i % 500 == 499 else 0
            most = max(most, waiting)
            yield add.s(i, i)

    with transaction.atomic(using=alias):
        assert stage_many(jobs()) == 3 * CHUNK_ROWS
    assert most <= CHUNK_ROWS
    assert StagedJob.objects.using(alias).count() == 3 * CHUNK_ROWS


BAD = {
    "refused": (lambda add: add.s(1, 1).set(queue="amq.x"), InvalidJob),
    "cannot be encoded": (lambda add: add.s(object(), 1), EncodeError),
    "no signature": (lambda add: 5, InvalidJob),
    "a broken generator": (lambda add: 1 / 0, ZeroDivisionError),
    "another alias": (lambda add: add.s(1, 1).set(using="nowhere"), ConnectionDoesNotExist),
}


@pytest.mark.parametrize(("bad", "error"), BAD.values(), ids=BAD)
@on_sqlite
def test_one_bad_job_and_nothing_of_the_call_is_staged(bad, error, alias, add, staged):
    with transaction.atomic(using=alias):
        add.delay("before", 0)
        with pytest.raises(error):
            stage_many(bad(add) if i == 5 else add.s(i, i) for i in range(9))
        add.delay("after", 0)

    assert staged() == [["before", 0], ["after", 0]]


@pytest.mark.slow
def test_a_bad_job_after_many_takes_back_what_was_written(alias, add, staged):
    def jobs():
        for i in range(2 * CHUNK_ROWS):
            yield add.s(i, i)
        yield add.s(1, 1).set(queue="amq.x")

    with transaction.atomic(using=alias):
        add.delay("before", 0)
        with pytest.raises(InvalidJob):
            stage_many(jobs())
        add.delay("after", 0)

    assert staged() == [["before", 0], ["after", 0]]


@on_sqlite
def test_a_group_with_a_bad_job_is_not_staged_in_part(alias, add, staged, monkeypatch):
    monkeypatch.setattr(insert, "CHUNK_ROWS", 1)  # no chunk of it is written before the rest
    with transaction.atomic(using=alias):
        for canvas in (
            group(add.s(1, 1), add.s(2, 2).set(queue="amq.x")),
            chord([add.s(1, 1), add.s(2, 2).set(queue="amq.x")], add.s(3)),
            group(add.s(1, 1), group(add.s(2, 2), add.s(object(), 2))),
        ):
            with pytest.raises(Exception, match=r"amq|JSON"):
                canvas.delay()
        add.delay("after", 0)
    assert staged() == [["after", 0]]


@pytest.mark.parametrize("before", [0, 10])
@on_sqlite
def test_a_group_that_is_refused_among_other_calls_is_not_staged_in_part(
    before, alias, add, staged, monkeypatch
):
    monkeypatch.setattr(insert, "CHUNK_ROWS", 10)

    def jobs():
        for i in range(before):
            yield add.s(i, i)
        with suppress(InvalidJob):
            group(add.si(7, 7) for _ in range(15)).delay()
            group([*(add.si(8, 8) for _ in range(15)), add.si(9, 9).set(queue="amq.x")]).delay()
        yield add.s("after", 0)

    with transaction.atomic(using=alias):
        stage_many(jobs())
    kept = [[i, i] for i in range(before)] + [[7, 7]] * 15
    assert staged() == [*kept, ["after", 0]]


@on_sqlite
def test_a_chord_that_is_polled_is_staged_with_its_poller_or_not_at_all(
    alias, make_app, tmp_path, staged
):
    app = make_app("memory://", result_backend=f"file://{tmp_path}")
    add = app.task(name="add", shared=False)(tasks.add)
    with transaction.atomic(using=alias):
        with pytest.raises(InvalidJob):
            stage(chord([add.s(1, 1), add.s(2, 2).set(queue="amq.x")], add.s(3)))
        assert not staged()
        stage(chord([add.s(1, 1), add.s(2, 2)], add.s(3)))

    names = StagedJob.objects.using(alias).order_by("id").values_list("task", flat=True)
    assert list(names) == ["celery.chord_unlock", "add", "add"]


@on_sqlite
@pytest.mark.parametrize("form", ["signature", "group", "chain", "chord", "name", "dictionary"])
def test_one_signature_is_no_list_of_them(form, alias, add, staged):
    """Signatures are dictionaries, whose keys would be staged as the names of tasks."""
    one = {
        "signature": add.s(1, 1),
        "group": group(add.s(1, 1), add.s(2, 2)),
        "chain": add.s(1, 1) | add.s(2),
        "chord": chord([add.s(1, 1)], add.si(1, 1)),
        "name": "add",
        "dictionary": json.loads(json.dumps(add.s(1, 1))),
    }[form]
    with transaction.atomic(using=alias):
        with pytest.raises(InvalidJob, match=r"takes a list of signatures; got .* Use stage"):
            stage_many(one, using=alias)
        if form != "dictionary":
            assert stage_many([one], using=alias) == 1


@on_sqlite
def test_a_task_and_its_arguments_are_no_list_of_signatures(alias, add):
    for call in ((add, [(1, 1)]), (add,), ([add.s(1, 1)], [(1, 1)]), ([(1, 1)],), ([7],)):
        with transaction.atomic(using=alias), pytest.raises(InvalidJob, match="pass signatures"):
            stage_many(*call, using=alias)


@on_sqlite
def test_a_savepoint_in_the_generator_decides_about_its_own_jobs(alias, add, staged):
    def jobs():
        for i in range(CHUNK_ROWS - 1):
            yield add.s("kept", i)
        with rolled_back(alias):
            yield add.s("lost", 0)
            yield add.s("lost", 1)
        with transaction.atomic(using=alias):
            add.delay("kept", CHUNK_ROWS - 1)

    with transaction.atomic(using=alias):
        stage_many(jobs())

    assert sorted(staged()) == [["kept", i] for i in range(CHUNK_ROWS)]


@pytest.fixture
def outside(settings):
    """``stage_many()`` opens the transaction itself."""
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage"}


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_what_a_thread_with_the_same_context_stages_is_its_own(alias, add, staged, outside):
    """As ``sync_to_async(…, thread_sensitive=False)`` runs it, for a generator that waits."""

    def run():
        try:
            with transaction.atomic(using=alias):
                add.delay("own", 0)
            with rolled_back(alias):
                add.delay("lost", 0)
        finally:
            connections[alias].close()

    def jobs():
        thread = Thread(target=copy_context().run, args=(run,))
        thread.start()
        thread.join()
        yield add.s("first", 0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stage_many(jobs())
    assert staged() == [["own", 0]]


@on_sqlite
@pytest.mark.parametrize("fails", [False, True])
def test_what_goes_on_after_the_call_stages_its_own(fails, alias, add, staged, outside):
    """As a task of asyncio that was begun meanwhile, and has a copy of the context."""
    contexts = []

    def jobs():
        yield add.s("first", 0)
        contexts.append(copy_context())
        if fails:
            raise ZeroDivisionError

    def go_on():
        with transaction.atomic(using=alias):
            add.delay("own", 0)

    with suppress(ZeroDivisionError):
        stage_many(jobs())
    contexts[0].run(go_on)
    assert staged() == [["first", 0]] * (not fails) + [["own", 0]]


@on_sqlite
def test_options_are_for_all(alias, add):
    with transaction.atomic(using=alias):
        stage_many([add.s(1, 1), add.s(2, 2)], ordering_key="k", queue="slow", countdown=4000)
        stage_many([add.s(3, 3).set(ordering_key="own"), add.s(4, 4)])

    jobs = list(StagedJob.objects.using(alias).order_by("id"))
    assert [job.ordering_key for job in jobs] == ["k", "k", "own", ""]
    assert [job.queue for job in jobs[:2]] == ["slow", "slow"]
    assert all(job.available_at for job in jobs[:2])


@on_sqlite
def test_the_signal_tells_of_each_call_before_the_commit(alias, add):
    heard = []

    def receiver(sender, using, jobs, **kwargs):
        assert connections[using].in_atomic_block
        heard.append([job.task for job in jobs])

    jobs_staged.connect(receiver)
    try:
        with transaction.atomic(using=alias):
            add.delay(1, 1)
            stage_many([add.s(2, 2), add.s(3, 3)])
    finally:
        jobs_staged.disconnect(receiver)

    assert heard == [["add"], ["add", "add"]]
