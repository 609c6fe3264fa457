"""A command is never executed again after retention has removed its version: money moves once."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import date, timedelta
from io import StringIO
from threading import Event as Signal
from threading import Thread

import pytest
from asgiref.sync import async_to_sync
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext

from outbox_app.database.clock import DatabaseNow
from outbox_app.entities import Command, Outcome, command
from outbox_app.entities.declaration import spec_of
from outbox_app.entities.exceptions import AnswerArchived, AnswerGone, CommandIdConflict
from outbox_app.entities.maintenance import erase
from outbox_app.entities.models import PrunedCommand, command_key, log_number
from outbox_app.events import prune_events
from outbox_app.events.sink import Sink
from outbox_app.exceptions import InvalidArgument
from outbox_app.pipeline.exceptions import ArchiveRefused
from outbox_app.retention import prune
from outbox_app.retention.run import Retention
from tests import forking
from tests.archives import archive
from tests.docs.test_code_in_docs import blocks
from tests.entities.models import Account, AccountVersion, Person, PersonVersion
from tests.faults.tools import ROOT
from tests.patience import SECONDS, patience
from tests.servers import processes

pytestmark = pytest.mark.django_db(transaction=True)

OPEN = ("open", {"owner": "ann", "balance": 10})
WITHDRAW = ("withdraw", {"amount": 1})


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "versions")


@pytest.fixture
def ask(alias):
    """``ask("x")``: withdraw 1 from account a by a command with the id x."""

    def execute(command_id, asked=WITHDRAW, *, id="a", **options):
        return Account.execute(id, *asked, command_id=command_id, using=alias, **options)

    return execute


@pytest.fixture
def age(alias):
    """``age(40)``: let all versions be 40 days old; those that are stay as they are archived."""

    def change(days=40):
        old = DatabaseNow() - timedelta(days=days)
        for log in (AccountVersion, PersonVersion):
            young = QuerySet(log, using=alias).filter(recorded_at__gt=old + timedelta(hours=1))
            young.update(recorded_at=old)

    return change


@pytest.fixture
def sink(alias, folder, settings, age):
    """``sink()``: archive all versions of accounts, and let them sink."""
    settings.OUTBOX = {**settings.OUTBOX, "SINK": {"account_version": (folder, 3)}}

    def run():
        age()
        archive(alias, folder, log=AccountVersion)
        return Sink(AccountVersion).run(once=True)

    return run


def balance(alias, id="a"):
    return Account.objects.using(alias).get(pk=id).state["balance"]


def ways(alias, folder):
    given = {"using": alias, "older_than": 3, "log": "account_version", "batch_size": 2}
    return {
        "sink": lambda: Sink(AccountVersion).run(once=True),
        "prune_archived": lambda: prune_events(archive=folder, **given),
        "prune": lambda: prune_events(**given),
    }


@pytest.mark.parametrize("way", ["sink", "prune_archived", "prune"])
def test_a_repeat_is_not_executed(alias, ask, age, folder, settings, way):
    settings.OUTBOX = {**settings.OUTBOX, "SINK": {"account_version": (folder, 3)}}
    first = [ask("open", OPEN), ask("x"), ask("no", ("withdraw", {"amount": 100}))]
    age()
    ask("new")
    archive(alias, folder, log=AccountVersion)
    assert ways(alias, folder)[way]() == 3
    assert balance(alias) == 8
    expected = AnswerGone if way == "prune" else AnswerArchived
    for command_id, version in (("open", 1), ("x", 2), ("no", 3)):
        with pytest.raises(AnswerGone, match="is not executed again") as caught:
            ask(command_id)
        assert (type(caught.value), caught.value.version) == (expected, version)
        with transaction.atomic(using=alias), pytest.raises(expected):
            ask(command_id)
    assert ask("new").replayed
    assert balance(alias) == 8
    assert list(Account.history("a", using=alias).values_list("version", flat=True)) == [4]
    if way != "prune":
        told = [
            ask("open", OPEN, archive=folder),
            ask("x", archive=folder),
            ask("no", ("withdraw", {"amount": 100}), archive=folder),
        ]
        assert told == [replace(each, replayed=True) for each in first]
    assert ask("after").response == {"balance": 7}


@pytest.mark.usefixtures("fresh")
def test_the_first_answer_is_read_from_the_archive(alias, ask, sink, folder, tmp_path):
    ask("open", OPEN)
    first = ask("x")
    ask("no", ("withdraw", {"amount": 100}))
    assert sink() == 3
    given = {"command_id": "x", "using": alias, "archive": folder}
    assert async_to_sync(Account.aexecute)("a", *WITHDRAW, **given).response == first.response
    with pytest.raises(CommandIdConflict, match="'withdraw' at version 2: the command or its arg"):
        ask("x", ("withdraw", {"amount": 2}), archive=folder)
    with pytest.raises(ArchiveRefused, match="is no archive"):
        ask("x", archive=str(tmp_path / "nowhere"))
    asked = [
        Command("a", *WITHDRAW, command_id="x"),
        Command("a", *WITHDRAW, command_id="new"),
        Command("a", "withdraw", {"amount": 2}, command_id="x"),
        Command("a", "withdraw", {"amount": 100}, command_id="no"),
    ]
    options = {"using": alias, "return_exceptions": True}
    answers = Account.execute_many(asked, archive=folder, **options)
    assert answers[0] == Outcome(first.response, 2, None, replayed=True)
    assert (answers[1].version, answers[1].replayed) == (4, False)
    assert isinstance(answers[2], CommandIdConflict)
    assert (answers[3].rejected.code, answers[3].version) == ("balance", 3)
    answers = Account.execute_many(asked, **options)
    kinds = [type(each).__name__ for each in answers]
    assert kinds == ["AnswerArchived", "Outcome", "AnswerArchived", "AnswerArchived"]
    assert balance(alias) == 8


def test_an_archive_without_the_version_is_refused(alias, ask, sink, folder, tmp_path):
    """The log was archived into a second folder since."""
    ask("open", OPEN)
    sink()
    ask("x")
    archive(alias, tmp_path / "second", log=AccountVersion)
    with pytest.raises(ArchiveRefused, match="has no version 1 of Account 'a' with the command id"):
        ask("open", OPEN, archive=str(tmp_path / "second"))


def test_the_error_needs_no_pyarrow(alias, ask, sink, monkeypatch):
    ask("open", OPEN)
    sink()
    for name in ("pyarrow", "deltalake", "outbox_app.pipeline.table"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AnswerArchived):
        ask("open", OPEN)


def test_an_id_is_its_entitys_and_its_types_own(alias, ask, sink, age):
    ask("open", OPEN)
    ask("open", OPEN, id="b")
    Person.execute("a", "enter", {"age": 1}, command_id="open", using=alias)
    ask("x")
    sink()
    assert not ask("x", id="b").replayed
    person = Person.execute("a", "change", {"age": 2}, command_id="x", using=alias)
    assert (person.version, person.replayed) == (2, False)
    assert PrunedCommand.objects.using(alias).count() == 3
    assert len(command_key("a", "b")) == 32
    assert log_number("account_version") != log_number("person_version")
    assert command_key("ab", "c") != command_key("a", "bc")


def test_a_batch_handler_gets_new_commands_only(alias, ask, sink, monkeypatch):
    given = []

    def add(self, requests):
        given.append(len(requests))
        self.state["balance"] += len(requests)
        return [self.state["balance"] for _ in requests]

    monkeypatch.setattr(Account, "states", "last")
    monkeypatch.setattr(Account, "add", command(batch=True)(add), raising=False)
    spec_of.cache_clear()
    ask("open", OPEN)
    ask("c1", ("add", {}))
    sink()
    given.clear()
    asked = [Command("a", "add", command_id=f"c{number}") for number in range(5)]
    answers = Account.execute_many(asked, using=alias, return_exceptions=True)
    spec_of.cache_clear()
    assert isinstance(answers[1], AnswerArchived)
    assert [answers[n].version for n in (0, 2, 3, 4)] == [3, 4, 5, 6]
    assert sum(given) == 4


@pytest.mark.parametrize("count", [1, 5])
def test_the_look_up_costs_no_statement(alias, ask, sink, count):
    """Neither where nothing has sunk, nor where the id is in the log, or has sunk."""

    def statements(prefix, kind):
        asked = [Command("a", *WITHDRAW, command_id=f"{prefix}{n}") for n in range(count)]
        with CaptureQueriesContext(connections[alias]) as captured:
            answers = Account.execute_many(asked, using=alias, return_exceptions=True)
        assert {type(each) for each in answers} == {kind}
        sql = [each["sql"] for each in captured]
        return [each for each in sql if "outbox_statistic" not in each and "NOTIFY" not in each]

    ask("open", OPEN)
    before = statements("x", Outcome)
    assert sum("outbox_prunedcommand" in sql for sql in before) == 1
    repeated = statements("x", Outcome)
    sink()
    assert len(statements("y", Outcome)) == len(before)
    assert len(statements("x", AnswerArchived)) == len(repeated)


def test_an_answer_that_was_erased_is_gone(alias, ask, sink, folder):
    ask("open", OPEN)
    ask("x")
    sink()
    ask("y")
    erase(Account, "a", reason="asked", using=alias)
    ask("open-again", OPEN)
    with pytest.raises(AnswerArchived):
        ask("x")
    with pytest.raises(AnswerGone, match="was erased with the entity") as caught:
        ask("x", archive=folder)
    assert (type(caught.value), caught.value.version) == (AnswerGone, 2)
    assert sink() == 3  # y, the end, and the second opening
    with pytest.raises(AnswerGone, match="No archive has its answer"):
        ask("y", archive=folder)
    with pytest.raises(AnswerGone, match="was erased with the entity"):
        ask("x", archive=folder)
    assert ask("open-again", OPEN, archive=folder).version == 5
    assert balance(alias) == 10


def test_a_version_that_was_restored_has_its_answer_again(alias, ask, age, sink):
    ask("open", OPEN)
    first = ask("x")
    age()
    rows = list(QuerySet(AccountVersion, using=alias).order_by("pk"))
    sink()
    for row in rows:
        row.save_base(raw=True, force_insert=True, using=alias)
    again = ask("x")
    assert (again.response, again.replayed) == (first.response, True)
    asked = [Command("a", *WITHDRAW, command_id=each) for each in ("x", "y")]
    assert [each.replayed for each in Account.execute_many(asked, using=alias)] == [True, False]
    sink()
    with pytest.raises(AnswerArchived):
        ask("x")
    assert balance(alias) == 8


def test_ids_are_kept_for_the_days_of_the_setting(alias, ask, age, settings):
    ask("open", OPEN)
    ask("x")
    age(40)
    ask("y")
    QuerySet(AccountVersion, using=alias).filter(command_id="y").update(
        recorded_at=DatabaseNow() - timedelta(days=20)
    )
    with pytest.raises(InvalidArgument, match="'ENTITY_COMMAND_DAYS'] is None"):
        prune("commands", alias)
    with pytest.raises(CommandError, match="'ENTITY_COMMAND_DAYS'] is None"):
        call_command("outbox_prune", "--commands", stdout=StringIO())
    settings.OUTBOX = {**settings.OUTBOX, "ENTITY_COMMAND_DAYS": 30}
    prune_events(using=alias, log="account_version", older_than=3)
    assert PrunedCommand.objects.using(alias).count() == 1  # the others are too old
    assert Retention(using=alias).run(once=True) == 0
    with pytest.raises(AnswerGone):
        ask("y")
    assert ask("x").version == 4
    rows = PrunedCommand.objects.using(alias)
    [day] = rows.values_list("executed_on", flat=True)
    rows.update(executed_on=day - timedelta(days=10))
    assert prune("commands", alias) == 0  # today it is thirty days old
    rows.update(executed_on=day - timedelta(days=12))
    output = StringIO()
    call_command("outbox_prune", "--commands", "--dry-run", stdout=output)
    assert "would prune commands rows=1" in output.getvalue()
    assert Retention(using=alias).run(once=True) == 1
    assert ask("y").version == 5


def test_more_ids_than_a_batch_are_removed(alias):
    """Of two logs and four days, whose order is not that of the keys."""
    days = [date(2026, 1, 1), date(2026, 1, 2), date(2026, 1, 3), date(9999, 1, 1)]
    table = PrunedCommand.objects.using(alias)
    table.bulk_create(
        PrunedCommand(
            log=number % 2,
            key=command_key("a", f"x{number}"),
            version=number + 1,
            executed_on=days[number // 800],
        )
        for number in range(2410)
    )
    assert prune("commands", alias, older_than=1) == 2400
    assert table.count() == 10


def test_ids_follow_a_table_that_is_renamed(alias, ask, sink):
    """By the migration of docs/howto/own-log.md."""
    ask("open", OPEN)
    sink()
    page = {}
    for code in blocks(ROOT / "docs/howto/own-log.md"):
        if {"rename", "rename_pruned"} & {*code.co_names}:
            exec(code, page)
    tables = "account_version", "renamed_version"
    with connections[alias].schema_editor() as editor:
        page["rename"](editor, *tables)
        with connections[alias].cursor() as cursor:
            page["rename_pruned"](cursor, *tables)
    rows = PrunedCommand.objects.using(alias)
    assert list(rows.values_list("log", flat=True)) == [log_number("renamed_version")]


@pytest.mark.parametrize("archived", [True, False], ids=["archived", "not_archived"])
def test_money_moves_once_beside_a_pruner_that_is_killed(
    alias, ask, age, folder, environment, archived
):
    """Before each of its statements; the same commands are repeated all the time."""
    ids = [f"x{number}" for number in range(3)]
    versions = {"open": ask("open", OPEN).version} | {each: ask(each).version for each in ids}
    age()
    ask("young")
    archive(alias, folder, log=AccountVersion)
    ended, faults, rounds = Signal(), [], []

    def repeat():
        try:
            while not ended.is_set():
                for each in ids:
                    asked = [Command("a", *WITHDRAW, command_id=each)]
                    [answer] = Account.execute_many(asked, using=alias, return_exceptions=True)
                    assert answer.version == versions[each], answer
                    assert isinstance(answer, AnswerGone) or answer.replayed
                rounds.append(1)
        except BaseException as error:
            faults.append(error)
        finally:
            connections.close_all()

    pruner = forking.Popen(
        [
            sys.executable,
            "-m",
            "tests.entities.pruning",
            alias,
            *([folder] if archived else []),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(alias),
    )
    processes.guard_process(pruner.pid)
    thread = Thread(target=repeat)
    thread.start()
    number = log_number("account_version")
    killed, line = 0, ""
    try:
        while (line := pruner.stdout.readline().strip()) == "killed":
            killed += 1
            with transaction.atomic(using=alias):
                log = QuerySet(AccountVersion, using=alias)
                kept = set(log.values_list("command_id", flat=True)) - {"young"}
                keys = {command_key("a", each): each for each in versions}
                found = PrunedCommand.objects.using(alias).filter(log=number)
                gone = {keys[key.hex] for key in found.values_list("key", flat=True)}
            assert (kept | gone, kept & gone) == ({*versions}, set()), killed
            pruner.stdin.write("\n")
            pruner.stdin.flush()
        assert line == "done"
    finally:
        ended.set()
        thread.join(patience(SECONDS))
        pruner.communicate("\n", timeout=patience(SECONDS))
        processes.forget_process(pruner.pid)
    assert not faults
    assert rounds
    assert killed > 10
    assert pruner.returncode == 0
    for each in ids:
        with pytest.raises(AnswerArchived if archived else AnswerGone):
            ask(each)
    assert PrunedCommand.objects.using(alias).count() == 4
    assert balance(alias) == 6
