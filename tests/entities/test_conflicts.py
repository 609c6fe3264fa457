"""Commands that conflict: twins, races, lost connections, killed processes, isolation levels."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from uuid import uuid4

import pytest
from django.db import OperationalError, connections, transaction

from outbox_app.entities import Command, batch
from outbox_app.entities import transaction as entity_transaction
from outbox_app.entities.batch import Moved
from outbox_app.entities.exceptions import EntityContended, OutcomeUnknown, UnknownEntity
from outbox_app.events import NO_STREAM
from outbox_app.events.models import StreamHead
from outbox_app.failpoints import set_failpoint
from tests import forking
from tests.entities.models import Account, Person
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)

#: SQLite lets one transaction write at a time: nothing comes between.
servers = pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)


@pytest.fixture
def elsewhere(alias):
    """``elsewhere("withdraw", {"amount": 1}, "x")``: execute a command as another process does."""

    def execute(command, arguments, command_id):
        def run():
            try:
                each = Command("a", command, arguments, command_id=command_id)
                return Account.execute_many([each], using=alias)  # past this process's queue
            finally:
                connections.close_all()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(run).result()

    return execute


@pytest.fixture
def at_point():
    """``at_point("entity_loaded", action)``: call ``action`` at the first pass of the failpoint."""
    points = []

    def once(name, action):
        def act():
            set_failpoint(name, None)
            action()

        points.append(name)
        set_failpoint(name, act)

    yield once
    for name in points:
        set_failpoint(name, None)


@pytest.fixture(params=["as it is", "strictest"])
def isolation(request, alias):
    """The default isolation level, and the strictest level that Django knows for the server."""
    strictest = {"postgresql": 4, "mysql": "serializable"}
    connection = connections[alias]
    if request.param == "as it is" or connection.vendor == "sqlite":
        yield
        return
    options = connection.settings_dict["OPTIONS"]
    connection.close()
    options["isolation_level"] = strictest[connection.vendor]
    yield
    connection.close()
    del options["isolation_level"]


@servers
@pytest.mark.parametrize("point", ["entity_loaded", "entity_handled"])
def test_a_twin_that_comes_between_is_found(account, ask, rows, elsewhere, at_point, point):
    """Loaded, then the twin commits, then it is looked up or the head is compared."""
    at_point(point, lambda: elsewhere("withdraw", {"amount": 4}, "x"))
    outcome = ask("withdraw", {"amount": 4}, command_id="x")
    assert (outcome.replayed, outcome.version, outcome.response) == (True, 2, {"balance": 6})
    assert len(rows()) == 2


@servers
def test_another_command_that_comes_between_is_built_upon(account, ask, rows, elsewhere, at_point):
    at_point("entity_handled", lambda: elsewhere("withdraw", {"amount": 4}, "y"))
    outcome = ask("withdraw", {"amount": 4}, command_id="x")
    assert (outcome.version, outcome.response) == (3, {"balance": 2})


@servers
def test_the_snapshot_of_a_caller_hides_the_twin(alias, account, ask, rows, elsewhere):
    """At REPEATABLE READ, MySQL's default; PostgreSQL tells by an error, which is the caller's."""
    connection = connections[alias]
    levels = {"postgresql": 2, "mysql": "repeatable read"}
    connection.close()
    connection.settings_dict["OPTIONS"]["isolation_level"] = levels[connection.vendor]
    try:
        with transaction.atomic(using=alias):
            assert len(rows()) == 1  # takes the snapshot
            elsewhere("withdraw", {"amount": 4}, "x")
            outcome = ask("withdraw", {"amount": 4}, command_id="x")
        assert (outcome.replayed, outcome.version) == (True, 2)
    finally:
        connection.close()
        del connection.settings_dict["OPTIONS"]["isolation_level"]
    assert len(rows()) == 2


@pytest.fixture
def snapshots(alias):
    """Connections of the alias at REPEATABLE READ."""
    connection = connections[alias]
    levels = {"postgresql": 3, "mysql": "repeatable read"}
    connection.close()
    connection.settings_dict["OPTIONS"]["isolation_level"] = levels[connection.vendor]
    yield
    connections[alias].close()
    del connections[alias].settings_dict["OPTIONS"]["isolation_level"]


@servers
@pytest.mark.parametrize("command", ["withdraw", "open"])
def test_a_hidden_twin_is_found_before_anything_is_refused(
    alias, ask, rows, elsewhere, snapshots, command
):
    """PostgreSQL refuses the caller's snapshot instead."""
    arguments = {"withdraw": {"amount": 4}, "open": {"owner": "ann"}}[command]
    if command == "withdraw":
        ask("open", {"owner": "ann", "balance": 4})
    expected = NO_STREAM if command == "open" else 1
    with suppress(OperationalError), transaction.atomic(using=alias):
        before = len(rows())  # takes the snapshot
        elsewhere(command, arguments, "x")
        outcome = ask(command, arguments, command_id="x", expected_version=expected)
        assert connections[alias].vendor == "mysql"
        assert (outcome.replayed, outcome.version) == (True, before + 1)
    assert len(rows()) == before + 1


@servers
def test_what_a_snapshot_hides_is_named_by_the_index_and_not_by_the_values(alias, snapshots):
    """Django's own look sees nothing, so it is told by the error, which quotes the values."""

    def enter(id, nick):
        return Person.execute(id, "enter", {"nick": nick}, command_id=id, using=alias)

    def elsewhere():
        try:
            return enter("b", "email for key x")
        finally:
            connections.close_all()

    with transaction.atomic(using=alias):
        assert not Person.objects.using(alias).exists()  # takes the snapshot
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(elsewhere).result().rejected
        assert enter("a", "email for key x").rejected.code == "nick"


@servers
def test_a_creation_of_a_caller_holds_up_no_other(alias, snapshots):
    """Nothing that is absent is locked: at REPEATABLE READ that would be the gap.

    Names of their own: InnoDB keeps what was deleted for a while, and locks beside it.
    """
    first, second = (f"{letter}-{uuid4()}" for letter in "ab")

    def create():
        try:
            return Account.execute(second, "open", {"owner": "b"}, command_id="x", using=alias)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool, transaction.atomic(using=alias):
        Account.execute(first, "open", {"owner": "a"}, command_id="x", using=alias)
        assert pool.submit(create).result(timeout=patience(8)).version == 1


@servers
def test_a_command_for_what_is_absent_leaves_no_head(alias, snapshots):
    with transaction.atomic(using=alias), pytest.raises(UnknownEntity):
        Account.execute("c", "withdraw", {"amount": 1}, command_id="x", using=alias)
    assert not StreamHead.objects.using(alias).filter(stream="c").exists()


@pytest.mark.parametrize("id", ["a", "b"])
def test_a_command_that_may_query_locks_its_entity_first(alias, account, declare, at_point, id):
    """Else its handler's rows would be locked before the head, and those of others after it."""
    met = []

    def write():
        heads = StreamHead.objects.using(alias).filter(stream=id)
        try:
            with connections[alias].cursor() as cursor:
                if connections[alias].vendor == "sqlite":
                    cursor.execute("PRAGMA busy_timeout = 0")
                elif connections[alias].vendor == "mysql":
                    cursor.execute("SET innodb_lock_wait_timeout = 1")
                else:
                    cursor.execute("SET lock_timeout = '100ms'")
            if not heads.update(version=1):
                StreamHead.objects.using(alias).create(log="account_version", stream=id, version=1)
        except OperationalError as error:
            met.append(error)
        finally:
            connections.close_all()

    def meet():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(write).result()

    def visit(self):
        self.state = {"visited": True}

    declare(visit, atomic=True, creates=id == "b")
    at_point("entity_loaded", meet)
    assert Account.execute(id, "visit", command_id="x", using=alias).version == (id == "a") + 1
    assert len(met) == 1


def test_fifty_commands_of_eight_threads_all_count(alias, account, rows, isolation):
    together = threading.Barrier(8)

    def withdraw(thread):
        together.wait()
        try:
            for number in range(6):
                name = f"{thread}-{number}"
                Account.execute("a", "leave", {"value": "rich"}, command_id=name, using=alias)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(withdraw, range(8)))
    assert [version for version, *_ in rows()] == list(range(1, 50))


@pytest.mark.parametrize("committed", [True, False])
def test_a_commit_whose_reply_is_lost(alias, account, ask, rows, monkeypatch, committed):
    connection = connections[alias]
    original = connection._commit

    def lost():
        monkeypatch.setattr(connection, "_commit", original)
        if committed:
            original()
        connection.connection.close()
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(connection, "_commit", lost)
    outcome = ask("withdraw", {"amount": 4}, command_id="x")
    assert (outcome.response, outcome.replayed) == ({"balance": 6}, committed)
    assert len(rows()) == 2


def test_a_lost_commit_and_a_database_that_stays_away(alias, account, ask, monkeypatch):
    connection = connections[alias]
    original = connection._commit

    def away(*args):
        raise OperationalError("connection refused")

    def lost():
        original()
        connection.connection.close()
        monkeypatch.setattr(connection, "connect", away)
        raise OperationalError("server closed the connection unexpectedly")

    with monkeypatch.context() as patch:
        patch.setattr(connection, "_commit", lost)
        with pytest.raises(OutcomeUnknown, match="same command id"):
            ask("withdraw", {"amount": 4}, command_id="x")
        monkeypatch.undo()
    assert ask("withdraw", {"amount": 4}, command_id="x").replayed


def test_a_database_that_is_away_before_the_commit_is_told_as_django_tells_it(
    alias, account, ask, monkeypatch
):
    def away(*args):
        raise OperationalError("connection refused")

    connections[alias].close()
    with monkeypatch.context() as patch:
        patch.setattr(connections[alias], "connect", away)
        with pytest.raises(OperationalError, match="refused"):
            ask("withdraw", {"amount": 4})


def test_others_are_ahead_each_time(account, ask, rows, monkeypatch):
    attempts = []

    def ahead(*args):
        attempts.append(1)
        raise Moved

    monkeypatch.setattr(entity_transaction.Batch, "run", ahead)
    monkeypatch.setattr(entity_transaction, "PAUSE", 0)
    with pytest.raises(EntityContended, match="or locked by other transactions in each attempt"):
        ask("withdraw", {"amount": 4})
    assert len(attempts) == 10
    assert len(rows()) == 1


@pytest.mark.parametrize(
    ("point", "versions"),
    [("entity_loaded", 1), ("entity_handled", 1), ("entity_written", 1), ("entity_committed", 2)],
)
def test_killed_at_any_point_it_is_all_or_nothing(
    alias, account, ask, rows, environment, point, versions
):
    code = (
        "import django; django.setup()\n"
        "from tests.entities.models import Account\n"
        f"Account.execute('a', 'withdraw', {{'amount': 4}}, command_id='x', using={alias!r})"
    )
    variables = {**environment(alias), "OUTBOX_FAILPOINT": f"{point}=kill"}
    done = forking.run(
        [sys.executable, "-c", code], env=variables, check=False, capture_output=True
    )
    assert done.returncode == -9, done.stderr
    assert len(rows()) == versions
    outcome = ask("withdraw", {"amount": 4}, command_id="x")
    assert (outcome.response, outcome.replayed) == ({"balance": 6}, versions == 2)
    assert len(rows()) == 2


@servers
def test_a_twin_that_is_created_between_the_row_and_the_head(
    alias, ask, rows, elsewhere, monkeypatch
):
    """The row was not there, and the head is."""

    def head(*args, **options):
        monkeypatch.undo()
        elsewhere("open", {"owner": "ann", "balance": 10}, "x")
        return batch.current_version(*args, **options)

    monkeypatch.setattr(batch, "current_version", head)
    assert ask("refuse_to_open").rejected.code == "exists"
    assert ask("withdraw", {"amount": 1}).response == {"balance": 9}
    assert [version for version, *_ in rows()] == [1, 2, 3]


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_a_lost_commit_and_a_database_that_only_reads(alias, account, ask, rows, monkeypatch):
    """As a standby does to which the address of the primary leads now."""
    connection = connections[alias]
    original, options = connection._commit, connection.settings_dict["OPTIONS"]

    def lost():
        original()
        connection.connection.close()
        options["options"] = "-c default_transaction_read_only=on"
        raise OperationalError("server closed the connection unexpectedly")

    with monkeypatch.context() as patch:
        patch.setattr(connection, "_commit", lost)
        try:
            with pytest.raises(OutcomeUnknown, match="same command id"):
                ask("withdraw", {"amount": 4}, command_id="x")
        finally:
            options.pop("options", None)
            connection.close()
    assert ask("withdraw", {"amount": 4}, command_id="x").replayed
    assert len(rows()) == 2


@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
@pytest.mark.parametrize("undone", [False, True])
def test_after_a_command_of_its_own_the_snapshot_of_a_caller_hides_the_twin(
    alias, account, ask, rows, elsewhere, snapshots, undone
):
    """What is hidden is no longer at the end of the versions."""
    with transaction.atomic(using=alias):
        assert len(rows()) == 1  # takes the snapshot
        elsewhere("withdraw", {"amount": 4}, "x")
        with transaction.atomic(using=alias):
            assert ask("withdraw", {"amount": 1}).version == 3
            assert ask("withdraw", {"amount": 1}).version == 4
            transaction.set_rollback(undone, using=alias)
        outcome = ask("withdraw", {"amount": 4}, command_id="x", expected_version=1)
        assert (outcome.replayed, outcome.version) == (True, 2)
    assert len(rows()) == (2 if undone else 4)


@pytest.mark.parametrize("alias", [pytest.param("default", id="sqlite")], indirect=True)
def test_an_attempt_with_a_lock_begins_with_a_write_on_sqlite(
    alias, account, ask, rows, elsewhere, monkeypatch
):
    """Django's default begins no write: one that comes after a read is refused, not waited for."""
    connection, seen = connections[alias], [""]
    monkeypatch.setattr(connection, "transaction_mode", None)

    def follow(execute, sql, *args):
        result = execute(sql, *args)
        if seen[-1] == "BEGIN" and sql.startswith("SELECT"):
            elsewhere("date", {}, f"other-{len(seen)}")
        seen.append(sql)
        return result

    with connection.execute_wrapper(follow):
        ask("look_around", {"using": alias})
    assert "BEGIN" in seen
    assert [command for _, command, *_ in rows()] == ["open", "look_around"]
