"""Rules, and columns with constraints: the second command is rejected, and no other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from uuid import uuid4

import pytest
from django.db import IntegrityError, connections, models, transaction
from django.db.models.fields.json import KT
from django.db.models.functions import Cast
from django.test.utils import isolate_apps

from outbox_app.entities import Command, Entity, EntityVersion, Rejected, command
from outbox_app.entities.declaration import TypeSpec
from outbox_app.entities.exceptions import InvalidCommand
from tests.entities.models import Person
from tests.faults.tools import on

commits = pytest.mark.django_db(transaction=True)


@pytest.fixture
def enter(alias):
    """``enter("a", email="x")``: create a person."""

    def execute(id, **state):
        return Person.execute(id, "enter", state, command_id="enter", using=alias)

    return execute


@pytest.fixture
def change(alias):
    """``change("a", email="x")``: change a person."""
    numbers = iter(range(10**6))

    def execute(id, **state):
        name = f"c{next(numbers)}"
        return Person.execute(id, "change", state, command_id=name, using=alias)

    return execute


@commits
def test_columns_are_taken_from_the_state(alias, enter, change):
    enter("a", email="x", age=3)
    change("a", row=1, seat=2)
    row = Person.objects.using(alias).get(email="x")
    assert (row.pk, row.row, row.seat, row.age) == ("a", 1, 2, 3)


@commits
def test_a_rule_that_is_broken_rejects_the_command(alias, enter, change):
    enter("a", age=3)
    outcome = change("a", age=-1)
    assert (outcome.rejected.code, outcome.rejected.text) == (
        "of_age",
        "Nobody is younger than nothing.",
    )
    assert Person.objects.using(alias).get(pk="a").state == {"age": 3}
    assert Person.execute("b", "enter", {"age": -1}, command_id="x", using=alias).rejected
    assert not Person.objects.using(alias).filter(pk="b").exists()


@commits
@pytest.mark.parametrize(
    ("first", "second", "code", "text"),
    [
        ({"email": "x"}, {"email": "x"}, "email", "Person with this Email already exists."),
        (
            *({"row": 1, "seat": 1}, {"row": 1, "seat": 1}),
            *("person_seat", "Constraint “person_seat” is violated."),
        ),
    ],
)
def test_an_index_that_is_violated_rejects_the_command(
    alias, enter, change, first, second, code, text
):
    assert enter("a", **first).rejected is None
    refused = enter("b", **second)
    assert (refused.rejected.code, refused.rejected.text) == (code, text)
    assert enter("b", **second).replayed
    assert not Person.objects.using(alias).filter(pk="b").exists()
    assert Person.execute("b", "enter", {}, command_id="again", using=alias).version == 2
    outcome = change("b", **second)
    assert (outcome.rejected.code, outcome.version) == (code, 3)
    change("a", email=None, row=None)
    assert change("b", **second).version == 4
    assert Person.objects.using(alias).get(pk="b").state == second


@on("mariadb")
@pytest.mark.django_db(transaction=True)
def test_the_database_names_what_django_cannot_ask_for(alias, enter, monkeypatch):
    """As on MySQL, where Django's SQL for a key of a JSON value is an error."""

    def validate(*args, **kwargs):
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT '{}' ->> '$.email'")

    monkeypatch.setattr(models.UniqueConstraint, "validate", validate)
    enter("a", email="x")
    assert enter("b", email="x").rejected.code == "email"


@commits
def test_inside_a_batch_only_the_one_at_fault_is_rejected(alias, enter):
    enter("a", email="x")
    enter("b", email="y")
    states = [{"age": 1}, {"email": "z"}, {"email": "x"}, {"age": 2}, {"email": "y"}]
    commands = [Command("b", "change", s, command_id=f"c{n}") for n, s in enumerate(states)]
    answers = Person.execute_many(commands, using=alias)
    assert [answer.rejected and answer.rejected.code for answer in answers] == [
        None,
        None,
        "email",
        None,
        None,
    ]
    assert Person.objects.using(alias).get(pk="b").state == {"email": "y", "age": 2}


@commits
def test_those_who_race_for_one_name(alias):
    together = threading.Barrier(5)

    def enter(number):
        together.wait()
        try:
            return Person.execute(
                f"p{number}", "enter", {"email": "x"}, command_id="x", using=alias
            )
        finally:
            connections.close_all()

    with ThreadPoolExecutor(5) as pool:
        outcomes = list(pool.map(enter, range(5)))
    codes = sorted(outcome.rejected.code if outcome.rejected else "" for outcome in outcomes)
    assert codes == ["", "email", "email", "email", "email"]


def test_in_the_callers_transaction_too(alias, enter, change):
    with transaction.atomic(using=alias):
        enter("a", email="x")
        assert enter("b", email="x").rejected.code == "email"
        assert change("a", email="y").rejected is None
    assert Person.objects.using(alias).get().email == "y"


UNFIT = [
    ({"email": "e" * 21}, "gives 'email' an invalid value"),
    ({"age": "old"}, "gives 'age' an invalid value"),
    ({"age": None}, "'age' an invalid value, None"),
    ({"size": 1}, r"columns\(\) names 'size', which is not one of"),
    ({"version": 1}, "names 'version'"),
]


@commits
def test_columns_that_do_not_fit(alias, enter, change, monkeypatch):
    enter("a", age=3)
    monkeypatch.setattr(Person.of_age, "__code__", (lambda self: True).__code__)
    for state, expected in UNFIT:
        with pytest.raises(InvalidCommand, match=expected):
            change("a", **state)
    assert Person.history("a", using=alias).count() == 1


@isolate_apps("tests.entities")
@pytest.mark.parametrize(
    ("meta", "unique"),
    [
        ({"unique_together": [("row", "seat")]}, {"row", "seat"}),
        (
            {
                "constraints": [
                    models.UniqueConstraint(
                        fields=["seat"], condition=models.Q(active=True), name="one_active"
                    )
                ]
            },
            {"row", "seat", "active"},
        ),
        (
            {"constraints": [models.UniqueConstraint(fields=["place"], name="place")]},
            {"row", "seat"},
        ),
        (
            {"constraints": [models.UniqueConstraint(KT("state__key"), name="key")]},
            {"row", "seat", "active", "state"},
        ),
    ],
    ids=["together", "partial", "generated", "state"],
)
def test_what_a_command_may_change_so_that_an_index_refuses_its_row(meta, unique):
    class TicketVersion(EntityVersion):
        pass

    class Ticket(Entity):
        versions = TicketVersion
        row = models.IntegerField()
        seat = models.IntegerField()
        active = models.BooleanField()
        place = models.GeneratedField(
            expression=models.F("row") * 100 + models.F("seat"),
            output_field=models.IntegerField(),
            db_persist=True,
        )
        Meta = type("Meta", (), meta)

    assert TypeSpec(Ticket).unique == unique


@commits
@pytest.mark.parametrize("by", ["constraint", "field"])
def test_an_index_on_a_part_of_the_state(alias, by):
    """Django makes it by an expression, or a column that the database generates."""
    # MariaDB has no index on an expression.
    constrains = by == "constraint" and connections[alias].features.supports_expression_indexes
    # MySQL has none on a text without an end.
    text = Cast(KT("state__email"), models.CharField(max_length=20))

    def enter(self, email):
        self.state = {"email": email}

    def be(self, email):
        self.state = {"email": email}

    with isolate_apps("tests.entities"):

        class GuestVersion(EntityVersion):
            pass

        class Guest(Entity):
            versions = GuestVersion
            email = models.GeneratedField(
                expression=KT("state__email"),
                output_field=models.CharField(max_length=20),
                db_persist=True,
                unique=not constrains,
            )

            class Meta:
                constraints = [models.UniqueConstraint(text, name="email")][:constrains]

    Guest.enter, Guest.be = command(creates=True)(enter), command()(be)
    with tables(alias, GuestVersion, Guest):
        Guest.execute("a", "enter", {"email": "x"}, command_id="a", using=alias)
        asked = [("enter", "x"), ("enter", "y"), ("be", "x"), ("be", "z"), ("be", "z")]
        answers = Guest.execute_many(
            [
                Command("b", name, {"email": e}, command_id=f"{n}")
                for n, (name, e) in enumerate(asked)
            ],
            using=alias,
        )
        codes = [each.rejected and each.rejected.code for each in answers]
        assert codes == ["email", None, "email", None, None]
        assert Guest.objects.using(alias).get(pk="b").email == "z"


@contextmanager
def tables(alias, *models):
    with connections[alias].schema_editor() as editor:
        for model in models:
            editor.create_model(model)
    try:
        yield
    finally:
        with connections[alias].schema_editor() as editor:
            for model in reversed(models):
                editor.delete_model(model)


@commits
@pytest.mark.parametrize("inside", [False, True])
def test_a_command_that_ends_its_batch_answers_for_no_other(alias, inside):
    """Another constraint refuses the row, for what one before it has done."""

    def enter(self, **state):
        self.state = state

    def be(self, **state):
        self.state |= state

    with isolate_apps("tests.entities"):

        class GuestVersion(EntityVersion):
            pass

        class Guest(Entity):
            versions = GuestVersion
            nick = models.CharField(max_length=20, unique=True)
            age = models.IntegerField()

            class Meta:
                constraints = [models.CheckConstraint(condition=models.Q(age__gte=0), name="age")]

            def columns(self):
                return self.state

    Guest.enter, Guest.be = command(creates=True)(enter), command()(be)
    with tables(alias, GuestVersion, Guest):
        asked = [{"nick": "x", "age": 1}, {"age": -1}, {"nick": "y"}, {"age": 2}]
        names = ["enter", "be", "be", "be"]
        commands = [
            Command("a", name, state, command_id=f"{number}")
            for number, (name, state) in enumerate(zip(names, asked, strict=True))
        ]
        with transaction.atomic(using=alias) if inside else nullcontext():
            answers = Guest.execute_many(commands, using=alias, return_exceptions=True)
        names = [type(each).__name__ for each in answers]
        assert names == ["Outcome", "IntegrityError", "Outcome", "Outcome"]
        assert Guest.objects.using(alias).get(pk="a").state == {"nick": "y", "age": 2}


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("name", "username"), "Duplicate entry 'x' for key 'person.username'"),
        (("name", "no"), "Duplicate entry 'name' for key 'shop_name.no'"),
        (("nick", "email"), 'constraint "nick_email_key"\nDETAIL:  Key (email)=(nick) exists.'),
    ],
)
def test_of_two_names_in_an_error_that_of_the_index_is_meant(names, text):
    class Unseen(models.UniqueConstraint):
        def validate(self, *args, **options):
            pass

    spec = TypeSpec(Person)
    spec.constraints = [Unseen(fields=["nick"], name=name) for name in names]
    refused = IntegrityError(text)
    with pytest.raises(Rejected) as caught:
        spec.require_free(Person(pk="a"), [refused, refused], using="default")
    assert caught.value.code == names[1]


@commits
@pytest.mark.parametrize("derives", [False, True])
def test_columns_that_the_database_or_a_default_fills_in(alias, derives):
    def columns(self):
        return {"row": self.state["row"]}

    def place(self, row):
        self.state = {"row": row, "token": str(self.token)}

    def move(self, row):
        self.state["row"] = row

    with isolate_apps("tests.entities"):

        class TicketVersion(EntityVersion):
            pass

        class Ticket(Entity):
            versions = TicketVersion
            row = models.IntegerField(null=True)
            twice = models.GeneratedField(
                expression=models.F("row") * 2,
                output_field=models.IntegerField(null=True),
                db_persist=True,
            )
            token = models.UUIDField(default=uuid4)

    Ticket.place, Ticket.move = command(creates=True)(place), command()(move)
    if derives:
        Ticket.columns = columns
    with connections[alias].schema_editor() as editor:
        for model in (TicketVersion, Ticket):
            editor.create_model(model)
    try:
        rows = Ticket.objects.using(alias).filter(pk="a")
        Ticket.execute("a", "place", {"row": 4}, command_id="x", using=alias)
        row = rows.get()
        assert (row.twice, str(row.token)) == (8 if derives else None, row.state["token"])
        Ticket.execute("a", "move", {"row": 5}, command_id="y", using=alias)
        assert rows.get().twice == (10 if derives else None)
        assert rows.get().token == row.token
    finally:
        with connections[alias].schema_editor() as editor:
            for model in (Ticket, TicketVersion):
                editor.delete_model(model)
