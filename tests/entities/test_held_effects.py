"""Jobs and events that commands stage and publish: written with the command, or not at all."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import pytest
from django.db import transaction

from outbox_app.entities import Command, Rejected
from outbox_app.entities.exceptions import InvalidCommand, WrittenByCommands
from outbox_app.events import publish
from outbox_app.events.exceptions import InvalidEvent
from outbox_app.events.models import Event
from outbox_app.models import StagedJob
from tests import tasks
from tests.entities.models import Account, AccountVersion

commits = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def one_database(settings, alias):
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}


@pytest.fixture
def add(make_app):
    """A task of an app that stages by itself."""
    return make_app().task(name="add")(tasks.add)


@pytest.fixture
def written(alias):
    """``written()``: the arguments of the staged jobs, and the types of the events."""

    def read():
        jobs = StagedJob.objects.using(alias).order_by("id")
        events = Event.objects.using(alias).order_by("id")
        args = [Job.of(job).args for job in jobs]
        return args, list(events.values_list("stream", "type"))

    from outbox_app.testing import Job

    return read


@commits
@pytest.mark.parametrize("atomic", [False, True])
def test_jobs_and_events_are_committed_with_the_command(
    alias, account, ask, declare, add, written, atomic
):
    def give(self, fate):
        self.stage(add, [1, 2])
        add.delay(3, 4)
        self.publish("money.left", {"amount": 1})
        self.publish("money.came", stream="b")
        if fate == "reject":
            raise Rejected("No.")
        if fate == "fail":
            raise ZeroDivisionError

    declare(give, atomic=atomic)
    assert ask("give", {"fate": "reject"}).rejected
    with pytest.raises(ZeroDivisionError):
        ask("give", {"fate": "fail"})
    with transaction.atomic(using=alias):
        ask("give", {"fate": ""})
        transaction.set_rollback(True, using=alias)
    assert written() == ([], [])
    ask("give", {"fate": ""}, command_id="x")
    expected = [[1, 2], [3, 4]], [("a", "money.left"), ("b", "money.came")]
    assert written() == expected
    assert ask("give", {"fate": ""}, command_id="x").replayed
    assert written() == expected


@commits
def test_in_a_batch_they_are_those_of_the_commands_that_were_accepted(
    alias, account, declare, add, written
):
    def give(self, number):
        self.stage(add, [number, 0])
        self.publish("given", stream=f"s{number}")
        if number % 2:
            raise Rejected("Odd.")

    declare(give)
    commands = [Command("a", "give", {"number": n}, command_id=f"c{n}") for n in range(6)]
    Account.execute_many(commands, using=alias)
    jobs, events = written()
    assert jobs == [[0, 0], [2, 0], [4, 0]]
    assert sorted(events) == [("s0", "given"), ("s2", "given"), ("s4", "given")]


@commits
@pytest.mark.parametrize("inside", [False, True])
def test_an_atomic_command_gives_after_those_before_it(
    alias, account, declare, add, written, inside
):
    """It stages in a savepoint of its own, where jobs are written at once."""

    def give(self, number):
        self.stage(add, [number, 0], ordering_key=self.pk)
        self.publish("given", {"number": number}, stream="s")

    def give_atomic(self, number):
        self.stage(add, [number, 0], ordering_key=self.pk)
        publish("s", "given", {"number": number})

    declare(give)
    declare(give_atomic, atomic=True)
    names = ["give", "give", "give_atomic", "give"]
    commands = [
        Command("a", name, {"number": n}, command_id=f"c{n}") for n, name in enumerate(names)
    ]
    with transaction.atomic(using=alias) if inside else nullcontext():
        Account.execute_many(commands, using=alias)
    assert written()[0] == [[n, 0] for n in range(4)]
    events = Event.objects.using(alias).filter(stream="s").order_by("version")
    assert [event.data["number"] for event in events] == [0, 1, 2, 3]


@commits
def test_what_an_atomic_command_gives_goes_with_its_own_savepoints(
    alias, account, ask, declare, add, written
):
    def give(self):
        self.publish("kept")
        for undone in (True, False):
            with suppress(ZeroDivisionError), transaction.atomic(using=alias):
                self.stage(add, [undone, 0])
                self.publish("undone" if undone else "kept", stream="b")
                assert not undone or 1 / 0
        savepoint = transaction.get_connection(alias).savepoint()
        self.publish("undone")
        transaction.savepoint_rollback(savepoint, using=alias)

    declare(give, atomic=True)
    ask("give")
    assert written() == ([[False, 0]], [("a", "kept"), ("b", "kept")])


@pytest.fixture
def immediate(settings, publishes):
    """Jobs are published right after the commit. A list of the number of jobs in each publish."""
    on = {"IMMEDIATE": True, "IMMEDIATE_TIMEOUT": 20, "IMMEDIATE_HOLD": 600}
    settings.OUTBOX = {**settings.OUTBOX, **on}
    return publishes


@commits
@pytest.mark.parametrize("error", [Rejected("No."), ZeroDivisionError()], ids=repr)
def test_a_callback_outlives_an_atomic_command_whose_job_would_leave_at_once(
    alias, account, declare, add, immediate, error
):
    """What publishes the job stands before the callbacks of all."""
    called = []

    def order(self):
        transaction.on_commit(lambda: called.append("order"), using=alias)

    def give(self):
        self.stage(add, [1, 2])
        raise error

    declare(order)
    declare(give, atomic=True)
    commands = [Command("a", name, command_id=name) for name in ("order", "give")]
    Account.execute_many(commands, using=alias, return_exceptions=True)
    assert (called, immediate) == (["order"], [])


@commits
def test_a_callback_of_the_caller_outlives_it_too(alias, account, ask, declare, add, immediate):
    called = []

    def give(self):
        self.stage(add, [1, 2])
        raise Rejected("No.")

    declare(give, atomic=True)
    with transaction.atomic(using=alias):
        transaction.on_commit(lambda: called.append("caller"), using=alias)
        assert ask("give").rejected
    assert (called, immediate) == (["caller"], [])


@commits
def test_jobs_of_atomic_commands_leave_as_one_batch(
    alias, account, declare, add, immediate, written
):
    called = []

    def give(self, number):
        transaction.on_commit(lambda: called.append(number), using=alias)
        self.stage(add, [number, 0])

    declare(give, atomic=True)
    commands = [Command("a", "give", {"number": n}, command_id=f"c{n}") for n in range(4)]
    Account.execute_many(commands, using=alias)
    assert (called, immediate, written()[0]) == ([0, 1, 2, 3], [4], [])


@commits
def test_what_cannot_be_given_fails_its_own_command(alias, account, declare, add, written):
    def give(self, number):
        if number == 1:
            self.stage(add, [object()])
        if number == 2:
            self.publish("")
        if number == 3:
            self.publish("x", log=AccountVersion)
        if number == 4:
            self.publish("x", {"a": float("nan")})
        self.stage(add, [number, 0])

    declare(give)
    commands = [Command("a", "give", {"number": n}, command_id=f"c{n}") for n in range(6)]
    answers = Account.execute_many(commands, using=alias, return_exceptions=True)
    errors = [type(answer) for answer in answers if isinstance(answer, Exception)]
    assert errors == [TypeError, InvalidEvent, WrittenByCommands, InvalidEvent]
    assert written()[0] == [[0, 0], [5, 0]]


def test_outside_of_commands_they_are_refused(account, add):
    for give in (lambda: Account().publish("x"), lambda: Account().stage(add, [1, 2])):
        with pytest.raises(InvalidCommand, match="Only its commands may call"):
            give()
