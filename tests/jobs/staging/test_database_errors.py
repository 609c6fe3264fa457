"""The database refuses the job's row: the business row is never committed without its job."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from urllib.parse import urlsplit

import pytest
from celery import group
from celery.exceptions import SoftTimeLimitExceeded
from django.contrib.auth.models import Group
from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError

from outbox_app import stage, stage_many
from outbox_app.exceptions import InvalidJob
from outbox_app.models import StagedJob
from outbox_app.signals import jobs_staged
from tests.servers.mysql import MARIADB_SERVER

pytestmark = pytest.mark.django_db(transaction=True)
IMPATIENT = {
    "mysql": "SET SESSION innodb_lock_wait_timeout = 1",
    "postgresql": "SET LOCAL lock_timeout = '100ms'",
}


@pytest.fixture
def locked(alias):
    """Another session holds locks on the whole table of jobs."""
    other = connections[alias].copy()
    other.set_autocommit(False)
    with other.cursor() as cursor:
        if other.vendor == "mysql":  # gap locks: no INSERT fits in
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT * FROM outbox_stagedjob FOR UPDATE")
        else:
            cursor.execute("LOCK TABLE outbox_stagedjob IN EXCLUSIVE MODE")
    yield
    other.rollback()
    other.close()


@contextmanager
def connected(receiver):
    jobs_staged.connect(receiver)
    try:
        yield
    finally:
        jobs_staged.disconnect(receiver)


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
@pytest.mark.parametrize("canvas", [False, True], ids=["task", "group"])
@pytest.mark.usefixtures("locked")
def test_a_caller_who_ignores_the_error_cannot_commit(canvas, alias, add):
    connection = connections[alias]
    job = group(add.s(1, 1), add.s(2, 2)) if canvas else add.s(1, 1)
    with transaction.atomic(using=alias):
        connection.cursor().execute(IMPATIENT[connection.vendor])
        Group.objects.using(alias).create(name="business")
        with pytest.raises(OperationalError):
            job.delay()
        with pytest.raises(TransactionManagementError):
            Group.objects.using(alias).create(name="more business")

    assert not Group.objects.using(alias).exists()


@pytest.mark.parametrize("fails_by", ["save", "query", 1213, 1020])
def test_a_receiver_that_undoes_the_callers_transaction_fails_the_call(alias, add, fails_by):
    """Otherwise the end of the block would be a rollback that raises nothing."""
    undoes = {"query": "postgresql", 1213: "mysql", 1020: "mysql"}
    if connections[alias].vendor != undoes.get(fails_by, connections[alias].vendor):
        pytest.skip("This database undoes no transaction because of such an error.")
    before = Group.objects.using(alias).create(name="before")

    def receiver(**kwargs):
        if fails_by == "save":
            Group(name=before.name).save(using=alias)
        if fails_by in (1213, 1020):
            connections[alias].connection.rollback()
            raise OperationalError(fails_by, "Deadlock found, or record has changed")
        connections[alias].cursor().execute("SELECT * FROM there_is_no_such_table")

    with connected(receiver), transaction.atomic(using=alias):
        Group.objects.using(alias).create(name="business")
        with pytest.raises(DatabaseError):
            add.delay(1, 1)
    assert [each.name for each in Group.objects.using(alias).all()] == ["before"]
    assert not StagedJob.objects.using(alias).exists()


def test_a_time_limit_of_the_callers_task_comes_in_a_receiver(alias, add):
    def receiver(**kwargs):
        raise SoftTimeLimitExceeded

    with connected(receiver), pytest.raises(SoftTimeLimitExceeded), transaction.atomic(using=alias):
        add.delay(1, 1)
    assert not StagedJob.objects.using(alias).exists()


def test_a_receiver_that_undoes_only_its_own_savepoint_is_logged(alias, add, caplog):
    Group.objects.using(alias).create(name="before")

    def receiver(**kwargs):
        with transaction.atomic(using=alias):
            Group(name="before").save(using=alias)

    with connected(receiver), transaction.atomic(using=alias):
        Group.objects.using(alias).create(name="business")
        add.delay(1, 1)
    assert Group.objects.using(alias).count() == 2
    assert StagedJob.objects.using(alias).count() == 1
    assert "IntegrityError" in caplog.text


def test_a_deadlock_that_undoes_nothing_of_the_caller_is_logged(alias, add, staged, settings):
    """One of another database; or one outside a transaction, where the job is committed."""
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage"}

    def receiver(**kwargs):
        raise OperationalError(1213, "Deadlock found when trying to get lock")

    mysql = connections[alias].vendor == "mysql"
    with connected(receiver), nullcontext() if mysql else transaction.atomic(using=alias):
        stage(add, (1, 1), using=alias)
    assert staged() == [[1, 1]]


@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
def test_a_message_that_may_not_fit_the_packet_is_refused_before_it_is_sent(alias, add, staged):
    with transaction.atomic(using=alias):
        with pytest.raises(InvalidJob, match=r"max_allowed_packet.*or store the data elsewhere"):
            add.apply_async((b"\x00" * (9 * 1024 * 1024), 1), serializer="pickle")
        add.delay(1, 1)

    assert staged() == [[1, 1]]


@pytest.fixture
def set_otherwise(alias, request):
    """The alias connects to a server with another setting, the parameter."""
    connection = connections[alias]
    connection.close()
    before = dict(connection.settings_dict)
    with MARIADB_SERVER(extra_arguments=(request.param,)) as server:
        url = urlsplit(server.url)
        connection.settings_dict.update(
            HOST=url.hostname,
            PORT=url.port,
            USER=url.username,
            PASSWORD=url.password,
            NAME="outbox",
        )
        with connection.schema_editor() as editor:
            editor.create_model(StagedJob)
        yield
        connection.close()
    connection.settings_dict.update(before)


@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
@pytest.mark.parametrize("set_otherwise", ["--innodb-rollback-on-timeout"], indirect=True)
@pytest.mark.usefixtures("set_otherwise")
def test_a_lock_timeout_in_a_receiver_that_undoes_the_transaction(alias, add):
    """The block ended without an error, and without its rows and its job."""
    with transaction.atomic(using=alias):
        add.delay(0, 0)
    own, other = connections[alias], connections[alias].copy()
    other.set_autocommit(False)
    with other.cursor() as cursor, own.cursor() as waiting:
        cursor.execute("SELECT * FROM outbox_stagedjob FOR UPDATE")
        waiting.execute(IMPATIENT["mysql"])

        def receiver(**kwargs):
            waiting.execute("DELETE FROM outbox_stagedjob ORDER BY id LIMIT 1")

        refused = pytest.raises(OperationalError, match="Lock wait timeout")
        with connected(receiver), refused, transaction.atomic(using=alias):
            add.delay(1, 1)
    other.close()


# An old default of max_allowed_packet, one mebibyte.
@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
@pytest.mark.parametrize("set_otherwise", ["--max-allowed-packet=1M"], indirect=True)
@pytest.mark.usefixtures("set_otherwise")
def test_chunks_are_cut_to_a_small_packet(alias, add):
    with transaction.atomic(using=alias):
        stage_many(add.s("'" * 900, i) for i in range(1500))
        stage_many(add.s("'" * 150_000, i) for i in range(5))
        stage(add, ("'" * 400_000, 1))
        with pytest.raises(InvalidJob, match="max_allowed_packet"):
            stage(add, ("'" * 600_000, 1))

    assert StagedJob.objects.using(alias).count() == 1506
