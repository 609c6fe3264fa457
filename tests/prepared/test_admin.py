"""Prepared events in the admin: undecided ones are listed, and decided with a reason and a log."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from outbox_app.admin import filters
from outbox_app.database.clock import DatabaseNow
from outbox_app.events.models import Event
from outbox_app.models import Statistic, counting
from outbox_app.prepared import NewPrepared, keeper
from outbox_app.prepared import series as of_prepared
from outbox_app.prepared.models import PreparedEvent
from outbox_app.prepared.request import checked
from outbox_app.process import counters

from ..admin.pages import OVERVIEW, body, hidden, page, said, selection, text

EVENTS = reverse("admin:outbox_prepared_preparedevent_changelist")
State = PreparedEvent.State


@pytest.fixture
def prepared(alias):
    """``prepared(stream, **columns)``: a row as the keeper writes it."""

    def make(stream="order-17", **columns):
        request = checked(NewPrepared(stream, "order.paid", {"total": 30, "password": "hunter2"}))
        sender = columns.get("sender", "alias:billing")
        keeper.prepare(sender, [request], using=alias)
        rows = PreparedEvent.objects.using(alias).filter(event_id=request.event_id)
        if columns:
            rows.update(**columns)
        return rows.get()

    return make


@pytest.fixture
def undecided(prepared):
    return prepared(
        state=State.UNDECIDED, next_check_at=None, asked=9, answered=2, unreachable=7,
        last_answer="OSError: password=hunter2\x1b", reason="The sender could not say in time.",
    )  # fmt: skip


def ask(client, action, *rows, **fields):
    return client.post(EVENTS, selection(action, *rows, **fields))


def test_the_page_shows_what_its_sender_said(alias, superuser, undecided):
    shown = text(superuser.get(page(undecided)))
    for words in ("undecided", "alias:billing", "OSError: password=••••", "could not say in time",
                  '"total": 30', '"password": "••••"'):  # fmt: skip
        assert words in shown
    assert "hunter2" not in shown
    assert all(each in shown for each in ("Asked: 9", "Answered: 2", "Not answered: 7"))


def test_the_content_takes_a_permission(alias, log_in, undecided):
    shown = text(log_in("staff", permissions=["view_preparedevent"]).get(page(undecided)))
    assert "outbox_prepared.view_payload_preparedevent" in shown
    assert '"total"' not in shown


def test_undecided_ones_are_found_below_any_number_of_others(
    alias, superuser, undecided, prepared, monkeypatch
):
    for number in range(5):
        prepared(f"new-{number}", state=State.CONFIRMED)
    monkeypatch.setattr(counting, "MANY", 3)
    assert "order-17" not in text(superuser.get(EVENTS))
    assert "order-17" in text(superuser.get(EVENTS, {"state": "undecided"}))
    monkeypatch.setattr(filters, "FEW", 0)  # there are many of them, too
    assert "order-17" not in text(superuser.get(EVENTS, {"state": "undecided"}))


def test_filters(alias, superuser, undecided, prepared):
    prepared("new", sender="alias:shop")

    def found(**query):
        shown = text(superuser.get(EVENTS, query))
        return "order-17" in shown, "new: prepared alias:shop" in shown

    PreparedEvent.objects.using(alias).filter(pk=undecided.pk).update(
        prepared_at=DatabaseNow() - timedelta(hours=30)
    )
    assert found() == (True, True)
    assert found(sender="alias:shop") == (False, True)
    assert found(state="prepared") == (False, True)
    assert found(older="24h") == (True, False)
    assert found(older="3d") == (False, False)
    assert found(q=str(undecided.event_id)) == (True, False)
    assert found(q="order-17")[1] is False
    assert superuser.get(EVENTS, {"q": "\x00"}).status_code in (200, 302)


def test_confirm_publishes_with_a_reason_and_a_log(alias, superuser, undecided):
    question = ask(superuser, "confirm_selected", undecided)
    assert "the event never happened" in text(question)
    assert not Event.objects.using(alias).exists()
    again = ask(superuser, "confirm_selected", undecided, confirmed="yes", reason="")
    assert "This field is required" in text(again)
    answer = ask(superuser, "confirm_selected", undecided, confirmed="yes", reason="it is paid")
    assert said(answer) == ["1 event was confirmed."]
    event = Event.objects.using(alias).get()
    assert (event.stream, event.message_id) == ("order-17", undecided.event_id)
    row = PreparedEvent.objects.using(alias).get()
    assert (row.state, row.decided_by, row.reason) == (
        "confirmed",
        "<b>superuser</b>",
        "it is paid",
    )
    [line] = LogEntry.objects.all()
    assert "it is paid" in line.change_message


def test_cancel_and_what_is_decided_stays(alias, superuser, undecided, prepared):
    done = prepared("done", state=State.CONFIRMED)
    answer = ask(superuser, "cancel_selected", undecided, done, confirmed="yes", reason="restored")
    assert said(answer) == ["1 event was cancelled."]
    rows = PreparedEvent.objects.using(alias).order_by("id")
    assert list(rows.values_list("state", flat=True)) == ["cancelled", "confirmed"]
    assert not Event.objects.using(alias).exists()


def test_one_that_was_edited_by_hand_says_so(alias, superuser, prepared):
    row = prepared(type="order.lost")
    answer = ask(superuser, "confirm_selected", row, confirmed="yes", reason="x")
    [words] = said(answer)
    assert words.startswith("0 events were confirmed.")
    assert "edited by hand" in words


def test_ask_now_and_extend(alias, superuser, undecided):
    answer = ask(superuser, "check_selected", undecided, confirmed="yes", reason="why")
    assert said(answer)[0].startswith("Asked now: 1 event.")
    row = PreparedEvent.objects.using(alias).annotate(now=DatabaseNow()).get()
    assert row.next_check_at <= row.now
    ask(superuser, "extend_selected", undecided, confirmed="yes", reason="away until noon")
    row = PreparedEvent.objects.using(alias).annotate(now=DatabaseNow()).get()
    assert row.state == "prepared"
    assert row.decide_by > row.now + timedelta(hours=23)
    assert row.reason == "Extended by <b>superuser</b>: away until noon"


def test_each_action_takes_its_permission(alias, log_in, undecided):
    viewer = log_in("staff", permissions=["view_preparedevent"])
    shown = body(viewer.get(page(undecided)))
    for action in ("check", "confirm", "cancel", "extend"):
        assert f'value="{action}_selected"' not in shown
        ask(viewer, f"{action}_selected", undecided, confirmed="yes", reason="x")
    assert PreparedEvent.objects.using(alias).get().state == "undecided"
    assert not LogEntry.objects.exists()


class TestOverview:
    def test_a_keeper_without_prepared_events_has_no_such_part(self, alias, superuser):
        assert "Prepared events" not in text(superuser.get(OVERVIEW)).partition("Incidents")[0]
        assert 'id="outbox-prepared"' not in body(superuser.get(OVERVIEW))

    def test_what_is_told(self, alias, superuser, undecided, prepared):
        silent = {"unreachable": 3, "last_answer": "OSError: token=abc gone"}
        prepared("new", prepared_at=DatabaseNow() - timedelta(minutes=7), **silent)
        now = PreparedEvent.objects.using(alias).annotate(now=DatabaseNow()).first().now
        for minutes, name, dimension, label, value in (
            *((m, of_prepared.DECIDED, of_prepared.ROUTE, "confirmed call", 1234) for m in (0, 1)),
            *((m, of_prepared.DECIDED, of_prepared.ROUTE, "cancelled answer", 5) for m in (0, 1)),
            (3, of_prepared.DECIDED, of_prepared.ROUTE, "cancelled policy", 7),
            (3, of_prepared.DECIDE_TIME, counters.LE, "0.05", 90),
            (3, of_prepared.DECIDE_TIME, counters.LE, "60", 10),
        ):
            minute = now.replace(second=0, microsecond=0) - timedelta(minutes=minutes)
            Statistic.objects.using(alias).create(
                source="s", minute=minute, name=name, dimension=dimension, label=label, value=value
            )
        answer = superuser.get(OVERVIEW)
        shown = text(answer)
        for words in ("Oldest prepared 7 min", "Undecided 1", "confirmed by a call 1,234",
                      "cancelled by an answer 5", "alias:billing OSError: token=•••• gone",
                      "Processes that ask senders 0"):  # fmt: skip
            assert words in shown
        assert "by its policy" not in shown
        assert f'href="{EVENTS}?state=undecided"' in body(answer)

    def test_those_who_may_not_view_them_do_not(self, alias, log_in, undecided):
        shown = body(log_in("viewer").get(OVERVIEW))
        assert 'id="outbox-prepared"' not in shown
        assert "undecided" not in shown


def test_those_are_decided_on_that_the_question_lists(alias, superuser, prepared):
    events = [prepared(f"order-{number:03}") for number in range(60)]
    question = ask(superuser, "cancel_selected", *events)
    listed = set(re.findall(r"order-\d{3}", text(question)))
    assert len(listed) == 50
    ask(superuser, "cancel_selected", *events, confirmed="yes", reason="restored")
    cancelled = PreparedEvent.objects.using(alias).filter(state=State.CANCELLED)
    assert set(cancelled.values_list("stream", flat=True)) == listed


@pytest.mark.parametrize("action", ["check", "confirm", "cancel", "extend"])
def test_what_comes_after_the_question_is_not_decided_on(alias, superuser, prepared, action):
    asked = prepared("asked")
    question = ask(superuser, f"{action}_selected", asked, select_across=1)
    later = prepared("later")
    answer = superuser.post(EVENTS, {**hidden(question), "confirmed": "yes", "reason": "why"})
    assert "1 event" in said(answer)[0]
    assert PreparedEvent.objects.using(alias).filter(pk=later.pk).values().get() == {
        field.attname: getattr(later, field.attname) for field in PreparedEvent._meta.fields
    }
    assert f"Rows: {asked.pk}." in LogEntry.objects.get().get_change_message()
