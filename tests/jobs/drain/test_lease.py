"""Leases, step by step: the owners of shards when drainers start, stop, die, and interleave."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from django.db import OperationalError, connections, transaction

from outbox_app.database.clock import DatabaseNow
from outbox_app.exceptions import LeaseLost
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import Lease, Process
from outbox_app.process import lease
from outbox_app.process.lease import LeaseHolder
from tests import tasks

pytestmark = pytest.mark.django_db(transaction=True)

PARTS = 8


@pytest.fixture
def clock():
    """Only the test moves ``clock.now``; the database's own clock goes on."""

    class Clock:
        now = 1000.0

        def __call__(self):
            return self.now

    return Clock()


@pytest.fixture
def member(alias, clock):
    def make(**options):
        return LeaseHolder(using=alias, lease_seconds=10, parts=PARTS, clock=clock, **options)

    return make


def die(member):
    """As if it had been silent for longer than its lease."""
    silent = Process.objects.using(member.using).filter(id=member.id)
    silent.update(heartbeat_at=DatabaseNow() - timedelta(seconds=11))


def owners(alias):
    return dict(Lease.objects.using(alias).order_by("part").values_list("part", "owner"))


def test_all_parts_of_the_only_one(alias, member):
    one = member()
    one.join()
    assert one.owned == set(range(PARTS))
    assert set(owners(alias).values()) == {one.id}
    one.leave()
    assert one.owned == set()
    assert set(owners(alias).values()) == {None}


def test_only_its_own_parts_are_handed_back(alias, member):
    one, two, of_other_work = member(), member(), member(resource="subscription:x")
    for each in (of_other_work, one, two):
        each.join()
    one.rebalance()
    two.rebalance()
    assert one.owned | two.owned == set(range(PARTS))
    one.leave()
    jobs = Lease.objects.using(alias).filter(resource="jobs")
    assert set(jobs.filter(owner=two.id).values_list("part", flat=True)) == two.owned
    assert jobs.filter(owner=None).count() == PARTS - len(two.owned)
    assert Lease.objects.using(alias).filter(owner=of_other_work.id).count() == PARTS


def test_a_takeover_is_recorded_or_does_not_happen(alias, member):
    taken = []

    def fail_once(owner, parts):
        taken.append((owner, parts))
        if len(taken) == 1:
            raise OperationalError("the incident could not be written")

    dead, heir = member(), member(on_takeover=fail_once)
    dead.join()
    die(dead)
    with pytest.raises(OperationalError):
        heir.join()
    assert set(owners(alias).values()) == {dead.id}
    assert heir.owned == set()
    heir.rebalance()
    assert set(owners(alias).values()) == {heir.id}
    assert taken == [(dead.id, list(range(PARTS)))] * 2


def test_what_was_handed_back_is_not_taken_over(alias, member):
    """It leaves between the other's two looks, at the leases and at the drainers."""
    taken = []
    leaving, other = member(), member(on_takeover=lambda *args: taken.append(args))
    leaving.join()
    look = other._remove_silent

    def leave_meanwhile():
        if leaving.joined:
            leaving.leave()
        return look()

    other._remove_silent = leave_meanwhile
    other.join()
    other.rebalance()
    assert other.owned == set(range(PARTS))
    assert taken == []


def test_the_dead_one_has_a_name_for_all_its_heirs(alias, member):
    """Also for one that finds its parts, and no longer its row: another one has removed it."""
    told = []
    dead, first = (
        member(),
        member(on_takeover=lambda owner, parts: told.append(first.name_of(owner))),
    )
    second = member(on_takeover=lambda owner, parts: told.append(second.name_of(owner)))
    for each in (dead, first, second):
        each.join()
    row = Process.objects.using(alias).get(id=dead.id)
    dead.rebalance()
    first.rebalance()
    second.rebalance()
    die(dead)
    first.rebalance()
    second.rebalance()
    assert told == [f"{row.host}:{row.pid} ({dead.id})"] * 2
    assert first.name_of(row.id).startswith(row.host)
    first.rebalance()
    first.rebalance()
    assert first.name_of(row.id) == str(row.id)


def test_who_joins_meanwhile_is_not_robbed(alias, member):
    """It joins and claims between the other's two looks."""
    joining, other = member(), member()
    other.join()
    other.leave()
    look = other._remove_silent

    def join_meanwhile():
        if not joining.joined:
            joining.join()
        return look()

    other._remove_silent = join_meanwhile
    other.join()
    assert not other.owned & joining.owned
    assert {part for part, id in owners(alias).items() if id == other.id} == other.owned


def test_the_silent_one_learns_it_from_its_own_heartbeat(alias, member):
    silent, heir = member(), member()
    silent.join()
    die(silent)
    heir.join()
    assert heir.owned == set(range(PARTS))
    with pytest.raises(LeaseLost, match="other processes removed it") as refused:
        silent.beat()
    assert "rainer" not in str(refused.value)  # subscriptions and the retention hold leases, too
    assert silent.owned == set()
    assert not silent.joined


def test_one_that_comes_back_in_time_is_not_buried(alias, member):
    """Its heartbeat arrives after it was found silent, before it is removed."""
    slow, other = member(), member()
    slow.join()
    die(slow)
    seen = Process.objects.using(alias).get(id=slow.id)
    slow.beat()
    gone = Process.objects.using(alias).filter(
        id=slow.id, heartbeat_at__lt=seen.heartbeat_at + timedelta(milliseconds=1)
    )
    assert not gone.exists()
    other.join()
    assert slow.owned == set(range(PARTS))


def test_a_heartbeat_of_the_hour_that_comes_twice(alias, member, settings):
    """Without USE_TZ the time that PostgreSQL returns for it is one of the second hour as well."""
    settings.USE_TZ, settings.TIME_ZONE = False, "Europe/Berlin"
    connections[alias].close()
    dead, heir = member(), member()
    dead.join()
    first = "2025-10-26 00:30:00.500000" + ("+00" if alias == "postgres" else "")
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE outbox_process SET heartbeat_at = %s", [first])
    heir.join()
    assert heir.owned == set(range(PARTS))


@pytest.mark.parametrize("beats", [True, False])
def test_a_step_of_the_database_s_clock_makes_no_other_silent(
    alias, member, clock, monkeypatch, beats
):
    """It goes an hour forward: after a fail-over, or in spring, without USE_TZ."""
    one, other, dead = member(), member(), member()
    for each in (dead, one, other):
        each.join()
    clock.now += 2
    other.rebalance()
    clock.now += 1
    if beats:
        one.beat()
    monkeypatch.setattr(lease, "DatabaseNow", lambda: DatabaseNow() + timedelta(hours=1))
    clock.now += 1
    other.rebalance()
    for _ in range(4):
        one.beat()
        other.beat()
        clock.now += 2
        other.rebalance()
    one.beat()
    with pytest.raises(LeaseLost):
        dead.beat()


def test_a_heartbeat_at_a_whole_second_is_buried_as_any_other(alias, member):
    """SQLite compares texts, in which ``12:00:00`` and ``12:00:00.000`` differ."""
    dead, heir = member(), member()
    dead.join()
    whole = datetime(2020, 1, 1, tzinfo=timezone.utc)  # noqa: UP017
    if alias == "default":
        with connections[alias].cursor() as cursor:
            cursor.execute("UPDATE outbox_process SET heartbeat_at = '2020-01-01 00:00:00.000'")
    else:
        Process.objects.using(alias).update(heartbeat_at=whole)
    heir.join()
    assert heir.owned == set(range(PARTS))
    assert Process.objects.using(alias).get().id == heir.id


def test_it_trusts_itself_for_less_than_its_lease(member, clock):
    one = member()
    one.join()
    clock.now += 8.9
    assert one.remaining >= 0
    assert one.remaining < 1
    clock.now += 0.2
    assert one.remaining < 0
    one.beat()
    assert one.remaining >= 0


def test_leases_that_somebody_deleted_come_back(alias, member):
    one = member()
    one.join()
    Lease.objects.using(alias).all().delete()
    one.rebalance()
    one.rebalance()
    assert one.owned == set(range(PARTS))


def test_its_idea_of_the_database_s_time(alias, member, clock):
    one = member()
    assert one.now() is None
    one.join()
    asked = Process.objects.using(alias).annotate(now=DatabaseNow()).get().now
    assert abs((one.now() - asked).total_seconds()) < 5
    clock.now += 3600
    assert 3595 < (one.now() - asked).total_seconds() < 3605


def test_a_heartbeat_that_took_too_long_is_not_trusted(alias, make_app, clock):
    """It counts from before it was sent: by the time of its answer others may own the shards."""
    note = make_app().task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        note.delay("", 1)
    drain = Drain(using=alias, lease_seconds=10)
    drain.holder.clock = clock
    drain.holder.join()
    clock.now += 3

    def slow(execute, sql, *args):
        if sql.startswith("UPDATE") and "heartbeat_at" in sql:
            clock.now += 8
        return execute(sql, *args)

    with connections[alias].execute_wrapper(slow), pytest.raises(LeaseLost, match="about to end"):
        drain.run_once()
    assert drain.tally.published == 0
    assert drain.holder.joined
    drain.run_once()
    assert drain.tally.published == 1
    drain.holder.leave()


def before_a_statement(alias, words, step):
    """Do something once, before a statement that begins with these words."""
    done = []

    def wrapper(execute, sql, *args):
        if sql.startswith(words) and not done:
            done.append(sql)
            step()
        return execute(sql, *args)

    return connections[alias].execute_wrapper(wrapper)


def quoted(alias, words, table):
    return f"{words} {connections[alias].ops.quote_name(table)}"


def test_one_that_comes_back_while_it_is_removed_is_not_buried(alias, member):
    """Its heartbeat arrives after the look that found it silent, before the DELETE."""
    taken = []
    slow, other = member(), member(on_takeover=lambda *args: taken.append(args))
    slow.join()
    die(slow)
    delete = quoted(alias, "DELETE FROM", "outbox_process")
    with before_a_statement(alias, delete, slow.beat):
        other.join()
    slow.beat()
    assert (taken, other.owned) == ([], set())
    slow.rebalance()
    assert len(slow.owned) == PARTS / 2


def test_an_answer_that_took_long_makes_no_other_silent(alias, member, clock):
    """While the database hung no heartbeat could be written, either."""
    one, other = member(), member()
    one.join()
    other.join()
    clock.now += 2

    def hang():
        clock.now += 9

    look = f"SELECT {connections[alias].ops.quote_name('outbox_process')}"
    with before_a_statement(alias, look, hang):
        other.rebalance()
    assert clock.now == 1011
    one.beat()


def test_none_removes_itself(alias, member):
    one = member()
    one.join()
    die(one)
    one.rebalance()
    assert one.owned == set(range(PARTS))
    one.beat()


def test_one_whose_row_is_gone_learns_it_from_a_look_as_well(alias, member):
    one = member()
    one.join()
    Process.objects.using(alias).all().delete()
    with pytest.raises(LeaseLost):
        one.rebalance()
    assert (one.owned, one.joined) == (set(), False)


def test_one_that_joins_again_takes_over_from_what_it_was(alias, member):
    """It may have sent rows of its old shards, which none has taken meanwhile."""
    taken = []
    one = member(on_takeover=lambda *args: taken.append(args))
    one.join()
    was = one.id
    Process.objects.using(alias).all().delete()
    with pytest.raises(LeaseLost):
        one.beat()
    one.join()
    assert taken == [(was, list(range(PARTS)))]


def test_an_entry_that_took_long_is_not_trusted(alias, member, clock):
    def slow():
        clock.now += 8

    one = member()
    with before_a_statement(alias, quoted(alias, "INSERT INTO", "outbox_process"), slow):
        one.join()
    assert one.remaining < 2


def test_what_is_given_up_is_not_used_even_if_that_fails(alias, member):
    one, other = member(), member()
    one.join()
    other.join()

    def fail():
        raise OperationalError("failed on purpose")

    update = quoted(alias, "UPDATE", "outbox_lease")
    with before_a_statement(alias, update, fail), pytest.raises(OperationalError):
        one.rebalance()
    assert len(one.owned) == PARTS / 2


def test_one_that_leaves_is_taken_over_at_no_moment(alias, member):
    taken = []
    leaving, other = member(), member(on_takeover=lambda *args: taken.append(args))
    leaving.join()
    other.join()

    def look(execute, sql, *args):
        if sql.startswith(("UPDATE", "DELETE")) and not looking:
            looking.append(sql)
            other.rebalance()
            looking.clear()
        return execute(sql, *args)

    looking = []
    with connections[alias].execute_wrapper(look):
        leaving.leave()
    other.rebalance()
    assert (taken, other.owned) == ([], set(range(PARTS)))
