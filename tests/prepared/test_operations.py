"""``manage.py outbox_prepared``: events in doubt are listed, asked about, decided, or wait."""

from __future__ import annotations

import json
import sqlite3
from datetime import timedelta
from io import StringIO
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction

from outbox_app.database.clock import DatabaseNow
from outbox_app.exceptions import NotMigrated
from outbox_app.models import Incident
from outbox_app.prepared import operations, prepared
from outbox_app.prepared import sender as senders
from outbox_app.prepared.checking_back import SenderWorker
from outbox_app.prepared.exceptions import Contradiction
from outbox_app.prepared.models import PreparedEvent

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])

State = PreparedEvent.State


@pytest.fixture
def doubtful(alias: str, sender: str) -> Any:
    """``doubtful(count, **columns)``: create undecided events. Returns their ids."""

    def make(count: int = 1, **columns: Any) -> list[UUID]:
        events = [
            senders.prepare(f"order-{n}", "order.paid", {"total": n}, using=sender)
            for n in range(count)
        ]
        ids = [event.event_id for event in events]
        values = {"state": State.UNDECIDED, "next_check_at": None, "reason": "not said in time"}
        PreparedEvent.objects.using(alias).filter(event_id__in=ids).update(**values | columns)
        return ids

    return make


def run(*arguments: Any, answer: str | None = None, monkeypatch: Any = None) -> tuple[int, str]:
    """The exit code, and what the command has written or asked."""
    output = StringIO()

    def asked(question: str) -> str:
        output.write(question)
        return answer or ""

    if monkeypatch:
        monkeypatch.setattr("builtins.input", asked)
    try:
        call_command("outbox_prepared", *map(str, arguments), stdout=output)
    except CommandError as error:
        return error.returncode, f"{output.getvalue()}{error}"
    return 0, output.getvalue()


def test_list_has_the_undecided_ones_first(alias: str, sender: str, doubtful: Any) -> None:
    senders.prepare("order-new", "order.paid", using=sender)
    [id] = doubtful(asked=3, answered=1, unreachable=2, last_answer="OSError: a\x1bb")
    code, text = run("list")
    assert code == 0
    assert text.index(str(id)) < text.index("order-new")
    assert "asked 3, answered 1, not answered 2" in text
    assert "OSError: a\\x1bb" in text
    assert text.endswith("undecided 1\nprepared 1\n")
    [row] = json.loads(run("list", "--json", "--state", "undecided")[1])
    assert (row["event_id"], row["sender"]) == (str(id), f"alias:{sender}")
    assert json.loads(run("list", "--json", "--sender", "alias:another")[1]) == []


def test_show_has_the_content(alias: str, doubtful: Any) -> None:
    [id] = doubtful()
    code, text = run("show", id)
    [row] = json.loads(text)
    assert (code, row["event_id"], row["state"]) == (0, str(id), "undecided")
    assert row["content"] == {"data": {"total": 0}, "metadata": {}}
    code, text = run("show", uuid4())
    assert (code, "There is no prepared event" in text) == (1, True)


def test_an_id_of_several_senders_needs_the_sender(alias: str, sender: str, doubtful: Any) -> None:
    [id] = doubtful()
    PreparedEvent.objects.using(alias).create(
        sender="another", event_id=id, decide_by=DatabaseNow(), state=State.UNDECIDED
    )
    for arguments in (["check"], ["cancel", "--reason=x", "--noinput"]):
        code, text = run(*arguments, id)
        assert (code, "Several senders have an event" in text) == (2, True)
    assert run("check", id, "--sender", "another")[0] == 0
    assert {row["sender"] for row in json.loads(run("show", id)[1])} == {
        f"alias:{sender}",
        "another",
    }


@pytest.mark.parametrize("option", ["--noinput", "--no-input"])
def test_confirm_publishes(
    alias: str, option: str, doubtful: Any, in_log: Any, states: Any
) -> None:
    _, second = doubtful(2)
    code, text = run("confirm", second, "--reason", "invoice 17 is paid", option)
    assert (code, text.splitlines()[-1]) == (0, "Confirmed 1 prepared event.")
    assert states() == ["undecided", "confirmed"]
    assert in_log() == [("order-1", "order.paid", {"total": 1})]
    row = PreparedEvent.objects.using(alias).get(event_id=second)
    assert "manage.py outbox_prepared" in row.decided_by
    assert row.reason == "invoice 17 is paid"


@pytest.mark.parametrize("action", ["confirm", "cancel", "extend"])
@pytest.mark.parametrize("given", [["--reason", " "], ["--reason=x", "--sender="]])
def test_nothing_is_decided_for_an_empty_argument(
    alias: str, action: str, given: list[str], doubtful: Any, states: Any
) -> None:
    doubtful(2)
    code, text = run(action, "--state", "undecided", *given, "--no-input")
    assert (code, "is empty" in text) == (2, True)
    assert states() == ["undecided"] * 2


def test_a_closed_standard_input_confirms_nothing(
    alias: str, doubtful: Any, states: Any, monkeypatch: Any
) -> None:
    [id] = doubtful()
    monkeypatch.setattr("sys.stdin", None)
    code, text = run("confirm", id, "--reason", "x")
    assert (code, "Not confirmed, so nothing was changed." in text) == (1, True)
    assert states() == ["undecided"]


def test_what_a_decision_risks_is_asked_first(
    alias: str, doubtful: Any, in_log: Any, states: Any, monkeypatch: Any
) -> None:
    doubtful(2)
    everything = ["--state", "undecided", "--reason", "x"]
    code, text = run("confirm", *everything, monkeypatch=monkeypatch)
    assert code == 1
    assert "Confirm 2 prepared events? If a sender's transaction was rolled back" in text
    code, text = run("extend", *everything, monkeypatch=monkeypatch)
    assert (code, "Extend 2 prepared events?" in text) == (1, True)
    assert states() == ["undecided"] * 2
    code, text = run("cancel", *everything, answer="y", monkeypatch=monkeypatch)
    assert (code, "If a sender's transaction has committed, its event is lost." in text) == (
        0,
        True,
    )
    assert states() == ["cancelled"] * 2
    assert in_log() == []


def test_an_event_that_comes_after_the_question_is_not_decided(
    alias: str, sender: str, states: Any, monkeypatch: Any
) -> None:
    """Its sender's transaction may be open: the answer was about the events that were counted."""
    senders.prepare("order-1", "order.paid", using=sender)

    def meanwhile(question: str) -> str:
        assert "Cancel 1 prepared event?" in question
        senders.prepare("order-2", "order.paid", using=sender)
        return "y"

    monkeypatch.setattr("builtins.input", meanwhile)
    assert run("cancel", "--state", "prepared", "--reason", "x")[0] == 0
    assert states() == ["cancelled", "prepared"]


def test_the_question_may_be_about_more_events_than_a_statement_has_parameters(
    alias: str, monkeypatch: Any
) -> None:
    """SQLite takes 32,766 unless built otherwise, PostgreSQL 65,535 from server-side binding."""
    due = {"sender": "alias:billing", "decide_by": DatabaseNow()}
    PreparedEvent.objects.using(alias).bulk_create(
        [PreparedEvent(event_id=uuid4(), **due) for _ in range(70)], batch_size=10
    )
    connection, kind = connections[alias].connection, sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER
    before = connection.setlimit(kind, 50) if alias == "default" else None
    everything = ["--state", "prepared", "--reason", "x"]
    try:
        code, text = run("extend", *everything, answer="y", monkeypatch=monkeypatch)
    finally:
        if before is not None:
            connection.setlimit(kind, before)
    assert (code, "Extended 70 prepared events." in text) == (0, True)


def test_of_a_sender_only_the_undecided_ones_are_chosen(
    alias: str, sender: str, doubtful: Any, states: Any, monkeypatch: Any
) -> None:
    senders.prepare("order-new", "order.paid", using=sender)
    doubtful(5)
    monkeypatch.setattr(operations, "BATCH_SIZE", 2)
    code, text = run("cancel", "--sender", f"alias:{sender}", "--reason", "restored", "--no-input")
    assert (code, text.count("total=")) == (0, 3)
    assert states() == ["prepared", *["cancelled"] * 5]


def test_nothing_selected_or_nothing_open(alias: str, sender: str, told: Any, states: Any) -> None:
    assert run("check")[0] == 2
    with prepared("order-17", "order.paid", using=sender) as event:
        pass
    told()
    code, text = run("cancel", event.event_id, "--reason", "x", "--no-input")
    assert (code, "No open event matches" in text) == (1, True)
    assert states() == ["confirmed"]
    assert not Incident.objects.using(alias).exists()
    with pytest.raises(CommandError, match="is not the id of an event"):
        call_command("outbox_prepared", "show", "17")


def test_one_that_was_edited_by_hand_cannot_be_confirmed(
    alias: str, doubtful: Any, states: Any, in_log: Any
) -> None:
    doubtful(2)
    PreparedEvent.objects.using(alias).filter(stream="order-0").update(stream="order-x")
    code, text = run("confirm", "--state", "undecided", "--reason", "x", "--no-input")
    assert code == 1
    assert "Confirmed 1 prepared event." in text
    assert "it was edited by hand" in text
    assert states() == ["undecided", "confirmed"]
    assert len(in_log()) == 1


def test_check_has_the_sender_asked(
    alias: str, sender: str, doubtful: Any, ask: Any, states: Any
) -> None:
    """Also where the time to decide is over, and where it is not: the fence has the last word."""
    late, early = doubtful(2)
    over = DatabaseNow() - timedelta(days=1)
    PreparedEvent.objects.using(alias).filter(event_id=late).update(decide_by=over)
    ask()
    assert states() == ["undecided"] * 2
    assert "asks the senders about 2 prepared events" in run("check", late, early)[1]
    ask()
    assert states() == ["cancelled"] * 2


def test_check_while_the_transaction_is_open(
    alias: str, sender: str, ask: Any, states: Any
) -> None:
    """What its sender cannot say yet is asked again, as long as there is time."""
    event = senders.prepare("order-17", "order.paid", using=sender)
    events = PreparedEvent.objects.using(alias)
    events.update(state=State.UNDECIDED, next_check_at=None)
    operations.check(operations.selected(using=alias))
    asking = SenderWorker(f"alias:{sender}", using=alias)
    rows = asking._claim()
    asking.settle(rows, {event.event_id: "in_progress"})
    [row] = events.all()
    assert (row.state, row.answered, row.next_check_at is None) == ("undecided", 1, False)
    events.update(next_check_at=DatabaseNow())
    ask()
    assert states() == ["cancelled"]


def test_extend_lets_senders_be_asked_for_longer(
    alias: str, sender: str, doubtful: Any, states: Any
) -> None:
    [id] = doubtful(decide_by=DatabaseNow() - timedelta(days=1))
    code, text = run("extend", id, "--reason", "back at noon", "--no-input")
    assert (code, text) == (0, "Extended 1 prepared event.\n")
    row = PreparedEvent.objects.using(alias).annotate(now=DatabaseNow()).get()
    assert row.state == "prepared"
    assert timedelta(hours=23) < row.decide_by - row.now <= timedelta(days=1)
    assert row.next_check_at <= row.now
    assert row.reason.endswith("(manage.py outbox_prepared): back at noon")
    events = operations.selected(using=alias)
    events.update(decide_by=DatabaseNow() + timedelta(days=3))
    operations.extend(events, by="ann", reason="never earlier than it was")
    row = PreparedEvent.objects.using(alias).annotate(now=DatabaseNow()).get()
    assert row.decide_by - row.now > timedelta(days=2)


def test_a_person_with_the_name_of_a_route_is_told_from_it(alias: str, doubtful: Any) -> None:
    doubtful()
    operations.decide(operations.selected(using=alias), State.CANCELLED, by="policy", reason="x")
    assert PreparedEvent.objects.using(alias).get().decided_by == "policy (a person)"


def test_a_late_confirm_against_a_person_is_a_contradiction(
    alias: str, sender: str, states: Any
) -> None:
    """The risk that is asked about."""
    event = senders.prepare("order-17", "order.paid", using=sender)
    with transaction.atomic(using=sender):
        senders.fence(event)
    rows = operations.selected(using=alias, ids=[event.event_id])
    assert operations.decide(rows, State.CANCELLED, by="ann", reason="guessed") == (1, [])
    with pytest.raises(Contradiction):
        senders.confirm(event)
    [incident] = Incident.objects.using(alias)
    assert (incident.kind, "(by ann), so it cannot be confirmed" in incident.detail) == (
        "contradiction",
        True,
    )


def test_an_alias_without_fences_is_said_before_anything_is_sent(
    alias: str, sender: str, states: Any, monkeypatch: Any
) -> None:
    senders._require_fences.cache_clear()
    tables = connections[sender].introspection
    with monkeypatch.context() as patch:
        patch.setattr(tables, "table_names", lambda: ["business"])
        with pytest.raises(NotMigrated, match=f"{sender}.* has no table outbox_fence"):
            senders.prepare("order-17", "order.paid", using=sender)
    assert states() == []
    senders.prepare("order-17", "order.paid", using=sender)
    assert senders._require_fences.cache_info().currsize == 1
