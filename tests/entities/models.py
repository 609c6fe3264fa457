"""Entity types of the tests: an account, and one whose command may query."""

from __future__ import annotations

from typing import Any

from django.db import models

from outbox_app.entities import Entity, EntityVersion, Rejected, command, rule
from outbox_app.fields import JSONField


class AccountVersion(EntityVersion):
    """What accounts were asked and answered."""

    class Meta(EntityVersion.Meta):
        abstract = False
        db_table = "account_version"


class Account(Entity):
    """Money of somebody."""

    versions = AccountVersion

    class Meta:
        db_table = "account"

    @command(creates=True)
    def open(self, owner: Any, balance: Any = 0) -> Any:
        self.state = {"owner": owner, "balance": balance}

    @command(event="account.withdrawn")
    def withdraw(self, amount: Any) -> Any:
        self.state["balance"] -= amount
        if self.state["balance"] < 0:
            raise Rejected("There is not enough on the account.", code="balance")
        return {"balance": self.state["balance"]}

    @command(creates=True)
    def refuse_to_open(self) -> Any:
        self.state = {"half": "done"}
        raise Rejected("Not you.")

    @command()
    def date(self) -> Any:
        self.state["at"] = self.now
        return self.now

    @command()
    def enlist(self, item: Any) -> Any:
        if item % 7 == 0:
            raise Rejected("Seven.", code="seven")
        items = self.state.setdefault("items", [])
        items.append(item)
        return len(items)

    @command()
    def leave(self, value: Any) -> Any:
        self.state = LEFT[value]

    @command()
    def fail(self) -> Any:
        self.state["balance"] = None
        raise ZeroDivisionError

    @command()
    def look(self, using: Any) -> Any:
        return Account.objects.using(using).count()

    @command(atomic=True)
    def ask_itself(self, using: Any) -> Any:
        return Account.execute(self.pk, "date", command_id="inner", using=using)

    @command(atomic=True)
    def look_around(self, using: Any) -> Any:
        return Account.objects.using(using).count()


class PersonVersion(EntityVersion):
    """What people were asked and answered."""

    class Meta(EntityVersion.Meta):
        abstract = False
        db_table = "person_version"


class Person(Entity):
    """Somebody with an address and a seat, which are nobody else's; and an age, which may be."""

    versions = PersonVersion
    email = models.CharField(max_length=20, null=True, unique=True)  # noqa: DJ001
    row = models.IntegerField(null=True)
    seat = models.IntegerField(null=True)
    age = models.IntegerField(default=0)
    nick = models.CharField(max_length=20, null=True, unique=True)  # noqa: DJ001
    tags = JSONField(default=list)
    friend = models.OneToOneField(
        "self", models.DO_NOTHING, null=True, db_constraint=False, related_name="+"
    )

    class Meta:
        db_table = "person"
        constraints = (models.UniqueConstraint(fields=["row", "seat"], name="person_seat"),)

    def columns(self) -> Any:
        return {"email": None, "row": None, "seat": None, "nick": None} | self.state

    @command(creates=True)
    def enter(self, **state: Any) -> None:
        self.state = state

    @command()
    def change(self, **state: Any) -> Any:
        self.state |= state
        return self.state

    @rule
    def of_age(self) -> Any:
        """Nobody is younger than nothing."""
        return self.state.get("age", 0) >= 0


class StockVersion(EntityVersion):
    """What articles were asked and answered."""

    class Meta(EntityVersion.Meta):
        abstract = False
        db_table = "stock_version"


class Stock(Entity):
    """The pieces of an article."""

    versions = StockVersion
    states = "last"

    class Meta:
        db_table = "stock"

    @command(creates=True)
    def fill(self, pieces: int) -> None:
        self.state = {"left": pieces}

    @command()
    def take(self, pieces: int) -> Any:
        if pieces > self.state["left"]:
            raise Rejected("Sold out.", code="sold_out")
        self.state["left"] -= pieces
        return self.state["left"]

    @command(batch=True)
    def sell(self, requests: list[Any]) -> list[Any]:
        answers: list[Any] = []
        for request in requests:
            if request["pieces"] > self.state["left"]:
                answers.append(Rejected("Sold out.", code="sold_out"))
            else:
                self.state["left"] -= request["pieces"]
                answers.append(self.state["left"])
        return answers

    @rule
    def never_below(self) -> Any:
        return self.state["left"] >= 0


NESTED: Any = 1
for _ in range(31):
    NESTED = [NESTED]

LEFT: dict[str, Any] = {
    "rich": {"balance": 1000},
    "nothing": None,
    "set": {"a": {1}},
    "nan": {"a": float("nan")},
    "nul": {"a": "\x00"},
    "surrogate": {"a": "\ud800"},
    "deep": NESTED,
    "large": {"a": "x" * 2_000_000},
}
