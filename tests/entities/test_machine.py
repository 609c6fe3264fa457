"""Commands in any order, alone and in batches, against a pure model; COMMITs whose reply is lost.

``HYPOTHESIS_PROFILE=long`` takes many different steps in each run, as in ``tests.machine``.
"""

from __future__ import annotations

import asyncio
import itertools
import os

import pytest
from django.db import OperationalError, connections
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from outbox_app.entities import Command
from tests.entities.models import Account
from tests.faults.tools import on

EXAMPLES = {"short": 20, "long": 1000}[os.environ.get("HYPOTHESIS_PROFILE", "short")]

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh"),
    pytest.mark.timeout(120 + EXAMPLES),
]

numbers = itertools.count()
asked = st.tuples(
    st.one_of(
        st.just(("open", {"owner": "ann", "balance": 5})),
        st.builds(lambda n: ("withdraw", {"amount": n}), st.integers(0, 4)),
        st.builds(lambda n: ("enlist", {"item": n}), st.integers(6, 9)),
        st.sampled_from([("fail", {}), ("refuse_to_open", {}), ("vanish", {})]),
    ),
    st.integers(0, 15),
    st.sampled_from([None, None, None, 1, 2]),
)


class Model:
    """What one account is, and what it has answered."""

    def __init__(self):
        self.version, self.state, self.answers = 0, None, {}

    def ask(self, command, arguments, command_id, expected):
        if command_id in self.answers:
            request, answer = self.answers[command_id]
            return answer if request == (command, arguments) else "CommandIdConflict"
        if command == "vanish":
            return "InvalidCommand"
        if expected is not None and expected != self.version:
            return "VersionConflict"
        if self.state is None and command not in ("open", "refuse_to_open"):
            return "UnknownEntity"
        if command == "fail":
            return "ZeroDivisionError"
        response, code = self.handle(command, **arguments)
        self.version += 1
        answer = response, self.version, code
        self.answers[command_id] = (command, arguments), answer
        return answer

    def handle(self, command, owner="", balance=0, amount=0, item=0):
        if command in ("open", "refuse_to_open"):
            if self.state is not None:
                return None, "exists"
            if command == "refuse_to_open":
                return None, ""
            self.state = {"owner": owner, "balance": balance}
            return None, None
        if command == "enlist":
            if item % 7 == 0:
                return None, "seven"
            self.state.setdefault("items", []).append(item)
            return len(self.state["items"]), None
        if amount > self.state["balance"]:
            return None, "balance"
        self.state["balance"] -= amount
        return {"balance": self.state["balance"]}, None


def plain(answer):
    if isinstance(answer, Exception):
        return type(answer).__name__
    return answer.response, answer.version, answer.rejected and answer.rejected.code


class Machine(RuleBasedStateMachine):
    def __init__(self, alias):
        super().__init__()
        self.alias, self.id, self.model = alias, f"m{next(numbers)}", Model()

    def commands(self, drawn):
        for (command, arguments), number, expected in drawn:
            options = {} if expected is None else {"expected_version": expected}
            yield Command(self.id, command, arguments, command_id=f"c{number}", **options)

    def expect(self, drawn):
        return [self.model.ask(*command, f"c{n}", expected) for command, n, expected in drawn]

    @rule(drawn=st.lists(asked, min_size=1, max_size=8))
    def in_a_batch(self, drawn):
        commands = self.commands(drawn)
        answers = Account.execute_many(commands, using=self.alias, return_exceptions=True)
        assert [plain(answer) for answer in answers] == self.expect(drawn)

    @rule(drawn=st.lists(asked, min_size=1, max_size=8))
    def as_coroutines(self, drawn):
        async def ask():
            calls = [
                Account.aexecute(
                    each.id,
                    each.command,
                    each.arguments,
                    command_id=each.command_id,
                    expected_version=each.expected_version,
                    using=self.alias,
                )
                for each in self.commands(drawn)
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

        assert [plain(answer) for answer in asyncio.run(ask())] == self.expect(drawn)

    @rule(drawn=st.lists(asked, min_size=1, max_size=8), committed=st.booleans())
    def with_a_reply_lost(self, drawn, committed):
        connection = connections[self.alias]
        connection.ensure_connection()
        original = connection._commit

        def lost():
            connection._commit = original
            if committed:
                original()
            connection.connection.close()
            raise OperationalError("server closed the connection unexpectedly")

        connection._commit = lost
        if committed:  # what was refused is tried again beside what was committed
            self.expect(drawn)
        try:
            self.in_a_batch(drawn=drawn)
        finally:
            connection._commit = original

    @invariant()
    def what_is_there_is_the_models(self):
        rows = list(Account.history(self.id, using=self.alias))
        assert [row.version for row in rows] == list(range(1, self.model.version + 1))
        assert {row.command_id for row in rows} == set(self.model.answers)
        states = list(Account.objects.using(self.alias).filter(pk=self.id).values("state"))
        assert states == ([{"state": self.model.state}] if self.model.state is not None else [])


@on("default", "postgres", "mariadb")
def test_answers_are_those_of_the_model(alias):
    steps = settings(
        max_examples=EXAMPLES,
        stateful_step_count=12,
        derandomize=EXAMPLES < 100,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: Machine(alias), settings=steps)
