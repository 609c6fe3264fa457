"""A database that was set back, or restored in part; damaged cursors; wrong arguments."""

from __future__ import annotations

import json
import threading
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.db.backends.sqlite3.base import DatabaseWrapper
from django.db.models import F

from outbox_app.events import prune_events, subscriber
from outbox_app.events.checks import check_log_tables
from outbox_app.events.models import Cursor, Event
from outbox_app.events.subscriptions import rebase_outbox, skip_event
from outbox_app.exceptions import InvalidArgument
from outbox_app.models import StagedJob
from tests.faults.tools import eventually, on
from tests.one_database import no_statement
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)


def rebase(*arguments: str) -> str:
    output = StringIO()
    call_command("outbox_rebase", *arguments, stdout=output, skip_checks=True)
    return output.getvalue()


@pytest.fixture
def seen():
    found = []

    @subscriber("all", batch_size=3)
    def handle(events):
        found.extend((event.stream, event.version) for event in events)

    return found


class Router:
    """Has the jobs in one database and the log in another."""

    def __init__(self, jobs: str, log: str) -> None:
        self.jobs, self.log = jobs, log

    def db_for_write(self, model, **hints):
        return self.jobs if model is StagedJob else self.log


def shifted(snapshot: str, by: int) -> str:
    """A snapshot of a cluster that is further on."""
    xmin, xmax, running = snapshot.split(":")
    later = ",".join(str(int(xid) + by) for xid in running.split(",") if xid)
    return f"{int(xmin) + by}:{int(xmax) + by}:{later}"


@on("postgres")
def test_transactions_of_the_same_cluster_were_set_back(alias, published, run, seen):
    """Its ids begin anew, as after pg_resetwal and a dump: rows and cursors are from its future."""
    published("a", "b")
    assert run("all") == 2
    published("c")
    Event.objects.using(alias).update(txid=F("txid") + 10**9)
    cursor = Cursor.objects.using(alias).get()
    state = json.loads(cursor.state)
    state |= {name: state[name] and shifted(state[name], 10**9) for name in ("lo", "hi")}
    Cursor.objects.using(alias).update(state=json.dumps(state))

    assert run("all") == 0
    assert "was set back" in Cursor.objects.using(alias).get().error
    assert {m.id for m in check_log_tables(databases=[alias])} == {"outbox.E012"}
    rebase()
    published("a")
    assert run("all") == 2
    assert seen == [("a", 1), ("b", 1), ("c", 1), ("a", 2)]


def cut(alias: str, position: int) -> None:
    """Restore the log, and it alone, to where it ended at a position."""
    Event.objects.using(alias).filter(id__gt=position).delete()
    statement = {
        "sqlite": f"UPDATE sqlite_sequence SET seq = {position} WHERE name = 'outbox_event'",
        "mysql": f"ALTER TABLE outbox_event AUTO_INCREMENT = {position + 1}",
    }[connections[alias].vendor]
    with connections[alias].cursor() as cursor:
        cursor.execute(statement)


def restored(alias, published, run):
    """Have four events handled, and the log alone restored to the second; return its position."""
    events = published("a", "b", "a", "c")
    assert run("all") == 4
    last = events[1].pk or Event.objects.using(alias).order_by("id")[1].pk
    cut(alias, last)
    return last


@on("default", "mariadb")
@pytest.mark.parametrize("published_before", [False, True])
def test_the_log_alone_was_restored(alias, published, run, seen, published_before):
    last = restored(alias, published, run)
    assert run("all") == 0
    assert "LogSetBack" in Cursor.objects.using(alias).get().error
    arguments = []
    if published_before:  # so many that nothing would tell any more
        published(*"uvwxyz")
        # What it says is what is right.
        with pytest.raises(CommandError, match=f"restore: --log outbox_event --last-id {last}"):
            rebase()
        arguments = ["--log", "outbox_event", "--last-id", str(last)]
    assert "rebased log=outbox_event" in rebase(*arguments)
    assert Cursor.objects.using(alias).get().position == last
    published("new")
    run("all")
    new = [("new", 1)]
    assert seen[4:] == ([(stream, 1) for stream in "uvwxyz"] if published_before else []) + new
    assert "unchanged log=outbox_event" in rebase()


@on("default", "mariadb")
def test_a_second_run_with_the_last_position(alias, published, run, seen):
    """It moved the cursor back over what it had handled since: those events came twice."""
    last = restored(alias, published, run)
    published(*"uvwxyz")  # before any process has looked: nothing else would tell
    arguments = ["--log", "outbox_event", "--last-id", str(last)]
    assert "rebased log=outbox_event" in rebase(*arguments)
    assert "unchanged log=outbox_event" in rebase(*arguments)
    assert run("all") == 6
    with pytest.raises(CommandError, match="seems to have handled events after") as raised:
        rebase(*arguments)
    assert raised.value.returncode == 2
    assert f"--from {last}" in str(raised.value)
    assert run("all") == 0
    assert "unchanged log=outbox_event" in rebase()


@on("default", "mariadb")
def test_a_subscription_that_ran_before_the_rebase(alias, published, run, seen):
    """It has passed over the first new events. A second run looks the same, so a person decides."""
    last = restored(alias, published, run)
    published(*"uvwxyz")
    assert run("all") == 4
    with pytest.raises(CommandError, match="may have passed over some; then move it") as raised:
        rebase("--log", "outbox_event", "--last-id", str(last))
    replay = str(raised.value).partition("move it: ")[2].partition(". ")[0]
    call_command(*replay.split(), skip_checks=True)
    assert run("all") == 6
    assert {stream for stream, _ in seen[4:]} == set("uvwxyz")


@on("default", "mariadb")
@pytest.mark.parametrize(
    ("error", "left"),
    [("ForeignCursor: restored", ""), ("TransactionEnded: in part", "TransactionEnded: in part")],
)
def test_what_waits_for_a_person_still_does(alias, published, run, seen, error, left):
    published("a", "b")
    run("all")
    cut(alias, Event.objects.using(alias).order_by("id")[0].pk)
    Cursor.objects.using(alias).update(error=error, retry_at=None, counted={"handled": 2})
    before = Cursor.objects.using(alias).values().get()
    assert "would rebase log=outbox_event" in rebase("--dry-run")
    assert Cursor.objects.using(alias).values().get() == before
    rebase()
    cursor = Cursor.objects.using(alias).get()
    assert (cursor.error, cursor.counted) == (left, None)


@on("default", "mariadb")
def test_a_parked_stream_of_what_is_gone_is_not_pruned(alias, published, run):
    """Its next event gets a position that is lower than that at which it was parked."""
    poison = ["b"]

    @subscriber("parks", on_error="park")
    def handle(events):
        if any(event.stream in poison for event in events):
            raise ValueError

    published("a", "c", "b")
    for _ in range(3):
        Cursor.objects.using(alias).update(retry_at=None)
        run("parks")
    cut(alias, Event.objects.using(alias).order_by("id")[0].pk)
    rebase()
    published("b", "c")
    run("parks")
    rows = Event.objects.using(alias)
    rows.update(recorded_at="2020-01-01T00:00Z")
    assert prune_events(using=alias, log="outbox_event", older_than=1) == 1
    assert list(rows.order_by("id").values_list("stream", flat=True)) == ["b", "c"]


@on("default", "mariadb")
def test_a_skip_of_what_is_gone_skips_no_new_event(alias, published, run):
    poison, seen = ["b"], []

    @subscriber("fails")
    def handle(events):
        if any(event.stream in poison for event in events):
            raise ValueError
        seen.extend(event.stream for event in events)

    published("a", "b")
    for _ in range(3):
        Cursor.objects.using(alias).update(retry_at=None)
        run("fails")
    first, failing = Event.objects.using(alias).order_by("id").values_list("id", flat=True)
    skip_event("fails", failing, by="ann", reason="Why not.", using=alias)
    cut(alias, first)
    rebase()
    published("c")
    run("fails")
    assert seen == ["a", "c"]


@on("default", "mariadb")
@pytest.mark.parametrize("arguments", [[], ["--log", "outbox_event"]])
def test_a_log_in_another_database_than_the_outbox(
    alias, published, run, seen, settings, arguments
):
    """It is looked at where it lives: its readers have said that this command is to be run."""
    published("a", "b")
    run("all")
    last = Event.objects.using(alias).order_by("id")[0].pk
    cut(alias, last)
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": None}
    settings.DATABASE_ROUTERS = [Router("elsewhere", alias)]
    assert f"rebased log=outbox_event last_id={last} cursors=1" in rebase(*arguments)


@on("default")
def test_an_older_copy_of_the_file_needs_nothing(alias, published, run, seen, tmp_path):
    connection = connections[alias]
    published("a", "b")
    run("all")
    published("c")
    copy = tmp_path / "copy.sqlite3"
    other = DatabaseWrapper({**connection.settings_dict, "NAME": str(copy)}, alias="copy")
    other.ensure_connection()
    connection.connection.backup(other.connection)
    published("lost")
    run("all")
    # Page by page: the tests share the file, and whoever has it open keeps it.
    other.connection.backup(connection.connection)
    other.close()

    published("d")
    run("all")
    assert seen == [("a", 1), ("b", 1), ("c", 1), ("lost", 1), ("c", 1), ("d", 1)]
    assert [*check_log_tables(databases=[alias])] == []
    assert "unchanged log=outbox_event" in rebase()


@on("mariadb")
def test_a_log_without_cursors_leaves_no_connection(alias, published, monkeypatch):
    published("a")
    monkeypatch.setattr(connections, "create_connection", None)
    assert "unchanged log=outbox_event cursors=0" in rebase()


def test_a_damaged_cursor_is_told_and_left(alias, published, run, seen):
    published("a")
    run("all")
    Cursor.objects.using(alias).update(state="nonsense")
    [message] = check_log_tables(databases=[alias])
    assert message.id == "outbox.E012"
    assert "all[0] in outbox_event" in message.msg
    output = StringIO()
    with pytest.raises(SystemExit) as ended:
        call_command("outbox_rebase", stdout=output, skip_checks=True)
    assert ended.value.code == 1
    assert "damaged log=outbox_event cursor=all[0] in outbox_event" in output.getvalue()
    assert Cursor.objects.using(alias).get().state == "nonsense"


def test_a_cursor_that_moves_meanwhile(alias, published, run, seen, monkeypatch):
    published("a", "b")
    run("all")
    vendor = connections[alias].vendor
    if vendor == "postgresql":
        Event.objects.using(alias).update(txid=F("txid") + 10**9)
    else:
        cut(alias, Event.objects.using(alias).order_by("id").first().pk)
    before = Cursor.objects.using(alias).get().state

    def move(*arguments, **options):
        Cursor.objects.using(alias).update(state=before + " ")
        return None

    monkeypatch.setattr("outbox_app.events.subscriptions.rebase.require_unwritten", move)
    with pytest.raises(CommandError, match="moved meanwhile; nothing was changed"):
        rebase()
    assert Cursor.objects.using(alias).get().state == before + " "
    assert not Event.objects.using(alias).filter(txid__lt=0).exists()


@on("mariadb")
def test_a_cursor_that_is_being_moved_is_waited_for(alias, published, run, seen):
    """Its page is not committed yet. Set over it, the rebase would have it handled again."""
    published("a", "b")
    run("all")
    cut(alias, Event.objects.using(alias).order_by("id").first().pk)
    errors = []

    def try_it():
        try:
            rebase()
        except CommandError as error:
            errors.append(str(error))
        finally:
            connections[alias].close()

    def waits():
        with connections[alias].cursor() as cursor:
            cursor.execute(
                "SELECT 1 FROM information_schema.processlist WHERE db = DATABASE() "
                "AND id <> CONNECTION_ID() AND command = 'Query' AND time > 0"
            )
            return cursor.fetchone()

    thread = threading.Thread(target=try_it)
    with transaction.atomic(using=alias):
        moved = Cursor.objects.using(alias).get().state + " "
        Cursor.objects.using(alias).update(state=moved)
        thread.start()
        eventually(waits)
    thread.join(patience())
    assert "moved meanwhile; nothing was changed" in str(errors)
    assert Cursor.objects.using(alias).get().state == moved


WRONG = [
    (["--last-id", "5"], "Add --log"),
    (["--log", "", "--last-id", "5"], "--log is empty"),
    (["--log", "outbox_event", "--last-id", "-1"], "at least 0; got -1"),
    (["--log", "nowhere"], "There is no log 'nowhere'"),
    (["--database", "x"], "no such alias"),
]


@pytest.mark.any_database
def test_wrong_arguments_are_refused(alias):
    for arguments, message in WRONG:
        with pytest.raises(CommandError, match=message) as error, no_statement(alias):
            rebase(*arguments)
        assert error.value.returncode == 2


def test_a_position_of_no_log_is_refused_in_code_too(alias):
    with pytest.raises(InvalidArgument, match="Add --log"):
        rebase_outbox(using=alias, log="", last_id=5)
