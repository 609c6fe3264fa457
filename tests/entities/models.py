"""Entity types of the tests: an account, and one whose command may query."""

from __future__ import annotations

from typing import Any

from outbox_app.entities import Entity, EntityVersion, Rejected, command


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
