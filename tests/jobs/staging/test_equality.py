"""The message that a worker receives equals, field by field, that of plain Celery."""

from __future__ import annotations

import decimal
import enum
import uuid
from datetime import UTC, datetime, timedelta

import kombu.serialization
import pytest
from celery import beat
from celery.utils.saferepr import saferepr
from django.utils import timezone

from outbox_app.celery import OutboxCelery
from outbox_app.jobs.staging.producer import quick_repr
from tests.jobs.staging import message_equality, tasks

pytestmark = pytest.mark.django_db(transaction=True, databases=["default"])

ID = "3f0e3c5e-0000-4000-8000-c0ffee000001"
SOON = timedelta(seconds=100)
LATER = timedelta(hours=1)


class Colour(enum.Enum):
    RED = "red"


TASKS = {
    "delay": lambda t: t.add.delay(2, 2),
    "keywords": lambda t: t.add.delay(x=2, y=2),
    "apply_async": lambda t: t.add.apply_async((2, 2)),
    "without arguments": lambda t: t.bound.delay(),
    "countdown": lambda t: t.add.apply_async((2, 2), countdown=100),
    "countdown 0": lambda t: t.add.apply_async((2, 2), countdown=0),
    "countdown in the past": lambda t: t.add.apply_async((2, 2), countdown=-5),
    "eta": lambda t: t.add.apply_async((2, 2), eta=t.now + SOON),
    "eta of another zone": lambda t: t.add.apply_async(
        (2, 2), eta=(t.now + SOON).astimezone(datetime.strptime("+0530", "%z").tzinfo)
    ),
    "naive eta": lambda t: t.add.apply_async((2, 2), eta=(t.now + SOON).replace(tzinfo=None)),
    "eta as text": lambda t: t.add.apply_async((2, 2), eta=(t.now + SOON).isoformat()),
    "expires in seconds": lambda t: t.add.apply_async((2, 2), expires=3000),
    "expires at": lambda t: t.add.apply_async((2, 2), expires=t.now + LATER),
    "expires at, naive": lambda t: t.add.apply_async(
        (2, 2), expires=(t.now + LATER).replace(tzinfo=None)
    ),
    "expires as text": lambda t: t.add.apply_async((2, 2), expires=(t.now + LATER).isoformat()),
    "expiration": lambda t: t.add.apply_async((2, 2), expiration=3000),
    "priority": lambda t: t.add.apply_async((2, 2), priority=3),
    "priority 0": lambda t: t.add.apply_async((2, 2), priority=0),
    "headers": lambda t: t.add.apply_async((2, 2), headers={"trace": "00-ab-01", "n": 1}),
    "headers of many types": lambda t: t.add.apply_async(
        (2, 2),
        headers={
            "bytes": b"\x00\xff",
            "text": "naïve 🎈",
            "at": datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
            "list": [1, "two", None],
            "table": {"a": {"b": 1.5}},
            "yes": True,
            "none": None,
            "price": decimal.Decimal("9.99"),
            "long": 2**40,
        },
    ),
    "overwritten header": lambda t: t.add.apply_async((2, 2), headers={"root_id": "mine"}),
    "serializer json": lambda t: t.add.apply_async((2, 2), serializer="json"),
    "serializer pickle": lambda t: t.add.apply_async((b"\x00\xff", {1: 2}), serializer="pickle"),
    "serializer yaml": lambda t: t.add.apply_async((2, 2), serializer="yaml"),
    "serializer of one's own": lambda t: t.add.apply_async((2, 2), serializer="backwards"),
    "compression zlib": lambda t: t.add.apply_async(("x" * 500, 2), compression="zlib"),
    "compression bzip2": lambda t: t.add.apply_async(("x" * 500, 2), compression="bzip2"),
    "link": lambda t: t.add.apply_async((2, 2), link=t.double.s()),
    "links": lambda t: t.add.apply_async((2, 2), link=[t.double.s(), t.add.s(1)]),
    "link_error": lambda t: t.add.apply_async((2, 2), link_error=t.double.si(1)),
    "time limits": lambda t: t.add.apply_async((2, 2), time_limit=20, soft_time_limit=10),
    "ignore_result": lambda t: t.add.apply_async((2, 2), ignore_result=True),
    "task_id": lambda t: t.add.apply_async((2, 2), task_id="order-17"),
    "shadow": lambda t: t.add.apply_async((2, 2), shadow="sum"),
    "reply_to": lambda t: t.add.apply_async((2, 2), reply_to="answers"),
    "add_to_parent": lambda t: t.add.apply_async((2, 2), add_to_parent=False),
    "argsrepr": lambda t: t.add.apply_async((2, 2), argsrepr="<secret>", kwargsrepr="{}"),
    "root and parent": lambda t: t.add.apply_async((2, 2), root_id="a", parent_id="b"),
    "group_id": lambda t: t.add.apply_async((2, 2), group_id="g", group_index=3),
    "delivery_mode": lambda t: t.add.apply_async((2, 2), delivery_mode="transient"),
    "mandatory": lambda t: t.add.apply_async((2, 2), mandatory=True),
    "retry policy": lambda t: t.add.apply_async(
        (2, 2), retry=True, retry_policy={"max_retries": 1}
    ),
    "correlation_id": lambda t: t.add.apply_async((2, 2), message_id="m-1", app_id="shop"),
    "types that Celery's JSON takes": lambda t: t.add.delay(
        [uuid.UUID(int=7), decimal.Decimal("1.10"), datetime(2030, 1, 2)], [b"\xff", t.now.date()]
    ),
    "what PostgreSQL's JSON refuses": lambda t: t.add.delay("\u0000\ud800", float("nan")),
    "4-byte text": lambda t: t.add.delay("🎈", y="ß"),
    "send_task": lambda t: t.app.send_task("elsewhere", (1,), {"k": 2}),
    "send_task, positional": lambda t: t.app.send_task("elsewhere", (1,), None, 100, None, ID),
    # OutboxCelery takes in all declared tasks for this; Celery sends a task's limits if it has.
    "send_task of a known task": lambda t: t.app.tasks and t.app.send_task("bound"),
    "exec options of a task": lambda t: t.app.task(
        name="own", serializer="pickle", compression="zlib", expires=3000, soft_time_limit=3
    )(tasks.own).delay(),
}


@pytest.fixture(autouse=True)
def backwards():
    """A custom serializer of the project, with a text encoding other than UTF-8."""
    kombu.serialization.register(
        "backwards", lambda o: repr(o)[::-1], eval, "application/x-backwards", "latin-1"
    )
    yield
    kombu.serialization.unregister("backwards")


@pytest.mark.parametrize("send", TASKS.values(), ids=TASKS)
def test_task(send, assert_equal):
    assert_equal(send)


@pytest.mark.django_db(transaction=True)
def test_task_with_everything_on_each_database(alias, assert_equal):
    def send(t):
        t.add.apply_async(
            (b"\x00\xff'\\", "🎈"),
            {},
            task_id="ß",
            countdown=100,
            expires=3000,
            priority=3,
            serializer="pickle",
            compression="zlib",
            headers={"bytes": b"\x00\xff", "text": "🎈 \\ ' \u0000"},
            link=t.double.s(),
            link_error=t.double.si(1),
            shadow="schatten-ß",
            reply_to="answers",
            time_limit=9,
        )

    assert_equal(send, using=alias)
    assert_equal(lambda t: t.add.delay("\u0000\ud800", "🎈"), using=alias)


@pytest.mark.parametrize("broker_url", ["rabbitmq"], indirect=True)
def test_text_that_is_not_utf_8_is_sent_in_its_own_encoding(assert_equal):
    (message,) = assert_equal(lambda t: t.add.apply_async(("ß", 2), serializer="backwards"))
    assert "'ß'"[::-1].encode("latin-1") in message["body"]


def test_beat_sends_with_a_producer_of_its_own(broker_url, inbox, settings):
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "refuse"}
    name = f"outbox-{uuid.uuid4().hex[:8]}"
    twin = message_equality.twin(OutboxCelery, broker_url, name, now=timezone.now())
    inbox.declare(twin.app.amqp.queues.values())
    twin.app.conf.beat_schedule = {"nightly": {"task": "add", "schedule": 0.0, "args": (1, 2)}}
    scheduler = beat.Scheduler(twin.app)

    for _ in range(2):  # the first one may only fill the schedule
        scheduler.tick()

    assert {message["headers"]["task"] for message in inbox.received()} == {"add"}
    scheduler.connection.release()
    twin.close()


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_arguments_are_shown_as_celery_shows_them(levels):
    plain = [1, True, None, -0.5, float("inf"), 10**30, "it's", "a\nü\\", '"', [], {}, ()]
    odd = [b"x", {1}, decimal.Decimal(1), object, {"a": {"b": {"c": {}}}}, ["x" * 2000], [0] * 60]
    for values in (plain, [plain, plain], [tuple(plain)] * 2, odd, *([each] for each in plain)):
        for value in (values, tuple(values), {f"k'{n}": each for n, each in enumerate(values)}):
            expected = saferepr(value, 10_000, maxlevels=levels)
            assert quick_repr(value, levels=levels) in (expected, "")
    assert (
        quick_repr({"a": [1, "it's"], None: (2,)}, levels=2) == "{'a': [1, 'it\\'s'], None: (2,)}"
    )
    assert not any(quick_repr([each], levels=levels) for each in odd)
