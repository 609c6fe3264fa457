"""A new number of partitions that a person has chosen: each event is handled once."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import pytest
from django.db import connections

from outbox_app.events import subscriber
from outbox_app.events.exceptions import ReplayRefused
from outbox_app.events.log.newevent import slice_of
from outbox_app.events.models import Cursor, Event, ParkedStream, Subscription
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions import subscriber as module
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.exceptions import OutboxError
from outbox_app.failpoints import set_failpoint
from outbox_app.models import Incident
from tests.events.log.own_log.models import Ledger
from tests.events.log.sessions import Session
from tests.faults.tools import eventually, on
from tests.one_database import no_statement

pytestmark = pytest.mark.django_db(transaction=True)

STREAMS = [f"s{number}" for number in range(12)]


@pytest.fixture
def declare(alias):
    """``declare(3)``: declare the subscription with 3 partitions. Its effects are rows."""

    def handle(events):
        Incident.objects.using(alias).bulk_create(
            Incident(kind="unknown", detail=event.stream, first_id=event.version, last_id=0)
            for event in events
        )

    def make(partitions: int, **options):
        module._subscribers.pop("counted", None)
        subscriber("counted", partitions=partitions, **options)(handle)

    return make


@pytest.fixture
def at_failpoint():
    """``at_failpoint(name, action)``: call it once, at the failpoint."""
    names = []

    def make(name, action):
        def once():
            set_failpoint(name, None)
            action()

        names.append(name)
        set_failpoint(name, once)

    yield make
    for name in names:
        set_failpoint(name, None)


def handled(alias):
    return Counter(Incident.objects.using(alias).values_list("detail", "first_id"))


@pytest.mark.parametrize("after", [4, 3], ids=["multiple", "other"])
def test_the_positions_that_people_see_stay(alias, published, run, declare, after):
    declare(2)
    published(*STREAMS)
    run("counted")
    declare(after)
    control.repartition("counted", using=alias)
    positions = list(Cursor.objects.using(alias).values_list("position", flat=True))
    assert positions == [Event.objects.using(alias).last().pk] * after


def test_partitions_are_cut_where_they_stand(alias, published, run, declare):
    """One of two stands behind the other: each of the four begins where its events were read."""
    declare(2)
    published(*STREAMS)
    run("counted")
    declared = module._subscribers["counted"]
    handle = declared.handle

    def fail_in_the_second(events):
        if any(slice_of(event.stream) % 2 for event in events):
            raise ValueError("not now")
        handle(events)

    module._subscribers["counted"] = replace(declared, handle=fail_in_the_second)
    published(*STREAMS)
    run("counted")
    behind = Counter((stream, 2) for stream in STREAMS if slice_of(stream) % 2)
    both = Counter((stream, version) for stream in STREAMS for version in (1, 2))
    assert behind
    assert handled(alias) == both - behind
    declare(4)
    run("counted")
    assert handled(alias) == both


@pytest.mark.parametrize(("before", "chosen", "other"), [(8, 2, 8), (2, 4, 8), (4, 6, 12)])
def test_no_process_changes_the_number_that_a_person_has_chosen(
    alias, published, run, declare, before, chosen, other
):
    """Not even to a multiple, by which the number grows otherwise."""
    declare(before)
    published(*STREAMS)
    run("counted")
    declare(chosen)
    assert control.repartition("counted") == (before, chosen)
    published(*STREAMS)
    declare(other)
    runner = Runner([module.subscriber_named("counted")])
    assert runner.run(once=True) == 0
    assert f"A person has chosen {chosen}" in runner.trouble
    assert "repartition counted" in runner.trouble
    assert Subscription.objects.using(alias).get().partitions == chosen
    declare(chosen)
    assert run("counted") == len(STREAMS)
    declare(other)
    assert control.repartition("counted") == (chosen, other)
    published(*STREAMS)
    assert run("counted") == len(STREAMS)
    assert handled(alias) == Counter({(s, v): 1 for s in STREAMS for v in (1, 2, 3)})


def test_a_call_that_changes_nothing_chooses_nothing(alias, published, run, declare):
    """As of a deployment that always makes it: the number grows by itself still."""
    declare(2)
    published(*STREAMS)
    run("counted")
    assert control.repartition("counted") == (2, 2)
    declare(4)
    published(*STREAMS)
    assert run("counted") == len(STREAMS)
    assert Subscription.objects.using(alias).get().partitions == 4


def test_parked_streams_go_to_their_new_partitions(alias, published, run, declare):
    declare(1)
    published(*STREAMS)
    run("counted")
    parked = ParkedStream.objects.using(alias)
    for stream in STREAMS:
        parked.create(
            subscription="counted", partition=0, log="outbox_event", stream=stream, version=2,
            position=1, error="",
        )  # fmt: skip
    of_another = parked.create(
        subscription="other", partition=7, log="outbox_event", stream="s1", version=1, position=1,
        error="",
    )  # fmt: skip
    subscriber("other", partitions=2)(lambda events: None)
    run("other")
    cursors = Cursor.objects.using(alias).filter(subscription="other").order_by("id")
    before = list(cursors.values())
    declare(3)
    control.repartition("counted")
    assert list(cursors.values()) == before
    of_another.refresh_from_db()
    assert of_another.partition == 7
    of_another.delete()
    published(*STREAMS)
    assert run("counted") == 0
    parked.update(released=True)
    assert run("counted") == len(STREAMS)
    assert not parked.exists()


def test_nothing_moves_before_all_partitions_of_all_logs_have_caught_up(
    alias, published, run, declare
):
    both = {"logs": [Event, Ledger]}
    declare(4, **both)
    published(*STREAMS)
    published(*STREAMS, log=Ledger)
    run("counted")
    published("s1", log=Ledger)
    cursors = Cursor.objects.using(alias).order_by("pk")
    before = list(cursors.values())
    declare(3, **both)
    wanted = r"pass over 1 event .* Let all 4 partitions catch up"
    with pytest.raises(ReplayRefused, match=wanted):
        control.repartition("counted")
    assert list(cursors.values()) == before
    assert Subscription.objects.using(alias).get().partitions == 4
    declare(4, **both)
    run("counted")
    declare(3, **both)
    assert control.repartition("counted") == (4, 3)
    published(*STREAMS)
    published(*STREAMS, log=Ledger)
    run("counted")
    versions = handled(alias)
    assert versions.pop(("s1", 3)) == 1
    assert versions == Counter({(s, v): 2 for s in STREAMS for v in (1, 2)})


@on("postgres", "mariadb")
def test_events_that_are_committed_while_the_command_looks(
    alias, published, run, declare, monkeypatch
):
    """They come after the end of the log that was read, or they refuse the change."""
    declare(4)
    published(*STREAMS)
    run("counted")
    events = control._events

    def publish():
        with Session(alias) as session:
            session.begin()
            for stream in STREAMS:
                session.publish(stream)
            session.commit()

    with Session(alias) as late:
        late.begin()
        late.publish("late")

        def publish_first(*args):
            monkeypatch.setattr(control, "_events", events)
            publish()
            late.commit()
            return events(*args)

        monkeypatch.setattr(control, "_events", publish_first)
        declare(3)
        assert control.repartition("counted") == (4, 3)
    run("counted")
    versions = handled(alias)
    assert versions.pop(("late", 1)) == 1
    assert versions == Counter({(s, v): 1 for s in STREAMS for v in (1, 2)})


@pytest.mark.parametrize("damage", ["is damaged", "is gone"])
def test_a_cursor_that_cannot_tell_its_place_is_not_passed_over(
    alias, published, run, declare, damage
):
    declare(2)
    published(*STREAMS)
    run("counted")
    cursor = Cursor.objects.using(alias).filter(partition=1)
    if damage == "is gone":
        cursor.delete()
    else:
        cursor.update(state="{}")
    declare(3)
    with pytest.raises(ReplayRefused, match="refuses the cursor of partition 1 of"):
        control.repartition("counted")
    assert Subscription.objects.using(alias).get().partitions == 2
    control.replay("counted", "beginning")
    Incident.objects.using(alias).all().delete()
    declare(2)
    run("counted")
    declare(3)
    assert control.repartition("counted") == (2, 3)
    published(*STREAMS)
    run("counted")
    assert handled(alias) == Counter({(s, v): 1 for s in STREAMS for v in (1, 2)})


def test_events_that_the_partitions_do_not_read(alias, published, run, declare):
    """They do not hold up the change, unless the subscription looks for gaps of versions."""
    other = {"types": ["other"]}
    declare(2, **other)
    run("counted")
    published(*STREAMS)
    declare(3, **other)
    assert control.repartition("counted") == (2, 3)
    declare(2, **other, on_gap="park")
    published("s1")
    with pytest.raises(ReplayRefused, match="pass over 1 event "):
        control.repartition("counted")


def test_the_position_stays_though_all_events_were_pruned(alias, published, run, declare):
    declare(2)
    published(*STREAMS)
    run("counted")
    last = Event.objects.using(alias).last().pk
    Event.objects.using(alias).all().delete()
    declare(3)
    assert control.repartition("counted") == (2, 3)
    assert {each.position for each in Cursor.objects.using(alias)} == {last}
    published(*STREAMS)
    assert run("counted") == len(STREAMS)


@pytest.mark.parametrize("point", ["page_read", "handled"])
def test_a_page_of_the_old_partitions_in_flight(
    alias, published, run, declare, at_failpoint, point
):
    """The old code has read it; the number is changed before its transaction, or during it."""
    declare(4)
    published(*STREAMS)
    run("counted")
    old = Runner([module.subscriber_named("counted")], lease_seconds=60)
    old.run_once()
    published(*STREAMS)
    refused = []

    def change():
        declare(3)
        try:
            control.repartition("counted")
        except OutboxError as error:
            refused.append(str(error))

    def beside():
        thread = threading.Thread(target=lambda: (change(), connections[alias].close()))
        thread.start()
        if point == "page_read":
            thread.join()
        threads.append(thread)

    threads: list[threading.Thread] = []
    at_failpoint(point, beside)
    while old.run_once():
        pass
    for thread in threads:
        thread.join()
    old._leave()
    assert all("catch up" in why for why in refused)
    declare(4)
    if refused:
        run("counted")
    declare(3)
    control.repartition("counted")
    published(*STREAMS)
    run("counted")
    assert handled(alias) == Counter({(s, v): 1 for s in STREAMS for v in (1, 2, 3)})


def test_a_process_that_cannot_run_it_looks_again_after_a_heartbeats_time(
    alias, published, run, declare
):
    declare(3)
    published("a")
    run("counted")
    declare(2)
    runner = Runner([module.subscriber_named("counted")])
    runner.run_once()
    assert "repartition counted" in runner.trouble
    with no_statement(alias):
        runner.run_once()


def test_numbers_that_change_under_load(alias, published, declare, running):
    """Runners of the old and of the new number side by side, while events are published."""
    choice, versions, ended = random.Random(alias), 0, threading.Event()
    quiet = threading.Lock()

    def publish():
        nonlocal versions
        try:
            while not ended.wait(choice.uniform(0.02, 0.2)):
                with quiet:
                    published(*STREAMS)
                    versions += 1
        finally:
            connections[alias].close()

    def try_change():
        try:
            return control.repartition("counted")
        except OutboxError:
            return None

    def change():
        for _ in range(20):
            if changed := try_change():
                return changed
        with quiet:  # a slow machine never has all partitions at the end of a log that grows
            return eventually(try_change, "a change of the number")

    declare(3)
    writer = threading.Thread(target=publish)
    writer.start()
    try:
        with ExitStack() as runners:
            runners.enter_context(running("counted"))
            eventually(lambda: Cursor.objects.using(alias).count() == 3)
            for number in (2, 5, 3):  # none is a multiple of another
                declare(number)
                assert change()[1] == number
                runners.enter_context(running("counted"))
            ended.set()
            writer.join()
            total = versions * len(STREAMS)
            eventually(lambda: Incident.objects.using(alias).count() >= total)
    finally:
        ended.set()
        writer.join()
    assert handled(alias) == Counter({(s, v + 1): 1 for s in STREAMS for v in range(versions)})


@pytest.mark.parametrize("back", [1, 2], ids=["read_again_before", "read_again_at_the_old_number"])
def test_a_log_that_was_left_out_when_the_number_was_changed(alias, published, run, declare, back):
    """Its cursors have the old number, each its own place; those of the other log are one."""
    both = {"logs": [Event, Ledger]}
    declare(2, **both)
    published(*STREAMS, log=Ledger)
    run("counted")
    behind = Cursor.objects.using(alias).get(log=Ledger._meta.db_table, partition=0)
    published(*STREAMS, log=Ledger)
    run("counted")
    Incident.objects.using(alias).filter(
        detail__in=[each for each in STREAMS if slice_of(each) % 2 == 0], first_id=2
    ).delete()
    Cursor.objects.using(alias).filter(pk=behind.pk).update(state=behind.state)
    declare(1)
    assert control.repartition("counted") == (2, 1)
    declare(back, **both)
    if back == 1:
        with pytest.raises(ReplayRefused, match=r"6 events .* Let all 2 partitions catch up"):
            control.repartition("counted")
        declare(2, **both)
    assert control.repartition("counted") == (1, 2)
    if back == 1:
        run("counted")
        declare(1, **both)
        assert control.repartition("counted") == (2, 1)
    published(*STREAMS, log=Ledger)
    run("counted")
    assert handled(alias) == Counter({(s, v): 1 for s in STREAMS for v in (1, 2, 3)})


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_replay_of_a_log_that_was_left_out(alias, published, run, declare, before, after):
    """It brings the number; what it passes over is known by the cursors that there were."""
    both = {"logs": [Event, Ledger]}
    declare(before, **both)
    published(*STREAMS, log=Ledger)
    run("counted")
    in_ledger = Cursor.objects.using(alias).filter(log=Ledger._meta.db_table).order_by("partition")
    behind = in_ledger.last()
    published(*STREAMS, log=Ledger)
    run("counted")
    in_ledger.filter(pk=behind.pk).update(state=behind.state)
    missed = [each for each in STREAMS if slice_of(each) % before == behind.partition]
    declare(after)
    assert control.repartition("counted") == (before, after)
    declare(after, **both)
    *_, move = control.plan("counted", "now")
    assert [(log, stream) for _, log, stream in move.passed] == [("made", s) for s in missed]
    control.replay("counted", "now", skip_ahead=True, by="Ada", reason="old")
    assert [(each.partition, each.partitions) for each in in_ledger] == [
        (part, after) for part in range(after)
    ]
    assert sum(each.handled for each in in_ledger) == 2 * len(STREAMS)
    published(*STREAMS, log=Ledger)
    run("counted")
    assert {each for each, count in handled(alias).items() if each[1] == 3 and count == 1} == {
        (stream, 3) for stream in STREAMS
    }


class Elsewhere:
    """A router that has no word on the outbox, as OUTBOX["DATABASE"] says where it is."""

    def db_for_write(self, model, **hints):
        return "elsewhere"


def test_the_setting_and_no_router_says_where_the_cursors_are(
    alias, published, run, declare, settings
):
    settings.DATABASE_ROUTERS = [Elsewhere()]
    declare(2)
    published(*STREAMS, using=alias)
    run("counted")
    declare(4)
    published(*STREAMS, using=alias)
    assert run("counted") == len(STREAMS)
    declare(3)
    assert control.repartition("counted") == (4, 3)
    assert set(handled(alias).values()) == {1}
