"""Readers of logs can read versions, with the answers in them."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.db.models import F

from outbox_app.entities import Command
from outbox_app.entities.verification import differences
from outbox_app.events import subscriber
from outbox_app.events.log.window import TOMBSTONE
from outbox_app.events.log.windows.time import TimeWindow
from outbox_app.events.models import Cursor, StreamHead
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions import subscriber as module
from outbox_app.events.testing import published_events
from tests.entities.models import Account, AccountVersion, Stock, StockVersion
from tests.entities.projected import StateOf
from tests.events.log.completeness.conftest import Reading
from tests.events.projections.declared import declare
from tests.events.projections.models import Status
from tests.faults.tools import on

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def ledger():
    """``ledger(partitions=2)``: subscribe to versions. Returns the list that the handler fills."""
    seen = []

    def make(**options):
        module._subscribers.pop("ledger", None)

        @subscriber("ledger", logs=[AccountVersion], **options)
        def handle(events):
            seen.extend(events)

        return seen

    return make


def balances(events):
    return [(each.version, each.state["balance"]) for each in events]


@pytest.mark.parametrize("way", [{}, {"by_time": True, "on_gap": "park"}], ids=["window", "time"])
def test_events_carry_the_answers(alias, account, ask, run, ledger, monkeypatch, way):
    monkeypatch.setattr(TimeWindow, "behind", 0)
    seen = ledger(**way)
    ask("withdraw", {"amount": 4}, command_id="x")
    ask("withdraw", {"amount": 40}, command_id="y")
    ask("refuse_to_open", id="b", command_id="z")
    assert run("ledger") == 4
    refusal = {"code": "balance", "text": "There is not enough on the account."}
    assert [(each.command_id, each.rejected, each.response, each.state) for each in seen] == [
        ("open", False, None, {"owner": "ann", "balance": 10}),
        ("x", False, {"balance": 6}, {"owner": "ann", "balance": 6}),
        ("y", True, refusal, {"owner": "ann", "balance": 6}),
        ("z", True, {"code": "", "text": "Not you."}, None),
    ]
    assert seen == published_events(log=AccountVersion)
    given = json.loads(json.dumps(seen[2].to_dict()))
    assert (given["command_id"], given["rejected"], given["response"]) == ("y", True, refusal)
    assert given["state"] == {"owner": "ann", "balance": 6}


def test_events_of_other_logs_are_as_they_were(alias, published, run):
    seen = []
    subscriber("plain")(seen.extend)
    published("a", data={"n": 1})
    run("plain")
    assert seen[0].command_id is None
    assert [*seen[0].to_dict()][-2:] == ["recorded_at", "log"]


@pytest.mark.parametrize("options", [{}, {"push": True}], ids=str)
def test_a_projection_has_the_newest_state(alias, ask, run, options):
    declare(StateOf, "states", **options)
    ask("open", {"owner": "ann", "balance": 10}, command_id="x")
    ask("withdraw", {"amount": 4}, command_id="y")
    ask("withdraw", {"amount": 40}, command_id="z")
    rows = Status.objects.using(alias).values_list("stream", "status", "path")
    expected = [("a", "z refused: balance", '{"balance": 6, "owner": "ann"}')]
    assert list(rows.all()) == (expected if options else [])
    run("states")
    assert list(rows.all()) == expected


def test_a_projection_is_given_a_batch(alias, ask):
    declare(StateOf, "states", push=True)
    ask("open", {"owner": "ann", "balance": 10}, command_id="x")
    commands = [Command("a", "withdraw", {"amount": 4}, command_id=f"x{n}") for n in range(3)]
    Account.execute_many(commands, using=alias)
    assert AccountVersion.objects.using(alias).count() == 4
    rows = Status.objects.using(alias).values_list("version", "status", "path")
    assert list(rows) == [(4, "x2 refused: balance", '{"balance": 2, "owner": "ann"}')]


def test_states_that_are_kept_for_the_last_of_a_batch_alone(alias, run):
    seen = []
    subscriber("stock", logs=[StockVersion])(seen.extend)
    commands = [Command("s", "take", {"pieces": 2}, command_id=f"x{n}") for n in range(3)]
    fill = Command("s", "fill", {"pieces": 4}, command_id="fill")
    Stock.execute_many([fill, *commands], using=alias)
    run("stock")
    assert [(each.response, each.state) for each in seen] == [
        (None, None),
        (2, None),
        (0, None),
        ({"code": "sold_out", "text": "Sold out."}, {"left": 0}),
    ]
    assert list(differences(Stock, using=alias)) == []


def test_a_missing_version_is_a_gap_until_it_is_back(alias, account, ask):
    ask("withdraw", {"amount": 1})
    ask("withdraw", {"amount": 2})
    rows = AccountVersion._base_manager.using(alias)
    lost = rows.get(version=2)
    rows.filter(version=2).delete()
    given = []

    class Versions(Reading):
        def note(self, events):
            given.extend(balances(events))
            super().note(events)

    reader = Versions(alias, logs=[AccountVersion])
    reader.poll()
    assert (given, reader.gaps) == ([(1, 10)], [("a", 2, 2, "open")])
    rows.bulk_create([lost])
    reader.later(5)
    reader.partition.close()
    assert (given[1:], reader.gaps) == ([(2, 9), (3, 7)], [("a", 2, 2, "filled")])


@on("mariadb")
def test_a_position_that_no_command_used_is_sealed(alias, account, ask, run, ledger, settings):
    settings.OUTBOX = {**settings.OUTBOX, "TOMBSTONES": True, "SETTLE_SECONDS": 0.0}
    seen = ledger()
    run("ledger")
    with transaction.atomic(using=alias):
        ask("withdraw", {"amount": 1})
        transaction.set_rollback(True, using=alias)
    ask("withdraw", {"amount": 2})
    run("ledger")
    run("ledger")
    sealed = AccountVersion.objects.using(alias).get(type=TOMBSTONE, pk__gt=seen[0].id)
    assert (sealed.command_id, sealed.rejected, sealed.state) == (None, False, None)
    assert balances(seen) == [(1, 10), (2, 8)]
    assert ask("withdraw", {"amount": 3}).version == 3
    run("ledger")
    assert balances(seen)[2:] == [(3, 5)]


def test_versions_are_kept_until_a_subscription_has_passed_them(
    alias, account, ask, run, ledger, rows
):
    ledger()
    run("ledger")
    ask("withdraw", {"amount": 1})
    AccountVersion._base_manager.using(alias).update(recorded_at="2020-01-01T00:00Z")

    def prune():
        output = StringIO()
        command = ("outbox_prune", "--events", "--log", "account_version", "--older-than=1")
        call_command(*command, stdout=output)
        return output.getvalue()

    assert "held log=account_version by=subscription ledger" in prune()
    assert [version for version, *_ in rows()] == [2]
    run("ledger")
    assert "removed=1" in prune()


def test_partitions_are_changed(alias, ask, run, ledger):
    ids = "abcdefgh"
    seen = ledger(partitions=2)
    for balance, partitions in enumerate([2, 3]):
        ledger(partitions=partitions)
        control.repartition("ledger")
        for id in ids:
            ask("leave", {"value": "rich"}, id=id) if balance else ask("open", {"owner": 1}, id=id)
        run("ledger")
    assert sorted((each.stream, each.version) for each in seen) == [
        (id, version) for id in ids for version in (1, 2)
    ]


@on("postgres", "mariadb")
def test_a_restored_database_is_rebased(alias, account, ask, run, ledger):
    seen = ledger()
    ask("withdraw", {"amount": 1})
    run("ledger")
    restore(alias, ask, run)
    assert run("ledger") == 0
    assert Cursor.objects.using(alias).get().error
    output = StringIO()
    call_command("outbox_rebase", "--log=account_version", stdout=output, skip_checks=True)
    assert "rebased log=account_version" in output.getvalue()
    known = len(seen)
    version = ask("withdraw", {"amount": 3}).version
    run("ledger")
    assert balances(seen[known:]) == [(version, 6)]


def restore(alias, ask, run):
    """As it was before one more command; PostgreSQL on a cluster whose ids are lower."""
    if connections[alias].vendor == "postgresql":
        AccountVersion._base_manager.using(alias).update(txid=F("txid") + 10**9)
        cursor = Cursor.objects.using(alias).get()
        state = json.loads(cursor.state)
        for name in ("lo", "hi"):
            if state[name]:
                first, last, _ = state[name].split(":")
                state[name] = f"{int(first) + 10**9}:{int(last) + 10**9}:"
        Cursor.objects.using(alias).update(state=json.dumps(state))
        return
    row = Account.objects.using(alias).get()
    ask("withdraw", {"amount": 5})
    run("ledger")
    last = AccountVersion._base_manager.using(alias).order_by("-pk").first()
    with connections[alias].cursor() as cursor:
        cursor.execute("DELETE FROM account_version WHERE version = 3")
        cursor.execute(f"ALTER TABLE account_version AUTO_INCREMENT = {last.pk}")
        state = json.dumps(row.state)
        cursor.execute("UPDATE account SET version = 2, state = %s", [state])
    StreamHead.objects.using(alias).filter(log="account_version").update(version=2)
