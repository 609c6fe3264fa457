"""Sender, keeper, network and clock in any order, with real fences, against a pure model.

The network loses, repeats, delays and reorders messages, also answers to check-backs. After each
step the published events are a subset of the committed ones, and no final state has changed; when
the faults have stopped, both are equal. ``OUTBOX_PREPARED_EXAMPLES=20000`` runs as many other
examples, half of them with each sender.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from django.db import connections, transaction
from django.utils import timezone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from outbox_app.database.clock import DatabaseNow
from outbox_app.events.models import Event
from outbox_app.models import Incident
from outbox_app.prepared import fence, keeper
from outbox_app.prepared import sender as senders
from outbox_app.prepared.checking_back import SenderWorker, ask
from outbox_app.prepared.exceptions import FencedOut
from outbox_app.prepared.fences import Question
from outbox_app.prepared.models import Fence, PreparedEvent
from outbox_app.prepared.request import NewPrepared, checked
from outbox_app.prepared.sender import Prepared
from tests.faults.tools import on

EXAMPLES = int(os.environ.get("OUTBOX_PREPARED_EXAMPLES", 300))

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"]),
    pytest.mark.timeout(120 + EXAMPLES),
]
numbers = itertools.count()
PAST = timedelta(seconds=-1)
which = st.integers(0, 999)
FINAL = ("confirmed", "cancelled")


class Model:
    """What a keeper and the fences of a sender are, without databases."""

    def __init__(self) -> None:
        self.states: dict[UUID, str] = {}
        self.fences: dict[UUID, str] = {}
        self.open: set[UUID] = set()

    def begin(self, id: UUID) -> bool:
        if id in self.fences:
            return False
        self.open.add(id)
        return True

    def end(self, id: UUID, *, commits: bool) -> None:
        self.open.discard(id)
        if commits:
            self.fences[id] = "committed"

    def answer(self, id: UUID) -> str:
        return "in_progress" if id in self.open else self.fences.setdefault(id, "rolled_back")

    def prepare(self, id: UUID) -> str:
        return self.states.setdefault(id, "prepared")

    def decide(self, id: UUID, wanted: str) -> str:
        state = self.states.get(id)
        if state is None and wanted == "confirmed":
            return "unknown"
        if state in FINAL:
            return state if state == wanted else "contradiction"
        self.states[id] = wanted
        return wanted


class Transaction:
    """A business transaction that stays open between steps, on a connection of its own."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.connection = connections.create_connection(using)
        self.atomic = transaction.atomic(using=using)
        with self.here():
            self.atomic.__enter__()

    @contextmanager
    def here(self) -> Any:
        outer = connections[self.using]
        connections[self.using] = self.connection
        try:
            yield
        finally:
            connections[self.using] = outer

    def end(self, *, commits: bool) -> None:
        with self.here():
            error = None if commits else ValueError
            self.atomic.__exit__(error, error and error(), None)
        self.connection.close()


class Machine(RuleBasedStateMachine):
    def __init__(self, alias: str, sender: str) -> None:
        super().__init__()
        self.alias, self.sender, self.name = alias, sender, f"m{next(numbers)}-"
        self.keeper_of = f"alias:{sender}"
        self.model = Model()
        self.events: list[Prepared] = []
        self.ready: list[Prepared] = []
        self.transactions: dict[UUID, tuple[Prepared, Transaction]] = {}
        #: What is under way.
        self.messages: list[Callable[[], None]] = []
        self.worker = SenderWorker(self.keeper_of, using=alias)
        self.final: dict[UUID, str] = {}

    # The sender

    @rule(fate=st.sampled_from(["answered", "answered", "answered", "reply lost", "lost", "late"]))
    def prepare(self, fate: str) -> None:
        new = NewPrepared(f"{self.name}{len(self.events)}", "order.paid", {}, immune=0)
        request = checked(new)
        event = Prepared(request.event_id, self.sender, "", request, timezone.now())
        self.events.append(event)
        if fate == "late":  # its client has given up
            self.messages.append(lambda: self.record(event))
        elif fate != "lost":
            self.record(event)
        if fate == "answered":
            self.ready.append(event)

    def record(self, event: Prepared) -> None:
        [answer] = keeper.prepare(self.keeper_of, [event.request], using=self.alias)
        assert answer.state == self.model.prepare(event.event_id)

    @rule(number=which)
    def begin(self, number: int) -> None:
        if not self.ready:
            return
        event = self.ready.pop(number % len(self.ready))
        business = Transaction(self.sender)
        if self.model.begin(event.event_id):
            with business.here():
                fence(event)
            self.transactions[event.event_id] = event, business
            return
        with business.here(), pytest.raises(FencedOut):
            fence(event)
        business.end(commits=False)

    @rule(number=which, commits=st.booleans(), tells=st.booleans())
    def end(self, number: int, commits: bool, tells: bool) -> None:
        if not self.transactions:
            return
        id = list(self.transactions)[number % len(self.transactions)]
        event, business = self.transactions.pop(id)
        business.end(commits=commits)
        self.model.end(id, commits=commits)
        if tells:
            self.messages.append(lambda: self.tell(event))

    @rule(number=which)
    def ask_its_own_fence(self, number: int) -> None:
        """As after an error in the block, or ``confirm()``: also in the middle of everything."""
        if self.events:
            event = self.events[number % len(self.events)]
            self.messages.append(lambda: self.tell(event))

    def tell(self, event: Prepared) -> None:
        id = event.event_id
        expected = self.model.answer(id)
        assert senders._outcomes([event]) == {id: expected}
        if expected == "in_progress":
            return
        wanted = {"committed": "confirmed", "rolled_back": "cancelled"}[expected]
        if not self.decide(id, wanted):  # the keeper does not know it: anew
            self.record(event)
            assert self.decide(id, wanted)

    def decide(self, id: UUID, wanted: str) -> bool:
        [answer] = keeper.decide(self.keeper_of, {id: wanted}, by="call", using=self.alias)
        assert answer.state == self.model.decide(id, wanted)
        return answer.state != "unknown"

    # The network

    @rule(number=which, again=st.booleans())
    def deliver(self, number: int, again: bool) -> None:
        if self.messages:
            index = number % len(self.messages)
            message = self.messages[index] if again else self.messages.pop(index)
            message()

    @rule(number=which)
    def lose(self, number: int) -> None:
        if self.messages:
            self.messages.pop(number % len(self.messages))

    # The keeper, and its clock

    @rule(late=st.booleans())
    def check_back(self, late: bool) -> None:
        PreparedEvent.objects.using(self.alias).open().update(next_check_at=DatabaseNow() + PAST)
        rows = self.worker._claim()
        given = [Question(r.event_id, r.prepared_at, r.stream, r.type) for r in rows]
        answers = ask(self.keeper_of, given)
        assert answers == {row.event_id: self.model.answer(row.event_id) for row in rows}

        def settle() -> None:
            self.worker.settle(rows, answers)
            for id, answer in answers.items():
                if answer != "in_progress":
                    state = {"committed": "confirmed", "rolled_back": "cancelled"}[answer]
                    assert self.model.decide(id, state) == state

        self.messages.append(settle)
        if not late:
            self.messages.pop()()

    @rule()
    def a_day_passes(self) -> None:
        rows = PreparedEvent.objects.using(self.alias).open()
        rows.update(decide_by=DatabaseNow() + PAST, next_check_at=DatabaseNow() + PAST)
        self.worker.expire()
        for id, state in self.model.states.items():
            if state == "prepared":
                self.model.states[id] = "undecided"

    @invariant()
    def published_is_a_part_of_committed(self) -> None:
        rows = PreparedEvent.objects.using(self.alias).filter(stream__startswith=self.name)
        states = dict(rows.values_list("event_id", "state"))
        assert states == {id: s for id, s in self.model.states.items() if id in states}
        missing = self.model.states.keys() - states  # a cancel that was first has no stream
        assert {self.model.states[id] for id in missing} <= {"cancelled"}
        for id, state in self.final.items():
            assert self.model.states[id] == state
        self.final = {id: s for id, s in self.model.states.items() if s in FINAL}
        published, committed = self.published(), self.committed()
        assert published <= committed
        assert published == {id for id, state in states.items() if state == "confirmed"}
        assert not Incident.objects.using(self.alias).exists()

    def published(self) -> set[UUID]:
        events = Event.objects.using(self.alias).filter(stream__startswith=self.name)
        ids = list(events.values_list("message_id", flat=True))
        assert len(ids) == len(set(ids))
        return set(ids)

    def committed(self) -> set[UUID]:
        ids = [event.event_id for event in self.events]
        rows = Fence.objects.using(self.sender).filter(pk__in=ids, outcome="committed")
        return set(rows.values_list("pk", flat=True))

    def teardown(self) -> None:
        """The faults stop: who was in a transaction has died, and the keeper asks."""
        try:
            for id, (_, business) in self.transactions.items():
                business.end(commits=False)
                self.model.end(id, commits=False)
            self.check_back(late=False)
            self.published_is_a_part_of_committed()
            assert self.published() == self.committed()
            assert not PreparedEvent.objects.using(self.alias).open().exists()
        finally:
            PreparedEvent.objects.using(self.alias).all()._raw_delete(self.alias)


@on("default", "postgres")  # the senders are PostgreSQL and MariaDB
@pytest.mark.usefixtures("short_waits")
def test_published_is_what_was_committed(alias: str, sender: str) -> None:
    steps = settings(
        max_examples=EXAMPLES // 2,
        stateful_step_count=25,
        derandomize=EXAMPLES < 1000,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(lambda: Machine(alias, sender), settings=steps)
