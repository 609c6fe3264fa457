"""``manage.py outbox_entities``: it compares, repairs and erases."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from decimal import Decimal
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections, models, transaction
from django.db.models import QuerySet
from django.utils.timezone import make_aware

from outbox_app.entities import Command, maintenance, verification
from outbox_app.entities.declaration import spec_of
from outbox_app.entities.exceptions import (
    CommandIdConflict,
    DamagedEntity,
    EntityContended,
    UnknownEntity,
)
from outbox_app.entities.handlers import derived_columns
from outbox_app.entities.maintenance import erase
from outbox_app.events import subscriber
from outbox_app.events.models import StreamHead
from outbox_app.events.testing import run_subscribers
from outbox_app.exceptions import InvalidArgument
from outbox_app.failpoints import set_failpoint
from tests.entities.models import Account, AccountVersion, Person, Stock
from tests.faults.tools import ROOT

pytestmark = pytest.mark.django_db(transaction=True)

servers = pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
TYPE = "entities.Account"


@pytest.fixture
def command(alias):
    """``command("verify")``: the exit code and the output."""

    def call(*arguments):
        out = StringIO()
        try:
            call_command("outbox_entities", *arguments, stdout=out)
        except SystemExit as exit:
            return exit.code, out.getvalue()
        except CommandError as error:
            return error.returncode, str(error)
        return 0, out.getvalue()

    return call


@pytest.fixture
def by_hand(alias):
    """``by_hand("DELETE FROM account")``: execute SQL, past all commands."""

    def execute(sql):
        with connections[alias].cursor() as cursor:
            cursor.execute(sql)

    return execute


@pytest.fixture
def many(account, ask):
    """Account a at version 3, b and c at 1, and one whose creation was rejected."""
    ask("withdraw", {"amount": 4}, command_id="four")
    ask("withdraw", {"amount": 99}, command_id="much")
    for id in "bc":
        ask("open", {"owner": id}, id=id)
    ask("refuse_to_open", id="none")


@pytest.mark.parametrize("alias", ["default"], indirect=True)
def test_a_type_whose_table_is_missing_is_named(alias, command, monkeypatch):
    monkeypatch.setattr(Account._meta, "db_table", "gone")
    code, out = command("verify")
    assert (code, "has no table gone. Run: manage.py migrate entities" in out) == (2, True), out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["verify", "Seat"], 2, "Known: entities.Account"),
        (["verify", "--database", "nowhere"], 2, "no such alias"),
        (["erase", TYPE, "x", "--reason", "why", "--no-input"], 1, "Account 'x' has no row"),
        (["erase", TYPE, "a", "--reason", " ", "--noinput"], 2, "needs a reason"),
    ],
)
@pytest.mark.parametrize("alias", ["default"], indirect=True)
def test_what_is_refused(alias, command, account, arguments, code, words):
    returned, out = command(*arguments)
    assert (returned, words in out) == (code, True), out


def test_what_commands_have_written_is_sound(alias, command, many, by_hand, monkeypatch):
    monkeypatch.setattr(verification, "BATCH_SIZE", 2)
    code, out = command("verify")
    assert (code, f"verified type={TYPE} entities=4 differences=0 repaired=0" in out) == (0, True)
    by_hand("DELETE FROM account_version WHERE stream = 'a' AND version = 1")  # pruned
    by_hand("DELETE FROM account_version WHERE stream IN ('b', 'none')")
    assert command("verify", TYPE)[0] == 0
    assert StreamHead.objects.using(alias).count() == 4


DAMAGES = {
    "there is no row, and version 3 has a state": "DELETE FROM account WHERE id = 'a'",
    "the row is at version 2, the newest version is 3": "UPDATE account SET version = 2",
    "the row has another state": "UPDATE account SET state = '{}'",
    "the head is at version 1, the newest version is 3": "UPDATE outbox_stream SET version = 1",
    "the head is at version 9, the newest version is 3": "UPDATE outbox_stream SET version = 9",
    "the head is at version 0, the newest version is 3": "DELETE FROM outbox_stream",
}


@pytest.mark.parametrize("words", DAMAGES)
def test_a_difference_is_found_and_repaired(alias, command, account, ask, rows, by_hand, words):
    ask("withdraw", {"amount": 4})
    ask("withdraw", {"amount": 99})
    before = list(QuerySet(Account, using=alias).values())
    by_hand(DAMAGES[words])
    heads = list(StreamHead.objects.using(alias).values())
    code, out = command("verify", TYPE)
    assert (code, f"difference type={TYPE} id='a': {words}" in out) == (1, True), out
    assert "differences=1 repaired=0" in out
    assert command("verify", TYPE)[0] == 1
    assert list(StreamHead.objects.using(alias).values()) == heads  # nothing was written
    code, out = command("verify", TYPE, "--repair")
    assert (code, "was written" in out, "differences=1 repaired=1" in out) == (0, True, True), out
    assert command("verify")[0] == 0
    [row] = QuerySet(Account, using=alias).values()
    assert [row[name] for name in ("id", "version", "state")] == [
        before[0][name] for name in ("id", "version", "state")
    ]
    assert ask("withdraw", {"amount": 1}).version == 4


@pytest.mark.parametrize(
    "damage", ["UPDATE outbox_stream SET version = 9", "DELETE FROM outbox_stream"]
)
def test_one_of_another_type_with_the_same_id_is_left_alone(
    alias, command, account, by_hand, damage
):
    for id in ("fill", "more"):
        Stock.execute("a", "fill", {"pieces": 5}, command_id=id, using=alias)
    by_hand(f"{damage} WHERE log = 'account_version'")
    out = command("verify", TYPE, "--repair")[1]
    assert f"verified type={TYPE} entities=1 differences=1 repaired=1" in out
    assert command("verify")[0] == 0


@pytest.fixture
def people(alias):
    """Ann and Bob, with columns of their own."""
    for id in ("ann", "bob"):
        Person.execute(id, "enter", {"email": id, "age": 7}, command_id="x", using=alias)


def test_columns_are_compared_and_written(alias, command, people, by_hand):
    before = list(QuerySet(Person, using=alias).order_by("pk").values())
    assert command("verify")[0] == 0
    by_hand("UPDATE person SET email = 'else', seat = 3 WHERE id = 'ann'")
    by_hand("DELETE FROM person WHERE id = 'bob'")
    code, out = command("verify", "person")
    assert (code, "do not follow from its state: email, seat" in out) == (1, True), out
    code, out = command("verify", "person", "--repair")
    assert (code, "differences=2 repaired=2" in out) == (0, True), out
    after = list(QuerySet(Person, using=alias).order_by("pk").values())
    assert [{**row, "changed_at": None} for row in after] == [
        {**row, "changed_at": None} for row in before
    ]
    assert after[0]["changed_at"] == before[0]["changed_at"]


@pytest.mark.filterwarnings("ignore:.*received a naive datetime")
def test_columns_are_compared_as_they_are_stored(monkeypatch):
    """A time that came without a zone has one in the row."""
    monkeypatch.setitem(spec_of(Person).fields, "nick", models.DateTimeField(null=True))
    state = {"nick": "2026-01-31T12:00:00"}
    row = Person(pk="a", version=1, state=state, nick=make_aware(datetime(2026, 1, 31, 12)))
    assert verification._stale(row) == []
    assert derived_columns("later in a batch", spec_of(Person), row)["nick"] == row.nick
    row.nick += timedelta(seconds=1)
    assert verification._stale(row) == ["nick"]


@pytest.mark.parametrize(
    ("field", "given", "read"),
    [
        (models.DecimalField(max_digits=9, decimal_places=2), "1.5", "1.50"),
        (models.DateTimeField(), "2026-01-31T12:00+02:00", "2026-01-31 10:00:00+00:00"),
        (models.JSONField(), 1e23, "100000000000000000000000"),
    ],
    ids=["decimal", "time", "json"],
)
def test_columns_are_what_a_load_gives(monkeypatch, field, given, read):
    """PostgreSQL stores a large float in JSON as an integer."""
    monkeypatch.setitem(spec_of(Person).fields, "nick", field)
    row = Person(pk="a", version=1, state={"nick": given})
    assert str(derived_columns("later in a batch", spec_of(Person), row)["nick"]) == read


class Hand:
    """Cards that are not comparable, as in Django's guide to fields."""

    def __init__(self, cards):
        self.cards = cards


class HandField(models.CharField):
    """It prepares hands only, and no text."""

    def to_python(self, value):
        return value if isinstance(value, Hand) else Hand(value.split())

    def get_prep_value(self, value):
        return " ".join(value.cards)


def test_columns_of_a_projects_field_are_left_to_it(monkeypatch):
    monkeypatch.setitem(spec_of(Person).fields, "nick", HandField())
    row = Person(pk="a", version=1, state={"nick": "ace king"}, nick=Hand(["ace", "king"]))
    assert derived_columns("a command", spec_of(Person), row)["nick"].cards == ["ace", "king"]
    assert verification._stale(row) == []
    row.nick.cards.pop()
    assert verification._stale(row) == ["nick"]


def test_json_in_a_column_is_compared_as_it_is_read(alias, command, people, monkeypatch):
    """``columns()`` may make a tuple, or whole numbers as keys. A batch sees what is read later."""
    seen = []

    def columns(self):
        seen.append(self.tags)
        return {"tags": (self.state["age"] * 1e23, {1: "a"})}

    monkeypatch.setattr(Person, "columns", columns)
    many = [Command("ann", "change", {"age": n}, command_id=f"{n}") for n in (1, 2)]
    Person.execute_many(many, using=alias)
    assert seen == [[], [10**23, {"1": "a"}]]
    Person.execute("bob", "change", {"age": 3}, command_id="3", using=alias)
    assert command("verify", "person")[0] == 0


class Exact(json.JSONDecoder):
    """It reads fractions as decimals, which the encoder of a field need not know."""

    def __init__(self):
        super().__init__(parse_float=Decimal)


def test_a_column_that_is_read_by_a_decoder_is_stored(alias, command, people, monkeypatch):
    monkeypatch.setattr(spec_of(Person).fields["tags"], "decoder", Exact)
    monkeypatch.setattr(Person, "columns", lambda self: {"tags": [self.state["age"] / 2]})
    many = [Command("ann", "change", {"age": n}, command_id=f"{n}") for n in (1, 3)]
    Person.execute_many(many, using=alias)
    assert Person.objects.using(alias).get(pk="ann").tags == [Decimal("1.5")]


def test_a_row_that_cannot_be_written_is_left(alias, command, people, by_hand, monkeypatch):
    by_hand("DELETE FROM person WHERE id = 'ann'")
    by_hand("UPDATE person SET email = 'ann' WHERE id = 'bob'")
    code, out = command("verify", "person", "--repair")
    assert (code, "differences=2 repaired=1" in out) == (1, True), out
    assert "the row cannot be written: IntegrityError" in out  # then ann's address comes free
    assert command("verify", "person", "--repair")[0] == 0
    monkeypatch.setattr(Person, "columns", lambda self: {"email": self.state["mail"]})
    code, out = command("verify", "person", "--repair")
    assert (code, "columns() raises KeyError('mail')" in out) == (1, True), out
    assert "left as it is" in out


def test_a_batch_that_keeps_its_last_state_only_is_sound(alias, command):
    commands = [Command("a", "take", {"pieces": 1}, command_id=str(n)) for n in range(3)]
    Stock.execute("a", "fill", {"pieces": 5}, command_id="fill", using=alias)
    Stock.execute_many(
        [*commands, Command("b", "fill", {"pieces": 1}, command_id="b")], using=alias
    )
    assert command("verify")[0] == 0
    assert erase(Stock, "a", reason="why", using=alias) == 4
    assert command("verify")[0] == 0


def test_a_head_and_a_row_that_are_both_gone(alias, command, many, ask, by_hand):
    by_hand("DELETE FROM outbox_stream WHERE stream = 'a'")
    by_hand("DELETE FROM account WHERE id = 'a'")
    code, out = command("verify", "--repair")
    assert (code, "the head was written, the row was written" in out) == (0, True)
    assert ask("withdraw", {"amount": 1}).response == {"balance": 5}


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("DELETE FROM account_version WHERE version = 2", "restore the missing versions"),
        ("UPDATE account_version SET state = NULL WHERE version = 2", "delete it"),
        ("DELETE FROM outbox_stream; DELETE FROM account_version", "there is no version"),
    ],
)
def test_what_no_version_can_repair_is_left(alias, command, account, ask, by_hand, sql, words):
    ask("withdraw", {"amount": 4})
    for statement in sql.split(";"):
        by_hand(statement)
    for _ in range(2):
        code, out = command("verify", "--repair")
        assert (code, words in out, "repaired=0" in out) == (1, True, True), out
    assert QuerySet(Account, using=alias).get().version == 2


def test_a_command_between_two_reads_is_no_difference(alias, command, many, ask, monkeypatch):
    read = verification._by_key

    def with_commands(*arguments):
        for batch in read(*arguments):
            ask("withdraw", {"amount": 0})
            ask("open", {"owner": "new"}, id=f"new-{batch[0][0]}")
            yield batch

    looked_at = []
    settle = verification._settle
    monkeypatch.setattr(verification, "_by_key", with_commands)
    monkeypatch.setattr(verification, "_settle", lambda *a: looked_at.append(a[1]) or settle(*a))
    code, out = command("verify", "--repair")
    assert (code, "differences=0" in out) == (0, True), out
    assert "a" in looked_at


def test_writers_are_never_reported(alias, command, account):
    """Four writers: two on one entity, two that create others."""
    ended = threading.Event()
    together = threading.Barrier(5)

    def write(writer):
        together.wait()
        number = 0
        try:
            while not ended.is_set():
                number += 1
                name = f"{writer}-{number}"
                if writer % 2:
                    arguments = {"owner": "x"}
                    Account.execute(name, "open", arguments, command_id=name, using=alias)
                else:
                    Account.execute("a", "date", command_id=name, using=alias)
            return number
        except EntityContended:
            return number
        finally:
            connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, number) for number in range(4)]
        together.wait()
        try:
            found = [command("verify", "--repair") for _ in range(5)]
        finally:
            ended.set()
        assert all(writer.result() for writer in writers)
    assert [code for code, _ in found] == [0] * 5, found


@servers
def test_an_entity_that_another_transaction_holds(alias, command, account, by_hand, monkeypatch):
    by_hand("UPDATE account SET version = 7")
    monkeypatch.setattr("outbox_app.entities.maintenance.LOCK_SECONDS", 1)
    held, ended = threading.Event(), threading.Event()

    def hold():
        try:
            with transaction.atomic(using=alias):
                StreamHead.objects.using(alias).update(version=1)
                held.set()
                ended.wait()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(hold)
        held.wait()
        try:
            code, out = command("verify")
        finally:
            ended.set()
        holder.result()
    assert (code, "is locked by another transaction" in out) == (1, True)


@pytest.mark.parametrize("alias", ["default"], indirect=True)
def test_the_loop_of_the_how_to_goes_on_and_can_be_repeated(alias, tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs/howto/operate-entities.md").read_text().partition("## Execute")[2]
    code = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    opened = {"id": "i", "command": "open", "arguments": {"owner": "i"}, "command_id": "1"}
    wrong = {**opened, "command": "nothing", "command_id": "2"}
    last = {**opened, "command": "date", "arguments": {}, "command_id": "3"}
    lines = [*map(json.dumps, (opened, wrong)), "{", json.dumps(last)]
    (tmp_path / "opening-balances.jsonl").write_text("\n".join(lines))
    for _ in range(2):
        exec(code, {"Account": Account})
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["2", "3"]
    history = AccountVersion.objects.using(alias).filter(stream="i").order_by("version")
    assert list(history.values_list("command_id", flat=True)) == ["1", "3"]


def content(alias, id="a"):
    found = QuerySet(AccountVersion, using=alias).filter(stream=id).order_by("version")
    return list(found.values_list("version", "command_id", "data", "response", "state"))


def test_an_erased_entity_is_forgotten(alias, command, many, ask):
    code, out = command("erase", TYPE, "a", "--reason", "ticket 88", "--no-input")
    assert (code, "3 versions emptied" in out, "Archives" in out) == (0, True, True)
    assert [each[1] for each in content(alias)][:3] == ["open", "four", "much"]
    assert [(number, *rest) for number, _, *rest in content(alias)] == [
        (number, {}, None, None) for number in range(1, 5)
    ]
    metadata = QuerySet(AccountVersion, using=alias).filter(stream="a").values_list("metadata")
    assert {each["erased"]["reason"] for (each,) in metadata} == {"ticket 88"}
    assert "manage.py outbox_entities" in metadata[0][0]["erased"]["by"]
    assert not QuerySet(Account, using=alias).filter(pk="a").exists()
    assert command("verify")[0] == 0
    assert QuerySet(Account, using=alias).count() == 2


def test_what_commands_get_after_an_erasure(alias, command, account, ask):
    ask("withdraw", {"amount": 4}, command_id="four")
    assert erase(Account, "a", reason="why", using=alias) == 2
    with pytest.raises(UnknownEntity):
        ask("withdraw", {"amount": 4})
    for name, arguments in (("withdraw", {"amount": 4}), ("withdraw", {"amount": 5})):
        with pytest.raises(CommandIdConflict):
            ask(name, arguments, command_id="four")
    with pytest.raises(CommandIdConflict):  # the person does not come back by a late request
        ask("open", {"owner": "ann", "balance": 10}, command_id="open")
    assert erase(Account, "a", reason="again", using=alias) == 0
    assert len(content(alias)) == 3
    assert ask("open", {"owner": "bob"}).version == 4
    assert command("verify")[0] == 0
    assert erase(Account, "a", reason="once more", using=alias) == 1
    assert [each[4] for each in content(alias)] == [None] * 5
    assert command("verify")[0] == 0


def test_a_command_that_comes_during_an_erasure_is_kept(alias, account, ask, monkeypatch):
    end = maintenance._end

    def ended(*args, **options):
        last = end(*args, **options)
        ask("open", {"owner": "bob"})
        return last

    monkeypatch.setattr(maintenance, "_end", ended)
    assert erase(Account, "a", reason="why", using=alias) == 1
    assert content(alias)[2][4]["owner"] == "bob"


def test_a_rejected_creation_is_erased_too(alias, command, ask):
    ask("open", {"owner": "ann"}, id="b")
    ask("refuse_to_open", id="a")
    assert erase(Account, "a", reason="why", using=alias) == 1
    assert [each[2:] for each in content(alias)] == [({}, None, None)] * 2
    assert command("verify")[0] == 0
    assert len(content(alias, "b")) == 1


def test_a_subscription_is_told_and_sees_nothing_of_before(alias, account, ask):
    seen = []

    @subscriber("ledger", logs=[AccountVersion])
    def handle(events):
        seen.extend((event.type, event.data) for event in events)

    erase(Account, "a", reason="why", using=alias)
    run_subscribers("ledger")
    assert seen == [("account.open", {}), ("account.erased", {})]


def test_an_erasure_that_was_broken_off_is_finished(alias, account, ask, rows, monkeypatch):
    monkeypatch.setattr(maintenance, "BATCH_SIZE", 2)
    for _ in range(4):
        ask("withdraw", {"amount": 1})
    update, calls = QuerySet.update, []

    def lost(self, **values):
        calls.append(values)
        if len(calls) == 2:
            raise OperationalError("server closed the connection")
        return update(self, **values)

    with monkeypatch.context() as patch:
        patch.setattr(QuerySet, "update", lost)
        with pytest.raises(OperationalError):
            erase(Account, "a", reason="why", using=alias)
    assert [each[4] is None for each in content(alias)] == [True] * 2 + [False] * 3 + [True]
    with pytest.raises(UnknownEntity):
        ask("withdraw", {"amount": 1})
    assert erase(Account, "a", reason="why", using=alias) == 3
    assert [each[2:] for each in content(alias)] == [({}, None, None)] * 6


@servers
def test_a_command_that_has_read_what_is_erased_writes_nothing(alias, account, ask):
    def erase_it():
        set_failpoint("entity_handled", None)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(erase_elsewhere).result()

    def erase_elsewhere():
        try:
            erase(Account, "a", reason="why", using=alias)
        finally:
            connections.close_all()

    set_failpoint("entity_handled", erase_it)
    try:
        with pytest.raises(UnknownEntity):
            ask("withdraw", {"amount": 4})
    finally:
        set_failpoint("entity_handled", None)
    assert [each[4] for each in content(alias)] == [None, None]


def test_a_head_that_is_behind_is_repaired_first(alias, account, ask, by_hand):
    ask("withdraw", {"amount": 4})
    by_hand("UPDATE outbox_stream SET version = 1")
    with pytest.raises(DamagedEntity, match=r"verify entities\.Account --repair"):
        erase(Account, "a", reason="why", using=alias)
    assert len(content(alias)) == 2


@pytest.mark.parametrize("reason", ["", "\0", "x" * 1_000_000])
def test_a_reason_that_cannot_be_kept(alias, account, reason):
    with pytest.raises(InvalidArgument):
        erase(Account, "a", reason=reason, using=alias)
    assert len(content(alias)) == 1


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 1), (EOFError, 1)])
@pytest.mark.parametrize("alias", ["default"], indirect=True)
def test_an_erasure_asks(alias, command, many, monkeypatch, answer, code):
    asked = []

    def answered(question):
        asked.append(question)
        if answer is EOFError:
            raise EOFError
        return answer

    monkeypatch.setattr("builtins.input", answered)
    assert command("erase", TYPE, "a", "--reason", "why")[0] == code
    assert asked == ["Erase entities.Account 'a', 3 versions? [y/N] "]
    assert QuerySet(Account, using=alias).filter(pk="a").exists() == bool(code)
