"""Entities that swap unique values at the same time, each from its own thread.

On PostgreSQL an index with a sleeping function precedes the unique index. It keeps both updates
open between the row and the unique index, so that they wait for one another every time.
"""

from __future__ import annotations

import threading

import pytest
from django.db import connections

from outbox_app.entities import transaction as entity_transaction
from outbox_app.entities.testing import at_once
from tests.entities.models import Person

pytestmark = pytest.mark.django_db(transaction=True)
ROUNDS = {"postgresql": 4, "mysql": 60, "sqlite": 10}


@pytest.fixture
def slow(alias):
    def run(*statements):
        with connections[alias].cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    if connections[alias].vendor != "postgresql":
        yield
        return
    run(
        "CREATE FUNCTION slow(text) RETURNS text IMMUTABLE LANGUAGE plpgsql "
        "AS 'BEGIN PERFORM pg_sleep(0.05); RETURN $1; END'",
        "CREATE INDEX slow_person ON person (slow(email))",
        # Indexes are written in the order in which they were made.
        "ALTER TABLE person DROP CONSTRAINT person_email_key",
        "ALTER TABLE person ADD CONSTRAINT person_email_key UNIQUE (email)",
    )
    yield
    run("DROP FUNCTION slow CASCADE")


@pytest.fixture
def conflicts(monkeypatch):
    """The errors after which a transaction was repeated."""
    found = []
    original = entity_transaction.is_conflict

    def note(error):
        conflict = original(error)
        found.extend([error] * conflict)
        return conflict

    monkeypatch.setattr(entity_transaction, "is_conflict", note)
    return found


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("free", [0, 1])
def test_those_who_swap_are_all_answered(alias, conflicts, free):
    """Without a free value both are rejected; with one, a value has one owner at any time."""
    vendor = connections[alias].vendor
    people, values = 2, 2 + free
    for n in range(people):
        Person.execute(f"p{n}", "enter", {"email": f"v{n}"}, command_id="enter", using=alias)
    began = threading.Barrier(people, timeout=300)

    def change(n):
        def run():
            answers = []
            for number in range(ROUNDS[vendor]):
                began.wait()
                own = int(Person.objects.using(alias).get(pk=f"p{n}").state["email"][1])
                wanted = {"email": f"v{(own + 1) % values}"}
                answers.append(
                    Person.execute(
                        f"p{n}", "change", wanted, command_id=f"{number}", timeout=60, using=alias
                    )
                )
            return answers

        return run

    found = at_once(*map(change, range(people)), using=alias)
    assert all(isinstance(answers, list) for answers in found), found
    for n, answers in enumerate(found):
        assert [answer.version for answer in answers] == list(range(2, ROUNDS[vendor] + 2))
        codes = {answer.rejected.code for answer in answers if answer.rejected}
        assert codes <= {"email"}
        assert free or all(answer.rejected for answer in answers)
        last = Person.history(f"p{n}", using=alias).last()
        row = Person.objects.using(alias).get(pk=f"p{n}")
        assert (row.version, row.state) == (last.version, last.state)
        assert row.email == row.state["email"]
    owned = Person.objects.using(alias).values_list("email", flat=True)
    assert len({*owned}) == people
    assert vendor != "postgresql" or free or conflicts
