"""Offsets: a reader resumes exactly at its offset, and only on the same log and database."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from uuid import uuid4

import pytest

from outbox_app.events.exceptions import DamagedCursor, ForeignCursor, UnknownLog
from outbox_app.events.models import Event
from outbox_app.pipeline.archive_reader import planned
from outbox_app.pipeline.database import connect
from outbox_app.pipeline.offset import Offset, Offsets
from outbox_app.pipeline.options import Options
from tests.events.log.conformance import commit, concurrent
from tests.events.log.own_log.models import Ledger
from tests.events.log.sessions import Session, execute, truncate
from tests.faults.tools import on

pytestmark = pytest.mark.django_db(transaction=True)

GOOD = Offset("outbox_event", "5", 7, "00000000-0000-4000-8000-000000000001", "{}")


@pytest.fixture
def offsets(alias, source_options):
    truncate(alias)
    with closing(connect(Options.of(source_options(alias)))) as database:
        yield Offsets(database)


def ids(offsets, start, end, count=2):
    source = offsets.scan.source
    return sorted(
        id
        for part in offsets.parts(start, end, count)
        for condition in part
        for (id,) in offsets.database.run(f"SELECT id FROM {source} WHERE {condition}", [])
    )


def test_batches(alias, offsets):
    start = offsets.beginning()
    assert offsets.end(start) == start
    commit(alias, *"abacb")
    bound = offsets.latest()
    commit(alias, "d")
    states, found = [start], []
    while (end := offsets.end(states[-1], 2, bound=bound)) != states[-1]:
        end = Offset.load(json.loads(json.dumps(end.dump())))
        found += ids(offsets, states[-1], end)
        states.append(end)
        offsets.verify(end)
    assert len(states) == 4
    assert found == ids(offsets, start, states[-1])
    assert len(found) == 5
    assert len(ids(offsets, states[-1], offsets.end(states[-1]))) == 1


@pytest.mark.parametrize("name", ["start", "end"])
def test_an_offset_that_a_read_is_given_is_looked_for(alias, offsets, source_options, name):
    commit(alias, "a", "b")
    offset = offsets.latest()
    Event.objects.using(alias).filter(pk=offset.position).update(message_id=uuid4())
    with pytest.raises(ForeignCursor):
        planned(Options.of(source_options(alias, **{name: offset.text})))


def test_an_offset_is_text_and_integers(alias, offsets):
    commit(alias, "a")
    offset = offsets.end(offsets.beginning())
    assert {type(value) for value in offset.dump().values()} == {int, str}
    assert Offset.load(json.dumps(offset.dump())) == offset


def test_another_log(alias, offsets, source_options):
    offset = offsets.end(offsets.beginning())
    with closing(connect(Options.of(source_options(alias, model=Ledger)))) as database:
        other = Offsets(database)
        for refused in (
            lambda: other.verify(offset),
            lambda: other.end(offset),
            lambda: other.end(other.beginning(), bound=offset),
            lambda: other.parts(other.beginning(), offset, 1),
        ):
            with pytest.raises(ForeignCursor, match="belongs to the log outbox_event, not to led"):
                refused()


def test_no_such_log(alias, source_options):
    options = replace(Options.of(source_options(alias)), log='no"such`')
    with (
        closing(connect(options)) as database,
        pytest.raises(UnknownLog, match=r"""There is no table 'no"such`' in"""),
    ):
        Offsets(database)


def test_another_database(alias, offsets):
    commit(alias, "a", "b")
    offset = offsets.end(offsets.beginning())
    with pytest.raises(ForeignCursor, match="made in database 1;"):
        offsets.verify(replace(offset, database="1"))
    # Where the vendor has no identifier the newest event tells.
    for row in Event.objects.using(alias):
        Event.objects.using(alias).filter(pk=row.pk).update(message_id=uuid4())
    with pytest.raises(ForeignCursor, match="is not there: this is another database"):
        offsets.verify(offset)


def test_a_database_that_was_restored(alias, offsets):
    commit(alias, "a", "b")
    offset = offsets.end(offsets.beginning())
    offsets.verify(offset)
    Event.objects.using(alias).latest("pk").delete()
    with pytest.raises(ForeignCursor, match="restored to an earlier time"):
        offsets.verify(offset)


def test_a_log_that_was_pruned(alias, offsets):
    commit(alias, "a", "b")
    offset = offsets.end(offsets.beginning())
    commit(alias, "c")
    Event.objects.using(alias).order_by("pk").first().delete()
    offsets.verify(offset)
    Event.objects.using(alias).exclude(stream="c").delete()
    offsets.verify(offset)
    assert len(ids(offsets, offset, offsets.end(offset))) == 1
    Event.objects.using(alias).all().delete()
    offsets.verify(offset)
    assert offsets.end(offset) == offset  # so no batch is made of nothing


@on("mariadb")
def test_counting_of_a_large_log_has_connections_of_its_own(alias, offsets, monkeypatch):
    monkeypatch.setattr("outbox_app.events.log.scans.mysql.COUNTED", 2)
    commit(alias, *"abcdef")
    database = offsets.database
    options = replace(database.options, partitions=1000)
    with closing(connect(options)) as many:
        assert many.log().readers == 8
    [one, two] = database.log().run_all(["SELECT CONNECTION_ID()"] * 2)
    assert len({one[0], two[0], database.run("SELECT CONNECTION_ID()")[0]}) == 3
    with pytest.raises(database.errors, match="no_such"):
        database.log().run_all(["SELECT 1", "SELECT 1 FROM no_such"])
    start = offsets.beginning()
    assert len(ids(offsets, start, offsets.end(start))) == 6


@concurrent
def test_a_log_that_was_pruned_while_an_event_came_late(alias, offsets):
    with Session(alias) as slow:
        slow.begin().publish("slow")
        commit(alias, "a")
        offset = offsets.end(offsets.beginning())
        Event.objects.using(alias).filter(stream="a").delete()
        slow.commit()
    offsets.verify(offset)
    assert len(ids(offsets, offset, offsets.end(offset))) == 1


def test_a_log_that_was_set_back(alias, offsets):
    commit(alias, "a", "b")
    offset = offsets.end(offsets.beginning())
    if alias == "postgres":
        values = json.loads(offset.state)
        far = f"{10**15}:{10**15}:"
        offset = replace(offset, state=json.dumps({**values, "lo": far}))
    else:
        Event.objects.using(alias).all().delete()
        if alias == "default":
            execute(alias, "DELETE FROM sqlite_sequence")
        truncate(alias)
    with pytest.raises(ForeignCursor, match=r"set back|restored"):
        offsets.verify(offset)


NONSENSE = [None, "", "{", "[]", "5", '"x"', [], [1], 5, {}, {"offset": 3}]
DAMAGE = [
    {"position": "7"},
    {"position": True},
    {"position": None},
    {"state": {}},
    {"log": 5},
    {"message_id": None},
    {"more": "x"},
]


@pytest.mark.parametrize("given", NONSENSE + [GOOD.dump() | each for each in DAMAGE], ids=repr)
def test_nonsense(given):
    assert Offset.load(GOOD.dump()) == GOOD
    with pytest.raises(DamagedCursor, match="no offset of a log"):
        Offset.load(given)


@pytest.mark.parametrize("given", [{"version": 2}, {"version": 2, "more": "x"}, {"version": "1"}])
def test_another_version(given):
    with pytest.raises(DamagedCursor, match=r"has version .*reads version 1"):
        Offset.load(GOOD.dump() | given)


@pytest.mark.parametrize("state", ["", "{}", '{"window":"none"}', '{"window":"sqlite","pos":-1}'])
def test_a_damaged_cursor(alias, offsets, state):
    offset = replace(offsets.beginning(), state=state)
    for refused in (lambda: offsets.verify(offset), lambda: offsets.end(offset)):
        with pytest.raises(DamagedCursor, match="cannot be read"):
            refused()
