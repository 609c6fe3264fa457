"""``outbox_prune --events`` deletes old events passed by all readers, from the front; no others."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from threading import Event as Signal
from threading import Thread

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app.database.clock import DatabaseNow
from outbox_app.events import publish, subscriber
from outbox_app.events import retention as event_retention
from outbox_app.events.log.newevent import slice_of
from outbox_app.events.models import Cursor, Event, ParkedStream, StreamHead, Subscription
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions.lag import lags
from outbox_app.events.subscriptions.partition import Partition
from outbox_app.events.subscriptions.subscriber import register, subscriber_named
from outbox_app.process import foreground
from tests.events.log.own_log.models import Ledger
from tests.events.log.sessions import Session
from tests.faults.tools import on
from tests.patience import patience

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


def prune(*arguments: str) -> str:
    output = StringIO()
    call_command("outbox_prune", "--events", "--log=outbox_event", *arguments, stdout=output)
    return output.getvalue()


@pytest.fixture
def old(alias, published):
    """``old("a", "b", days=10)``: events of this age. Returns their positions."""

    def make(*streams: str, days: float = 10, **options) -> list[int]:
        before = set(Event.objects.using(alias).values_list("pk", flat=True))
        published(*streams, **options)
        rows = Event.objects.using(alias).exclude(pk__in=before)
        rows.update(recorded_at=DatabaseNow() - timedelta(days=days))
        return sorted(rows.values_list("pk", flat=True))

    return make


@on("mariadb")
def test_positions_that_are_sealed_after_a_prune_hold_nothing_up(
    alias, old, left, settings, monkeypatch
):
    monkeypatch.setattr("outbox_app.events.subscriptions.partition.STORE_SECONDS", -1.0)
    settings.OUTBOX = {**settings.OUTBOX, "SETTLE_SECONDS": 0.0, "TOMBSTONES": True}
    old("a", "b", "c", days=100)
    kept = old("a", "b", days=50)
    seen = declare("all")
    page("all", 10)
    prune("--older-than=90")
    assert left() == kept
    control.replay("all", "beginning")
    for _ in range(3):
        page("all", 10)
    assert seen[-2:] == kept
    assert len(left()) > len(kept)
    prune("--older-than=40")
    assert left() == []


@pytest.fixture
def left(alias):
    """``left()``: the positions left in the log."""
    return lambda: list(Event.objects.using(alias).order_by("pk").values_list("pk", flat=True))


def declare(name: str, **options) -> list[int]:
    seen: list[int] = []

    @subscriber(name, **options)
    def handle(events):
        seen.extend(event.id for event in events)

    return seen


def page(name: str, size: int, part: int = 0) -> None:
    declared = subscriber_named(name)
    defaults = {"partitions": declared.partitions}
    Subscription.objects.using(declared.using).get_or_create(name=name, defaults=defaults)
    partition = Partition(declared, part, batch_size=size)
    partition.run_once()
    partition.close()


@on("postgres", "mariadb")
def test_what_another_run_has_just_removed_is_not_counted(alias, old, left, monkeypatch):
    """Without subscriptions, of which it locks the rows, both reported all rows."""
    old("a", "b", "a")
    deleting, said = event_retention.deleting_by_key, []

    def run():
        said.append(prune("--older-than=3"))
        connections[alias].close()

    def be_second(rows):
        monkeypatch.setattr(event_retention, "deleting_by_key", deleting)
        other = Thread(target=run)
        other.start()
        other.join(patience(30))
        return deleting(rows)

    monkeypatch.setattr(event_retention, "deleting_by_key", be_second)
    said.append(prune("--older-than=3"))
    assert ["removed=3" in said[0], "removed=0" in said[1], left()] == [True, True, []]


def test_old_events_go_and_versions_go_on(alias, old, published, left):
    old("a", "b", "a")
    kept = old("a", days=2.9)
    said = prune("--older-than=3")
    assert left() == kept
    assert f"pruned log=outbox_event removed=3 older_than=3d database={alias} " in said
    assert "held" not in said
    assert StreamHead.objects.using(alias).get(stream="b").version == 1
    with transaction.atomic(using=alias):
        assert publish("b", "made").version == 2
        assert publish("a", "made", expected_version=3).version == 4


@on("postgres", "mariadb")
def test_events_in_flight_are_not_waited_for(alias, old, left):
    """Of a small table MySQL would walk all rows to delete some."""
    positions = old(*"abcdefgh")
    with Session(alias).begin() as session, connections[alias].cursor() as cursor:
        session.publish("in flight")
        if connections[alias].vendor == "mysql":
            cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        assert f"removed={len(positions)}" in prune("--older-than=1")
    assert left() == []
    connections[alias].close()


def test_a_dry_run_counts_says_who_holds_the_rest_and_removes_nothing(alias, old, left):
    declare("slow")
    positions = old(*"abcdefgh")
    page("slow", 5)
    rows = Subscription.objects.using(alias).filter(name="slow")
    with CaptureQueriesContext(connections[alias]) as queries:
        said = prune("--older-than=1", "--batch-size=2", "--dry-run")
    assert "would prune log=outbox_event rows=5 older_than=1d " in said
    assert "held log=outbox_event by=subscription slow[0] in outbox_event" in said
    assert left() == positions
    assert not [each for each in queries if each["sql"].startswith(("UPDATE", "DELETE"))]
    assert rows.exists()
    assert "removed=5" in prune("--older-than=1", "--batch-size=2")


def test_the_setting_says_how_long(alias, settings, old, left):
    old("a", days=9)
    kept = old("b", days=7)
    with pytest.raises(CommandError, match="EVENT_RETENTION_DAYS") as error:
        prune()
    assert error.value.returncode == 2
    settings.OUTBOX = {**settings.OUTBOX, "EVENT_RETENTION_DAYS": 8}
    prune()
    assert left() == kept


def test_what_a_subscription_has_not_passed_stays(alias, old, left, run):
    seen = declare("slow")
    positions = old(*"abcdefgh")
    page("slow", 3)  # in the middle of a window
    said = prune("--older-than=1")
    assert left() == positions[3:]
    assert "held log=outbox_event by=subscription slow[0] in outbox_event" in said
    run("slow")
    assert seen == positions
    assert "removed=5" in prune("--older-than=1")
    assert left() == []
    more = old("a")
    run("slow")
    assert seen == positions + more


def test_each_partition_holds_its_own(alias, old, left, run):
    declare("two", partitions=2)
    # The first ones are of the partition that has passed them.
    positions = old(*sorted((f"s{i}" for i in range(12)), key=lambda s: -(slice_of(s) % 2)))
    slices = dict(Event.objects.using(alias).values_list("pk", "slice"))
    page("two", 50, part=1)
    prune("--older-than=1")
    first = next(pk for pk in positions if slices[pk] % 2 == 0)
    assert left() == [pk for pk in positions if pk >= first] != positions
    run("two")
    prune("--older-than=1")
    assert left() == []


def test_a_paused_subscription_holds_too_and_one_that_never_ran_is_told(alias, old, left, run):
    declare("paused")
    declare("new")
    declare("from now on", start="now")
    run("paused")
    Subscription.objects.using(alias).update(paused=True)
    positions = old("a", "b")
    said = prune("--older-than=1")
    assert left() == positions
    assert "by=subscription paused[0]" in said
    assert "warning log=outbox_event subscription=new: the subscription has not run yet" in said
    assert "from now on" not in said


@pytest.mark.parametrize("again", [False, True], ids=["for-good", "and-back"])
def test_a_log_that_was_left_out_holds_until_the_new_code_has_run(alias, old, left, run, again):
    """A subscription moves to a log of its own: nothing would ever remove its old one's events."""
    seen = declare("moves", logs=[Event, Ledger])
    first = old("a", "b")
    run("moves")
    more = old("a")
    register(replace(subscriber_named("moves"), log_names=("own_log.Ledger",)))
    assert "held log=outbox_event by=subscription moves[0]" in prune("--older-than=1")
    assert left() == more
    run("moves")
    [lag] = lags(using=alias)
    assert (lag.behind, [each.cursor.log for each in lag.cursors]) == (0, ["ledger"])
    if again:
        register(replace(subscriber_named("moves"), log_names=("outbox_events.Event",)))
        assert "held" in prune("--older-than=1")
        run("moves")
        assert seen == first + more
    assert "held" not in prune("--older-than=1")
    assert left() == []


def test_a_parked_stream_of_a_log_that_was_left_out_holds_no_longer(alias, old, left, run):
    declare("moves", logs=[Event, Ledger])
    [_, position] = old("a", "b")
    run("moves")
    ParkedStream.objects.using(alias).create(
        subscription="moves", partition=0, log="outbox_event", stream="b", version=1,
        position=position, error="x",
    )  # fmt: skip
    register(replace(subscriber_named("moves"), log_names=("own_log.Ledger",)))
    assert "held log=outbox_event by=parked stream b@1 of moves" in prune("--older-than=1")
    assert left() == [position]
    run("moves")
    assert "held" not in prune("--older-than=1")
    assert left() == []


def test_a_parked_stream_holds(alias, old, left, run):
    @subscriber("parks", on_error="park")
    def handle(events):
        if any(event.stream == "c" for event in events):
            raise ValueError

    positions = old("a", "c", "b", "c")
    # Parked before, at a later event.
    parked = {"subscription": "parks", "partition": 0, "log": "outbox_event", "stream": "b"}
    ParkedStream.objects.using(alias).create(**parked, version=1, position=positions[2])
    for _ in range(3):
        run("parks")
        Cursor.objects.using(alias).update(retry_at=None)
    assert ParkedStream.objects.using(alias).get(stream="c").version == 1
    said = prune("--older-than=1")
    assert left() == positions[1:]
    assert "by=parked stream c@1 of parks in outbox_event" in said


@on("postgres", "mariadb")
def test_what_commits_late_below_the_rest_stays_until_it_was_handled(alias, old, left, run):
    seen = declare("all")
    begun, go_on = Signal(), Signal()

    def late() -> None:
        with transaction.atomic(using=alias):
            event = publish("late", "made")
            Event.objects.using(alias).filter(stream="late").update(
                recorded_at=DatabaseNow() - timedelta(days=10)
            )
            begun.set()
            assert go_on.wait(patience()), event
        connections[alias].close()

    writer = Thread(target=late)
    writer.start()
    assert begun.wait(patience())
    positions = old("a", "b")
    run("all")
    prune("--older-than=1")
    assert left() == []
    go_on.set()
    writer.join()
    [position] = left()
    assert position < positions[0]
    assert "by=subscription all[0]" in prune("--older-than=1")
    run("all")
    assert seen == [*positions, position]
    prune("--older-than=1")
    assert left() == []


def test_it_stops_at_the_first_that_is_too_young(alias, old, left, run, django_assert_num_queries):
    old("a", "b", "c")
    kept = [*old("d", days=0.5), *old("e", "f")]
    lines: list[str] = []
    steps = event_retention.prune_steps(Event, 1, 2, None, using=alias)
    # Who holds what (one, as it has no reader) and the clock; for each of two batches the
    # transaction's begin (on PostgreSQL, how) and end, the lock, who holds what (one), a SELECT,
    # which counts are noted, and a DELETE.
    batch = 7 + (alias == "postgres")
    with django_assert_num_queries(2 + 2 * batch, connection=connections[alias]):
        assert [(count, held) for count, _, held in steps] == [(2, ""), (1, "")]
    assert left() == kept
    event_retention.prune_events(log="outbox_event", older_than=1, write=lines.append)
    assert left() == kept


def test_it_tells_how_far_it_is(alias, monkeypatch, old):
    monkeypatch.setattr(foreground, "PROGRESS_INTERVAL", 1e-9)
    positions = old("a", "b", "c")
    lines = prune("--older-than=1", "--batch-size=2").splitlines()
    assert lines[0].startswith("pruning log=outbox_event removed=2 rate=")
    assert lines[0].endswith(f"reached={positions[1]}")


def test_nothing_goes_where_a_cursor_is_not_understood(alias, old, left, run):
    declare("all")
    run("all")
    positions = old("a")
    Cursor.objects.using(alias).update(state="nonsense")
    with pytest.raises(CommandError, match="Nothing of outbox_event was removed") as error:
        prune("--older-than=1")
    assert error.value.returncode == 2
    assert left() == positions


def test_nothing_goes_where_a_cursor_is_from_before_a_restore(alias, old, left, run):
    declare("all")
    positions = old("a")
    run("all")
    positions += old("b")
    cursors = Cursor.objects.using(alias)
    foreign = {
        "postgresql": {"cluster": "1", "lo": "1000000:1000000:"},
        "mysql": {"high": 10**6},
        "sqlite": {"pos": 10**6},
    }
    state = json.loads(cursors.get().state) | foreign[connections[alias].vendor]
    cursors.update(state=json.dumps(state, separators=(",", ":")))
    with pytest.raises(CommandError, match=r"Nothing of outbox_event .*outbox_rebase"):
        prune("--older-than=1")
    assert left() == positions


def test_a_log_that_cannot_be_pruned_stops_no_other(alias, old, left, published, run):
    declare("books", logs=[Ledger])
    published("a", log=Ledger)
    run("books")
    Cursor.objects.using(alias).update(state="nonsense")
    old("a")
    output = StringIO()
    with pytest.raises(CommandError, match="Nothing of ledger was removed") as error:
        call_command("outbox_prune", "--events", "--older-than=1", stdout=output)
    assert error.value.returncode == 2
    assert 'not pruned log=ledger error="ReadRefused: ' in output.getvalue()
    assert "pruned log=outbox_event removed=1" in output.getvalue()
    assert left() == []


WRONG = [
    (["--events", "--older-than=1", "--log=nowhere"], "There is no log 'nowhere'"),
    (["--events", "--older-than=0"], "at least 1 day; got 0"),
    (["--events", "--older-than=1", "--database=x"], "no such alias"),
    (["--inbox", "--log=outbox_event"], "--log needs --events"),
    (["--inbox", "--older-than=1000000"], "--older-than must be at most 365000 days"),
    (["--events", "--older-than=1", "--archived="], "--archived is empty"),
    (["--events", "--older-than=1", "--log="], "--log is empty"),
    (["--events", "--older-than=1", "--database="], "--database is empty"),
]


def test_wrong_arguments_are_refused(alias, old, left):
    """Nothing goes, as where a script's variable is not set."""
    there = old("a")
    for arguments, message in WRONG:
        with pytest.raises(CommandError, match=message) as error:
            call_command("outbox_prune", *arguments)
        assert error.value.returncode == 2
    assert left() == there


def test_a_replay_while_it_prunes(alias, old, left, run, monkeypatch):
    """What the subscription was put back in front of is not taken away from it."""
    monkeypatch.setattr(foreground, "PROGRESS_INTERVAL", 1e-9)
    seen = declare("reads")
    ids = old("a", "b", "c", "d")
    run("reads")
    lines = []

    def write(line):
        if not lines:
            control.replay("reads", "beginning")
        lines.append(line)

    prune = event_retention.prune_events
    assert prune(log="outbox_event", older_than=1, batch_size=1, write=write) == 1
    assert "held log=outbox_event by=subscription reads[0]" in lines[-2]
    assert left() == ids[1:]
    run("reads")
    assert seen == [*ids, *ids[1:]]


def test_an_archive_holds_one_log(alias, monkeypatch):
    """With an archive no other log is pruned, as if its events were in there."""
    asked = []

    def steps(log, *arguments, **options):
        asked.append(log._meta.db_table)
        return iter(())

    def open_archive(folder, log, *, using):
        asked.append(log._meta.db_table)

    monkeypatch.setattr(event_retention, "open_archive", open_archive)
    monkeypatch.setattr(event_retention, "prune_steps", steps)
    event_retention.prune_events(archive="folder", older_than=1, using=alias)
    assert asked == ["outbox_event", "outbox_event"]
