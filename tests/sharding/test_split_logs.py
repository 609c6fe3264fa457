"""The tables of prepared events, and of versions of entities, may be split."""

from __future__ import annotations

from io import StringIO
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connections
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext

from outbox_app.events import subscriber
from outbox_app.events.checks import check_log_tables
from outbox_app.events.exceptions import UnsafeLog
from outbox_app.events.log.reader import LogReader
from outbox_app.events.models import Event
from outbox_app.exceptions import InvalidArgument
from outbox_app.prepared import NewPrepared, keeper
from outbox_app.prepared.models import PreparedEvent
from outbox_app.prepared.request import checked
from tests.entities.models import Account, AccountVersion
from tests.events.log.sessions import Session
from tests.pipeline import harness
from tests.splitting import partitions_read, split

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True),
]
MESSAGE_ID = "message_id"


@pytest.fixture
def versions(alias):
    """The versions of accounts, split by their stream."""
    with split(AccountVersion, alias, by="stream", giving_up=[MESSAGE_ID]):
        yield QuerySet(AccountVersion, using=alias)


def prune(*arguments):
    output = StringIO()
    call_command("outbox_prune", *arguments, stdout=output)
    return output.getvalue()


def test_commands_are_answered_once_and_read_one_partition(alias, versions):
    def ask(id, command, arguments, command_id):
        return Account.execute(id, command, arguments, command_id=command_id, using=alias)

    for id in "abcdefgh":
        ask(id, "open", {"owner": id, "balance": 10}, "open")
    first = ask("a", "withdraw", {"amount": 1}, "x")
    again = ask("a", "withdraw", {"amount": 1}, "x")
    assert (again.version, again.replayed) == (first.version, True)
    assert Account.history("a", using=alias).count() == 2
    for rows in versions.filter(stream="a", command_id="x"), versions.filter(stream="a", version=2):
        assert partitions_read(rows) == 1
    assert partitions_read(versions.filter(message_id=uuid4())) == 4
    assert [*check_log_tables(databases=[alias])] == []
    call_command("outbox_entities", "verify", stdout=StringIO())


def test_windows_gaps_retention_and_archive(alias, versions, run, tmp_path):
    seen = []

    @subscriber("ledger", logs=[AccountVersion])
    def handle(events):
        seen.extend((event.stream, event.version) for event in events)

    def ask(id, command="date", **arguments):
        Account.execute(id, command, arguments, command_id=str(uuid4()), using=alias)

    for id in "abc":
        ask(id, "open", owner=id)
    run("ledger")
    with Session(alias) as slow, Session(alias) as gone:
        gone.begin().do(lambda: ask("b"))
        slow.begin().do(lambda: ask("a"))
        ask("c")
        run("ledger")
        assert seen[3:] == [("c", 2)]
        slow.commit()
        gone.rollback()
    ask("b")
    run("ledger")
    assert sorted(seen) == sorted(versions.values_list("stream", "version"))
    assert len(seen) == len(set(seen)) == 6

    harness.archive(alias, tmp_path, log=AccountVersion)
    assert harness.archived(tmp_path) == harness.logged(alias, AccountVersion)
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE account_version SET recorded_at = '2020-01-01 00:00:00'")
    said = prune("--events", "--log", "account_version", "--older-than=1")
    assert "pruned log=account_version removed=6" in said
    ask("a")
    assert [version.version for version in versions] == [3]


def test_tombstones_are_refused_where_they_refuse_no_row(alias, versions, settings):
    settings.OUTBOX = {**settings.OUTBOX, "TOMBSTONES": True}
    reader = LogReader(AccountVersion, using=alias)
    try:
        state = reader.window.start()
        if alias == "postgres":  # it needs none
            reader.verify(state)
            return
        with pytest.raises(UnsafeLog, match="split by another column"):
            reader.verify(state)
    finally:
        reader.close()


def test_prepared_events_are_decided_in_their_partitions(alias):
    with split(PreparedEvent, alias, by="event_id"):
        rows = PreparedEvent.objects.using(alias)
        new = [NewPrepared(f"order-{n}", "placed", {"n": n}) for n in range(20)]
        made = [checked(each, using=alias) for each in new]
        ids = [row.event_id for row in made]
        for _ in range(2):
            answers = keeper.prepare("s", made, using=alias)
            assert {answer.state for answer in answers} == {"prepared"}
        with CaptureQueriesContext(connections[alias]) as statements:
            keeper.decide("s", {ids[0]: "confirmed"}, by="call", using=alias)
        own = [q["sql"] for q in statements if "outbox_prepared" in q["sql"]]
        assert own
        assert all("event_id" in sql.partition("WHERE")[2] for sql in own)
        wanted = {id: ["confirmed", "cancelled"][n % 2] for n, id in enumerate(ids)}
        keeper.decide("s", wanted, by="call", using=alias)
        assert dict(rows.values_list("event_id", "state")) == wanted
        published = Event.objects.using(alias).values_list("message_id", flat=True)
        assert sorted(published) == sorted(ids[::2])
        assert partitions_read(rows.filter(sender="s", event_id=ids[0])) == 1
        assert partitions_read(rows.filter(state="prepared")) == 4
        with connections[alias].cursor() as cursor:
            cursor.execute("UPDATE outbox_prepared SET decided_at = '2020-01-01 00:00:00'")
        assert "pruned prepared removed=20" in prune("--prepared")


def test_the_split_of_a_log_says_what_is_lost(alias):
    with (
        pytest.raises(InvalidArgument, match=r"would lose .*\(message_id\)"),
        split(AccountVersion, alias, by="stream"),
    ):
        pass
