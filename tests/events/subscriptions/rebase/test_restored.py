"""A PostgreSQL database restored elsewhere is noticed, and a rebase loses or repeats no event.

The dumps and restores are real, between two clusters, with cursors in the middle of windows, and
with open transactions.
"""

from __future__ import annotations

from contextlib import contextmanager
from io import StringIO
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction

from outbox_app.events import subscriber
from outbox_app.events.checks import check_log_tables
from outbox_app.events.models import Cursor, Event, StreamHead, Subscription
from outbox_app.events.subscriptions.partition import Partition
from outbox_app.events.subscriptions.rebase import rebase_outbox
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import all_subscribers, subscriber_named


def rebase(*arguments: str, **options) -> str:
    output = StringIO()
    call_command("outbox_rebase", *arguments, stdout=output, skip_checks=True, **options)
    return output.getvalue()


class Readers:
    """Subscriptions, and what each has been given, wherever its database was at the time."""

    def __init__(self) -> None:
        self.seen: dict[str, list[tuple[str, int]]] = {}

    def declare(self, name: str, **options) -> None:
        seen = self.seen[name] = []

        @subscriber(name, **options)
        def handle(events):
            seen.extend((event.stream, event.version) for event in events)

    def page(self, name: str, size: int) -> None:
        """Have a subscription handle one page."""
        declared = subscriber_named(name)
        Subscription.objects.using(declared.using).get_or_create(name=name)
        partition = Partition(declared, 0, batch_size=size)
        partition.run_once()
        partition.close()

    def run(self, *names: str) -> int:
        chosen = [subscriber_named(name) for name in names] or all_subscribers()
        return Runner([each for each in chosen if each.name in self.seen]).run(once=True)

    def assert_exact(self, alias: str) -> None:
        """Each has been given every event of its database once, in the order of its stream."""
        events = set(Event.objects.using(alias).values_list("stream", "version"))
        for name, seen in self.seen.items():
            assert set(seen) == events, name
            assert len(seen) == len(set(seen)), name
            for stream in {stream for stream, _ in seen}:
                versions = [v for s, v in seen if s == stream]
                assert versions == sorted(versions), name


@pytest.fixture
def readers():
    return Readers()


@contextmanager
def in_flight(alias: str, stream: str):
    """An event that is written, and not committed before the block ends."""
    connection = connections.create_connection(alias)
    connection.set_autocommit(False)
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO outbox_event (topic, stream, version, type, data, metadata, slice, "
            "message_id, recorded_at) VALUES ('', %s, 1, 'made', '{}', '{}', 0, %s, now())",
            [stream, str(uuid4())],
        )
    try:
        yield
    finally:
        connection.commit()
        connection.close()


@pytest.mark.parametrize("busier", ["the old cluster", "the new cluster"])
def test_restored_in_another_cluster(databases, servers, readers, publish_now, busier):
    old, new = servers
    alias = databases.make(old)
    if busier == "the old cluster":
        databases.overtake(new)
    readers.declare("ahead")
    readers.declare("middle")
    readers.declare("parts", partitions=3, batch_size=2)
    readers.declare("late")
    readers.declare("now", start="now")

    publish_now("a", "b", "a", "c")
    readers.run("late")
    with in_flight(alias, "lost"):  # until after the dump: it is not in it
        with in_flight(alias, "slow"):  # until the cursors have passed its position
            publish_now("b", "d", "e", "a")
            readers.page("middle", 3)
            readers.run("ahead", "now")
        publish_now("f", "b")
        readers.page("ahead", 1)  # in the middle of its second window
        readers.run("parts")
        publish_now("a", "d", "slow2")
        alias = databases.move(new)
    if busier == "the new cluster":
        databases.overtake(old)
    before = {name: list(seen) for name, seen in readers.seen.items()}
    assert 0 < len(before["middle"]) < len(before["ahead"]) < Event.objects.using(alias).count()

    # It is noticed, not misread.
    assert readers.run() == 0
    assert readers.seen == before
    errors = Cursor.objects.using(alias).values_list("error", flat=True)
    assert all(text.startswith("ForeignCursor: ") for text in errors)
    assert {m.id for m in check_log_tables(databases=[alias])} == {"outbox.E012"}

    # Events are published before anybody rebases; they are not taken for old ones.
    last = Event.objects.using(alias).order_by("id").last().pk
    publish_now("a", "new")
    with pytest.raises(CommandError, match=f"--last-id {last}"):
        rebase()
    arguments = ["--log", "outbox_event", "--last-id", str(last)]
    assert "would rebase log=outbox_event" in rebase(*arguments, "--dry-run")
    assert readers.run() == 0
    assert f"rebased log=outbox_event last_id={last} cursors=7" in rebase(*arguments)

    readers.declare("fresh")
    readers.run()
    for name in ("ahead", "middle", "parts", "late", "fresh"):
        assert readers.seen[name][: len(before.get(name, ()))] == before.get(name, [])
    publish_now("a", "b", "z")
    readers.run()
    # It began behind eight events; what was in flight then is in front of it.
    now = readers.seen.pop("now")
    assert len(now) == len(set(now)) == Event.objects.using(alias).count() - 8
    readers.assert_exact(alias)
    assert [*check_log_tables(databases=[alias])] == []
    assert StreamHead.objects.using(alias).get(stream="a").version == 6

    # Again: there is nothing to do. And once more, to a third place, while somebody is half-way.
    assert "unchanged log=outbox_event" in rebase()
    readers.declare("from the beginning")
    readers.page("from the beginning", 5)
    publish_now("y")
    alias = databases.move(old)
    assert readers.run() == 0
    rebase()
    readers.run()
    publish_now("y", "a")
    readers.run()
    readers.assert_exact(alias)


def test_events_that_were_published_under_savepoints_are_not_taken_for_old_ones(
    databases, servers, readers, publish_now
):
    """As under ATOMIC_REQUESTS: the row has the id of a subtransaction in its system column."""
    old, new = servers
    databases.make(old)
    readers.declare("all")
    publish_now("a")
    publish_now("b", "a")
    readers.page("all", 1)
    alias = databases.move(new)
    last = Event.objects.using(alias).latest("id").pk
    for _ in range(3):
        with transaction.atomic(using=alias):
            publish_now("a", "c")
    with pytest.raises(CommandError, match=f"before the restore: --last-id {last}"):
        rebase()
    assert "rebased" in rebase("--log", "outbox_event", "--last-id", str(last))
    readers.run()
    readers.assert_exact(alias)


def test_switched_over_by_logical_replication(databases, servers, readers, publish_now):
    """To a cluster that gives out more transaction ids: rows look as if they were written there."""
    old, new = servers
    readers.declare("ahead")
    readers.declare("middle")
    databases.make(old)
    # Two transactions: copied rows of a single one can look as if the copy had written them.
    publish_now("a", "b")
    publish_now("a")
    with databases.switch_over(new):
        databases.overtake(new)
        publish_now("a", "c")
        databases.be_overtaken(new)
        publish_now("b", "c")
        readers.page("middle", 4)
        readers.run("ahead")
    assert readers.run() == 0
    with pytest.raises(CommandError, match=r"--last-id 5; if no event was published.*--last-id 7"):
        rebase()
    rebase("--log", "outbox_event", "--last-id", "7")
    publish_now("a", "d")
    readers.run()
    readers.assert_exact(databases.alias)


def test_now_goes_on_from_where_it_was(databases, servers, readers, publish_now):
    old, new = servers
    alias = databases.make(old)
    publish_now("before")
    readers.declare("now", start="now")
    with in_flight(alias, "slow"):
        readers.run("now")
    publish_now("after")
    alias = databases.move(new)
    rebase()
    publish_now("after")
    readers.run("now")
    assert readers.seen["now"] == [("slow", 1), ("after", 1), ("after", 2)]


def test_a_new_subscription_does_not_read_rows_of_another_cluster(
    databases, servers, readers, publish_now
):
    old, new = servers
    databases.make(old)
    databases.overtake(new)
    publish_now("a", "b")
    alias = databases.move(new)
    readers.declare("first")
    assert readers.run() == 0
    assert not Cursor.objects.using(alias).exists()
    assert "rebased log=outbox_event last_id=2 cursors=0" in rebase()
    assert readers.run() == 2
    readers.assert_exact(alias)


def test_killed_in_between_nothing_has_changed(
    databases, servers, readers, publish_now, monkeypatch
):
    old, new = servers
    databases.make(old)
    readers.declare("all")
    publish_now(*"abcdefgh")
    readers.page("all", 3)
    alias = databases.move(new)

    def state():
        rows = Event.objects.using(alias).order_by("id").values_list("id", "txid")
        return list(rows), list(Cursor.objects.using(alias).values_list("state", "revision"))

    before = state()
    monkeypatch.setattr("outbox_app.events.log.transaction_ids.BATCH", 3)
    lines = []

    def dies(line):
        lines.append(line)
        if line.startswith("rebasing log=outbox_event reached=6"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rebase_outbox(write=dies)
    assert lines[-1].startswith("rebasing log=outbox_event reached=6")
    assert state() == before
    rebase_outbox(write=lines.append)
    assert readers.run() == 5
    readers.assert_exact(alias)


def test_the_same_cluster_after_pg_upgrade(databases, servers, readers, publish_now):
    """Transaction ids go on; only the identifier is new. (Written into the cursors here.)"""
    alias = databases.make(servers[0])
    readers.declare("all")
    publish_now(*"abcdefgh")
    readers.page("all", 3)
    for cursor in Cursor.objects.using(alias):
        text, cluster = cursor.state, Partition(subscriber_named("all"), 0)._readers[0]
        own = cluster.load(text).cluster
        Cursor.objects.using(alias).update(state=text.replace(own, "12345"))
    assert readers.run() == 0
    with pytest.raises(CommandError, match="--upgraded"):
        rebase()
    txids = list(Event.objects.using(alias).order_by("id").values_list("txid", flat=True))
    assert "cursors=1" in rebase("--upgraded")
    assert list(Event.objects.using(alias).order_by("id").values_list("txid", flat=True)) == txids
    publish_now("a")
    readers.run()
    readers.assert_exact(alias)
    assert "unchanged" in rebase("--upgraded")


def test_restored_in_the_same_cluster_nothing_is_needed(databases, servers, readers, publish_now):
    old, _ = servers
    alias = databases.make(old)
    readers.declare("all")
    publish_now("a", "b")
    with in_flight(alias, "lost"):
        publish_now("c", "d")
        readers.page("all", 3)
        alias = databases.move(old)
    publish_now("e", "a")
    readers.run()
    readers.assert_exact(alias)
    assert "unchanged" in rebase()


def test_a_restore_whose_own_transaction_id_is_among_those_of_the_log(databases, servers, readers):
    """One row was written, long ago and elsewhere, by a transaction of the restore's number."""
    databases.make(servers[0])
    databases.run_sql(
        "INSERT INTO outbox_event (txid, topic, stream, version, type, data, metadata, slice, "
        "message_id, recorded_at) SELECT CASE n WHEN 2 THEN pg_current_xact_id()::text::bigint "
        "ELSE 10 ^ 9 END, '', 'a', n, 'made', '{}', '{}', 0, gen_random_uuid(), now() "
        "FROM generate_series(1, 3) n"
    )
    assert "would rebase log=outbox_event last_id=3 cursors=0" in rebase("--dry-run")


def test_no_second_rebase_while_the_first_is_read(databases, servers, readers, publish_now):
    old, new = servers
    databases.make(old)
    readers.declare("all")
    publish_now(*"abcdef")
    readers.page("all", 1)
    databases.move(new)
    rebase()
    readers.page("all", 2)
    alias = databases.move(old)
    before = Cursor.objects.using(alias).get().state
    with pytest.raises(CommandError, match=r"all\[0\] in outbox_event: .* at its last rebase"):
        rebase()
    assert Cursor.objects.using(alias).get().state == before


def test_cursors_of_two_clusters(databases, servers, readers, publish_now):
    old, new = servers
    databases.make(old)
    readers.declare("old")
    publish_now(*"abc")
    readers.page("old", 1)
    alias = databases.move(new)
    databases.overtake(old)  # nothing in the log tells that it is from elsewhere
    readers.declare("new")
    readers.page("new", 1)
    with pytest.raises(CommandError, match="made in different clusters"):
        rebase()
    assert not Event.objects.using(alias).filter(txid__lt=0).exists()
