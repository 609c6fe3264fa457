"""A batch of N equals N batches of one: versions, states and answers, with any mix of commands."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import DataError, OperationalError, connections, transaction
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext
from django.utils import timezone, translation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox_app.database.transaction_guard import ConnectionClosed
from outbox_app.entities import Command, Rejected, Rejection, command
from outbox_app.entities import transaction as entity_transaction
from outbox_app.entities.declaration import spec_of
from outbox_app.entities.exceptions import CommandIdConflict, InvalidCommand
from outbox_app.entities.request import Call
from outbox_app.events.exceptions import VersionConflict
from outbox_app.events.signals import events_published
from outbox_app.exceptions import TransactionEnded
from outbox_app.failpoints import set_failpoint
from tests.entities.models import Account, AccountVersion, Person, PersonVersion, Stock

commits = pytest.mark.django_db(transaction=True)


def history(entity, id, alias):
    fields = ("version", "command_id", "type", "rejected", "response", "data")
    return list(entity.history(id, using=alias).values_list(*fields))


def plain(answer):
    """An answer as it can be compared between two runs."""
    if isinstance(answer, Exception):
        return type(answer).__name__
    return answer.response, answer.version, answer.rejected, answer.replayed


class Emptied(Exception):
    """Ends an example, and its rows."""


def run(entity, commands, size, alias):
    """Answers, versions and rows of the commands in batches of this size; then they are undone."""
    try:
        with transaction.atomic(using=alias):
            taken = {"email": "x", "row": 1, "seat": 1}
            if entity is Person:
                Person.execute("b", "enter", taken, command_id="b", using=alias)
            answers = []
            for start in range(0, len(commands), size):
                batch = commands[start : start + size]
                answers += entity.execute_many(batch, using=alias, return_exceptions=True)
            versions = history(entity, "a", alias)
            states = list(entity.objects.using(alias).filter(pk="a").values_list())
            states = [value[:3] + value[4:] for value in states]  # without the time
            raise Emptied
    except Emptied:
        return [plain(answer) for answer in answers], versions, states


ids = st.sampled_from([f"id{number}" for number in range(8)])
versions = st.sampled_from([None, 1, 2])


def commands(*kinds):
    def build(drawn):
        found = []
        for (name, arguments), command_id, expected in drawn:
            options = {} if expected is None else {"expected_version": expected}
            found.append(Command("a", name, arguments, command_id=command_id, **options))
        return found

    each = st.tuples(st.one_of(*kinds), ids, versions)
    return st.lists(each, max_size=12).map(build)


people = commands(
    st.builds(
        lambda e, s: ("enter", {"email": e, "row": 1, "seat": s}),
        st.sampled_from("xyz"),
        st.integers(1, 2),
    ),
    st.builds(lambda e: ("change", {"email": e}), st.sampled_from(["x", "y", None, "e" * 21])),
    st.builds(lambda s: ("change", {"seat": s}), st.integers(1, 2)),
    st.builds(lambda a: ("change", {"age": a}), st.sampled_from([3, -1, "old", 1.5])),
)
stocks = commands(
    st.just(("fill", {"pieces": 5})),
    st.builds(lambda n: ("sell", {"pieces": n}), st.integers(-1, 4)),
    st.builds(lambda n: ("sell", {"pieces": n}), st.sampled_from(["two", -20])),
    st.builds(lambda n: ("take", {"pieces": n}), st.integers(1, 3)),
)
accounts = commands(
    st.just(("open", {"owner": "ann", "balance": 5})),
    st.just(("fail", {})),
    st.just(("refuse_to_open", {})),
    st.just(("unknown", {})),
    st.builds(lambda n: ("withdraw", {"amount": n}), st.integers(0, 4)),
    st.builds(lambda n: ("leave", {"value": n}), st.sampled_from(["rich", "set", "nothing"])),
)


@pytest.mark.parametrize(
    ("entity", "made"),
    [(Account, accounts), (Stock, stocks), (Person, people)],
    ids=["plain", "last", "columns"],
)
def test_a_batch_of_n_is_n_batches_of_one(alias, entity, made):
    @settings(
        max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(made, st.sampled_from([2, 7, 1000]))
    def check(commands, size):
        assert run(entity, commands, size, alias) == run(entity, commands, 1, alias)

    check()


@pytest.mark.parametrize("size", [1, 3])
def test_a_handler_sees_when_the_command_before_it_has_changed_the_entity(alias, declare, size):
    """So that it can refuse two changes within a second, say."""

    def look(self):
        seen.append((self._state.adding, self.changed_at == nows[-1]))
        if self.version == 1:
            raise Rejected("This one changes nothing.")
        nows.append(self.now)
        self.state = {}

    def begin(self):
        look(self)

    declare(begin, creates=True)
    declare(look)
    seen, nows = [], [None]
    commands = [
        Command("a", name, command_id=f"{number}")
        for number, name in enumerate(("begin", "look", "look"))
    ]
    for start in range(0, 3, size):
        Account.execute_many(commands[start : start + size], using=alias)
    assert seen == [(True, True), (False, True), (False, True)]


def test_a_batch_handler_that_rejects_all_has_not_changed_the_entity(alias, monkeypatch):
    seen = []

    def look(self):
        seen.append(self.changed_at == self.now)

    monkeypatch.setattr(Stock, "look", command()(look), raising=False)
    spec_of.cache_clear()
    Stock.execute("a", "fill", {"pieces": 1}, command_id="fill", using=alias)
    QuerySet(Stock, using=alias).update(changed_at=timezone.now() - timedelta(days=1))
    sold = [Command("a", "sell", {"pieces": 2}, command_id=f"{number}") for number in range(2)]
    Stock.execute_many([*sold, Command("a", "look", command_id="look")], using=alias)
    spec_of.cache_clear()
    assert seen == [False]


def test_the_rows_of_a_batch_are_written_by_few_statements(alias, account):
    """Also where one of them fails, and one is rejected."""
    commands = [Command("a", "withdraw", {"amount": 0}, command_id=f"c{n}") for n in range(200)]
    commands[50:50] = [Command("a", "fail", command_id="f"), Command("a", "x", command_id="x")]
    commands[99] = Command("a", "withdraw", {"amount": 99}, command_id="r")
    with CaptureQueriesContext(
        connections[alias],
    ) as seen:
        answers = Account.execute_many(commands, using=alias, return_exceptions=True)
    assert sum(isinstance(answer, Exception) for answer in answers) == 2
    assert answers[-1].version == 201
    assert len(seen) <= 12


@commits
def test_one_that_the_database_refuses_costs_no_other_its_answer(alias, account, ask, rows):
    """It is found by halves, not by running one after the other."""
    sent = []

    def refuse(sender, events, **kwargs):
        sent.append(len(events))
        if any(event.command_id == "c37" for event in events):
            raise DataError("out of range")

    commands = [Command("a", "withdraw", {"amount": 0}, command_id=f"c{n}") for n in range(64)]
    events_published.connect(refuse, sender=AccountVersion)
    try:
        answers = Account.execute_many(commands, using=alias, return_exceptions=True)
    finally:
        events_published.disconnect(refuse, sender=AccountVersion)
    assert [type(a).__name__ for a in answers] == ["Outcome"] * 37 + ["DataError"] + [
        "Outcome"
    ] * 26
    assert [version for version, *_ in rows()] == list(range(1, 65))
    assert len(sent) <= 2 * 6 + 1


@commits
def test_what_comes_after_a_half_that_ends_early_keeps_its_turn(alias):
    """The command that changes a unique column ends its transaction; all others follow it."""
    failures = [0] * 9 + [1]

    def refuse(sender, events, **kwargs):
        if failures.pop():
            raise DataError("once")

    Person.execute("a", "enter", {}, command_id="enter", using=alias)
    commands = [
        Command("a", "change", {"email": "x"} if n == 1 else {"age": n}, command_id=f"{n}")
        for n in range(8)
    ]
    events_published.connect(refuse, sender=PersonVersion)
    try:
        answers = Person.execute_many(commands, using=alias)
    finally:
        events_published.disconnect(refuse, sender=PersonVersion)
    assert [each.version for each in answers] == list(range(2, 10))


@commits
def test_the_time_limit_of_a_task_comes_in_a_callback_of_the_commit(alias):
    """The callbacks of the other commands of the batch run all the same."""
    called = []

    def end():
        called.append("end")
        raise SoftTimeLimitExceeded

    def receive(**facts):
        for call in (end, lambda: called.append("next")):
            transaction.on_commit(call, using=alias)

    events_published.connect(receive, sender=PersonVersion)
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            Person.execute("a", "enter", {}, command_id="1", using=alias)
    finally:
        events_published.disconnect(receive, sender=PersonVersion)
    assert called == ["end", "next"]
    assert Person.history("a", using=alias).count() == 1


@commits
@pytest.mark.parametrize("point", ["loaded", "handled", "written", "committed", "sell", "take"])
def test_the_time_limit_of_a_task_ends_it(alias, monkeypatch, point):
    """It comes at any line, and is no answer to the command whose line that is."""
    limits = [SoftTimeLimitExceeded]

    def end():
        if limits:
            raise limits.pop()

    def sell(self, requests):
        end()
        return [None for _ in requests]

    def take(self, pieces):
        end()

    Stock.execute("a", "fill", {"pieces": 9}, command_id="fill", using=alias)
    if point in ("sell", "take"):
        handler = command(batch=True)(sell) if point == "sell" else command()(take)
        monkeypatch.setattr(Stock, point, handler)
    spec_of.cache_clear()
    name = "sell" if point == "sell" else "take"
    commands = [Command("a", name, {"pieces": 1}, command_id=f"c{n}") for n in range(4)]
    set_failpoint(f"entity_{point}", end)
    try:
        with pytest.raises(SoftTimeLimitExceeded):
            Stock.execute_many(commands, using=alias, return_exceptions=True)
    finally:
        set_failpoint(f"entity_{point}", None)
    assert Stock.history("a", using=alias).count() == (5 if point == "committed" else 1)
    answers = Stock.execute_many(commands, using=alias)
    assert [each.version for each in answers] == [2, 3, 4, 5]
    spec_of.cache_clear()


@commits
def test_without_return_exceptions_the_first_error_is_raised_after_all_calls(alias, account, rows):
    commands = [
        Command("a", "withdraw", {"amount": 1}, command_id="x"),
        Command("a", "withdraw", {"amount": 2}, command_id="x"),
        Command("", "withdraw", {"amount": 2}, command_id="y"),
        Command("a", "withdraw", {"amount": 1}, command_id="z"),
    ]
    with pytest.raises(CommandIdConflict):
        Account.execute_many(commands, using=alias)
    assert len(rows()) == 3
    answers = Account.execute_many(commands, using=alias, return_exceptions=True)
    assert [plain(answer) for answer in answers] == [
        ({"balance": 9}, 2, None, True),
        "CommandIdConflict",
        "InvalidCommand",
        ({"balance": 8}, 3, None, True),
    ]


@commits
def test_an_expected_version_is_that_of_its_turn(alias, account):
    def withdraw(id, version):
        return Command("a", "withdraw", {"amount": 1}, command_id=id, expected_version=version)

    commands = [withdraw("x", 1), withdraw("y", 2), withdraw("z", 2)]
    answers = Account.execute_many(commands, using=alias, return_exceptions=True)
    assert [getattr(answer, "version", None) for answer in answers] == [2, 3, None]
    assert isinstance(answers[2], VersionConflict)
    assert answers[2].current == 3


@commits
def test_a_type_may_keep_the_last_state_of_each_transaction_only(alias):
    commands = [Command("a", "fill", {"pieces": 9}, command_id="fill")]
    commands += [Command("a", "sell", {"pieces": 2}, command_id=f"c{n}") for n in range(6)]
    answers = Stock.execute_many(commands, using=alias)
    assert [a.response for a in answers] == [None, 7, 5, 3, 1, None, None]
    assert [a.rejected for a in answers[5:]] == [Rejection("sold_out", "Sold out.")] * 2
    states = list(Stock.history("a", using=alias).values_list("state", flat=True))
    assert states == [None] * 6 + [{"left": 1}]
    assert Stock.at("a", version=7, using=alias) == {"left": 1}


@commits
def test_a_handler_of_batches_is_called_once_for_those_that_follow_one_another(alias, monkeypatch):
    calls = []

    def sell(self, requests):
        calls.append([each["pieces"] for each in requests])
        return original(self, requests)

    original = Stock.sell
    monkeypatch.setattr(Stock, "sell", command(batch=True)(sell))
    spec_of.cache_clear()
    Stock.execute("a", "fill", {"pieces": 9}, command_id="fill", using=alias)
    commands = [Command("a", "sell", {"pieces": n}, command_id=f"c{n}") for n in (1, 2, 3)]
    commands.insert(2, Command("a", "take", {"pieces": 1}, command_id="take"))
    commands.append(Command("a", "sell", {"pieces": 0}, command_id="c1"))  # a conflict
    Stock.execute_many(commands, using=alias, return_exceptions=True)
    assert calls == [[1, 2], [3]]
    spec_of.cache_clear()


def test_callers_of_another_language_or_zone_have_a_call_of_a_handler_of_batches(
    alias, monkeypatch
):
    """What it says is kept, and given again for their ids."""
    calls = []

    def sell(self, requests):
        calls.append(len(requests))
        said = f"{translation.get_language()} {timezone.get_current_timezone_name()}"
        return [said, *[Rejected(said)] * (len(requests) - 1)]

    monkeypatch.setattr(Stock, "sell", command(batch=True)(sell))
    spec_of.cache_clear()
    Stock.execute("a", "fill", {"pieces": 9}, command_id="fill", using=alias)
    asked = []
    for number, (language, zone) in enumerate([("de", "UTC"), ("de", "UTC"), ("fr", "Asia/Tokyo")]):
        with translation.override(language), timezone.override(zone):
            asked.append(Call(Command("a", "sell", command_id=f"c{number}")))
    entity_transaction.answer(Stock, asked, using=alias)
    assert [each.answer.response for each in asked] == ["de UTC", None, "fr Asia/Tokyo"]
    assert (asked[1].answer.rejected.text, calls) == ("de UTC", [2, 1])
    spec_of.cache_clear()


@commits
def test_commands_that_end_their_batch_are_given_to_a_handler_of_batches_once(alias, monkeypatch):
    """As each changes what an index is about: others would be run a hundred times."""
    calls = []

    def sell(self, requests):
        calls.append(len(requests))
        return original(self, requests)

    original = Stock.sell
    monkeypatch.setattr(Stock, "sell", command(batch=True)(sell))
    spec_of.cache_clear()
    monkeypatch.setattr(spec_of(Stock), "unique", {"state"})
    Stock.execute("a", "fill", {"pieces": 9}, command_id="fill", using=alias)
    commands = [Command("a", "sell", {"pieces": 1}, command_id=f"c{n}") for n in range(5)]
    answers = Stock.execute_many(commands, using=alias)
    assert [answer.response for answer in answers] == [8, 7, 6, 5, 4]
    assert calls == [5, 1, 1, 1, 1, 1]
    spec_of.cache_clear()


@commits
def test_a_handler_of_batches_is_called_once_again_after_a_commit_that_was_lost(alias, monkeypatch):
    """The state may be large: one by one it would be decoded and encoded a thousand times."""
    calls = []

    def sell(self, requests):
        calls.append(len(requests))
        return original(self, requests)

    def lost():
        monkeypatch.setattr(connection, "_commit", commit)
        connection.connection.close()
        raise OperationalError("server closed the connection unexpectedly")

    original, connection = Stock.sell, connections[alias]
    commit = connection._commit
    Stock.execute("a", "fill", {"pieces": 9}, command_id="fill", using=alias)
    monkeypatch.setattr(Stock, "sell", command(batch=True)(sell))
    spec_of.cache_clear()
    monkeypatch.setattr(connection, "_commit", lost)
    commands = [Command("a", "sell", {"pieces": 1}, command_id=f"c{n}") for n in range(4)]
    answers = Stock.execute_many(commands, using=alias)
    assert [answer.response for answer in answers] == [8, 7, 6, 5]
    assert calls == [4, 4]
    spec_of.cache_clear()


@commits
@pytest.mark.parametrize("left", [None, [1], "ab", [{1}, {2}]])
def test_a_handler_of_batches_that_returns_something_else(alias, monkeypatch, left):
    def sell(self, requests):
        return left if len(requests) > 1 else None

    monkeypatch.setattr(Stock, "sell", command(batch=True)(sell))
    spec_of.cache_clear()
    Stock.execute("a", "fill", {"pieces": 9}, command_id="fill", using=alias)
    commands = [Command("a", "sell", {"pieces": 1}, command_id=f"c{n}") for n in (1, 2)]
    answers = Stock.execute_many(commands, using=alias, return_exceptions=True)
    assert all(isinstance(answer, InvalidCommand) for answer in answers)
    assert "must return a list with an answer for each of 1 commands" in str(answers[0])
    spec_of.cache_clear()


@commits
def test_an_atomic_command_sees_what_those_before_it_have_done(alias, declare, batches, rows):
    """Its own row, too, as it would one by one."""

    def read(self):
        return Account.objects.using(alias).get(pk=self.pk).state["balance"]

    def read_and_fail(self):
        return read(self) / 0

    declare(read, atomic=True)
    declare(read_and_fail, atomic=True)
    commands = [
        Command("a", "open", {"owner": "ann", "balance": 5}, command_id="x"),
        Command("a", "read", command_id="y"),
        Command("a", "withdraw", {"amount": 1}, command_id="z"),
        Command("a", "read", command_id="w"),
        Command("a", "withdraw", {"amount": 9}, command_id="no"),
        Command("a", "read_and_fail", command_id="f"),
    ]
    *answers, error = Account.execute_many(commands, using=alias, return_exceptions=True)
    assert [answer.response for answer in answers] == [None, 5, {"balance": 4}, 4, None]
    assert type(error) is ZeroDivisionError
    assert [(version, state["balance"]) for version, *_, state in rows()] == [
        *((1, 5), (2, 5), (3, 4), (4, 4), (5, 4))
    ]
    assert batches == [6]
    assert Account.execute("a", "withdraw", {"amount": 4}, command_id="v", using=alias).version == 6


@commits
def test_who_changes_an_answer_changes_no_other(alias, account):
    command = Command("a", "withdraw", {"amount": 1}, command_id="x")
    for _ in range(2):  # the second time they are found
        answers = Account.execute_many([command] * 3, using=alias)
        for answer in answers:
            answer.response["balance"] -= 1
        assert [answer.response for answer in answers] == [{"balance": 8}] * 3


@commits
def test_a_handler_that_ends_the_transaction_costs_no_other_its_answer(
    alias, account, declare, rows
):
    connection = connections[alias]
    swallows = connection.vendor == "mysql"  # where a deadlock undoes the whole transaction

    def end(self):
        used = connection.connection
        used.execute("ROLLBACK") if hasattr(used, "execute") else used.rollback()
        if swallows:
            with connection.cursor() as cursor, suppress(OperationalError):
                cursor.execute("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213")

    declare(end, atomic=True)
    asked = [Command("a", "withdraw", {"amount": 1}, command_id=each) for each in "xy"]
    asked += [Command("a", "end", command_id="end")]
    *answers, ended = Account.execute_many(asked, using=alias, return_exceptions=True)
    assert isinstance(ended, OperationalError if swallows else TransactionEnded)
    assert [answer.version for answer in answers] == [2, 3]
    assert [command for _, command, *_ in rows()] == ["open", "withdraw", "withdraw"]


@commits
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("then", ["returns", "raises"])
def test_a_handler_that_closes_its_connection_costs_no_other_its_answer(
    alias, account, declare, rows, then, atomic
):
    def close(self):
        connections[alias].close()
        if then == "raises":
            raise ValueError

    declare(close, atomic=atomic)
    asked = [Command("a", "withdraw", {"amount": 1}, command_id=each) for each in "xy"]
    asked += [Command("a", "close", command_id="close")]
    *answers, closed = Account.execute_many(asked, using=alias, return_exceptions=True)
    assert isinstance(closed, ConnectionClosed)
    assert "close closed the connection of its transaction" in str(closed)
    assert [answer.version for answer in answers] == [2, 3]
    assert [command for _, command, *_ in rows()] == ["open", "withdraw", "withdraw"]
