"""Push: the view is fresh right after the commit; lost, late or reordered pushes do no harm."""

from __future__ import annotations

import sys
import threading

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connections, transaction

from outbox_app.events import NewEvent, publish, publish_many
from outbox_app.events.models import Cursor, Event
from outbox_app.events.projections import push
from outbox_app.failpoints import set_failpoint
from tests import forking
from tests.database.endings import each_ending, end
from tests.events.log.own_log.models import Visit
from tests.events.projections.declared import StatusOf, declare
from tests.events.projections.models import Status
from tests.faults.tools import ROOT, on
from tests.patience import patience

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


@pytest.fixture
def no_push():
    """``no_push()``: lose all pushes from now on; ``no_push(False)``: stop losing them."""

    def lose(lost=True):
        set_failpoint("push", (lambda: 1 / 0) if lost else None)

    return lose


def hold(point, thread_name):
    """Stop a thread at a failpoint, once. Returns what says that it is there, and what lets go."""
    there, go = threading.Event(), threading.Event()

    def act():
        if threading.current_thread().name == thread_name and not there.is_set():
            there.set()
            assert go.wait(patience())

    set_failpoint(point, act)
    return there, go


def test_a_row_is_fresh_right_after_the_commit(alias, published, run, status):
    declare(StatusOf, "status", push=True, logs=[Event])
    with transaction.atomic(using=alias):
        published("a", "b", "a")
        published("a")
        assert status() == {}
    assert status() == {"a": ("1 2 3", 3), "b": ("1", 1)}
    assert run("status") == 4
    assert status() == {"a": ("1 2 3", 3), "b": ("1", 1)}


def test_nothing_is_pushed_of_a_rollback(alias, published, status):
    declare(StatusOf, "status", push=True)
    with transaction.atomic(using=alias):
        published("a")
        transaction.set_rollback(True, using=alias)
    with transaction.atomic(using=alias):
        published("b")
        with transaction.atomic(using=alias):
            published("b")
            transaction.set_rollback(True, using=alias)
    assert status() == {"b": ("1", 1)}


def test_a_push_that_cannot_log_its_error_does_not_reach_the_writer(
    alias, published, no_push, status, monkeypatch
):
    """A filter of the project's logging may raise."""
    declare(StatusOf, "status", push=True)
    no_push()
    monkeypatch.setattr(push.logger, "warning", lambda *args: 1 / 0)
    published("a")
    assert status() == {}


def test_a_time_limit_of_the_writers_task_reaches_it(alias, published, status):
    """The connection is closed: a statement that was interrupted would let the next one fail."""

    def interrupt():
        raise SoftTimeLimitExceeded

    declare(StatusOf, "status", push=True)
    set_failpoint("push", interrupt)
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            published("a")
    finally:
        set_failpoint("push", None)
    assert alias == "default" or connections[alias].connection is None
    assert status() == {}


@on("postgres")
def test_a_time_limit_while_a_push_commits_reaches_the_task(alias, published, status, monkeypatch):
    """The connection is busy then: Django ends the transaction with another error."""
    connection = connections[alias]

    def interrupt():
        connection.connection.pgconn.send_query(b"COMMIT")
        raise SoftTimeLimitExceeded

    declare(StatusOf, "status", push=True)
    set_failpoint("push", lambda: monkeypatch.setattr(connection, "_commit", interrupt))
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            published("a")
    finally:
        set_failpoint("push", None)
    assert connection.connection is None
    monkeypatch.undo()
    assert status() == {"a": ("1", 1)}


def test_push_sees_what_the_pull_sees(alias, published, run):
    seen = []

    def apply(self, event, row):
        seen.append(event)
        return StatusOf.apply(self, event, row)

    declare(StatusOf, "status", push=True, apply=apply)
    published("a", data={"n": [1, "é", None, 1.5]})
    pushed = list(seen)
    seen.clear()
    Status.objects.using(alias).all().delete()
    run("status")
    assert pushed == seen != []


def test_a_lost_push_is_logged_and_repaired(alias, published, run, status, no_push, caplog):
    declare(StatusOf, "status", push=True)
    published("a")
    no_push()
    published("a", "b")
    assert "Push left to the pull subscription=status events=2" in caplog.text
    no_push(False)
    published("a", "b")  # out of turn
    assert status() == {"a": ("1", 1)}
    run("status")
    assert status() == {"a": ("1 2 3", 3), "b": ("1 2", 2)}
    published("a", "b")
    assert status() == {"a": ("1 2 3 4", 4), "b": ("1 2 3", 3)}


@each_ending
def test_a_push_that_ends_its_transaction_is_left_to_the_pull(
    alias, published, run, status, way, caplog
):
    ends = declare(StatusOf, "status", push=True, logs=[Event])
    ends.apply = lambda self, event, row: end(way, alias) or StatusOf.apply(self, event, row)
    published("a")
    assert "The projection 'status' ended its transaction" in caplog.text
    assert status() == ({"a": ("1", 1)} if alias == "default" else {})  # SQLite is in autocommit
    ends.apply = StatusOf.apply
    run("status")
    assert status()["a"][0] == "1"


def test_events_of_a_log_that_it_does_not_read_change_no_row(alias, published, status):
    declare(StatusOf, "status", push=True)
    published("a", "b", log=Visit)
    published("a")
    assert status() == {"a": ("1", 1)}


def test_an_event_that_the_logs_manager_hides_is_not_passed_over(
    alias, published, run, status, no_push
):
    declare(StatusOf, "status", push=True, logs=[Visit])
    published("a", log=Visit)
    no_push()
    with transaction.atomic(using=alias):
        publish("a", "made", log=Visit, topic="closed")
    no_push(False)
    published("a", log=Visit)
    assert status() == {"a": ("1", 1)}
    run("status")
    assert status() == {"a": ("1 2 3", 3)}


def test_whole_state_is_pushed_on_anything_lower(alias, published, run, status, no_push):
    declare(StatusOf, "status", push=True, whole_state=True)
    no_push()
    published("a", "a")
    no_push(False)
    published("a")
    assert status() == {"a": ("3", 3)}
    run("status")
    assert status() == {"a": ("3", 3)}


def test_a_handler_that_raises_disturbs_no_writer(alias, published, status, caplog):
    declare(StatusOf, "status", push=True)
    published("a", type="bad")
    assert Event.objects.using(alias).count() == 1
    assert "ValueError: a@1" in caplog.text
    published("a", "b")
    assert status() == {"b": ("1", 1)}  # a is out of turn


def test_a_callback_of_apply_that_fails_is_no_lost_push(alias, published, status, caplog):
    """The row is committed, so nothing is left to the pull."""

    class Tells(StatusOf):
        def apply(self, event, row):
            transaction.on_commit(lambda: 1 / 0, using=alias)
            return super().apply(event, row)

    declare(Tells, "status", push=True)
    published("a")
    assert status() == {"a": ("1", 1)}
    assert "Push left to the pull" not in caplog.text
    [record] = [each for each in caplog.records if each.name == "outbox_app.callbacks"]
    assert record.of == "the projection 'status'"
    assert "Tells.apply.<locals>.<lambda>" in record.callback


def test_a_push_stands_on_the_event_before_that_was_asked_for(alias, published, status, no_push):
    declare(StatusOf, "status", types=["made", "order.*"], push=True)
    for type in ("Order.x", "made", "orders", "order.sent", "other", "other", "made"):
        published("a", type=type)
    assert status() == {"a": ("2 4 7", 7)}
    with transaction.atomic(using=alias):
        publish_many(NewEvent("a", t) for t in ("other", "made", "other", "order.x"))
    assert status() == {"a": ("2 4 7 9 11", 11)}
    no_push()
    published("a", type="order.lost")
    no_push(False)
    published("a", type="other")
    published("a", type="made")
    assert status() == {"a": ("2 4 7 9 11", 11)}


def test_topics_are_kept_apart(alias, published, status):
    declare(StatusOf, "status", topics=["eu"], push=True)
    with transaction.atomic(using=alias):
        publish_many(NewEvent(s, "made", topic=t) for s, t in [("a", "eu"), ("a", ""), ("b", "us")])
    published("a")
    with transaction.atomic(using=alias):
        publish("a", "made", topic="eu")
    assert status() == {"a": ("1 4", 4)}


def test_a_writer_killed_before_its_push_loses_nothing(alias, environment, run, status):
    declare(StatusOf, "status", push=True)
    code = (
        "import django; django.setup()\n"
        "from django.db import transaction\n"
        "from outbox_app.events import publish\n"
        "from tests.events.projections.declared import StatusOf, declare\n"
        "declare(StatusOf, 'status', push=True)\n"
        f"with transaction.atomic(using={alias!r}): publish('a', 'made')\n"
    )
    done = forking.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment(alias), "OUTBOX_FAILPOINT": "push=kill"},
        capture_output=True,
    )
    assert done.returncode == -9, done.stderr.decode()
    assert status() == {}
    run("status")
    assert status() == {"a": ("1", 1)}


@pytest.mark.parametrize("known", [False, True], ids=["new row", "known row"])
@pytest.mark.parametrize(
    ("held", "point"),
    [
        ("push", "push"),
        ("push", "view_read"),
        ("pull", "page_read"),
        ("pull", "advanced"),
        ("pull", "view_read"),
        ("pull", "handled"),
    ],
)
def test_push_and_pull_race_for_a_row(
    alias, published, run, status, in_thread, no_push, caplog, held, point, known
):
    """One is held at a point while the other runs, as far as locks let it."""
    declare(StatusOf, "status", push=True)
    if known:
        published("a")
        run("status")

    def start(side, name):
        def body():
            threading.current_thread().name = name
            if side == "push":
                published("a", "a")
                return
            if held == "push":  # one more, of which the push in progress knows nothing
                no_push()
                published("a")
            run("status")

        return in_thread(body)

    if held == "pull":
        no_push()
        published("a")
        no_push(False)
    there, go = hold(point, "held")
    first = start(held, "held")
    assert there.wait(patience())
    second = start("push" if held == "pull" else "pull", "other")
    second.join(0.3)  # it is done, or waits for a lock
    go.set()
    first.join(patience())
    second.join(patience())
    run("status")
    versions = 3 + known
    path = " ".join(map(str, range(1, versions + 1)))
    assert status() == {"a": (path, versions)}
    assert "Subscription failed" not in caplog.text


def test_two_pushes_at_one_moment(alias, published, run, status, in_thread):
    declare(StatusOf, "status", push=True)
    published("b")
    barrier = threading.Barrier(2)
    set_failpoint("push", lambda: barrier.wait(patience()))
    threads = [in_thread(lambda: published("a", "b")) for _ in range(2)]
    for thread in threads:
        thread.join(patience())
    rows = status()
    assert rows["b"][0] in ("1 2", "1 2 3")
    assert rows["a"][0] in ("1", "1 2")
    run("status")
    assert status() == {"a": ("1 2", 2), "b": ("1 2 3", 3)}


@pytest.mark.parametrize("whole_state", [False, True])
def test_a_late_push_does_not_bring_a_deleted_row_back(
    alias, published, run, status, in_thread, no_push, whole_state
):
    declare(StatusOf, "status", push=True, whole_state=whole_state)
    there, go = hold("push", "late")

    def late():
        threading.current_thread().name = "late"
        published("a")

    thread = in_thread(late)
    assert there.wait(patience())
    no_push()
    published("a", type="gone")
    run("status")
    go.set()
    thread.join(patience())
    assert status() == {}
    no_push(False)
    published("a")  # made anew: apply() is given no row
    assert status() == {"a": ("3", 3)}
    run("status")
    assert status() == {"a": ("3", 3)}


def test_pull_applies_no_deletion_twice(alias, published, run, status):
    declare(StatusOf, "status", push=True)
    published("a", "a")
    published("a", type="gone")
    published("a", type="gone")
    published("b", type="gone")  # there never was a row
    row = Status.objects.using(alias).get()
    assert (row.deleted, row.version) == (True, 4)
    assert run("status", batch_size=1) == 5
    assert status() == {}


def test_a_key_that_is_not_the_stream_is_refused(alias, published, run, caplog):
    declare(StatusOf, "status", push=True, key=lambda self, event: event.stream[0])
    published("ab")
    assert "several streams feed have no version" in caplog.text.replace("\n", " ")
    assert run("status") == 0
    assert "which is not the event's stream" in Cursor.objects.using(alias).get().error
    assert not Status.objects.using(alias).exists()


@on("postgres", "mariadb")
def test_a_push_waits_for_no_stopped_process(alias, published, run, status, in_thread, caplog):
    declare(StatusOf, "status", push=True)
    published("a")
    locked, go = threading.Event(), threading.Event()

    def stopped():
        with transaction.atomic(using=alias):
            Status.objects.using(alias).select_for_update().get()
            locked.set()
            assert go.wait(patience())

    def wait_of():
        name = {"postgresql": "SHOW lock_timeout", "mysql": "SELECT @@innodb_lock_wait_timeout"}
        with connections[alias].cursor() as cursor:
            cursor.execute(name[connections[alias].vendor])
            return cursor.fetchone()

    before = wait_of()
    thread = in_thread(stopped)
    assert locked.wait(patience())
    published("a")
    assert not go.is_set()
    assert "Push left to the pull" in caplog.text
    assert wait_of() == before
    go.set()
    thread.join(patience())
    run("status")
    assert status() == {"a": ("1 2", 2)}


@on("mariadb")
def test_keys_that_the_database_takes_for_one_are_refused(alias, published, run):
    declare(StatusOf, "status")
    published("a")
    run("status")
    published("A")
    assert run("status") == 0
    assert (
        "projections.Status.stream with outbox_app.fields.CharField"
        in Cursor.objects.using(alias).get().error
    )
