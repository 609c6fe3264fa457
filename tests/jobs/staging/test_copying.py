"""Many rows on PostgreSQL are one COPY, which all that watch Django's statements see."""

from __future__ import annotations

import pytest
from celery import group
from django.db import DataError, IntegrityError, OperationalError, connections, transaction
from django.db.backends.postgresql import base
from django.db.backends.utils import CursorWrapper
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from outbox_app import stage_many
from outbox_app.database import copying
from outbox_app.jobs.staging.insert import COPY_ROWS
from outbox_app.models import StagedJob
from tests.jobs.staging import tasks

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("alias", ["postgres"], indirect=True),
]


@pytest.fixture(autouse=True)
def new_connection(alias):
    """Each connection asks once whether rows can be copied."""
    connections[alias].close()
    yield
    connections[alias].close()


ODD = ["\\", "\t\n\r", "\\N", "\\.", "'", '"', "%", "🎈", "a\\tb"]


def _verbs(statements):
    return [sql.split()[0] for sql in statements if "outbox_stagedjob" in sql]


def test_the_rows_are_those_that_an_insert_writes(alias, app, add, monkeypatch):
    receipt = app.task(name="receipt", shared=False, receipt=60)(tasks.add)
    jobs = [(receipt if i % 5 else add).s(ODD[i % 9], i).set(task_id=str(i)) for i in range(99)]
    for i, job in enumerate(jobs):
        job.set(ordering_key=ODD[i % 9] if i % 9 > 3 else "")
    columns = {f.name for f in StagedJob._meta.concrete_fields} - {"id", "staged_at"}
    rows = StagedJob.objects.using(alias).order_by("id")
    found = []
    for copies in (copying.copies, lambda connection, model: False):
        monkeypatch.setattr(copying, "copies", copies)
        with transaction.atomic(using=alias):
            stage_many(jobs, using=alias)
        found.append(list(rows.values_list(*columns)))
        rows.delete()
        with transaction.atomic(using=alias):
            stage_many((add.s(i, i) for i in range(20)), using=alias, countdown=86_400)
        assert rows.held().count() == 20
        rows.delete()
    assert found[0] == found[1]
    assert len(found[0]) == 99


def test_the_query_log_a_wrapper_and_a_patch_see_one_statement(alias, add, monkeypatch):
    """Sentry replaces the method of Django's cursor."""
    connection, wrapped, patched, execute = connections[alias], [], [], CursorWrapper.execute

    def wrapper(run, sql, params, many, context):
        wrapped.append(sql)
        return run(sql, params, many, context)

    def traced(self, sql, params=None):
        patched.append(sql)
        return execute(self, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", traced)
    with transaction.atomic(using=alias), connection.execute_wrapper(wrapper):
        stage_many((add.s(i, i) for i in range(COPY_ROWS)), using=alias)
        with CaptureQueriesContext(connection) as queries:
            stage_many((add.s(i, i) for i in range(COPY_ROWS)), using=alias)
    assert _verbs(query["sql"] for query in queries) == ["COPY"]
    assert _verbs(wrapped) == ["COPY", "COPY"]
    assert _verbs(patched) == ["COPY", "COPY"]


def test_a_driver_that_is_traced_executes_an_insert(alias, add, monkeypatch):
    """As OpenTelemetry's cursor, which overrides ``execute``."""
    executed, execute = [], base.Cursor.execute

    def traced(self, sql, *args, **options):
        executed.append(sql)
        return execute(self, sql, *args, **options)

    monkeypatch.setattr(base.Cursor, "execute", traced)
    with transaction.atomic(using=alias):
        stage_many((add.s(i, i) for i in range(COPY_ROWS)), using=alias)
    assert _verbs(executed) == ["INSERT"]


@pytest.mark.parametrize(
    ("on", "off"),
    [
        ("ALTER TABLE {} ENABLE ROW LEVEL SECURITY", "ALTER TABLE {} DISABLE ROW LEVEL SECURITY"),
        ("CREATE RULE r AS ON INSERT TO {} DO ALSO NOTHING", "DROP RULE r ON {}"),
    ],
    ids=["row-level security", "a rule"],
)
def test_rows_are_inserted_where_copy_would_do_something_else(on, off, alias, add):
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(on.format("outbox_stagedjob"))
    try:
        with transaction.atomic(using=alias), CaptureQueriesContext(connection) as queries:
            stage_many((add.s(i, i) for i in range(COPY_ROWS)), using=alias)
    finally:
        with connection.cursor() as cursor:
            cursor.execute(off.format("outbox_stagedjob"))
    assert _verbs(query["sql"] for query in queries) == ["INSERT"]


def test_few_rows_and_those_whose_ids_are_needed_are_inserted(alias, add):
    for jobs, immediate in ((COPY_ROWS - 1, False), (COPY_ROWS, True)):
        with (
            transaction.atomic(using=alias),
            CaptureQueriesContext(connections[alias]) as queries,
        ):
            stage_many((add.s(i, i) for i in range(jobs)), using=alias, immediate=immediate)
        assert _verbs(query["sql"] for query in queries)[:1] == ["INSERT"]


def test_an_error_of_the_database_is_django_s_and_undoes_the_transaction(alias, add, monkeypatch):
    monkeypatch.setattr("outbox_app.jobs.staging.insert.SHARDS", 10_000)  # above the constraint
    with pytest.raises(IntegrityError), transaction.atomic(using=alias):
        stage_many((add.s(i, i) for i in range(100)), using=alias)
    assert not StagedJob.objects.using(alias).exists()


@pytest.mark.parametrize("sends", [stage_many, group], ids=["stage_many", "group"])
def test_a_broken_transaction_is_found_as_by_an_insert(sends, alias, app, add):
    jobs = [add.s(i, i) for i in range(COPY_ROWS)]
    with transaction.atomic(using=alias):
        with pytest.raises(DataError), transaction.atomic(using=alias, savepoint=False):
            connections[alias].cursor().execute("SELECT 1 / 0")
        with pytest.raises(TransactionManagementError):
            stage_many(jobs, using=alias) if sends is stage_many else group(jobs, app=app)()
        transaction.set_rollback(True, using=alias)


def test_an_error_of_the_question_is_django_s(alias, add, monkeypatch):
    def lost(driver, table):
        driver.close()
        driver.execute("SELECT 1")

    monkeypatch.setattr(copying, "_copies", lost)
    with pytest.raises(OperationalError), transaction.atomic(using=alias):
        stage_many((add.s(i, i) for i in range(COPY_ROWS)), using=alias)


def test_rows_are_inserted_in_a_pipeline(alias, add):
    """Psycopg copies nothing in one."""
    connection = connections[alias]
    with transaction.atomic(using=alias), CaptureQueriesContext(connection) as queries:
        for _ in range(2):
            with connection.connection.pipeline():
                stage_many((add.s(i, i) for i in range(COPY_ROWS)), using=alias)
            stage_many((add.s(i, i) for i in range(COPY_ROWS)), using=alias)
    assert _verbs(query["sql"] for query in queries) == ["INSERT", "COPY"] * 2
