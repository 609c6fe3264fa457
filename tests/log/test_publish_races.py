"""Writers that meet: one message id, one expected version, at any isolation."""

from __future__ import annotations

import threading
from uuid import uuid4

import pytest
from django.db import IntegrityError, OperationalError, connections, transaction

from outbox_app import publish
from outbox_app.exceptions import MessageIdConflict, VersionConflict
from outbox_app.models import Event, StreamHead
from tests.faults.tools import PATIENCE, on

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def isolated(alias):
    """``isolated("repeatable read")``: as OPTIONS["isolation_level"] would have it."""
    options = connections.settings[alias]["OPTIONS"]
    before = dict(options)

    def make(level):
        if level:
            options["isolation_level"] = (
                level
                if alias == "mariadb"
                else getattr(
                    __import__("psycopg").IsolationLevel, level.upper().replace(" ", "_")
                )
            )

    yield make
    options.clear()
    options.update(before)


def both(alias, first, second, look=lambda: None):
    """Run ``second`` in a thread's transaction that has looked, while the one of ``first`` is open.

    Returns what became of ``second``.
    """
    found, looked, ready = [], threading.Event(), threading.Event()

    def run():
        try:
            with transaction.atomic(using=alias):
                look()
                looked.set()
                ready.wait(PATIENCE)
                found.append(second())
        except Exception as error:
            found.append(error)
        finally:
            connections[alias].close()

    thread = threading.Thread(target=run)
    thread.start()
    assert looked.wait(PATIENCE)
    with transaction.atomic(using=alias):
        first()
        ready.set()
        thread.join(0.3)
    thread.join(PATIENCE)
    return found[0]


@on("postgres", "mariadb")
@pytest.mark.parametrize("level", ["", "repeatable read", "serializable"])
@pytest.mark.parametrize("same", [True, False], ids=["same", "other"])
def test_explore(alias, isolated, level, same):
    id = uuid4()
    isolated(level)
    log = []

    def second():
        for attempt in range(3):
            try:
                with transaction.atomic(using=alias):
                    return publish("a" if same else "b", "made", message_id=id, using=alias)
            except Exception as error:
                log.append(error)
        raise log[-1]

    result = both(
        alias,
        lambda: publish("a", "made", message_id=id, using=alias),
        second,
        lambda: StreamHead.objects.using(alias).filter(stream="zz").exists(),
    )
    print("XX", alias, level, same, [repr(e)[:150] for e in log], repr(result)[:100],
          list(StreamHead.objects.using(alias).values_list("stream", "version")), Event.objects.using(alias).count())


@on("postgres", "mariadb")
@pytest.mark.parametrize("level", ["", "repeatable read", "serializable"])
def test_explore_version(alias, isolated, level):
    isolated(level)
    with transaction.atomic(using=alias):
        publish("a", "made", using=alias)
    result = both(
        alias,
        lambda: publish("a", "made", expected_version=1, using=alias),
        lambda: publish("a", "made", expected_version=1, using=alias),
        lambda: StreamHead.objects.using(alias).filter(stream="a").exists(),
    )
    print("YY", alias, level, repr(result)[:150], getattr(result, "current", None))
