"""An event whose handler fails is found, named and skipped; no effect is lost or doubled."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from outbox_app.events import subscriber
from outbox_app.events.exceptions import GapNotSkippable
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream, Subscription
from outbox_app.events.subscriptions.control import release
from outbox_app.events.subscriptions.handling import HandlingResult, narrowed
from outbox_app.events.subscriptions.skips import discard_stream, skip_event
from outbox_app.models import InboxEntry

pytestmark = pytest.mark.django_db(transaction=True)

STREAMS = [f"s{n}" for n in range(11)]


@pytest.fixture
def shop(alias):
    """``shop(poison, **options)``: it writes a row per event, and fails at these streams."""

    def make(*poison, **options):
        poison = set(poison)

        @subscriber("shop", **options)
        def handle(events):
            for event in events:
                InboxEntry.objects.using(alias).create(job_id=f"{event.stream}@{event.version}")
            if bad := [event.stream for event in events if event.stream in poison]:
                raise ValueError(f"password=hunter2 {bad[0]}")

        return poison

    return make


def effects(alias):
    return sorted(InboxEntry.objects.using(alias).values_list("job_id", flat=True))


def ids(alias):
    return list(Event.objects.using(alias).order_by("id").values_list("id", flat=True))


def wanted(*without):
    return sorted(f"{stream}@1" for stream in STREAMS if stream not in without)


@pytest.mark.parametrize("at", [0, 4, 10])
def test_the_second_failure_finds_it(alias, published, run, shop, at):
    poison = shop(f"s{at}")
    published(*STREAMS)
    run("shop")
    cursor = Cursor.objects.using(alias).get()
    assert (cursor.failures, cursor.failed_event) == (1, None)
    assert effects(alias) == []
    run("shop")
    cursor.refresh_from_db()
    failed = cursor.failed_event
    assert (failed["position"], failed["type"]) == (ids(alias)[at], "made")
    assert (failed["stream"], failed["version"]) == (f"s{at}", 1)
    assert "in handle" in failed["traceback"]
    assert cursor.failures == 2
    assert effects(alias) == sorted(f"s{n}@1" for n in range(at))
    run("shop")  # alone, and again
    cursor.refresh_from_db()
    assert (cursor.failures, cursor.failed_event["position"]) == (3, ids(alias)[at])
    poison.clear()
    assert run("shop") == 11 - at
    cursor.refresh_from_db()
    assert (cursor.failures, cursor.failed_event, cursor.handled) == (0, None, 11)
    assert effects(alias) == wanted()


@pytest.mark.parametrize("options", [{"partitions": 3}, {"types": ["made"]}], ids=["part", "few"])
def test_it_is_found_among_rows_that_are_not_wanted(alias, published, run, options):
    @subscriber("shop", **options)
    def handle(events):
        if any((event.stream, event.version) == ("one", 5) for event in events):
            raise ValueError

    for _ in range(9):  # of one stream: all in one partition, side by side
        published("one")
        if "types" in options:
            published(*["other"] * 40, type="unwanted")
    run("shop")
    run("shop")
    cursor = Cursor.objects.using(alias).get(failures__gte=2)
    assert (cursor.failed_event["version"], cursor.handled) == (5, 4)


@pytest.mark.parametrize(
    "options",
    [{}, {"on_gap": "park"}, {"on_gap": "park", "by_time": True}, {"types": ["m*"]}],
    ids=["plain", "gaps", "by time", "filter"],
)
def test_it_is_skipped(alias, published, run, shop, options):
    shop("s4", "s10", **options)
    published(*STREAMS)
    Event.objects.using(alias).update(recorded_at="2026-01-01T00:00Z")
    places = ids(alias)
    run("shop")
    with pytest.raises(GapNotSkippable, match="does not fail at position"):
        skip_event("shop", places[4], by="ann", reason="why", using=alias)
    run("shop")
    with pytest.raises(GapNotSkippable):
        skip_event("shop", places[5], by="ann", reason="why", using=alias)
    with pytest.raises(GapNotSkippable, match="a name and a reason"):
        skip_event("shop", places[4], by="ann", reason=" ", using=alias)
    gap = skip_event("shop", places[4], by="ann", reason="sold twice", using=alias)
    assert (gap.kind, gap.state, gap.stream, gap.first, gap.last) == (
        *("event", "skipped", "s4"),
        *(places[4], places[4]),
    )
    assert (gap.settled_by, gap.reason) == ("ann", "sold twice")
    for _ in range(2):  # to the next one that fails
        run("shop")
    skip_event("shop", places[10], by="ann", reason="the last", using=alias)
    run("shop")
    cursor = Cursor.objects.using(alias).get()
    assert (cursor.error, cursor.failed_event, cursor.handled) == ("", None, 9)
    assert effects(alias) == wanted("s4", "s10")
    assert run("shop") == 0
    published("s4", "s3")
    Event.objects.using(alias).filter(version=2).update(recorded_at="2026-01-02T00:00Z")
    run("shop")
    run("shop")
    assert Cursor.objects.using(alias).get().failed_event["version"] == 2
    with pytest.raises(GapNotSkippable):  # that is another event
        skip_event("shop", places[4], by="ann", reason="again", using=alias)


def test_a_page_that_is_in_hand_does_not_outrun_a_skip(alias, published, run, shop):
    """The decision moves the revision: what was read before it is read again."""
    shop("s0")
    published("s0")
    for _ in range(2):
        run("shop")
    before = Cursor.objects.using(alias).get()
    skip_event("shop", ids(alias)[0], by="ann", reason="why", using=alias)
    assert Cursor.objects.using(alias).get().revision == before.revision + 1


def test_a_handler_that_fails_for_a_combination_gets_past_it(alias, published, run):
    seen = []

    @subscriber("shop")
    def handle(events):
        names = [event.stream for event in events]
        if {"s3", "s7"} <= set(names):
            raise ValueError("together")
        seen.extend(names)

    published(*STREAMS)
    for _ in range(3):
        run("shop")
    assert seen == STREAMS
    assert Cursor.objects.using(alias).get().error == ""


def test_a_parked_stream_names_its_event(alias, published, run, shop):
    poison = shop("s1", on_error="park")
    published("s0", "s1", "s2", "s1", "s1")
    for _ in range(3):
        run("shop")
    parked = ParkedStream.objects.using(alias).get()
    assert (parked.version, parked.failed_event["version"]) == (1, 1)
    assert "ValueError" in parked.failed_event["traceback"]
    skip_event("shop", parked.position, by="ann", reason="why", using=alias)
    run("shop")
    parked.refresh_from_db()
    assert (parked.version, parked.failed_event["position"]) == (2, ids(alias)[3])
    poison.clear()
    ParkedStream.objects.using(alias).update(released=True)
    run("shop")
    assert effects(alias) == ["s0@1", "s1@2", "s1@3", "s2@1"]
    assert not ParkedStream.objects.using(alias).exists()


def test_what_is_released_is_handled_up_to_the_event_that_fails(alias, published, run):
    seen, bad = [], {1, 3}

    @subscriber("shop", on_error="park")
    def handle(events):
        if wrong := bad.intersection(event.version for event in events):
            raise ValueError(wrong)
        seen.extend(event.version for event in events)

    published("a", "a", "a", "a", "a")
    for _ in range(3):
        run("shop")
    bad.discard(1)
    ParkedStream.objects.using(alias).update(released=True)
    of_another = ParkedStream.objects.using(alias).create(
        subscription="other", partition=0, log="outbox_event", stream="a", version=1, position=1,
        error="", released=True,
    )  # fmt: skip
    run("shop")
    of_another.refresh_from_db()
    assert (of_another.version, of_another.released) == (1, True)
    parked = ParkedStream.objects.using(alias).get(subscription="shop")
    assert (seen, parked.version, parked.failed_event["version"]) == ([1, 2], 3, 3)
    assert parked.position == ids(alias)[2]
    skip_event("shop", parked.position, by="ann", reason="why", using=alias)
    run("shop")
    assert seen == [1, 2, 4, 5]


@pytest.mark.parametrize("options", [{}, {"by_time": True, "on_gap": "park"}], ids=["", "by time"])
def test_discard(alias, published, run, shop, options):
    of_another = {"subscription": "other", "log": "outbox_event", "stream": "s1"}
    parked = ParkedStream.objects.using(alias)
    parked.create(**of_another, partition=0, version=1, position=1, error="")
    Gap.objects.using(alias).create(**of_another, kind="version", first=1, last=1)
    poison = shop("s1", on_error="park", **options)
    published("s0", "s1", "s1", "s2")
    Event.objects.using(alias).update(recorded_at="2026-01-01T00:00Z")
    for _ in range(3):
        run("shop")
    places = ids(alias)
    with pytest.raises(GapNotSkippable, match="has not parked"):
        discard_stream("shop", "s0", by="ann", reason="why", using=alias)
    gap = discard_stream("shop", "s1", by="ann", reason="why", using=alias)
    assert (gap.stream, gap.first, gap.last) == ("s1", places[1], places[2])
    poison.clear()
    published("s1")
    Event.objects.using(alias).filter(version=3).update(recorded_at="2026-01-02T00:00Z")
    assert run("shop") == 1
    assert effects(alias) == ["s0@1", "s1@3", "s2@1"]
    assert parked.get().subscription == "other"


@pytest.mark.parametrize(("skip", "what"), [(skip_event, 5), (discard_stream, "s1")])
def test_a_skip_of_a_subscription_that_has_never_run_changes_nothing(alias, shop, skip, what):
    shop()
    with pytest.raises(GapNotSkippable):
        skip("shop", what, by="ann", reason="why", using=alias)
    assert not Subscription.objects.using(alias).exists()


def test_one_that_waits_for_versions_is_not_discarded(alias, published, run, shop):
    shop()
    published("a")
    run("shop")
    key = {"subscription": "shop", "log": "outbox_event", "stream": "a"}
    ParkedStream.objects.using(alias).create(**key, partition=0, version=2, position=9, error="")
    Gap.objects.using(alias).create(**key, kind="version", first=2, last=2)
    with pytest.raises(GapNotSkippable, match="skip its gap"):
        discard_stream("shop", "a", by="ann", reason="why", using=alias)


def command(*arguments):
    out = StringIO()
    try:
        call_command("outbox_subscriptions", *arguments, stdout=out)
    except CommandError as error:
        return error.returncode, str(error)
    return 0, out.getvalue()


def test_the_command(alias, published, run, shop):
    shop("s1", "s2")
    published(*STREAMS)
    for _ in range(2):
        run("shop")
    place = str(ids(alias)[1])
    assert f"fails at position {place}: made s1 version 1" in command("list")[1]
    assert '"position": ' + place in command("list", "--json")[1]
    assert "hunter2" not in command("list", "--json")[1].partition("failed_event")[2]
    assert "--reason" in command("skip", "shop", "--position", place)[1]
    assert "--position" in command("skip", "shop", "--reason", "why")[1]
    assert command("skip", "shop", "--position", "1" * 15, "--reason", "why")[0] == 1
    assert command("skip", "shop", "--position", place, "--reason", "why")[0] == 0
    assert "(skipped)" in command("list")[1]
    run("shop")
    assert effects(alias) == ["s0@1"]
    ParkedStream.objects.using(alias).create(
        subscription="shop", partition=0, log="outbox_event", stream="s0", version=1, position=1,
        error="",
    )  # fmt: skip
    assert "--reason" in command("discard", "shop", "--stream", "s0")[1]
    assert command("discard", "shop", "--stream", "s9", "--reason", "why")[0] == 1
    assert command("discard", "shop", "--stream", "s0", "--reason", "why")[0] == 0


@pytest.mark.parametrize("bad", range(8))
def test_halves(bad):
    """Whichever it is, it is reached, and no event is tried after it."""
    left = list(range(8))

    def attempt(limit):
        page = left[:limit]
        if bad in page:
            return HandlingResult(len(page), error=ValueError(), events=page)
        del left[:limit]
        return HandlingResult(len(page))

    found = narrowed(HandlingResult(8, error=ValueError()), attempt)
    assert (found.events, left[0]) == ([bad], bad)
    bad = -1
    assert narrowed(HandlingResult(len(left), error=ValueError()), attempt).error is None
    assert left == []


def test_a_stream_of_a_log_that_is_read_no_more_cannot_be_discarded(alias, shop):
    shop()
    lost = {"subscription": "shop", "partition": 1, "log": "outbox_event", "error": "why"}
    ParkedStream.objects.using(alias).create(**lost, stream="s", version=1, position=1)
    with pytest.raises(GapNotSkippable, match="No cursor of 'shop' reads outbox_event"):
        discard_stream("shop", "s", by="ann", reason="why", using=alias)


def test_the_streams_that_are_not_named_stay_parked(alias):
    for name, stream in (("shop", "a"), ("shop", "b"), ("other", "a")):
        ParkedStream.objects.using(alias).create(
            subscription=name, partition=0, log="outbox_event", stream=stream, version=1,
            position=1, error="why",
        )  # fmt: skip
    released = ParkedStream.objects.using(alias).filter(released=True)
    assert release("shop", ["a", "c"], using=alias) == 1
    assert list(released.values_list("subscription", "stream")) == [("shop", "a")]
    assert release("shop", using=alias) == 2
    assert not released.filter(subscription="other").exists()
