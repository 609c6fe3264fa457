"""Every problem, caused by real rows and sessions: overview, command, health and metrics agree."""

from __future__ import annotations

import html
import json
import re
import time
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connections
from django.db.backends.sqlite3.base import DatabaseWrapper as SQLite
from django.test import RequestFactory
from prometheus_client.parser import text_string_to_metric_families

from outbox_app import views
from outbox_app.capability import kinds
from outbox_app.database.clock import DatabaseNow
from outbox_app.events.models import Cursor, Event, EventLog, Gap, ParkedStream, Subscription
from outbox_app.events.subscriptions.subscriber import _subscribers
from outbox_app.metrics import exposition
from outbox_app.models import Incident, Lease, Process, StagedJob, Statistic
from outbox_app.monitoring import diagnosis
from outbox_app.monitoring import status as status_module
from outbox_app.prepared.models import PreparedEvent
from outbox_app.process import counters
from tests.patience import eventually

from .pages import OVERVIEW, body

pytestmark = pytest.mark.django_db(transaction=True)

LIMITS = {
    "max_age": {"max_age": 60},
    "max_backlog": {"max_backlog": 1},
    "max_dead": {"max_dead": 1},
}


@pytest.fixture
def outbox(alias, staged, died, drainer, published, run, seen_by, monkeypatch, settings):
    """Functions that cause each problem, by its code. A healthy drainer owns all shards."""
    worker = drainer(shards=128)
    drainers, leases = Process.objects.using(alias), Lease.objects.using(alias)

    def stopped():
        seen_by("stock")
        published("a")

    def failing():
        seen_by("stock")
        published("a")
        run("stock")
        Cursor.objects.using(alias).update(error="ValueError: no")

    def paused():
        seen_by("stock")
        published("a")
        run("stock")
        published("b")
        Subscription.objects.using(alias).update(paused=True)

    def undeclared():
        seen_by("stock")
        published("a")
        run("stock")
        published("b")
        _subscribers.clear()

    def parked():
        seen_by("stock")
        published("a")
        run("stock")
        ParkedStream.objects.using(alias).create(
            subscription="stock", partition=0, log="outbox_event", stream="s", version=1,
            position=1, error="")  # fmt: skip

    def late():
        staged(3, age=1000)
        [minute] = drainers.annotate(now=DatabaseNow()).values_list("now", flat=True)
        Statistic.objects.using(alias).create(
            source=str(worker.pk), minute=minute.replace(second=0, microsecond=0),
            name=counters.PUBLISHED, value=5)  # fmt: skip

    def not_started():
        [job] = staged(1)
        StagedJob.objects.using(alias).filter(pk=job.pk).update(
            queue="q", receipt=60, sent_at=DatabaseNow(), publishes=2,
            available_at=DatabaseNow() + timedelta(hours=1))  # fmt: skip

    def gap():
        Gap.objects.using(alias).create(kind="version", log="outbox_event", first=1, last=2)

    def sink():
        published("a")
        Event.objects.using(alias).update(recorded_at=DatabaseNow() - timedelta(days=9))
        settings.OUTBOX = {**settings.OUTBOX, "SINK": {"outbox_event": ("/srv/archive", 8)}}

    def prepared(**columns):
        PreparedEvent.objects.using(alias).create(
            sender="alias:billing", event_id=uuid4(), decide_by=DatabaseNow(), **columns
        )

    def database():
        class Router:
            def db_for_write(self, model, **hints):
                return "away" if issubclass(model, EventLog) else alias

        settings.OUTBOX = {}
        settings.DATABASE_ROUTERS = [Router()]
        nowhere = {**connections.settings["default"], "NAME": "/nowhere/at/all.sqlite3"}
        away = SQLite(nowhere, alias="nowhere")  # which Django lets a test connect to
        monkeypatch.setattr(connections._connections, "away", away, raising=False)

    def unmigrated():
        monkeypatch.setattr(Gap._meta, "db_table", "outbox_not_yet")

    def not_working(**columns):
        staged(2)
        drainers.update(**columns)

    return {
        "no_drainer": lambda: (staged(2), drainers.all().delete()),
        "trouble": lambda: not_working(trouble="BrokerUnavailable: away"),
        "not_leaving": lambda: staged(3, age=1000),
        "not_started": not_started,
        "unowned_shards": lambda: leases.filter(part__gte=120).update(owner=None),
        "failing": failing,
        "subscription": stopped,
        "max_age": lambda: staged(1, age=100),
        "max_backlog": lambda: staged(2),
        "max_dead": lambda: died(2),
        "late": late,
        "drainer_silent": lambda: drainer(host="web-2", silent=99),
        "drainer_trouble": lambda: drainer(host="web-2", trouble="BrokerUnavailable: away"),
        "paused": paused,
        "undeclared": undeclared,
        "parked": parked,
        "dead": lambda: died(2),
        "gaps": gap,
        "sink": sink,
        "database": database,
        "unmigrated": unmigrated,
        "no_check_back": lambda: prepared(next_check_at=DatabaseNow()),
        "undecided": lambda: prepared(state="undecided"),
        "sender_silent": lambda: prepared(unreachable=3, last_answer="OSError: away"),
        "contradiction": lambda: (
            prepared(state="confirmed"),
            Incident.objects.using(alias).create(kind="contradiction", first_id=1, last_id=1),
        ),
        "transaction": lambda: (staged(), monkeypatch.setattr(diagnosis, "OLD_WRITER", -1.0)),
        "snapshot": lambda: (staged(), monkeypatch.setattr(status_module, "OLD_SNAPSHOT", -1.0)),
    }


@contextmanager
def session(alias):
    """Another session, which changes the staged jobs and does not commit."""
    other = connections.create_connection(alias)
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute("UPDATE outbox_stagedjob SET queue = 'another'")
        if other.vendor == "mysql":
            eventually(lambda: lists_transactions(alias))
        yield
    finally:
        other.rollback()
        other.close()


def lists_transactions(alias):
    """Say whether the list has one: it is made anew for who asks no more often than each 0.1 s."""
    time.sleep(0.15)
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT count(*) FROM information_schema.innodb_trx")
        return cursor.fetchone()[0]


def alike(sentence):
    """Without the age in it, which goes on from one look to the next."""
    return re.sub(r"[\d.]+ (?:s|min|h|d)\b", "", sentence)


def by_command(capsys, limits):
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    try:
        call_command("outbox_status", "--json", *arguments)
        code = 0
    except SystemExit as error:
        code = error.code
    answer = json.loads(capsys.readouterr().out)
    assert (code == 0) == answer["ok"]
    return code, answer["problems"]


def by_metrics():
    return {
        (sample.labels["code"], sample.labels["severity"])
        for family in text_string_to_metric_families(exposition("")[0].decode())
        for sample in family.samples
        if sample.name == "outbox_problem" and sample.value
    }


@pytest.mark.parametrize("code", [None, *kinds()])
def test_every_door_says_the_same(alias, superuser, outbox, capsys, code):
    by_session = code in ("transaction", "snapshot")
    if by_session and connections[alias].vendor == "sqlite":
        return  # which does not say who holds what
    if code:
        outbox[code]()
    with session(alias) if by_session else nullcontext():
        compare(superuser, capsys, code)


def compare(superuser, capsys, code):
    limits = LIMITS.get(code, {})
    exit_code, problems = by_command(capsys, limits)
    codes = [(each["code"], each["severity"]) for each in problems]
    assert codes == ([(code, kinds()[code].severity)] if code else [])
    assert exit_code == (1 if code and kinds()[code].severity == "bad" else 0)

    health = views.health(RequestFactory().get("/"), **limits)
    answer = json.loads(health.content)
    assert health.status_code == (503 if exit_code else 200)
    assert answer["status"] == ("failing" if exit_code else "ok")
    assert [(each["code"], each["severity"]) for each in answer["problems"]] == codes
    sentences = [alike(each["text"]) for each in problems]
    assert [alike(each["text"]) for each in answer["problems"]] == sentences

    if limits:  # which the command and the view were given
        return
    assert by_metrics() == set(codes)
    page = superuser.get(OVERVIEW)
    lines = r'<li class="outbox-(\w+)"><a href="[^"]*">([^<]+)<'
    shown = [(tone, html.unescape(words)) for tone, words in re.findall(lines, body(page))]
    # The headline has the text of the first problem, and its line what to do.
    assert shown == [(each["severity"], each["action"]) for each in problems]
    headline = r'class="outbox-headline outbox-(\w+)">([^<]*)<'
    tone, words = re.search(headline, body(page)).groups()
    assert tone == (kinds()[code].severity if code else "good")
    for sentence in sentences:
        assert sentence[1:].removesuffix(".") in alike(html.unescape(words))
