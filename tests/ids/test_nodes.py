"""Which process may make ids with a node, and when: faults of the table and of processes."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connections, transaction
from django.db.models import F

from outbox_app.aliases import chosen
from outbox_app.database.clock import Milliseconds
from outbox_app.database.transactions import own_connection
from outbox_app.ids.exceptions import NoNode
from outbox_app.ids.generator import Snowflakes
from outbox_app.ids.models import Node
from tests.faults.tools import on
from tests.patience import eventually

pytestmark = pytest.mark.django_db(transaction=True)


def now(alias):
    rows = Node.objects.using(alias).annotate(now=Milliseconds())
    return rows.values_list("now", flat=True)[0]


def row_of(ids, alias):
    return Node.objects.using(alias).get(owner=ids.owner)


def only_one_is_free(alias, ids):
    """All nodes are taken, but that of one process, which others may have now."""
    others = Node.objects.using(alias).exclude(owner=ids.owner)
    others.update(owner=Snowflakes().owner, reserved_ms=Milliseconds() + 1_000_000)
    Node.objects.using(alias).filter(owner=ids.owner).update(owner=None)


def test_a_reservation_is_ten_seconds_of_the_databases_clock(alias, process):
    ids = process()
    before = now(alias)
    id = ids.make()
    row = row_of(ids, alias)
    assert before < row.reserved_ms - 9_999 <= (id >> 20) <= now(alias) + 1
    assert row.reserved_ms <= now(alias) + 10_000
    assert (id >> 17 & 7, id >> 12 & 31) == (row.datacentre, row.node)


def test_the_rollback_of_a_caller_gives_no_time_out_again(alias, process):
    ids = process()
    with transaction.atomic(using=alias):
        made = [ids.make(), ids.make()]
        transaction.set_rollback(True, using=alias)
    if alias != "default":
        assert row_of(ids, alias).reserved_ms > made[0] >> 20
    # Whichever process has the node next.
    others = Node.objects.using(alias).exclude(
        datacentre=made[0] >> 17 & 7, node=made[0] >> 12 & 31
    )
    others.update(owner=Snowflakes().owner, reserved_ms=Milliseconds() + 1_000_000)
    assert ids.make() > made[1] > made[0]
    Node.objects.using(alias).filter(owner=ids.owner).update(owner=None)
    assert process().make() > made[1]


@on("default")
def test_on_sqlite_time_of_a_transaction_is_used_by_others_once_it_is_committed(alias, process):
    ids = process()
    with transaction.atomic(using=alias):
        transaction.on_commit(list, using=alias)  # the project's own
        first = ids.make()
        assert ids._reserved is None
        with transaction.atomic(using=alias):
            assert ids.make() > first
            transaction.set_rollback(True, using=alias)
        assert ids.make() > first
        assert len(connections[alias].run_on_commit) == 2  # time is reserved once
    assert ids._reserved is not None
    assert row_of(ids, alias).reserved_ms == ids._reserved.high
    ids._reserved = None
    with transaction.atomic(using=alias):
        with transaction.atomic(using=alias):
            dropped = ids.make()
            transaction.set_rollback(True, using=alias)
        assert connections[alias].run_on_commit == []
        assert ids.make() > dropped
    assert ids.make() > dropped


@on("default")
def test_time_that_a_savepoint_of_the_projects_own_takes_back_is_not_used(alias, process):
    ids = process()
    with transaction.atomic(using=alias):
        savepoint = transaction.get_connection(alias).savepoint()
        ids.make()
        transaction.savepoint_rollback(savepoint, using=alias)
    assert ids._reserved is None


@pytest.mark.django_db(transaction=False)
def test_the_transaction_of_a_test_is_no_other(alias, clock):
    ids = Snowflakes(clock=clock)
    assert ids.make() < ids.make()
    if alias == "default":  # one writer: the test
        assert row_of(ids, alias)
        return
    with own_connection(alias, seconds=1):
        assert row_of(ids, alias)
        Node.objects.using(alias).all().delete()


def test_time_is_renewed_early_and_without_a_gap(alias, process, clock):
    ids = process()
    ids.make()
    row = row_of(ids, alias)
    clock.seconds += 6.9
    ids.make()
    assert ids._reserved.high == row.reserved_ms
    clock.seconds += 0.2
    assert ids.make() >> 20 <= row.reserved_ms
    if alias != "default":  # SQLite is asked when time is used up
        eventually(lambda: ids._reserved.high == row.reserved_ms + 10_000)
    last = ids.make()
    assert last >> 20 <= row.reserved_ms
    clock.seconds += 3600  # suspended, or idle
    assert ids.make() > last
    row.refresh_from_db()
    assert (row.owner, row.reserved_ms) == (ids.owner, ids._reserved.high)


def test_while_the_database_is_away_ids_go_on_until_time_is_used_up(alias, process, clock):
    ids = process()
    made = [ids.make()]

    def away(using):
        raise OperationalError("it is away")

    ids._request, request = away, ids._request
    for _ in range(9):
        clock.seconds += 1
        made.append(ids.make())
    clock.seconds += 1.1
    with pytest.raises(NoNode, match="it is away"):
        ids.make()
    ids._request = request
    made.append(ids.make())
    assert made == sorted(set(made))


@on("default")
def test_no_millisecond_above_the_reservation_is_used(alias, process, clock):
    """It is the first one of the node's next owner."""
    ids = process()
    ids.make()

    def away(using):
        raise OperationalError("it is away")

    ids._request, reserved = away, ids._reserved
    clock.seconds = reserved.zero + (reserved.high + 0.5) / 1000
    assert ids.make() >> 20 == reserved.high
    clock.seconds += 0.001
    with pytest.raises(NoNode):
        ids.make()


@on("postgres")
def test_a_database_that_does_not_answer_is_not_waited_for_again_and_again(
    alias, process, monkeypatch
):
    monkeypatch.setattr("outbox_app.ids.generator.WAIT", 0.05)
    ids = process()
    asked = []
    ids._answer = lambda using, future: asked.append(future)
    ids._clock, seconds = lambda: seconds.pop(0) if seconds[1:] else seconds[0], [0, 0.05]
    for _ in range(2):
        with pytest.raises(NoNode, match="no answer in"):
            ids.make()
    assert len(asked) == 1
    seconds[:] = [10.1, 20]
    with pytest.raises(NoNode):
        ids.make()
    assert len(asked) == 2


def test_a_node_is_given_back_with_what_was_not_used(alias, process, clock):
    ids, other = process(), process()
    last = ids.make_many(10_000)[-1]
    row = row_of(ids, alias)
    other.make()
    theirs = Node.objects.using(alias).filter(owner=other.owner)
    theirs.update(reserved_ms=row.reserved_ms)  # they have asked in one millisecond
    ids.give_back()
    assert theirs.get().reserved_ms == row.reserved_ms
    row.refresh_from_db()
    assert (row.owner, row.reserved_ms) == (None, last >> 20)
    assert ids.make() > last
    ids.give_back()
    Node.objects.using(alias).exclude(pk=row.pk).update(
        owner=ids.owner, reserved_ms=Milliseconds() + 1_000_000
    )
    assert process().make() > last
    late = process()
    Node.objects.using(alias).update(owner=None, reserved_ms=0)
    late.make()
    clock.seconds += 11
    late.give_back()  # it has ended: others wait their minute
    assert row_of(late, alias)


def test_the_33rd_of_a_datacentre_is_told_so(alias, process, settings):
    settings.OUTBOX = {**settings.OUTBOX, "DATACENTRE": 3}
    processes = [process() for _ in range(32)]
    pairs = {(id >> 17 & 7, id >> 12 & 31) for id in (ids.make() for ids in processes)}
    assert pairs == {(3, node) for node in range(32)}
    with pytest.raises(NoNode, match="All 32 nodes of datacentre 3 are taken"):
        process().make()
    # A minute after its end, and not before.
    row = Node.objects.using(alias).filter(owner=processes[7].owner)
    row.update(reserved_ms=Milliseconds() - 50_000)
    with pytest.raises(NoNode):
        process().make()
    row.update(reserved_ms=Milliseconds() - 60_001)
    new = process()
    assert new.make() >> 12 & 31 == row_of(new, alias).node
    processes[8].give_back()
    assert process().make()
    settings.OUTBOX = {**settings.OUTBOX, "DATACENTRE": None}
    assert process().make() >> 17 & 7 != 3


@on("default")
def test_of_two_who_see_a_node_as_free_one_has_it(alias, process, monkeypatch):
    first, second = process(), process()
    made = []

    def choice(draw, free):
        if not made:
            made.append(None)
            made.append(second.make())  # between the look of the first one and its UPDATE
        return free[0]

    monkeypatch.setattr("outbox_app.ids.generator.SystemRandom.choice", choice)
    assert first.make() >> 12 & 255 != made[1] >> 12 & 255


@on("default")
def test_time_that_another_process_had_in_between_is_not_used(alias, process, clock):
    ids = process()
    ids.make()
    only_one_is_free(alias, ids)
    free = Node.objects.using(alias).filter(owner=None)
    free.update(reserved_ms=F("reserved_ms") + 5_000)
    theirs = free.get().reserved_ms
    clock.seconds += 11
    assert ids.make() >> 20 > theirs


def test_all_nodes_are_taken(alias, process):
    Node.objects.using(alias).update(owner=process().owner, reserved_ms=Milliseconds())
    with pytest.raises(NoNode, match="All 256 nodes are taken"):
        process().make()


def test_who_was_stopped_for_too_long_takes_another_node(alias, process, clock):
    """SIGSTOP for two minutes: the other has its node, and begins above all that it may make."""
    stopped = process()
    stopped.make()
    row = row_of(stopped, alias)
    only_one_is_free(alias, stopped)
    other = process()
    theirs = other.make()
    assert theirs >> 12 & 255 == row.datacentre << 5 | row.node
    assert stopped.make() < theirs  # its own time still
    clock.seconds += 11
    with pytest.raises(NoNode):
        stopped.make()
    Node.objects.using(alias).exclude(pk=row.pk).update(owner=None, reserved_ms=0)
    assert stopped.make() >> 12 & 255 != theirs >> 12 & 255


def test_rows_that_somebody_deleted_come_back_above_all_that_is_in_use(
    alias, process, clock, settings
):
    settings.OUTBOX = {**settings.OUTBOX, "DATACENTRE": 0}
    # As where time is renewed early: thirteen seconds may be in use.
    Node.objects.using(alias).update(reserved_ms=Milliseconds() + 3_000)
    before = [process() for _ in range(4)]
    nodes = {ids.make() >> 12 & 31: ids for ids in before}
    Node.objects.using(alias).all().delete()
    theirs = {id >> 12 & 31: id for id in (process().make() for _ in range(32))}
    assert len(theirs) == 32
    for node, ids in nodes.items():
        clock.seconds = ids._reserved.zero + ids._reserved.high / 1000
        assert ids.make() < theirs[node]


def test_rows_edited_by_hand(alias, process, settings):
    settings.OUTBOX = {**settings.OUTBOX, "DATACENTRE": 0}
    table = Node.objects.using(alias)
    table.create(datacentre=8, node=0)
    table.create(datacentre=0, node=32)
    ids = process()
    first = ids.make()
    table.filter(owner=ids.owner).update(reserved_ms=F("reserved_ms") - 5_000)  # restored
    ids._reserved = None
    assert ids.make() > first
    table.exclude(owner=ids.owner).update(reserved_ms=2**62)
    with pytest.raises(NoNode):
        process().make()
    table.exclude(owner=ids.owner).update(reserved_ms=-(2**62))
    made = [process().make() for _ in range(31)]
    assert all(0 < id < 2**63 and abs((id >> 20) - now(alias)) < 60_000 for id in made)
    assert len({id >> 12 & 255 for id in made}) == 31


def test_a_clock_of_the_database_that_is_set_back_makes_no_id_again(alias, process, clock):
    ids = process()
    Node.objects.using(alias).update(reserved_ms=Milliseconds() + 7_200_000)
    made = [ids.make()]
    for _ in range(3):
        clock.seconds += 20
        made.append(ids.make())
    assert made == sorted(set(made))
    assert made[0] >> 20 > now(alias) + 7_000_000
    ids.give_back()
    assert process().make() not in made


def test_an_id_costs_no_statement_while_there_is_time(alias, process, django_assert_num_queries):
    ids = process()
    ids.make()
    with django_assert_num_queries(0, using=alias):
        ids.make_many(100_000)


def test_the_admins_page_of_another_database_reserves_none_there(alias, process):
    """What a receiver of it makes would be equal to ids of that database's own processes."""
    with chosen("another"):
        assert process().make()


@on("postgres", "mariadb")
def test_no_thread_can_be_started(alias, process, clock, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    ids = process()
    with monkeypatch.context() as patch:
        patch.setattr("outbox_app.ids.generator.Thread.start", start)
        with pytest.raises(NoNode, match="can't start new thread"):
            ids.make()
    first = ids.make()
    with monkeypatch.context() as patch:
        patch.setattr("outbox_app.ids.generator.Thread.start", start)
        clock.seconds += 8
        assert ids.make() > first  # there is time for three seconds more
