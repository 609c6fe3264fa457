"""The answers to callers, on each database: first answers, replays, rejections, errors."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
from django.db import connections, models, transaction
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext

from outbox_app.entities import Command, Rejected, Rejection
from outbox_app.entities.declaration import spec_of
from outbox_app.entities.exceptions import (
    CommandIdConflict,
    DamagedEntity,
    InvalidCommand,
    StatementRefused,
    UnknownEntity,
    WrittenByCommands,
)
from outbox_app.events import ANY, NO_STREAM, publish
from outbox_app.events.exceptions import VersionConflict
from outbox_app.events.models import StreamHead
from outbox_app.exceptions import InvalidArgument, NotAtomic
from tests.entities.models import Account, AccountVersion, Person, Stock
from tests.faults.tools import on

commits = pytest.mark.django_db(transaction=True)


@commits
def test_a_command_is_committed_with_its_answer_and_its_version(alias, account, ask, rows):
    outcome = ask("withdraw", {"amount": 4})
    assert (outcome.response, outcome.version) == ({"balance": 6}, 2)
    assert (outcome.rejected, outcome.replayed) == (None, False)
    row = Account.objects.using(alias).get(pk="a")
    assert (row.version, row.state) == (2, {"owner": "ann", "balance": 6})
    assert rows() == [
        (1, "open", False, {"owner": "ann", "balance": 10}),
        (2, "withdraw", False, {"owner": "ann", "balance": 6}),
    ]
    version = Account.history("a", using=alias).last()
    assert (version.type, version.data) == ("account.withdrawn", {"amount": 4})
    assert Account.history("a", using=alias).first().type == "account.open"
    assert Account.at("a", version=1, using=alias)["balance"] == 10
    with pytest.raises(UnknownEntity, match="no version 3"):
        Account.at("a", version=3, using=alias)
    with pytest.raises(InvalidArgument, match="version must be an integer from 1 on; got '1'"):
        Account.at("a", version="1", using=alias)


@commits
def test_a_command_takes_as_few_statements_as_it_can(alias, account, ask, monkeypatch):
    """And makes no query for receivers of a signal where there is none."""
    made = []
    plain = QuerySet.filter
    monkeypatch.setattr(QuerySet, "filter", lambda s, **kw: made.append(s.model) or plain(s, **kw))

    def words(command_id):
        with CaptureQueriesContext(connections[alias]) as seen:
            outcome = ask("withdraw", {"amount": 1}, command_id=command_id)
        sent = [q["sql"] for q in seen if "account" in q["sql"] or "outbox_stream" in q["sql"]]
        return outcome.replayed, [re.search("SELECT|UPDATE|INSERT", sql)[0] for sql in sent]

    one = connections[alias].vendor == "postgresql"
    reads, writes = (
        (["SELECT"], ["UPDATE"]) if one else (["SELECT"] * 2, ["UPDATE"] * 2 + ["INSERT"])
    )
    assert words("one") == (False, [*reads, *writes])
    assert words("one") == (True, reads)
    assert AccountVersion not in made


@commits
def test_the_same_id_gets_the_first_answer_whatever_holds_by_now(account, ask, rows):
    first = ask("withdraw", {"amount": 4}, command_id="one")
    refused = ask("withdraw", {"amount": 7}, command_id="two")
    assert refused.rejected == Rejection("balance", "There is not enough on the account.")
    assert refused.response is None
    ask("leave", {"value": "rich"})
    again = ask("withdraw", {"amount": 4}, command_id="one", expected_version=99)
    assert (again.response, again.version, again.replayed) == (first.response, 2, True)
    refused = ask("withdraw", {"amount": 7}, command_id="two")
    assert (refused.rejected.code, refused.version, refused.replayed) == ("balance", 3, True)
    assert [version for version, *_ in rows()] == [1, 2, 3, 4]


@commits
def test_a_rejection_is_a_version_that_changes_nothing(alias, account, ask, rows):
    with pytest.raises(Rejected, match="not enough") as caught:
        ask("withdraw", {"amount": 70}, raise_rejected=True)
    assert caught.value.code == "balance"
    assert rows()[-1] == (2, "withdraw", True, {"owner": "ann", "balance": 10})
    assert Account.history("a", using=alias).last().type == "account.withdrawn.rejected"
    row = Account.objects.using(alias).get(pk="a")
    assert (row.version, row.state["balance"]) == (2, 10)


@commits
def test_a_creation_that_is_rejected_leaves_a_head_and_no_row(alias, ask, rows):
    assert ask("refuse_to_open", command_id="no").rejected == Rejection("", "Not you.")
    assert ask("refuse_to_open", command_id="no").replayed
    assert rows() == [(1, "refuse_to_open", True, None)]
    assert not Account.objects.using(alias).exists()
    assert ask("open", {"owner": "ann"}).version == 2
    assert Account.objects.using(alias).get(pk="a").version == 2
    assert ask("withdraw", {"amount": 1}).version == 3


@commits
def test_a_creation_of_what_exists_is_rejected(account, ask):
    assert ask("open", {"owner": "bob"}).rejected.code == "exists"
    assert ask("open", {"owner": "ann", "balance": 10}, command_id="open").replayed


@commits
def test_what_a_handler_raises_is_its_callers_and_nothing_is_recorded(account, ask, rows):
    with pytest.raises(ZeroDivisionError):
        ask("fail", command_id="x")
    assert len(rows()) == 1
    assert ask("withdraw", {"amount": 1}, command_id="x").response == {"balance": 9}


@commits
def test_another_request_with_the_same_id_is_a_conflict(account, ask, rows):
    ask("withdraw", {"amount": 1}, command_id="x")
    for command, arguments in [("withdraw", {"amount": 2}), ("date", None)]:
        with pytest.raises(CommandIdConflict, match="another request"):
            ask(command, arguments, command_id="x")
    assert ask("withdraw", {"amount": 1}, command_id="X").version == 3  # ids differ in case
    assert ask("open", {"owner": "bob"}, id="b", command_id="x").version == 1
    assert len(rows()) == 3


@commits
def test_an_expected_version_is_compared(account, ask, rows):
    assert ask("withdraw", {"amount": 1}, expected_version=1).version == 2
    with pytest.raises(VersionConflict) as caught:
        ask("withdraw", {"amount": 1}, expected_version=1)
    assert caught.value.current == 2
    with pytest.raises(VersionConflict):
        ask("open", {"owner": "bob"}, expected_version=NO_STREAM)
    assert ask("withdraw", {"amount": 1}, expected_version=ANY).version == 3
    assert ask("open", {"owner": "bob"}, id="b", expected_version=NO_STREAM).version == 1
    assert len(rows()) == 3


@commits
def test_the_time_is_the_databases(alias, account, ask):
    outcome = ask("date")
    row = Account.objects.using(alias).get(pk="a")
    assert row.state["at"] == outcome.response
    assert row.changed_at.isoformat()[:19] == outcome.response[:19]


BAD_INPUT = [
    ("withdraw", {}, {}, "missing a required argument: 'amount'"),
    ("withdraw", {"amount": 1, "more": 2}, {}, "unexpected keyword argument 'more'"),
    *(("date", value, {}, "arguments must be a mapping") for value in ([1], [], 0, "", False)),
    ("withdraw", {"amount": {1}}, {}, "arguments cannot be stored as JSON"),
    ("vanish", {}, {}, "has no command 'vanish'. It has: "),
    ("withdraw", {"amount": 1}, {"id": ""}, "id must not be empty"),
    ("withdraw", {"amount": 1}, {"id": 7}, "id must be a string"),
    ("withdraw", {"amount": 1}, {"id": "$tombstone"}, "id must not be"),
    ("withdraw", {"amount": 1}, {"command_id": ""}, "command_id must not be empty"),
    ("withdraw", {"amount": 1}, {"command_id": "x" * 256}, "256 characters"),
    ("withdraw", {"amount": 1}, {"command_id": None}, "command_id must be a string"),
    *(
        ("withdraw", {"amount": 1}, {"expected_version": value}, "expected_version must be")
        for value in (0, "1", True, 2**63)
    ),
    ("leave", {"value": "nothing"}, {}, "left self.state unset"),
    ("leave", {"value": "set"}, {}, "self.state cannot be stored as JSON"),
    ("leave", {"value": "nan"}, {}, "self.state cannot be stored as JSON"),
    ("leave", {"value": "nul"}, {}, "self.state holds a NUL"),
    ("leave", {"value": "surrogate"}, {}, "self.state cannot be stored as JSON"),
    ("leave", {"value": "deep"}, {}, "nested 31 levels"),
    ("leave", {"value": "large"}, {}, "self.state is 2000009 bytes"),
]


@commits
def test_bad_input_is_refused_and_nothing_is_written(account, ask, rows):
    for command, arguments, options, expected in BAD_INPUT:
        with pytest.raises(InvalidCommand) as caught:
            ask(command, arguments, **options)
        assert expected in str(caught.value), (command, arguments, options)
    assert len(rows()) == 1


def test_a_command_id_is_required():
    with pytest.raises(TypeError, match="command_id"):
        Account.execute("a", "withdraw")


@commits
def test_an_answer_is_given_again_though_the_signature_has_changed(alias, account, ask):
    ask("withdraw", {"amount": 1}, command_id="x")
    Account.history("a", using=alias)
    with connections[alias].cursor() as cursor:  # as if an older release had had other arguments
        cursor.execute("SELECT request_hash FROM account_version WHERE version = 2")
        from outbox_app.entities.request import Call

        old = Call(Command("a", "take", {"sum": 1}, command_id="x"), 0)
        cursor.execute("UPDATE account_version SET request_hash = %s WHERE version = 2", [old.hash])
    assert ask("take", {"sum": 1}, command_id="x").response == {"balance": 9}


NUMBERS = [1e16, 1.5e300, -1e22, -0.0, 1e-7, 0.1, [1e308, "e+"], 10**30, 2**64, -(2**63) - 1]


@commits
def test_a_number_is_answered_as_it_is_read(alias, account, ask, declare):
    def note(self):
        self.state["noted"] = number
        return number

    def noted(self):
        return self.state["noted"]

    declare(note)
    declare(noted)
    for number in NUMBERS:
        outcomes = [ask("note", command_id=repr(number)) for _ in range(2)]
        answers = [*(each.response for each in outcomes), ask("noted").response]
        answers += [Account.at("a", version=outcomes[0].version, using=alias)["noted"]]
        answers += [Account.objects.using(alias).get(pk="a").state["noted"]]
        assert len({repr(answer) for answer in answers}) == 1, number


@commits
def test_integers_beyond_64_bits_are_counted_one_by_one_and_in_a_batch(alias):
    def more(id):
        return [Command(id, "take", {"pieces": -1}, command_id=f"{n}") for n in range(5)]

    for id in ("one by one", "batch"):
        Stock.execute(id, "fill", {"pieces": 2**64 - 1}, command_id="fill", using=alias)
    one = [
        Stock.execute(
            each.id, each.command, each.arguments, command_id=each.command_id, using=alias
        )
        for each in more("one by one")
    ]
    many = Stock.execute_many(more("batch"), using=alias)
    again = Stock.execute_many(more("batch"), using=alias)
    for outcomes in (one, many, again):
        assert [each.response for each in outcomes] == [2**64 + n for n in range(5)]
    assert {row.state["left"] for row in Stock.objects.using(alias).all()} == {2**64 + 4}


@commits
@on("mysql")
def test_an_integer_that_mysqls_own_json_would_change_is_refused(alias, monkeypatch):
    """In a column of the project. Nothing is written, and the transaction goes on."""
    monkeypatch.setitem(spec_of(Person).fields, "tags", models.JSONField(default=list))
    for number, refused in [(2**64, True), (-(2**63) - 1, True), (1e20, True), (2**64 - 1, False)]:
        monkeypatch.setattr(Person, "columns", lambda self, n=number: {"tags": [{"n": n}]})
        with transaction.atomic(using=alias):
            expected = pytest.raises(InvalidCommand, match="which MySQL's JSON would make a float")
            with expected if refused else nullcontext():
                Person.execute(f"{number}", "enter", command_id="1", using=alias)
    assert Person.objects.using(alias).get().tags == [{"n": 2**64 - 1}]


@commits
def test_an_unknown_entity(ask, rows):
    with pytest.raises(UnknownEntity, match="There is no Account 'a'"):
        ask("withdraw", {"amount": 1})
    assert rows() == []


@commits
def test_a_handler_may_not_query_unless_it_says_so(alias, account, ask, rows):
    with pytest.raises(StatementRefused, match="may not query a database"):
        ask("look", {"using": alias})
    assert ask("look_around", {"using": alias}).response == 1
    assert len(rows()) == 2


@commits
def test_a_row_that_was_edited_by_hand_is_found(alias, account, ask, rows):
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE account SET version = 7 WHERE id = 'a'")
    with pytest.raises(DamagedEntity, match=r"hand.*Run manage.py outbox_entities verify"):
        ask("withdraw", {"amount": 1})
    assert len(rows()) == 1


@commits
def test_a_row_that_was_edited_by_hand_hides_no_answer_of_before(alias):
    """Beside a new command, too, which ends with an error of its own."""
    fill = Command("x", "fill", {"pieces": 9}, command_id="fill")
    first, *new = (Command("x", "sell", {"pieces": 1}, command_id=id) for id in "abc")
    Stock.execute_many([fill, first], using=alias)
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE stock SET version = 7 WHERE id = 'x'")
    known, *refused = Stock.execute_many([first, *new], using=alias, return_exceptions=True)
    assert (known.version, known.replayed) == (2, True)
    assert [type(each) for each in refused] == [DamagedEntity] * 2


@commits
def test_inside_atomic_it_belongs_to_the_callers_transaction(alias, account, ask, rows):
    with transaction.atomic(using=alias):
        assert ask("withdraw", {"amount": 1}, command_id="x").response == {"balance": 9}
        transaction.set_rollback(True, using=alias)
    assert len(rows()) == 1
    with transaction.atomic(using=alias):
        assert not ask("withdraw", {"amount": 1}, command_id="x").replayed
        assert ask("withdraw", {"amount": 1}, command_id="x").replayed
        with pytest.raises(InvalidCommand):
            ask("withdraw", {})
        assert ask("open", {"owner": "bob"}, id="b").version == 1
    assert len(rows()) == 2


def test_inside_the_transaction_of_a_test_too(account, ask):
    assert ask("withdraw", {"amount": 4}).response == {"balance": 6}


@pytest.mark.parametrize("alias", ["postgres", "mariadb"])
@pytest.mark.django_db(transaction=True, databases="__all__")
def test_a_transaction_on_another_alias_only_is_refused(alias):
    with transaction.atomic(using="default"), pytest.raises(NotAtomic, match="'default'"):
        Account.execute("a", "open", {"owner": "ann"}, command_id="x", using=alias)


@commits
def test_one_command_id_of_many_threads_is_executed_once(alias, account, rows):
    together = threading.Barrier(8)

    def withdraw(number):
        together.wait()
        try:
            return Account.execute(
                "a", "withdraw", {"amount": 1}, command_id=f"c{number % 2}", using=alias
            )
        finally:
            connections.close_all()

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(withdraw, range(8)))
    assert sorted({outcome.version for outcome in outcomes}) == [2, 3]
    assert sum(not outcome.replayed for outcome in outcomes) == 2
    assert rows()[-1] == (3, "withdraw", False, {"owner": "ann", "balance": 8})


@commits
def test_creators_that_race_create_once(alias, rows):
    together = threading.Barrier(6)

    def create(number):
        together.wait()
        try:
            return Account.execute(
                "a", "open", {"owner": str(number)}, command_id=f"c{number}", using=alias
            )
        finally:
            connections.close_all()

    with ThreadPoolExecutor(6) as pool:
        outcomes = list(pool.map(create, range(6)))
    assert sum(outcome.rejected is None for outcome in outcomes) == 1
    assert sorted(outcome.version for outcome in outcomes) == [1, 2, 3, 4, 5, 6]


def test_rows_are_written_by_commands_only(alias, account):
    for write in (
        lambda: Account(pk="x", version=1, state={}).save(),
        lambda: Account.objects.using(alias).update(version=3),
        lambda: Account.objects.using(alias).create(pk="x"),
        lambda: Account.objects.using(alias).all().delete(),
        lambda: AccountVersion.objects.using(alias).bulk_create([]),
        lambda: Account.objects.using(alias).get(pk="a").delete(),
        lambda: Account.history("a", using=alias).delete(),
        lambda: publish("a", "b", log=AccountVersion, using=alias),
    ):
        with pytest.raises(WrittenByCommands, match="commands"):
            write()


def test_versions_are_a_log_with_a_head(alias, account):
    head = StreamHead.objects.using(alias).get(log="account_version", stream="a")
    assert head.version == 1
