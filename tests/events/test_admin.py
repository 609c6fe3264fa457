"""Events, subscriptions, parked streams and gaps in the admin.

They are shown escaped. Only users with permission decide, by POST, with a reason in the log.
"""

from __future__ import annotations

import re
from html import unescape

import pytest
from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.messages import get_messages
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from outbox_app.events import NewEvent, publish_many
from outbox_app.events.log.newevent import slice_of
from outbox_app.events.log.registry import all_logs
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream, Subscription
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import _subscribers, subscriber, subscriber_named

from ..admin.pages import OVERVIEW, body, hidden, page, said, selection, text
from ..admin.test_display import CODES, SCRIPT, VISIBLE

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]

EVENTS = reverse("admin:outbox_events_event_changelist")
SUBSCRIPTIONS = reverse("admin:outbox_events_subscription_changelist")
PARKED = reverse("admin:outbox_events_parkedstream_changelist")
GAPS = reverse("admin:outbox_events_gap_changelist")
LISTS = (EVENTS, SUBSCRIPTIONS, PARKED, GAPS)

VIEW = ("view_event", "view_subscription", "view_parkedstream", "view_gap", "view_process")
ACTIONS = {
    "pause_selected": "pause_subscription",
    "resume_selected": "pause_subscription",
    "replay_selected": "replay_subscription",
    "release_selected": "replay_subscription",
}


@pytest.fixture
def shop(alias):
    """A subscription that has handled four events, its parked stream and its gap."""

    @subscriber("shop", partitions=2)
    def handle(events):
        pass

    publish(alias, *"abcd")
    run("shop")
    row = ParkedStream.objects.using(alias).create(
        subscription="shop", partition=slice_of("a") % 2, log="outbox_event", stream="a",
        version=1, position=1, error="ValueError: no",
    )  # fmt: skip
    gap = Gap.objects.using(alias).create(
        kind="version", subscription="shop", log="outbox_event", stream="a", first=1, last=2
    )
    return Subscription.objects.using(alias).get(), row, gap


def publish(alias, *streams, **options):
    with transaction.atomic(using=alias):
        return publish_many(NewEvent(stream, "made", **options) for stream in streams)


def run(name):
    return Runner([subscriber_named(name)]).run(once=True)


def listed(response):
    return re.findall(r'class="field-version[^"]*">([^<]*)<', body(response))


def state(alias):
    models = (Subscription, Cursor, ParkedStream)
    return [list(model.objects.using(alias).order_by("pk").values()) for model in models]


def decide(client, url, action, row, **fields):
    """Ask and answer, as a person does. Returns question and answer."""
    question = client.post(url, selection(action, row))
    return question, client.post(url, {**hidden(question), "confirmed": "yes", **fields})


def test_pages_are_seen_by_those_who_may_view(alias, shop, log_in):
    addresses = [*LISTS, *map(page, [*shop, Event.objects.using(alias).first()])]
    for role, permissions, expected in (
        ("anonymous", (), 302),
        ("staff", (), 403),
        ("viewer", VIEW[:4], 200),
        ("superuser", (), 200),
    ):
        client = log_in(role, permissions=permissions)
        assert {client.get(url).status_code for url in addresses} == {expected}, role


def test_nobody_adds_edits_or_deletes(alias, shop, superuser):
    for row in [*shop, Event.objects.using(alias).first()]:
        assert superuser.get(page(row, "delete")).status_code == 403
        assert superuser.post(page(row, "delete"), {"post": "yes"}).status_code == 403
        assert superuser.post(page(row), {"stream": "forged", "_save": "1"}).status_code == 403
        assert type(row).objects.using(alias).filter(pk=row.pk).exists()
    for url in LISTS:
        assert superuser.get(f"{url}add/").status_code == 403
        superuser.post(url, selection("delete_selected", shop[0], post="yes"))
    assert Subscription.objects.using(alias).exists()


@pytest.mark.parametrize("action", ACTIONS)
def test_actions_take_their_permission(alias, shop, log_in, action):
    for permissions in ((), ("pause_subscription",), ("replay_subscription",), ("skip_gap",)):
        client = log_in(f"with {permissions}", permissions=(*VIEW, *permissions))
        allowed = ACTIONS[action] in permissions
        offered = body(client.get(SUBSCRIPTIONS)), body(client.get(page(shop[0])))
        assert [f'value="{action}"' in content for content in offered] == [allowed] * 2
        before = state(alias)
        form = {"confirmed": "yes", "place": "beginning", "reason": "why"}
        client.post(SUBSCRIPTIONS, selection(action, shop[0], **form))
        assert (state(alias) != before) == allowed
        logged = LogEntry.objects.filter(user__username=f"<b>with {permissions}</b>")
        assert logged.exists() == allowed


@pytest.mark.parametrize(("url", "row", "permission", "action"), [
    (PARKED, 1, "replay_subscription", "release_selected"),
    (GAPS, 2, "skip_gap", "skip_selected"),
])  # fmt: skip
def test_so_do_those_of_parked_streams_and_gaps(alias, shop, log_in, url, row, permission, action):
    form = {"confirmed": "yes", "reason": "why"}
    for permissions, allowed in (((), False), ((permission,), True)):
        client = log_in(f"with {permissions}", permissions=(*VIEW, *permissions))
        assert (f'value="{action}"' in body(client.get(url))) == allowed
        client.post(url, selection(action, shop[row], **form))
        assert LogEntry.objects.exists() == allowed


@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_is_done_by_get_or_without_a_token(alias, shop, log_in, action):
    client = log_in("superuser", enforce_csrf_checks=True)
    form = selection(action, shop[0], confirmed="yes", place="beginning", reason="why")
    before = list(Cursor.objects.using(alias).order_by("pk").values())
    client.get(SUBSCRIPTIONS, form)
    assert client.post(SUBSCRIPTIONS, form).status_code == 403
    assert list(Cursor.objects.using(alias).order_by("pk").values()) == before
    assert not LogEntry.objects.exists()


def test_pause_and_resume(alias, shop, superuser):
    question, answer = decide(superuser, SUBSCRIPTIONS, "pause_selected", shop[0], reason="<b>x")
    assert "They handle no event until they are resumed" in text(question)
    assert said(answer) == ["Paused: shop."]
    assert "paused" in text(superuser.get(SUBSCRIPTIONS))
    publish(alias, "e")
    assert run("shop") == 0
    decide(superuser, SUBSCRIPTIONS, "resume_selected", shop[0], reason="over")
    assert run("shop") == 1
    first, second = LogEntry.objects.order_by("id")
    assert first.get_change_message() == (
        "Paused: shop. Action: pause_selected. Rows: shop. Reason: <b>x"
    )
    assert first.content_type.model == "subscription"
    assert "Reason: over" in second.get_change_message()
    history = reverse("admin:outbox_events_subscription_history", args=["shop"])
    assert "Paused: shop. Action: pause_selected." in text(superuser.get(history))


def test_replay_asks_from_where_and_why(alias, shop, superuser):
    question, answer = decide(superuser, SUBSCRIPTIONS, "replay_selected", shop[0], place="now")
    assert "Their effects are not undone" in text(question)
    assert "This field is required" in text(answer)  # the reason
    _, answer = decide(
        superuser, SUBSCRIPTIONS, "replay_selected", shop[0], place="<i>", reason="why"
    )
    assert "is no place in a log" in text(answer)
    assert "<i>" not in body(answer)
    assert not LogEntry.objects.exists()
    _, answer = decide(
        superuser, SUBSCRIPTIONS, "replay_selected", shop[0], place="beginning", reason="lost"
    )
    assert "to the beginning: every event that is kept is handled again" in said(answer)[0]
    assert run("shop") == 4
    assert "Reason: lost" in LogEntry.objects.get().get_change_message()


def test_what_cannot_be_done_is_said_and_logged(alias, shop, superuser):
    _, answer = decide(
        superuser, SUBSCRIPTIONS, "replay_selected", shop[0], place="999999", reason="why"
    )
    assert said(answer)[0].startswith("Not done: outbox_event has no event")
    assert "Not done" in LogEntry.objects.get().get_change_message()
    _, answer = decide(superuser, GAPS, "skip_selected", shop[2], reason="why")
    assert said(answer)[0].startswith("Skipped: ")
    _, answer = decide(superuser, GAPS, "skip_selected", shop[2], reason="why")
    [refused] = get_messages(answer.wsgi_request)
    assert refused.level_tag == "error"
    assert refused.message.startswith("Not done: Gap")
    gap = Gap.objects.using(alias).get(subscription="shop")
    assert (gap.state, gap.settled_by, gap.reason) == ("skipped", "<b>superuser</b>", "why")


@pytest.mark.parametrize("url", [SUBSCRIPTIONS, PARKED])
def test_release(alias, shop, superuser, url):
    row = shop[0] if url == SUBSCRIPTIONS else shop[1]
    _, answer = decide(superuser, url, "release_selected", row, reason="why")
    assert said(answer) == ["1 stream was released."]
    assert run("shop") == 1
    assert not ParkedStream.objects.using(alias).exists()


@pytest.mark.parametrize("id", ["", "\x00", "a" * 81, "\n"])
def test_forged_names_are_refused(superuser, id):
    form = {"action": "pause_selected", "_selected_action": [id], "confirmed": "yes"}
    assert superuser.post(SUBSCRIPTIONS, form).status_code == 400


@pytest.mark.parametrize("name", ["change", "history"])
def test_an_address_of_a_name_that_no_database_can_compare(alias, shop, superuser, name):
    """It is the address of no row: Django leads to its index, as for any such address."""
    for id in ("shop\x00", "\x00", "shop_00"):
        address = reverse(f"admin:outbox_events_subscription_{name}", args=[id])
        assert superuser.get(address).status_code == 302


@pytest.mark.parametrize(("url", "action"), [(PARKED, "release_selected"), (GAPS, "skip_selected")])
def test_forged_ids_are_refused(superuser, url, action):
    form = {"action": action, "confirmed": "yes", "reason": "why"}
    for id in ("x", "", "-1", "9" * 5000, "٣", 2**63):
        assert superuser.post(url, {**form, "_selected_action": [id]}).status_code == 400, id


def test_events_are_found(alias, superuser):
    publish(alias, "a", "b", "a", "x y")
    rows = Event.objects.using(alias)
    assert listed(superuser.get(EVENTS)) == ["1", "2", "1", "1"]
    assert listed(superuser.get(EVENTS, {"q": "a"})) == ["2", "1"]
    assert listed(superuser.get(EVENTS, {"q": " x y "})) == ["1"]
    assert listed(superuser.get(EVENTS, {"q": "A"})) == []
    assert listed(superuser.get(EVENTS, {"q": str(rows.order_by("-id")[1].message_id)})) == ["2"]
    assert listed(superuser.get(EVENTS, {"type": "made"})) == ["1", "2", "1", "1"]
    assert listed(superuser.get(EVENTS, {"type": "Made"})) == []
    shown = body(superuser.get(page(rows.first())))
    [link] = set(re.findall(r'href="([^"]*\?stream=[^"]*)"', shown))
    assert listed(superuser.get(unescape(link))) == ["2", "1"]
    assert superuser.get(f"{EVENTS}?data__contains=x").status_code == 400


@pytest.mark.parametrize("query", [{"stream": "a\x00"}, {"q": "a\x00"}])
def test_no_stream_has_what_no_database_can_compare(alias, superuser, query):
    publish(alias, "a")
    assert listed(superuser.get(EVENTS, query)) == ([] if "stream" in query else ["1"])


def test_lists_read_with_a_limit_and_without_contents(alias, shop, superuser):
    publish(alias, *["a"] * 120)
    for query in ("", "?type=made", "?q=a", "?stream=a"):
        with CaptureQueriesContext(connections[alias]) as queries:
            body(superuser.get(f"{EVENTS}{query}"))
        found = [q["sql"] for q in queries if "outbox_event" in q["sql"]]
        assert found
        for sql in found:
            assert "LIMIT" in sql or "MAX(" in sql, sql
            assert '"data"' not in sql.replace("`", '"'), sql


@pytest.mark.parametrize("url", [SUBSCRIPTIONS, OVERVIEW, EVENTS, PARKED, GAPS])
def test_the_number_of_statements_does_not_depend_on_the_rows(alias, shop, superuser, url):
    def statements():
        with CaptureQueriesContext(connections[alias]) as queries:
            body(superuser.get(url))
        return len([q for q in queries if "outbox_" in q["sql"]])

    publish(alias, "late")
    before = statements()
    publish(alias, *(f"s{i}" for i in range(60)))
    for i in range(30):
        ParkedStream.objects.using(alias).create(
            subscription="shop", partition=0, log="outbox_event", stream=f"p{i}", version=1,
            position=1, error="",
        )  # fmt: skip
    assert statements() == before <= 38  # one for each log


def test_a_subscription_is_shown_with_what_keeps_it(alias, shop, superuser):
    publish(alias, *"efg")
    Cursor.objects.using(alias).filter(partition=1).update(error=f"ValueError: {SCRIPT}")
    shown = text(superuser.get(page(shop[0])))
    assert "failing" in shown
    assert "ValueError: <script>" in shown
    assert "Parked streams : 1" in shown
    assert "Open gaps : 1" in shown
    assert shown.count("outbox_event") >= 2
    over = text(superuser.get(OVERVIEW))
    assert "shop failing" in over
    assert over.count("ValueError: <script>") == 2, "with the problem and in the table"
    assert "1 subscription is failing." in over


def test_release_is_offered_where_something_is_parked(alias, shop, superuser):
    subscription, stream, _ = shop

    def offered(row):
        return 'value="release_selected"' in body(superuser.get(page(row)))

    assert (offered(subscription), offered(stream)) == (True, True)
    ParkedStream.objects.using(alias).update(released=True)
    assert not offered(stream)
    ParkedStream.objects.using(alias).all().delete()
    assert not offered(subscription)


def test_a_subscription_without_a_process_is_a_problem(alias, shop, superuser):
    words = "shop : no process runs it, and it is behind"
    assert words not in text(superuser.get(OVERVIEW))
    publish(alias, "b")
    assert words in text(superuser.get(OVERVIEW))
    runner = Runner([subscriber_named("shop")])
    runner.run_once()
    try:
        assert words not in text(superuser.get(OVERVIEW))
        drainers = reverse("admin:outbox_app_process_changelist")
        assert "subscription:shop" in text(superuser.get(drainers))
    finally:
        runner._leave()
    control.pause("shop")
    assert words not in text(superuser.get(OVERVIEW))


def test_one_that_the_code_no_longer_declares_is_forgotten(alias, shop, superuser, log_in):
    publish(alias, "b")
    Cursor.objects.using(alias).update(error="ValueError: no")
    offered = body(superuser.get(page(shop[0])))
    assert 'value="pause_selected"' in offered
    assert 'value="forget_selected"' not in offered
    _, answer = decide(superuser, SUBSCRIPTIONS, "forget_selected", shop[0], reason="gone")
    assert "is still declared" in said(answer)[0]

    _subscribers.clear()
    assert "shop undeclared ValueError: no 1" in text(superuser.get(SUBSCRIPTIONS))
    shown = superuser.get(page(shop[0]))
    assert re.findall(r'value="(\w+_selected)"', body(shown)) == ["forget_selected"]
    assert "manage.py outbox_subscriptions forget NAME" in text(shown)
    over = text(superuser.get(OVERVIEW))
    assert "1 subscription is not declared, and no process runs it." in over
    assert "shop : 1 events behind" in over
    assert "Subscriptions behind 0 s" in over

    others = log_in("others", permissions=(*VIEW, "replay_subscription", "skip_event"))
    others.post(SUBSCRIPTIONS, selection("forget_selected", shop[0], confirmed="yes", reason="-"))
    question = superuser.post(SUBSCRIPTIONS, selection("forget_selected", shop[0]))
    assert Subscription.objects.using(alias).exists()
    answer = superuser.post(SUBSCRIPTIONS, {**hidden(question), "confirmed": "yes", "reason": "x"})
    assert said(answer)[-1] == "Forgotten: shop."
    assert state(alias) == [[], [], []]
    logged = LogEntry.objects.latest("id")
    assert (logged.action_flag, logged.object_id) == (DELETION, "shop")
    assert "not declared" not in text(superuser.get(OVERVIEW))


@pytest.mark.parametrize("vendor", ["postgresql", "mysql"])
def test_what_is_in_flight_is_shown(alias, shop, superuser, log_in, vendor):
    if connections[alias].vendor != vendor:
        return
    logs = [each._meta.db_table for each in all_logs(using=alias)]
    other = connections.create_connection(alias)
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute("UPDATE outbox_event SET topic = topic WHERE version = 1")
            cursor.execute("UPDATE outbox_event SET topic = '<b>' WHERE version = 1")
            for log in logs:
                cursor.execute(f"DELETE FROM {log} WHERE 1 = 0")
            name = "connection_id" if vendor == "mysql" else "pg_backend_pid"
            cursor.execute(f"SELECT {name}()")
            pid = cursor.fetchone()[0]
            cursor.execute("SELECT 'secret'")
        shown = text(superuser.get(page(shop[0])))
        assert len(logs) > 1
        for log in logs:
            assert f"In flight on {log} session {pid}, " in shown
        assert "secret" in shown or vendor == "mysql"
        viewer = log_in("staff", permissions=["view_subscription"])
        seen = text(viewer.get(page(shop[0])))
        assert re.search(rf"session {pid}, [^:]* hidden Its events are read when it commits", seen)
        assert "secret" not in seen
    finally:
        other.rollback()
        other.close()


def test_never_run_subscriptions_are_on_the_overview(alias, superuser):
    @subscriber("young")
    def handle(events):
        pass

    assert "young waiting" in text(superuser.get(OVERVIEW))
    publish(alias, "s")
    shown = superuser.get(OVERVIEW)
    assert "it has never run" in text(shown)
    assert b"subscription/young/" not in shown.content  # it has no page yet
    control.pause("young")
    assert "young paused" in text(superuser.get(OVERVIEW))


@pytest.mark.parametrize("evil", [SCRIPT, CODES])
def test_whatever_a_row_holds_is_harmless(alias, superuser, evil):
    data = {evil: [evil], "deep": {"n": None}}
    [event] = publish(alias, "s", data=data, metadata={evil: evil})
    rows = Event.objects.using(alias)
    rows.update(stream=evil, type=evil, topic=evil)
    event = rows.get()
    Subscription.objects.using(alias).create(name=evil[:80])
    Cursor.objects.using(alias).create(
        subscription=evil[:80], partition=0, log=evil, state=evil, error=evil
    )
    parked = ParkedStream.objects.using(alias).create(
        subscription=evil[:80], partition=0, log=evil, stream=evil, version=1, position=1,
        error=evil,
    )  # fmt: skip
    gap = Gap.objects.using(alias).create(
        kind="version", subscription=evil[:80], log=evil, stream=evil, first=1, last=1,
        reason=evil, settled_by=evil,
    )  # fmt: skip
    pages = [
        *(superuser.get(url) for url in (*LISTS, OVERVIEW)),
        *(superuser.get(page(row)) for row in (event, parked, gap)),
        superuser.post(GAPS, selection("skip_selected", gap)),
        superuser.post(PARKED, selection("release_selected", parked)),
    ]
    if evil == SCRIPT:  # Django gives back what is asked for in the address as it came, escaped
        pages.append(superuser.get(EVENTS, {"stream": evil, "type": evil, "q": evil}))
    for response in pages:
        content = body(response)
        assert "<script>alert" not in content
        assert "<img" not in re.sub(r'<img src="/static/[^>]*>', "", content)
        if evil == CODES:
            assert VISIBLE in content
            assert not set(CODES) & set(content) - set("[31mredgnp.exe")


def test_a_large_content_is_cut(alias, superuser):
    [event] = publish(alias, "s", data={"long": "x" * 200_000})
    shown = body(superuser.get(page(Event.objects.using(alias).get(pk=event.id))))
    assert "Cut: the first" in shown
    assert len(shown) < 60_000


def test_pages_hold_nothing_that_a_strict_policy_forbids(alias, shop, superuser):
    publish(alias, "x")
    event = Event.objects.using(alias).first()
    pages = [superuser.get(url) for url in (*LISTS, OVERVIEW, *map(page, [*shop, event]))]
    pages.append(superuser.post(SUBSCRIPTIONS, selection("replay_selected", shop[0])))
    for response in pages:
        content = re.sub(r"<style>\s*#changelist table thead[^<]*</style>", "", body(response))
        assert "<style" not in content
        assert not re.findall(r"<script(?![^>]*\bsrc=)", content)
        assert not re.findall(r"<[^>]*\s(?:style|on\w+)=", content)


def test_a_move_ahead_names_the_events_and_takes_a_tick(alias, shop, superuser):
    publish(alias, "e", "f")
    _, answer = decide(
        superuser, SUBSCRIPTIONS, "replay_selected", shop[0], place="now", reason="why"
    )
    assert "Not done: Nothing was changed" in said(answer)[0]
    assert re.search(
        r"2 events that it has not handled \(\d+ made e, \d+ made f\)", said(answer)[0]
    )
    assert run("shop") == 2
    publish(alias, "g")
    decide(
        superuser, SUBSCRIPTIONS, "replay_selected", shop[0], place="now", reason="why",
        skip_ahead="on",
    )  # fmt: skip
    assert run("shop") == 0
    gap = Gap.objects.using(alias).get(kind="event")
    assert (gap.settled_by, gap.state) == ("<b>superuser</b>", "skipped")
    assert "1 event that it has not handled" in text(superuser.get(page(gap)))


def test_the_event_that_fails_is_shown_and_skipped(alias, superuser, log_in):
    @subscriber("fails")
    def handle(events):
        if any(event.stream == "b" for event in events):
            raise ValueError("password=hunter2 <script>")

    publish(alias, *"abc")
    for _ in range(2):
        run("fails")
    row = Subscription.objects.using(alias).get()
    event = Event.objects.using(alias).get(stream="b")
    shown = body(superuser.get(page(row)))
    assert f'<a href="{page(event)}">{event.pk}: made b</a>' in shown
    assert "logs: outbox_event; topics: all; types: all" in shown
    assert "in handle" in shown
    assert "hunter2" not in shown
    assert "<script>" not in shown.partition("<pre")[2].partition("</pre>")[0]
    form = {"position": event.pk, "reason": "sold twice"}
    viewer = log_in("without", permissions=(*VIEW, "replay_subscription"))
    viewer.post(SUBSCRIPTIONS, selection("skip_selected", row, confirmed="yes", **form))
    assert not Gap.objects.using(alias).exists()
    wrong = {**form, "position": event.pk + 1}
    _, answer = decide(superuser, SUBSCRIPTIONS, "skip_selected", row, **wrong)
    assert said(answer)[0].startswith("Not done: Subscription")
    question, answer = decide(superuser, SUBSCRIPTIONS, "skip_selected", row, **form)
    assert "The handler never receives this event" in text(question)
    assert said(answer) == ["Skips the event: fails."]
    assert run("fails") == 1
    gap = Gap.objects.using(alias).get()
    assert (gap.first, gap.settled_by, gap.reason) == (event.pk, "<b>superuser</b>", "sold twice")


@pytest.mark.parametrize(
    ("action", "left"),
    [("skip_selected", [2, 3]), ("discard_selected", [])],
    ids=["skip", "discard"],
)
def test_so_is_that_of_a_parked_stream(alias, superuser, log_in, action, left):
    seen, bad = [], {1}

    @subscriber("parks", on_error="park")
    def handle(events):
        if bad.intersection(event.version for event in events):
            raise ValueError("no")
        seen.extend(event.version for event in events)

    publish(alias, *"aaa")
    for _ in range(3):
        run("parks")
    row = ParkedStream.objects.using(alias).get()
    assert "in handle" in body(superuser.get(page(row)))
    viewer = log_in("without", permissions=(*VIEW, "replay_subscription"))
    viewer.post(PARKED, selection(action, row, confirmed="yes", reason="why"))
    assert not Gap.objects.using(alias).exists()
    _, answer = decide(superuser, PARKED, action, row, reason="why")
    assert ": a, position" in said(answer)[0]
    run("parks")
    assert seen == left
    assert not ParkedStream.objects.using(alias).exists()
    assert Gap.objects.using(alias).get().settled_by == "<b>superuser</b>"


@pytest.mark.parametrize("action", ["skip_selected", "discard_selected"])
def test_an_event_that_was_not_asked_about_is_not_given_up(alias, superuser, action):
    bad = {1}

    @subscriber("parks", on_error="park")
    def handle(events):
        if bad.intersection(event.version for event in events):
            raise ValueError("no")

    publish(alias, *"aaa")
    for _ in range(3):
        run("parks")
    row = ParkedStream.objects.using(alias).get()
    question = superuser.post(PARKED, selection(action, row))
    bad = {2}  # the first one is handled meanwhile, and another one fails
    decide(superuser, PARKED, "release_selected", row, reason="why")
    for _ in range(3):
        run("parks")
    answer = superuser.post(PARKED, {**hidden(question), "confirmed": "yes", "reason": "why"})
    assert "Not done, because it has changed: a@1 of parks." in said(answer)[-1]
    assert "a@1 of parks" in LogEntry.objects.latest("id").get_change_message()
    assert ParkedStream.objects.using(alias).get().version == 2
    assert not Gap.objects.using(alias).exists()


def test_what_is_done_of_one_is_said_where_another_is_refused(alias, shop, superuser):
    @subscriber("behind")
    def handle(events):
        pass

    Runner([subscriber_named("behind")]).run(once=True)
    publish(alias, "a")
    run("shop")
    place = str(Event.objects.using(alias).latest("id").pk)
    rows = Subscription.objects.using(alias).order_by("name")
    question = superuser.post(SUBSCRIPTIONS, selection("replay_selected", *rows))
    form = {**hidden(question), "confirmed": "yes", "place": place, "reason": "why"}
    [words] = said(superuser.post(SUBSCRIPTIONS, form))
    assert words.startswith("Moved: shop ")
    assert "'behind' would pass over 1 event" in words
    assert words[:60] in LogEntry.objects.get().get_change_message()


def test_those_gaps_are_skipped_that_the_question_lists(alias, shop, superuser):
    gap = {"kind": "version", "subscription": "shop", "log": "outbox_event", "first": 1, "last": 2}
    gaps = [Gap(stream=f"stream-{number:03}", **gap) for number in range(60)]
    Gap.objects.using(alias).bulk_create(gaps)
    ParkedStream.objects.using(alias).bulk_create(
        ParkedStream(
            subscription="shop", partition=slice_of(each.stream) % 2, log="outbox_event",
            stream=each.stream, version=1, position=1, error="",
        )
        for each in gaps
    )  # fmt: skip
    rows = Gap.objects.using(alias).filter(stream__startswith="stream-")
    question = superuser.post(GAPS, selection("skip_selected", *rows))
    listed = set(re.findall(r"stream-\d{3}", text(question)))
    assert len(listed) == 50
    superuser.post(GAPS, {**hidden(question), "confirmed": "yes", "reason": "why"})
    assert set(rows.filter(state="skipped").values_list("stream", flat=True)) == listed


@pytest.mark.parametrize(
    ("kind", "first", "last", "shown"),
    [
        ("version", 4, 4, "a, version 4"),
        ("version", 4, 6, "a, versions 4 to 6"),
        ("id", 4, 6, "outbox_event, positions 4 to 6"),
    ],
)
def test_a_gap_says_what_is_missing(alias, superuser, kind, first, last, shown):
    stream = "a" if kind == "version" else ""
    gap = Gap.objects.using(alias).create(
        kind=kind, log="outbox_event", stream=stream, first=first, last=last
    )
    assert str(gap) == shown
    assert shown in text(superuser.get(GAPS))
    assert f"Missing: {shown} " in text(superuser.get(page(gap)))
