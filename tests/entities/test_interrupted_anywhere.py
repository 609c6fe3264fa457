"""An error raised from outside at any line, as by Celery's soft time limit."""

from __future__ import annotations

import sys
from collections import OrderedDict
from contextlib import contextmanager, suppress
from functools import partial

import pytest
from django.db import transaction

from outbox_app.entities import Command, Outcome, command, handlers, queue
from outbox_app.entities import batch as entity_batch
from outbox_app.entities.declaration import spec_of
from outbox_app.entities.request import Call
from outbox_app.events.models import Event
from tests.entities.models import Account, Stock

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh")]
HANDLING = ("_answer", "_handle", "_handle_run", "_keep", "_step", "of", "_hooks_since")


class SoftLimit(Exception):
    pass


@contextmanager
def raising_at(number, modules, functions=()):
    """Raise ``SoftLimit`` at the line of these modules that is executed after ``number`` others."""
    left, tracer = [number], sys.gettrace()

    def at_line(frame, event, arg):
        if event == "line":
            left[0] -= 1
            if left[0] < 0:
                raise SoftLimit
        return at_line

    def at_call(frame, event, arg):
        code = frame.f_code
        is_there = code.co_filename in [each.__file__ for each in modules]
        return at_line if is_there and (not functions or code.co_name in functions) else None

    sys.settrace(at_call)
    try:
        yield left
    finally:
        sys.settrace(tracer)


def own_state(call):
    """Yield what a call returns. A generator has a state of its own of what is being handled.

    A tracer that raises leaves an ``except`` block without its end. Outside, the error would be
    handled for ever: Python would show it with each later one, and take some for others.
    """
    yield call()


def test_a_lead_is_not_lost(account, ask, fresh):
    number, is_there = 0, True
    while is_there:
        with raising_at(number, [queue]) as left, suppress(SoftLimit):
            next(own_state(lambda: ask("withdraw", {"amount": 0})))
        is_there = left[0] < 0
        ask("withdraw", {"amount": 0}, timeout=30)
        assert not fresh.by_key, number
        assert not fresh.is_leading(), number
        assert not fresh.waiting, number
        number += 1
    assert number > 30
    assert sys.exception() is None


def test_the_collector_may_end_a_coroutine_while_its_line_is_read(fresh, alias):
    """It is executed, though its caller has gone, and those taken with it are answered."""

    class Collecting(str):
        def __len__(self):
            fresh._leave(entity_queue, last, ends=True)
            return super().__len__()

    entity_queue = queue.EntityQueue(queue.QueueKey(Account, alias, "a"))
    calls = [Call(Command("a", "withdraw", command_id=f"{number}")) for number in range(2)]
    entity_queue.waiting, last = OrderedDict.fromkeys(calls), calls[-1]
    last.text = Collecting(last.text)
    assert entity_queue.take() == calls


@pytest.mark.parametrize("alias", ["default"], indirect=True)  # none of these lines asks which
@pytest.mark.parametrize("entity", [Account, Stock])
def test_a_command_leaves_all_or_nothing(alias, declare, monkeypatch, settings, entity):
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
    called = []

    def add(self):
        self.state["count"] += 1
        self.publish("added")
        transaction.on_commit(lambda: called.append(1), using=alias)

    def add_many(self, requests):
        return [add(self) for _ in requests]

    def begin(self):
        self.state = {"count": 0, "left": 0}

    adds = command(batch=True)(add_many) if entity is Stock else command()(add)
    monkeypatch.setattr(entity, "begin", command(creates=True)(begin), raising=False)
    monkeypatch.setattr(entity, "add", adds, raising=False)
    spec_of.cache_clear()
    entity.execute("n", "begin", command_id="begin", using=alias)
    execute = partial(entity.execute_many, using=alias, return_exceptions=True)
    number, is_there = 0, True
    while is_there:
        given = [Command("n", "add", command_id=f"{number}-{each}") for each in range(2)]
        with raising_at(number, [entity_batch, handlers], HANDLING) as left:
            answers = next(own_state(partial(execute, given)))
        is_there = left[0] < 0
        there = {v.command_id for v in entity.history("n", using=alias)} - {"begin"}
        told = {c.command_id for c, a in zip(given, answers, strict=True) if isinstance(a, Outcome)}
        row, events = entity.objects.using(alias).get(pk="n"), Event.objects.using(alias).count()
        assert told <= there, number
        assert row.state["count"] == events == len(called) == len(there), number
        number += 1
    assert number > 30
    assert called
    assert sys.exception() is None
