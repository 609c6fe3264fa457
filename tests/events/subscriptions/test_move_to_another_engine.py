"""dumpdata on one database engine, loaddata on another: docs/howto/move-to-another-engine.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import transaction

from outbox_app.capability import capabilities
from outbox_app.events import NewEvent, publish_many
from outbox_app.events.exceptions import ForeignCursor, ReplayRefused
from outbox_app.events.models import Event
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions.lag import lags
from outbox_app.events.subscriptions.rebase import rebase_outbox
from tests.servers.mysql import MARIADB

#: The apps whose rows move.
APPS = [app.label for app in capabilities()]
EVERY = ["default", "postgres", MARIADB]
pytestmark = [
    pytest.mark.django_db(transaction=True, databases=EVERY),
    pytest.mark.usefixtures("new_log"),
]


@pytest.fixture(params=[1, 2], ids=["to the next", "to the other"])
def target(request: pytest.FixtureRequest, alias: str) -> str:
    """The alias of another engine."""
    return EVERY[(EVERY.index(alias) + request.param) % len(EVERY)]


@pytest.fixture
def moved(alias: str, target: str, settings: Any, tmp_path: Path) -> Callable[[], None]:
    """``moved()``: move the outbox from the alias to the target, which becomes the outbox's."""

    def move() -> None:
        file = str(tmp_path / "all.json")
        without = ["outbox_app.process", "outbox_app.lease"]
        call_command("dumpdata", *APPS, exclude=without, database=alias, output=file)
        call_command("flush", database=target, interactive=False)
        call_command("loaddata", file, database=target, verbosity=0)
        settings.OUTBOX = {**settings.OUTBOX, "DATABASE": target}

    return move


def publish(using: str, *streams: str) -> None:
    with transaction.atomic(using=using):
        publish_many(NewEvent(stream, "made") for stream in streams)


def test_what_had_handled_all_continues_from_now(
    alias: str, target: str, moved: Any, seen_by: Any, run: Any
) -> None:
    """With partitions, each of which has stored another position."""
    seen = seen_by("stock", partitions=3)
    publish(alias, *"abcdabcd")
    run("stock")
    assert len(seen) == 8
    seen.clear()
    moved()

    run("stock")  # it stops, and its list says why
    [lag] = lags(using=target)
    assert (lag.state, seen) == ("failing", [])
    assert "replay it --from now" in lag.error

    control.replay("stock", "now", using=target)
    publish(target, "a", "e")
    run("stock")
    assert sorted(seen) == [("a", 3), ("e", 1)]


def test_what_had_not_continues_from_its_position(
    alias: str, target: str, moved: Any, seen_by: Any, run: Any
) -> None:
    seen = seen_by("stock")
    publish(alias, "a", "b")
    run("stock")
    publish(alias, "a", "c")
    moved()
    with pytest.raises(ReplayRefused, match="would pass over 2 events"):
        control.replay("stock", "now", using=target)
    [lag] = lags(using=target)
    control.replay("stock", lag.position, using=target)
    publish(target, "a")
    run("stock")
    assert seen == [("a", 1), ("b", 1), ("a", 2), ("c", 1), ("a", 3)]
    assert Event.objects.using(target).count() == 5


def test_events_of_another_cluster_are_rebased_first(
    alias: str, target: str, moved: Any, seen_by: Any, run: Any
) -> None:
    """They have kept its transaction ids; neither rebase nor replay went on with such cursors."""
    if target != "postgres":
        return  # where transaction ids are not read
    seen = seen_by("stock")
    publish(alias, "a", "b")
    run("stock")
    Event.objects.using(alias).update(txid=2**40)
    moved()
    with pytest.raises(ForeignCursor, match="outbox_rebase"):
        control.replay("stock", "now", using=target)
    assert rebase_outbox(using=target, log="outbox_event", write=lambda line: None) == 1
    control.replay("stock", "now", using=target)
    publish(target, "a")
    run("stock")
    assert seen == [("a", 1), ("b", 1), ("a", 2)]
