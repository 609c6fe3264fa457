"""When receivers get ``after_task_publish``: those that pair it with the other signal, and others.

The tests use receivers that claim to be of OpenTelemetry's module; the real ones are in
``test_tracing``.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from celery.signals import after_task_publish, before_task_publish
from django.db import transaction

from outbox_app.exceptions import InvalidJob
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.staging.producer import PAIRED
from tests import tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=[True, False], ids=["weak", "strong"])
def heard(request):
    """``heard``: the calls of the receivers, each with the receiver's name and its arguments."""
    calls = []

    def before(sender, headers, **kwargs):
        headers["trace"] = "t"

    def paired(sender, body, headers, exchange, routing_key, **kwargs):
        calls.append(("paired", sender, body[0], headers["trace"], exchange, routing_key))

    def other(sender, body, headers, exchange, routing_key, **kwargs):
        calls.append(("other", sender, body[0], headers["trace"], exchange, routing_key))

    paired.__module__ = f"{PAIRED[0]}.somewhere"
    before_task_publish.connect(before)
    for receiver in (paired, other):
        after_task_publish.connect(receiver, weak=request.param)
    yield calls
    before_task_publish.disconnect(before)
    for receiver in (paired, other):
        after_task_publish.disconnect(receiver)


@pytest.fixture
def app(make_app):
    return make_app()


def test_paired_ones_hear_of_the_row_and_the_others_of_the_publish(alias, app, heard):
    add = app.task(name="add")(tasks.add)
    with transaction.atomic(using=alias):
        add.delay(1, 2)
    said = ("add", (1, 2), "t", "", app.main)
    assert heard == [("paired", *said)]
    heard.clear()
    Drain(using=alias).run(once=True)
    assert heard == [("other", *said)]


def test_paired_ones_hear_of_what_is_refused_too(alias, app, heard):
    add = app.task(name="add")(tasks.add)
    with transaction.atomic(using=alias), pytest.raises(InvalidJob):
        add.apply_async((1, 2), countdown=1e9)
    assert [call[0] for call in heard] == ["paired"]


def test_what_is_sent_at_once_is_heard_as_ever(alias, app, heard):
    add = app.task(name="add")(tasks.add)
    add.delay(1, 2)
    assert sorted(call[0] for call in heard) == ["other", "paired"]


def test_a_receiver_that_raises_stops_no_staging(alias, app, heard, caplog):
    add = app.task(name="add")(tasks.add)

    def broken(**kwargs):
        raise RuntimeError("broken")

    broken.__module__ = PAIRED[0]
    after_task_publish.connect(broken)
    try:
        with transaction.atomic(using=alias):
            add.delay(1, 2)
    finally:
        after_task_publish.disconnect(broken)
    assert "broken" in caplog.text
    assert Drain(using=alias).run(once=True).published == 1


def test_the_core_imports_neither_package():
    code = (
        "import sys, django; django.setup();"
        "from django.core.management import get_commands, load_command_class as load;"
        "[load(a, n) for n, a in get_commands().items() if a == 'outbox_app'];"
        "import outbox_app.urls, outbox_app.jobs.drain.publisher;"
        "print(*{'.'.join(name.split('.')[:1]) for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )  # under the settings of the tests
    found = set(done.stdout.split())
    assert "outbox_app" in found
    assert not found & {"prometheus_client", "opentelemetry"}
