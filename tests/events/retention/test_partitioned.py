"""docs/howto/partition-a-log.md, executed: SQL and Python, with subscriptions on the log."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path
from threading import Event as Signal
from threading import Thread

import pytest
from django.core.management import call_command
from django.db import IntegrityError, OperationalError, connections, transaction

from outbox_app.events import NO_STREAM, publish, subscriber
from outbox_app.events.checks import check_log_tables
from outbox_app.events.exceptions import VersionConflict
from outbox_app.events.models import Event
from outbox_app.events.subscriptions.partition import Partition
from outbox_app.events.subscriptions.subscriber import subscriber_named
from tests.patience import patience

PAGE = Path(__file__).resolve().parents[3] / "docs" / "howto" / "partition-a-log.md"
#: Positions of a partition here, instead of ten million.
SIZE = 10

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("alias", [pytest.param("postgres", id="postgres")], indirect=True),
]


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [block.replace("0000000", str(SIZE)[1:]) for block in found]


@pytest.fixture
def sql(alias):
    def run(statement):
        with connections[alias].cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall() if cursor.description else []

    return run


@pytest.fixture
def partitioned(alias, sql):
    """Partition the log as the page says; restore the table afterwards."""
    sql("ALTER SEQUENCE outbox_event_id_seq RESTART 1")
    sql("ALTER TABLE outbox_event RENAME TO kept")
    sql("CREATE TABLE outbox_event (LIKE kept INCLUDING ALL)")
    yield lambda: [sql(block) for block in blocks("sql")]
    sql("DROP TABLE outbox_event")
    sql("ALTER TABLE kept RENAME TO outbox_event")


@pytest.fixture
def drop_if_passed():
    namespace = {}
    [code] = blocks("python")
    exec(code, namespace)
    return namespace["drop_if_passed"]


def partitions(sql) -> list[str]:
    rows = sql(
        "SELECT inhrelid::regclass::text FROM pg_inherits "
        "WHERE inhparent = 'outbox_event'::regclass ORDER BY 1"
    )
    return [name for (name,) in rows]


def declare(name):
    seen = []

    @subscriber(name)
    def handle(events):
        seen.extend((event.stream, event.version) for event in events)

    return seen


def test_the_recipe(alias, sql, partitioned, drop_if_passed, published, run):
    ahead, behind = declare("ahead"), declare("behind")
    published("a", "b", "a")
    run("ahead", "behind")
    published("c")
    partitioned()
    assert partitions(sql) == ["outbox_event_0", "outbox_event_1", "outbox_event_2"]
    assert [*check_log_tables(databases=[alias])] == []
    before = Event.objects.using(alias).order_by("id").last().pk

    # Publishing and reading go on: positions, versions, expectations.
    published(*"abcabcabcabc")
    assert Event.objects.using(alias).order_by("id")[4].pk > before
    with transaction.atomic(using=alias):
        with pytest.raises(VersionConflict):
            publish("a", "made", expected_version=NO_STREAM)
        assert publish("a", "made", expected_version=6).version == 7
    run("ahead")
    partition = Partition(subscriber_named("behind"), 0, batch_size=2)
    partition.run_once()
    partition.close()
    assert sorted(ahead) == sorted(Event.objects.using(alias).values_list("stream", "version"))

    # A partition goes when everybody has passed it, and it is old enough.
    assert len(behind) == 5
    assert not drop_if_passed("outbox_event_0", days=0, using=alias)
    run("behind")
    assert not drop_if_passed("outbox_event_0", days=1, using=alias)
    sql("UPDATE outbox_event SET recorded_at = recorded_at - interval '2 days'")
    assert drop_if_passed("outbox_event_0", days=1, using=alias)
    assert partitions(sql) == ["outbox_event_1", "outbox_event_2"]
    assert Event.objects.using(alias).order_by("id").first().pk >= SIZE

    # Versions and subscriptions go on, from the old place and from a new one.
    published("a", "new")
    run("ahead", "behind")
    assert sorted(ahead) == sorted(behind)
    assert ahead[-2:] == [("a", 8), ("new", 1)]
    late = declare("late")
    run("late")
    assert sorted(late) == sorted(Event.objects.using(alias).values_list("stream", "version"))

    # The prune works inside of a partition.
    output = StringIO()
    arguments = ["--events", "--log=outbox_event", "--older-than=1"]
    call_command("outbox_prune", *arguments, stdout=output)
    assert re.search(r"pruned log=outbox_event removed=[1-9]", output.getvalue())
    assert [e.stream for e in Event.objects.using(alias).order_by("id")] == ["a", "new"]

    # A position without a partition is refused, and nothing is half there.
    sql("SELECT setval(pg_get_serial_sequence('outbox_event', 'id'), 1000)")
    with pytest.raises(IntegrityError, match="no partition"):
        published("a")
    sql("SELECT setval(pg_get_serial_sequence('outbox_event', 'id'), 25)")
    assert published("a")[0].version == 9

    # However quiet the log is, the partition stays that the next event goes to; those ahead, too.
    run("ahead", "behind", "late")
    sql("CREATE TABLE ahead PARTITION OF outbox_event FOR VALUES FROM (30) TO (40)")
    assert drop_if_passed("outbox_event_1", days=0, using=alias)
    assert not drop_if_passed("outbox_event_2", days=0, using=alias)
    assert not drop_if_passed("ahead", days=0, using=alias)


def test_what_is_in_flight_keeps_its_partition(
    alias, sql, partitioned, drop_if_passed, published, run
):
    partitioned()
    seen = declare("all")
    written, go_on = Signal(), Signal()

    def late() -> None:
        with transaction.atomic(using=alias):
            publish("late", "made")
            written.set()
            assert go_on.wait(patience())
        connections[alias].close()

    writer = Thread(target=late)
    writer.start()
    assert written.wait(patience())
    published(*"abcdefghijkl")
    run("all")
    sql("UPDATE outbox_event SET recorded_at = recorded_at - interval '2 days'")
    with pytest.raises(OperationalError, match="lock timeout"):
        drop_if_passed("outbox_event_0", days=1, using=alias)
    go_on.set()
    writer.join()
    assert not drop_if_passed("outbox_event_0", days=0, using=alias)
    run("all")
    assert seen[-1] == ("late", 1)
    assert drop_if_passed("outbox_event_0", days=0, using=alias)
