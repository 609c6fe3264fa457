"""PostgreSQL in LATIN1 and SQL_ASCII: what cannot be stored is refused, and costs nothing else."""

from __future__ import annotations

import os

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.utils import timezone

from outbox_app import cancel, reschedule, stage
from outbox_app.checks.databases import check_databases
from outbox_app.database.encoding import replaced, unstorable
from outbox_app.entities import Rejected
from outbox_app.entities.exceptions import InvalidCommand
from outbox_app.events import publish, subscriber
from outbox_app.events.exceptions import InvalidEvent
from outbox_app.events.models import Cursor, Event, Gap
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.skips import skip_gap
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.exceptions import InvalidJob
from outbox_app.jobs.drain.dead_rows import move_to_dead
from outbox_app.models import DeadJob, StagedJob
from outbox_app.prepared import operations, prepare
from outbox_app.prepared.exceptions import InvalidPrepared
from outbox_app.prepared.models import PreparedEvent
from tests.entities import models
from tests.entities.models import Account
from tests.one_database import no_statement

pytestmark = pytest.mark.django_db(transaction=True)
#: By encoding: a text that it holds, and one that it does not.
TEXTS = {"LATIN1": ("é", "é🎉"), "SQL_ASCII": ("e", "é")}


@pytest.fixture(scope="module", params=sorted(TEXTS))
def database(request, django_db_setup, django_db_blocker):
    """Encoding and name of a migrated database of that encoding."""
    name = f"test_outbox_{request.param.lower()}_{os.getpid()}"
    with django_db_blocker.unblock():
        connection = connections["postgres"]
        with connection.cursor() as cursor:
            cursor.execute(
                f"CREATE DATABASE {name} ENCODING '{request.param}' TEMPLATE template0 "
                "LC_COLLATE 'C' LC_CTYPE 'C'"
            )
        with swapped(name):
            call_command("migrate", database="postgres", verbosity=0, skip_checks=True)
    yield request.param, name
    with django_db_blocker.unblock(), connections["postgres"].cursor() as cursor:
        cursor.execute(f"DROP DATABASE {name}")


class swapped:
    """Lets the alias postgres be another database."""

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        settings = connections["postgres"].settings_dict
        connections["postgres"].close()
        self.before, settings["NAME"] = settings["NAME"], self.name

    def __exit__(self, *_):
        connections["postgres"].close()
        connections["postgres"].settings_dict["NAME"] = self.before


@pytest.fixture
def texts(alias, database, settings):
    """``good, bad``: what the database holds, and what it does not."""
    encoding, name = database
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
    with swapped(name):
        yield TEXTS[encoding]
        call_command("flush", database="postgres", verbosity=0, interactive=False)


ON_POSTGRES = pytest.mark.parametrize("alias", ["postgres"], indirect=True)


@ON_POSTGRES
@pytest.mark.parametrize("field", ["ordering_key", "queue", "task_id", "task"])
def test_a_job_is_refused_and_its_neighbour_is_not(alias, texts, make_app, field):
    good, bad = texts
    app = make_app()
    options = {"using": alias, "app": app}
    with transaction.atomic(using=alias):
        with pytest.raises(InvalidJob, match=rf"{field} .* holds .* cannot store: its encoding"):
            stage(**{"task": "note", field: f"t{bad}"}, **options)
        stage("note", [bad], {"text": bad}, **options, ordering_key=good)
    assert StagedJob.objects.using(alias).get().ordering_key == good


@ON_POSTGRES
def test_no_job_has_an_id_that_cannot_be_stored(alias, texts):
    """To look for one broke the caller's transaction."""
    _, bad = texts
    with transaction.atomic(using=alias):
        with no_statement(alias):
            with pytest.raises(InvalidJob, match=r"task_id .* cannot store: its encoding"):
                cancel(bad, using=alias)
            with pytest.raises(InvalidJob, match=r"task_id .* cannot store: its encoding"):
                reschedule(bad, eta=timezone.now(), using=alias)
        publish("s", "t", using=alias)


@ON_POSTGRES
@pytest.mark.parametrize("field", ["stream", "type", "topic", "data", "metadata"])
def test_an_event_is_refused_and_its_neighbour_is_not(alias, texts, field):
    good, bad = texts

    def event(text):
        value = {"text": text} if field in ("data", "metadata") else text
        given = {"stream": "s", "type": "t", field: value}
        return publish(**given, using=alias)

    with transaction.atomic(using=alias):
        with (
            no_statement(alias),
            pytest.raises(InvalidEvent, match=rf"{field} holds .* cannot store: its encoding"),
        ):
            event(bad)
        event(good)
    stored = getattr(Event.objects.using(alias).get(), field)
    assert stored in (good, {"text": good})


@ON_POSTGRES
@pytest.mark.parametrize("inside", [False, True])
def test_a_command_is_refused_and_its_neighbour_is_not(alias, texts, inside, monkeypatch):
    good, bad = texts
    monkeypatch.setitem(models.LEFT, "odd", {"note": bad})
    monkeypatch.setitem(models.LEFT, "even", {"note": good})

    def execute(id, command, arguments, command_id):
        return Account.execute(id, command, arguments, command_id=command_id, using=alias)

    def ask():
        for given, what in [
            ((bad, "open", {"owner": "o"}, "1"), "id holds"),
            (("a", "open", {"owner": bad}, "1"), "arguments holds"),
            (("a", "open", {"owner": "o"}, bad), "command_id holds"),
            (("a", f"open{bad}", {"owner": "o"}, "1"), "command holds"),
        ]:
            with pytest.raises(InvalidCommand, match=f"{what} .* cannot store: its encoding is"):
                execute(*given)
        execute("a", "open", {"owner": good}, "1")
        with pytest.raises(InvalidCommand, match=r"leave: self\.state holds .* cannot store"):
            execute("a", "leave", {"value": "odd"}, "2")
        execute("a", "leave", {"value": "even"}, f"3{good}")

    if inside:
        with transaction.atomic(using=alias):
            ask()
    else:
        ask()
    assert Account.objects.using(alias).get().state == {"note": good}


@ON_POSTGRES
def test_a_rejection_is_refused_too(alias, texts, monkeypatch):
    good, bad = texts
    Account.execute("a", "open", {"owner": "o"}, command_id="1", using=alias)

    class Odd(dict):
        def __getitem__(self, value):
            raise Rejected({"good": good, "bad": bad}[value])

    monkeypatch.setattr(models, "LEFT", Odd())
    with pytest.raises(InvalidCommand, match=r"leave: the rejection holds .* cannot store"):
        Account.execute("a", "leave", {"value": "bad"}, command_id="2", using=alias)
    said = Account.execute("a", "leave", {"value": "good"}, command_id="3", using=alias)
    assert said.rejected.text == good


@ON_POSTGRES
@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_a_prepared_event_is_refused(alias, texts):
    good, bad = texts
    with pytest.raises(InvalidPrepared, match=r"content holds .* cannot store"):
        prepare("s", "t", {"text": bad}, using="default")
    with pytest.raises(InvalidPrepared, match=r"stream holds .* cannot store"):
        prepare(bad, "t", using="default")
    assert prepare("s", "t", {"text": good}, using="default")


@ON_POSTGRES
def test_an_error_is_stored_with_escapes(alias, texts, make_app):
    """A handler's, and that of a job that cannot be sent."""
    _, bad = texts

    @subscriber("fails")
    def fails(events):
        raise ValueError(bad)

    with transaction.atomic(using=alias):
        publish("s", "t", using=alias)
        stage("note", using=alias, app=make_app())
    Runner([subscriber_named("fails")]).run(once=True)
    escape = bad[-1].encode("ascii", "backslashreplace").decode()
    cursor = Cursor.objects.using(alias).get()
    assert escape in cursor.error
    assert escape in cursor.failed_event["traceback"]
    move_to_dead(StagedJob.objects.using(alias).get(), ValueError(bad), using=alias)
    assert escape in DeadJob.objects.using(alias).get().reason


@ON_POSTGRES
@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_a_name_and_a_reason_are_stored_with_escapes(alias, texts):
    _, bad = texts
    escape = bad[-1].encode("ascii", "backslashreplace").decode()
    said = {"by": bad, "reason": bad}
    prepare("s", "t", using="default")
    events = PreparedEvent.objects.using(alias).all()
    assert operations.extend(events, **said) == 1
    assert events.get().reason.count(escape) == 2
    operations.decide(events, PreparedEvent.State.CANCELLED, **said)
    assert escape in events.get().reason
    assert escape in events.get().decided_by
    gap = Gap.objects.using(alias).create(kind="version", log="l", stream="s", first=1, last=1)
    gap = skip_gap(gap.pk, **said, using=alias)
    assert escape in gap.reason
    assert escape in gap.settled_by


@ON_POSTGRES
def test_a_check_names_the_encoding(alias, texts, database):
    [message] = check_databases(databases=[alias])
    assert message.id == "outbox.W050"
    assert f"has the encoding {database[0]}, not UTF8" in message.msg


def test_a_database_in_utf8_takes_any_text(alias):
    text = "é🎉"
    assert unstorable(text, using=alias) == ""
    assert replaced(text, using=alias) == text
    with transaction.atomic(using=alias):
        event = publish(text, text, {"text": text}, using=alias)
    assert Event.objects.using(alias).get(stream=text).data == event.data == {"text": text}
