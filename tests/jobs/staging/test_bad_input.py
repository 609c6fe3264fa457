"""Bad input, on each database: accepted as by Celery, or refused with a usable transaction."""

from __future__ import annotations

import decimal
import pickle
import uuid
from datetime import UTC, date, datetime, timedelta

import pytest
from django.contrib.auth.models import Group
from django.db import transaction
from django.utils import timezone
from kombu import Queue, serialization
from kombu.exceptions import EncodeError

from outbox_app.exceptions import InvalidJob
from outbox_app.jobs.message import Message
from outbox_app.jobs.staging.validation import MAX_NAME_BYTES
from outbox_app.models import StagedJob
from tests.jobs.staging import tasks
from tests.one_database import no_statement

pytestmark = pytest.mark.django_db

LONG = "x" * (MAX_NAME_BYTES + 1)
LONG_IN_BYTES = "ß" * (MAX_NAME_BYTES // 2 + 1)
YEARS = timedelta(days=3 * 366)

ACCEPTED = {
    "NaN and Infinity": (float("nan"), [float("inf"), -float("inf")]),
    "a NUL and lone surrogates": ("\u0000", "\ud800 \udfff"),
    "4-byte text": ("🎈", {"🎈": "ß"}),
    "UUID, datetime, Decimal": (uuid.UUID(int=7), [datetime(2030, 1, 1), decimal.Decimal("1.0")]),
    "bytes": (b"\x00\xff", b"text"),
    "deep nesting": (eval("[" * 90 + "]" * 90), 1),
    "a large number": (2**200, -(2**63)),
    "markup and terminal codes": ("<script>alert(1)</script>", "\x1b[31m\x07"),
    "quotes and backslashes": ("'\"\\%s%%", "{}{0}"),
    "300 kB": ("x" * 300_000, 1),
}


@pytest.mark.parametrize("args", ACCEPTED.values(), ids=ACCEPTED)
def test_what_celery_takes_is_stored_byte_for_byte(args, alias, app, add):
    with transaction.atomic(using=alias):
        add.delay(*args)

    job = StagedJob.objects.using(alias).get()
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    _, _, expected = serialization.dumps((args, {}, embed), "json")
    assert bytes(job.body).decode() == expected


def test_headers_of_any_kind_are_stored(alias, add):
    headers = {
        "text": "naïve 🎈 \u0000 \ud800 '\"\\",
        "bytes": b"\x00\xff",
        "at": datetime(2030, 1, 1, tzinfo=UTC),
        "price": decimal.Decimal("9.99"),
        "table": {"list": [1, None, True]},
    }
    with transaction.atomic(using=alias):
        add.apply_async((1, 1), headers=headers)

    stored = Message.loads(StagedJob.objects.using(alias).get().envelope).headers
    assert {name: stored[name] for name in headers} == headers


@pytest.mark.parametrize("serializer", ["pickle", "yaml"])
def test_other_serializers_are_stored_unread(serializer, alias, app, add):
    with transaction.atomic(using=alias):
        add.apply_async((b"\x00'\\", 1), serializer=serializer)

    job = StagedJob.objects.using(alias).get()
    message = Message.loads(job.envelope)
    assert (
        message.content_type
        == f"application/x-{'python-serialize' if serializer == 'pickle' else 'yaml'}"
    )
    if serializer == "pickle":
        assert pickle.loads(bytes(job.body))[0] == (b"\x00'\\", 1)


def test_names_of_the_greatest_length_fit(alias, app):
    name = "ß" * (MAX_NAME_BYTES // 2) + "x"
    task = app.task(name=name, shared=False)(tasks.own)
    with transaction.atomic(using=alias):
        task.apply_async(task_id=name, queue=name, ordering_key=name, reply_to=name)

    job = StagedJob.objects.using(alias).get()
    assert (job.task, job.task_id, job.queue, job.ordering_key) == (name,) * 4


def test_keys_that_look_alike_are_different(alias, add):
    keys = ["key", "KEY", "key ", "kéy", "key\u00a0"]
    with transaction.atomic(using=alias):
        for key in keys:
            add.apply_async((1, 1), ordering_key=key)

    for key in keys:
        assert StagedJob.objects.using(alias).get(ordering_key=key).ordering_key == key


@pytest.mark.parametrize("due", [timedelta(0), -YEARS, timedelta(days=365)])
def test_an_eta_within_a_year_is_accepted(due, alias, add):
    eta = (timezone.now() + due).replace(tzinfo=None)  # naive: UTC is assumed, as in Celery
    with transaction.atomic(using=alias):
        add.apply_async((1, 1), eta=eta)

    job = StagedJob.objects.using(alias).get()
    if due > timedelta(0):
        assert abs(job.available_at.replace(tzinfo=None) - eta) < timedelta(milliseconds=1)
    else:
        assert job.available_at is None


# The options of apply_async, and what the error has to say: the field and what to do, or expect.
REFUSED = {
    "eta in years": ({"eta": timezone.now() + YEARS}, "eta .* further away than 366 days"),
    "countdown of years": ({"countdown": YEARS.total_seconds()}, "eta .* further away"),
    "eta as nonsense": ({"eta": "tomorrow"}, "eta must be a datetime, .* got 'tomorrow'"),
    "long task_id": ({"task_id": LONG}, "task_id must have 1 to 255 characters.*it has 256"),
    "task_id with a NUL": ({"task_id": "a\x00b"}, "task_id must have .* without NUL"),
    "task_id with a surrogate": ({"task_id": "\ud800"}, "task_id must have .* valid Unicode"),
    "long key": ({"ordering_key": LONG}, "ordering_key is 256 bytes long"),
    "key that is no text": ({"ordering_key": 17}, "ordering_key must be a string; got 17. Convert"),
    "key with a NUL": ({"ordering_key": "a\x00"}, "ordering_key .* has control characters"),
    "key with a surrogate": ({"ordering_key": "\udfff"}, "ordering_key .* is not valid Unicode"),
    "long queue": ({"queue": LONG}, "queue is 256 bytes long"),
    "queue of the broker's": ({"queue": "amq.direct"}, "queue 'amq.direct'.* belong to the broker"),
    "queue with a newline": ({"queue": "a\nb"}, "queue .* has control characters"),
    "queue with kombu's separator": ({"queue": "a\x06\x163"}, "queue .* has control characters"),
    "queue object of the broker's": ({"queue": Queue("amq.mine")}, "belong to the broker"),
    "long routing key": (
        {"exchange": "e", "exchange_type": "topic", "routing_key": LONG},
        "routing_key is 256 bytes long|queue is 256 bytes long",
    ),
    "long exchange": (
        {"exchange": LONG, "exchange_type": "topic", "routing_key": "k"},
        "exchange is 256 bytes long",
    ),
    "headers that replace id": ({"headers": {"id": "x"}}, "'id' would replace the task's own"),
    "headers that replace task": (
        {"headers": {"task": "x"}},
        "'task' would replace the task's own",
    ),
    "headers as a list": ({"headers": ["a"]}, "headers must be a mapping"),
    "headers that cannot be encoded": ({"headers": {"a": object()}}, "cannot be stored"),
    "declare of what is no queue": ({"declare": ["q"]}, "cannot be stored: declare"),
}
#: Refused where the broker speaks AMQP. Others take them, and so they are staged.
REFUSED_BY_AMQP = {
    "priority -1": ({"priority": -1}, "priority must be an integer from 0 to 255; got -1"),
    "priority 300": ({"priority": 300}, "priority must be an integer from 0 to 255; got 300"),
    "priority as text": ({"priority": "5"}, "priority must be an integer from 0 to 255; got '5'"),
    "priority 1.5": ({"priority": 1.5}, "priority must be an integer"),
    "task_id in many bytes": ({"task_id": LONG_IN_BYTES}, "task_id must be a string of at most"),
    "task_id that is no text": ({"task_id": uuid.UUID(int=7)}, "task_id must be a string"),
    "long reply_to": ({"reply_to": LONG}, "reply_to must be a string of at most 255 bytes"),
    "headers with a number for key": ({"headers": {1: "x"}}, "headers: a key must be a string"),
    "headers with a UUID": (
        {"headers": {"tenant": {"id": uuid.UUID(int=7)}}},
        "headers: AMQP takes no such value: .*UUID.*for key b'id'.*Convert it to str",
    ),
    "headers with a date": ({"headers": {"day": date(2030, 1, 1)}}, "takes no .*datetime.date"),
    "headers with 65 bits": ({"headers": {"n": {"of": [2**63]}}}, "takes no such value: .*int"),
    "a stamp with 65 bits": (
        {"stamped_headers": ["n"], "n": 2**63},
        "headers: AMQP takes no such value: .*int",
    ),
    "headers with a long key": ({"headers": {LONG: 1}}, "headers: a key .* got 'xxx.*Convert"),
}
# Celery's own errors, raised in the caller's line.
REFUSED_BY_CELERY = {
    "arguments that do not fit": (lambda add: add.delay(1, 2, 3), TypeError),
    "argument that cannot be encoded": (lambda add: add.delay(object(), 1), EncodeError),
    "args as text": (lambda add: add.apply_async("ab"), TypeError),
    "serializer nobody knows": (
        lambda add: add.apply_async((1, 1), serializer="none"),
        serialization.SerializerNotInstalled,
    ),
    "compression nobody knows": (
        lambda add: add.apply_async((1, 1), compression="none"),
        KeyError,
    ),
    "expires as nonsense": (lambda add: add.apply_async((1, 1), expires="soon"), ValueError),
    "countdown without end": (lambda add: add.apply_async((1, 1), countdown=1e15), OverflowError),
}


def assert_refused(call, error, match, alias, add):
    # On PostgreSQL a statement that failed would make the two that follow fail as well.
    with transaction.atomic(using=alias):
        with no_statement(alias), pytest.raises(error, match=match):
            call(add)
        Group.objects.using(alias).create(name="business")
        add.delay("neighbour", 0)

    assert Group.objects.using(alias).get().name == "business"
    assert b"neighbour" in bytes(StagedJob.objects.using(alias).get().body)


@pytest.mark.any_database
@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_with_words(options, message, alias, add):
    assert_refused(lambda add: add.apply_async((1, 1), **options), InvalidJob, message, alias, add)


@pytest.mark.parametrize(("options", "message"), REFUSED_BY_AMQP.values(), ids=REFUSED_BY_AMQP)
def test_refused_where_the_broker_speaks_amqp(options, message, alias, add, make_app):
    amqp = make_app("amqp://guest@localhost:1//").task(name="add", shared=False)(tasks.add)

    def call(_):
        amqp.apply_async((1, 1), **options)

    assert_refused(call, InvalidJob, message, alias, add)
    with transaction.atomic(using=alias):
        add.apply_async((1, 1), **options)
    job = StagedJob.objects.using(alias).latest("id")
    assert job.task_id == str(options.get("task_id", job.task_id))


@pytest.mark.any_database
@pytest.mark.parametrize(("call", "error"), REFUSED_BY_CELERY.values(), ids=REFUSED_BY_CELERY)
def test_refused_as_celery_refuses(call, error, alias, add):
    assert_refused(call, error, None, alias, add)


@pytest.mark.any_database
@pytest.mark.parametrize("name", [LONG, "new\nline", "", "\ud800"], ids=["long", "LF", "", "bad"])
def test_a_task_name_that_could_not_be_sent_is_refused(name, alias, app, add):
    assert_refused(lambda add: app.send_task(name), InvalidJob, "task name", alias, add)


def test_an_app_name_that_does_not_fit_is_refused(alias, app, add):
    app.main, main = LONG, app.main
    with transaction.atomic(using=alias), pytest.raises(InvalidJob, match="app name is 256 bytes"):
        add.delay(1, 1)
    app.main = main


def test_a_message_above_the_limit_is_refused(alias, add, settings):
    settings.OUTBOX = {**settings.OUTBOX, "MAX_MESSAGE_BYTES": 2000}
    message = r"bytes; at most 2000 are possible \(OUTBOX\['MAX_MESSAGE_BYTES'\]\)\. Store the data"
    assert_refused(lambda add: add.delay("x" * 2000, 1), InvalidJob, message, alias, add)


def test_megabytes_are_refused_by_default(alias, add):
    body = b"\x00" * (17 * 1024 * 1024)
    assert_refused(
        lambda add: add.apply_async((body, 1), serializer="pickle"),
        InvalidJob,
        "MAX_MESSAGE_BYTES",
        alias,
        add,
    )


def test_a_large_message_is_staged_with_a_warning(alias, add, caplog):
    with transaction.atomic(using=alias):
        add.apply_async(("x" * 1000, 1), task_id="small")
        assert not caplog.records
        add.apply_async(("x" * 300_000, 1), task_id="large")

    (record,) = caplog.records
    assert record.name == "outbox_app.staging"
    assert "task=add task_id=large bytes=301" in record.getMessage()
    assert StagedJob.objects.using(alias).count() == 2


def test_a_message_just_below_the_limit_is_stored(alias, add, settings):
    # Each byte is escaped, which doubles it on the way to MariaDB.
    body = b"\x00" * (7 * 1024 * 1024)
    with transaction.atomic(using=alias):
        add.apply_async((body, 1), serializer="pickle")

    assert pickle.loads(bytes(StagedJob.objects.using(alias).get().body))[0] == (body, 1)
