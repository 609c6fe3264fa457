"""The versions of an entity type are a log: readers, pruning and archives of logs work on them."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from io import StringIO
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import IntegrityError, connections, models
from django.test.utils import isolate_apps

from outbox_app.entities import Command, Entity, EntityVersion, command
from outbox_app.entities.verification import verify
from outbox_app.events import subscriber
from outbox_app.events.log.reader import LogReader
from outbox_app.events.testing import run_subscribers
from tests.entities.models import Account, AccountVersion
from tests.entities.test_rules import tables

commits = pytest.mark.django_db(transaction=True)


@commits
def test_versions_are_pruned_and_the_entity_goes_on(alias, account, ask, rows):
    ask("withdraw", {"amount": 1}, command_id="x")
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE account_version SET recorded_at = '2020-01-01 00:00:00'")
    output = StringIO()
    command = ("outbox_prune", "--events", "--log", "account_version", "--older-than=1")
    call_command(*command, stdout=output)
    assert "pruned log=account_version removed=2" in output.getvalue()
    assert rows() == []
    assert ask("withdraw", {"amount": 1}).version == 3
    assert Account.objects.using(alias).get(pk="a").version == 3


@commits
def test_versions_are_read_by_a_subscription(alias, account, ask):
    seen = []

    @subscriber("ledger", logs=[AccountVersion], types=["account.withdrawn"])
    def handle(events):
        seen.extend((event.stream, event.version, event.data) for event in events)

    ask("withdraw", {"amount": 99})  # a rejection has another type
    ask("withdraw", {"amount": 1})
    assert run_subscribers("ledger") == 1
    assert seen == [("a", 3, {"amount": 1})]


@commits
@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
def test_tombstones_seal_versions(alias, account, ask, settings):
    settings.OUTBOX = {**settings.OUTBOX, "TOMBSTONES": True}
    reader = LogReader(AccountVersion, using=alias)
    newest = Account.history("a", using=alias).get().pk
    assert reader.window._seal(newest + 3, newest + 5)
    reader.close()
    sealed = AccountVersion.objects.using(alias).filter(command_id=None)
    assert sealed.filter(rejected=False, state__isnull=True).count() == 3
    assert ask("withdraw", {"amount": 1}).version == 2
    assert Account.history("a", using=alias).count() == 2
    assert verify(Account, repair=False, using=alias, write=print) == 0


@commits
def test_an_index_of_the_log_that_refuses_a_version_is_no_rejection(alias):
    """Not even of a command that changes a column with a unique index."""
    with isolate_apps("tests.entities"):

        class DeedVersion(EntityVersion):
            place = models.CharField(max_length=20, default="one", unique=True)

        class Deed(Entity):
            versions = DeedVersion
            name = models.CharField(max_length=20, default="", unique=True)

            def columns(self):
                return {"name": self.state["name"]}

    def begin(self):
        self.state = {"name": "a"}

    def rename(self, name):
        self.state = {"name": name}

    Deed.begin, Deed.rename = command(creates=True)(begin), command()(rename)
    with tables(alias, DeedVersion, Deed):
        Deed.execute("a", "begin", command_id="x", using=alias)
        with pytest.raises(IntegrityError):
            Deed.execute("a", "rename", {"name": "b"}, command_id="y", using=alias)


@commits
@pytest.mark.parametrize("binds", [False, True])
def test_each_version_has_own_values_of_its_logs_columns(alias, binds, monkeypatch):
    """As each event of ``publish_many()`` has: in a batch, alone, and if the server binds them."""
    if binds and connections[alias].vendor == "postgresql":
        options = connections[alias].settings_dict["OPTIONS"]
        monkeypatch.setitem(options, "server_side_binding", True)
        connections[alias].close()
    with isolate_apps("tests.entities"):

        class SaleVersion(EntityVersion):
            booking = models.UUIDField(default=uuid4)
            note = models.CharField(max_length=20, default="100 %")
            price = models.DecimalField(max_digits=9, decimal_places=2, default=Decimal("1.50"))
            on = models.DateField(default=date(2026, 5, 1))
            extra = models.JSONField(default=list)
            by = models.IntegerField(null=True, default=None)

        class Sale(Entity):
            versions = SaleVersion

    def begin(self, left):
        self.state = {"left": left}

    def sell(self, left):
        self.state = {"left": left}

    Sale.begin, Sale.sell = command(creates=True)(begin), command()(sell)
    with tables(alias, SaleVersion, Sale):
        asked = [("begin", "a"), ("sell", "b"), ("sell", "c")]
        commands = [Command("a", name, {"left": x}, command_id=x) for name, x in asked]
        Sale.execute_many(commands, using=alias)
        for x in "de":
            Sale.execute("a", "sell", {"left": x}, command_id=x, using=alias)
        names = ["booking", "note", "price", "on", "extra", "by", "state"]
        found = Sale.history("a", using=alias).values_list(*names)
        assert len({booking for booking, *_ in found}) == 5
        same = ["100 %", Decimal("1.50"), date(2026, 5, 1), [], None]
        assert [each for _, *each in found] == [[*same, {"left": x}] for x in "abcde"]
    connections[alias].close()
