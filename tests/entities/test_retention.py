"""``outbox_prune --events`` on a log of versions: they go by their age, as events do."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import transaction
from django.db.models import QuerySet

from outbox_app.database.clock import DatabaseNow
from outbox_app.entities.models import PrunedCommand
from outbox_app.events import prune_events, publish, subscriber
from outbox_app.events.models import Event
from tests.entities.models import Account, AccountVersion

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def ask(alias):
    """``ask("a", "x", days=40)``: a command with the id x to account a, 40 days ago."""

    def execute(id, command_id, *, days):
        command = ("open", {"owner": id}) if command_id == "open" else ("date", {})
        outcome = Account.execute(id, *command, command_id=command_id, using=alias)
        made = QuerySet(AccountVersion, using=alias).filter(stream=id, version=outcome.version)
        made.update(recorded_at=DatabaseNow() - timedelta(days=days))

    return execute


@pytest.fixture
def left(alias):
    """``left()``: the command ids that are left."""
    rows = QuerySet(AccountVersion, using=alias).order_by("pk")
    return lambda: list(rows.values_list("stream", "command_id"))


def prune(*arguments):
    output = StringIO()
    call_command("outbox_prune", "--events", *arguments, stdout=output)
    return output.getvalue()


def test_no_version_goes_before_its_time(alias, ask, left):
    ask("a", "open", days=40)
    ask("a", "x", days=31)
    ask("a", "y", days=29)
    said = prune("--older-than=30", "--log=account_version")
    assert left() == [("a", "y")]
    assert f"pruned log=account_version removed=2 older_than=30d database={alias} " in said
    assert Account.execute("a", "date", command_id="y", using=alias).replayed


def test_all_logs_go_by_the_same_age(alias, ask, left, settings):
    settings.OUTBOX = {**settings.OUTBOX, "ENTITY_COMMAND_DAYS": 60}  # it is about their ids
    with transaction.atomic(using=alias):
        publish("order-1", "made")
    Event.objects.using(alias).update(recorded_at=DatabaseNow() - timedelta(days=5))
    for number, days in enumerate((40, 20, 8, 6)):
        ask("a", f"c{number}" if number else "open", days=days)
    prune("--older-than=30")
    assert left() == [("a", "c1"), ("a", "c2"), ("a", "c3")]
    assert Event.objects.using(alias).exists()
    assert "would prune log=account_version rows=2" in prune("--older-than=7", "--dry-run")
    assert PrunedCommand.objects.using(alias).count() == 1
    assert prune_events(using=alias, older_than=4) == 4
    assert left() == []
    assert PrunedCommand.objects.using(alias).count() == 4


def test_an_entity_lives_on_without_its_versions(alias, ask, left):
    """The newest goes too, of an idle one: the row has the state."""
    ask("a", "open", days=40)
    ask("b", "open", days=40)
    ask("b", "x", days=1)
    prune("--older-than=2")
    assert left() == [("b", "x")]
    call_command("outbox_entities", "verify", stdout=StringIO())
    outcome = Account.execute("a", "withdraw", {"amount": 0}, command_id="new", using=alias)
    assert (outcome.version, outcome.response) == (2, {"balance": 0})


def test_versions_wait_for_a_subscription_too(alias, ask, left, run):
    @subscriber("ledger", logs=[AccountVersion], start="beginning")
    def handle(events):
        """Sees them."""

    ask("a", "open", days=40)
    assert run("ledger") == 1
    ask("a", "x", days=39)
    assert "held log=account_version by=subscription ledger[0]" in prune("--older-than=1")
    assert left() == [("a", "x")]
