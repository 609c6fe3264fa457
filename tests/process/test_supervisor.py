"""``run_outbox``: rows of each kind are processed once, and a failing part stops no other."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.db import OperationalError, connections, transaction
from django.utils.timezone import now

from outbox_app import supervisor
from outbox_app.aliases import inbox_alias, model_alias
from outbox_app.capability import Loop
from outbox_app.database.clock import DatabaseNow
from outbox_app.events import publish, subscriber
from outbox_app.events.models import Event
from outbox_app.exceptions import InvalidArgument
from outbox_app.models import InboxEntry, Incident, Lease, Process, StagedJob, Statistic
from outbox_app.prepared import NewPrepared, keeper
from outbox_app.prepared.models import Fence, PreparedEvent
from outbox_app.prepared.request import checked
from outbox_app.retention.run import Retention
from outbox_app.supervisor import LoopThread
from tests import tasks
from tests.faults.tools import Book, assert_handed_back, on
from tests.patience import eventually, patience

pytestmark = pytest.mark.django_db(transaction=True)

DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def signals_stay() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def prepare_event(alias: str) -> Callable[[str], None]:
    """``prepare_event(stream)``: an event whose sender has committed without a confirm."""

    def make(stream: str) -> None:
        request = checked(NewPrepared(stream, "order.paid", {}))
        keeper.prepare(f"alias:{alias}", [request], using=alias)
        Fence.objects.using(alias).create(event_id=request.event_id, outcome="committed")
        PreparedEvent.objects.using(alias).update(next_check_at=DatabaseNow() - DAY)

    return make


def old_incident(alias: str) -> None:
    Incident.objects.using(alias).create(
        kind="requeue", first_id=1, last_id=1, created_at=now() - 99 * DAY
    )


def test_rows_of_each_kind_move(
    alias: str, make_named_app: Any, redis_url: str, seen_by: Any, prepare_event: Any
) -> None:
    app, book = make_named_app(redis_url), Book(using=alias)
    seen = seen_by("copy")
    book.stage(app, 3)
    prepare_event("order-1")
    old_incident(alias)

    call_command("run_outbox", "--once")

    book.receive(app)
    book.assert_exact()
    assert seen == [("order-1", 1)]
    assert not Incident.objects.using(alias).exists()
    assert_handed_back(alias)


@pytest.fixture
def start(start_drainer: Any, alias: str) -> Callable[..., Any]:
    """``start(app)``: start a real process, with the subscription of ``tests.subscribers``."""
    options = {"name": "noted"}
    variables = {"OUTBOX_TEST_SUBSCRIBER": json.dumps(options)}
    return lambda app: start_drainer(alias, app, command="run_outbox", **variables)


def test_two_at_once_one_is_killed_the_other_stopped(
    alias: str, make_named_app: Any, redis_url: str, start: Any, prepare_event: Any
) -> None:
    app, book = make_named_app(redis_url), Book(using=alias)
    old_incident(alias)
    first, second = start(app), start(app)
    rows = Process.objects.using(alias)
    resources = {"jobs", "prepared", "retention", "subscription:noted"}

    def both_run() -> bool:
        pids = [set(rows.filter(resource=each).values_list("pid")) for each in resources]
        return all(len(each) == 2 for each in pids)

    eventually(both_run, "two processes, with all parts each")
    assert {row.resource for row in rows.all()} == resources

    def work(round: int) -> None:
        book.stage(app, 20)
        with transaction.atomic(using=alias):
            publish(f"stream-{round}", "made", using=alias)
        prepare_event(f"order-{round}")

    def moved(round: int) -> bool:
        noted = Incident.objects.using(alias).filter(kind="unknown")
        left = StagedJob.objects.using(alias).exists()
        return not left and noted.exclude(detail="").count() == 2 * round

    work(1)
    eventually(lambda: moved(1), "the first round")
    assert not Incident.objects.using(alias).filter(kind="requeue").exists()
    first.signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    work(2)
    eventually(lambda: moved(2), "the second round, all of it by one process")
    eventually(lambda: rows.count() == len(resources), "the killed one is removed")
    assert second.stop() == 0
    assert_handed_back(alias)

    book.receive(app)
    book.assert_complete()
    noted = Incident.objects.using(alias).filter(kind="unknown").exclude(detail="")
    streams = [row.detail for row in noted]
    assert sorted(streams) == ["order-1", "order-2", "stream-1", "stream-2"]
    assert Event.objects.using(alias).count() == 4


def test_without_subscriptions_the_rest_runs(
    alias: str, make_named_app: Any, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    app, book = make_named_app(redis_url), Book(using=alias)

    @subscriber("wrong", logs=["no_such_table"])
    def handle(events: Any) -> None: ...

    book.stage(app, 1)
    assert supervisor.run_together(once=True) == 0
    book.receive(app)
    book.assert_exact()
    assert "Subscription left out" in caplog.text


@pytest.mark.slow
def test_once_ends_although_a_broker_is_away(
    alias: str, make_app: Any, caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "LEASE_SECONDS": 1.0, "PUBLISH_TIMEOUT": 0.4}
    note = make_app("redis://127.0.0.1:1/0").task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        note.delay("", 1)
    old_incident(alias)

    assert supervisor.run_together(once=True) == 1

    assert "Drainer stopped published=0 dead=0 trouble=" in caplog.text
    assert StagedJob.objects.using(alias).count() == 1
    assert not Incident.objects.using(alias).exists()  # the parts after it ran


def test_a_wrong_alias() -> None:
    with pytest.raises(InvalidArgument, match="no such alias"):
        supervisor.run_together(using="nowhere")


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LoopThread]]:
    """``running(work)``: a part in a thread, restarted at once; it must end when stopped."""
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE", 0.01)
    started: list[LoopThread] = []

    def make(work: Any) -> LoopThread:
        part = LoopThread("jobs", Loop(work))
        part.start()
        started.append(part)
        return part

    yield make
    for part in started:
        part.stop()
        part.join(patience())
        assert not part.is_alive()


@pytest.mark.parametrize("error", [ValueError("bug"), SystemExit(9), None], ids=str)
def test_a_part_that_fails_is_started_again(
    running: Any, caplog: pytest.LogCaptureFixture, error: BaseException | None
) -> None:
    attempts: list[int] = []
    stopped = threading.Event()

    def work(*, once: bool, listen: Any) -> int:
        attempts.append(len(attempts))
        listen(stopped.set)
        if len(attempts) < 3:
            if error:
                raise error
            return 3
        stopped.wait(patience())
        return 0

    with caplog.at_level(logging.ERROR):
        part = running(work)
        eventually(lambda: len(attempts) == 3, "the third attempt")
        assert part.code == (1 if error else 3)
        part.stop()
        eventually(lambda: part.code == 0, "it recovered")
    assert caplog.text.count("Loop ended and will be restarted") == 2
    assert caplog.text.count("Loop failed") == (2 if error else 0)


def test_a_part_is_stopped_while_it_pauses(monkeypatch: pytest.MonkeyPatch, running: Any) -> None:
    failed = threading.Event()

    def work(*, once: bool, listen: Any) -> int:
        failed.set()
        return 3

    part = running(work)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE", 3600.0)
    assert failed.wait(patience())
    part.stop()  # and the fixture joins it
    assert part.code == 3


@pytest.mark.parametrize("command", ["run_outbox", "drain_outbox", "run_subscriptions"])
def test_a_command_that_code_calls_leaves_its_signal_handlers(alias: str, command: str) -> None:
    """Or a worker, or a run of tests, could not be stopped any more."""
    subscriber("some")(print)
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    call_command(command, "--once", "--database", alias)
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_stop_of_a_single_run_lets_the_handler_end(alias: str, published: Any) -> None:
    """Each part connects before its work, which may not take the handlers of all parts away."""
    handled: list[str] = []

    @subscriber("stopped")
    def handle(events: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        handled.extend(event.stream for event in events)

    published("a")
    assert supervisor.run_together(once=True) == 0
    assert handled == ["a"]


@pytest.mark.parametrize("by_database", [False, True], ids=["setting", "database"])
def test_the_retention_goes_on_after_a_kind_that_fails(
    alias: str, settings: Any, seen_by: Any, caplog: pytest.LogCaptureFixture, by_database: bool
) -> None:
    def refuse(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if by_database and Incident._meta.db_table in sql:
            raise OperationalError("The table is locked.")
        return execute(sql, params, many, context)

    days = 1 if by_database else 0
    settings.OUTBOX = {**settings.OUTBOX, "INBOX_DATABASE": alias, "INCIDENT_RETENTION_DAYS": days}
    keeper.prepare(f"alias:{alias}", [checked(NewPrepared("s", "t", {}))], using=alias)
    PreparedEvent.objects.using(alias).update(state="cancelled", decided_at=now() - 99 * DAY)
    loop = Retention(using=alias)
    with connections[alias].execute_wrapper(refuse):
        assert loop.run(once=True) == 1
    fault = "OperationalError" if by_database else "InvalidArgument"
    assert f"incidents: {fault}" in loop.trouble
    assert "Old rows were not removed kind=incidents" in caplog.text
    assert not Lease.objects.using(alias).filter(owner__isnull=False).exists()


@on("postgres", "mariadb")
@pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
def test_the_retention_of_a_second_outbox(alias: str, settings: Any) -> None:
    """The counters of logs in other databases, where no drainer may run; each inbox."""
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": None}
    there = Statistic.objects.using(model_alias(Event))
    there.create(source="one", name="handled", minute=now() - 3 * DAY, value=1.0)
    inboxes = [InboxEntry.objects.using(each) for each in (alias, inbox_alias())]
    for inbox in inboxes:
        inbox.create(job_id="1", task="t", handled_at=now() - 99 * DAY)
    assert Retention(using=alias).run(once=True) == 3
    assert not there.exists()
    assert not any(inbox.exists() for inbox in inboxes)


@on("mariadb")
@pytest.mark.parametrize("command", ["run_subscriptions", "run_outbox"])
def test_a_statement_of_a_handler_may_take_longer_than_the_lease(
    alias, published, settings, monkeypatch, command
):
    """The driver is given a bound for answers: that of the subscriptions, not of the drain."""
    settings.OUTBOX = {**settings.OUTBOX, "LEASE_SECONDS": 1, "PUBLISH_TIMEOUT": 0.5}
    connection = connections[alias]
    options = {**connection.settings_dict["OPTIONS"]}
    for name in ("connect_timeout", "read_timeout", "write_timeout"):
        options.pop(name, None)  # as a command of another test has left it
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    answers = []

    @subscriber("slow")
    def ask(events):
        with connection.cursor() as cursor:
            cursor.execute("SELECT SLEEP(2)")
            answers.extend(cursor.fetchall())

    published("a")
    connection.close()
    try:
        call_command(command, once=True)
    finally:
        connection.close()
    assert answers == [(0,)]
