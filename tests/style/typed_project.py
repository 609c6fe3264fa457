"""A project as its type checkers see it; it is not run. Where a line is wrong, both must say so.

``make lint`` checks it with mypy and with pyright: a comment that ignores an error which is not
there is an error, too.
"""

from uuid import uuid4

from django.db import models, transaction

from outbox_app import Projektion as _Typo  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]  # noqa: F401
from outbox_app import cancel, idempotent, stage, stage_many
from outbox_app.celery import OutboxCelery, OutboxTask, shared_task
from outbox_app.entities import Entity, EntityVersion, Rejected, command
from outbox_app.events import Projection, RecordedEvent, publish, subscriber
from outbox_app.fields import CharField
from outbox_app.mixin import OutboxMixin, on_create
from outbox_app.prepared import prepaired as _Typo2  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]  # noqa: F401
from outbox_app.prepared import prepared

app = OutboxCelery("shop")


@app.task
@idempotent
def ship(order: int) -> str:
    return str(order)


@shared_task
def thank(order: int) -> str:
    return str(order)


@shared_task(name="shop.tasks.pack", immediate=True, outbox="stage", receipt=60, max_retries=3)
@idempotent
def pack(order: int) -> None:
    pass


@shared_task(bind=True, autoretry_for=(OSError,), queue="slow")
def send(self: OutboxTask, order: int, *, express: bool = False) -> None:
    self.retry(countdown=3)


@shared_task(imediate=True)  # type: ignore[call-overload, untyped-decorator]  # pyright: ignore[reportCallIssue]
def sweep() -> None:
    pass


class Audited(OutboxTask):
    pass


@shared_task(base=Audited, audit=True)
def audit(order: int) -> None:
    pass


def call_shared_tasks(order: int) -> str:
    thank.delay(order)
    thank.apply_async((order,), {}, ordering_key="a", using=None, immediate=True, countdown=3)
    thank.apply_async([order], ordering_kye="a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    thank.apply_async([order], ordering_key=order)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    thank.apply_async([order], imediate=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    thank.delay("first")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    thank.delay_on_commit(order)
    thank.apply_async_on_commit((order,), ordering_key="a")
    pack.apply_async((order,), immediate=False)
    send.delay(order, express=True)
    send.delay(order, expres=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    audit.apply_async((order,), ordering_key="a")
    stage(thank.s(order), ordering_key="a")
    stage(thank, (order,), immediate=True)
    stage(thank, (order,), orderingkey="a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    stage_many([thank.s(order)], using="default", immediate=True, queue="slow")
    stage_many([thank.s(order)], orderingkey="a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    return thank(order) + thank.delay(order).get().upper()


def pay(order: int) -> None:
    with transaction.atomic():
        ship.delay(order)
        ship.apply_async([order], ordering_key="a", using="default", immediate=True, countdown=3)
        ship.apply_async([order], ordering_kye="a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        ship.apply_async([order], ordering_key=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        stage("shop.tasks.ship", [order], ordering_key="a", using="default", queue="slow")
        cancel(stage("shop.tasks.ship", [order], app=app).id, app=app)
        stage("shop.tasks.ship", [order], ordering_key=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        publish(f"order-{order}", "order.paid", {"total": 30}, topic="paid", message_id=uuid4())
        publish(f"order-{order}")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with prepared(f"order-{order}", "order.paid", {"total": 30}, using="billing"):
        pass


@subscriber("shipping", types=["order.paid"], on_error="park")
def on_paid(events: list[RecordedEvent]) -> None:
    for event in events:
        ship.delay(event.version)
        event.number  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


@subscriber("mail", types=["order.paid"], on_error="forget")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
def on_mail(events: list[RecordedEvent]) -> None:
    pass


class Sales(models.Model):  # noqa: DJ008
    article = CharField(max_length=255, primary_key=True)
    buyer = CharField(max_length=255, null=True)
    sold = models.IntegerField(default=0)


class SalesView(Projection):
    name = "sales"
    model = Sales
    types = ["order.placed"]

    def key(self, event: RecordedEvent) -> str:
        return str(event.data["article"])

    def apply(self, event: RecordedEvent, row: models.Model | None) -> models.Model | None:
        return row


class Order(OutboxMixin, models.Model):  # noqa: DJ008
    outbox = (
        on_create(thank, ordered=True, queue="slow", using="default", app=app),
        on_create(thank, orderd=True),  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    )

    def thank(self) -> None:
        self.stage(thank, (self.pk,), ordered=True, immediate=True, countdown=3)
        self.stage(thank, (self.pk,), orderingkey="a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def article_of(sales: Sales) -> str:
    sales.article.number  # type: ignore[attr-defined]  # noqa: B018
    return sales.article if sales.buyer is None else sales.buyer


class AccountVersion(EntityVersion):
    pass


class Account(Entity):
    versions = AccountVersion

    @command(creates=True)
    def open(self, owner: str) -> None:
        self.state = {"owner": owner, "balance": 0}
        self.stage(thank, (1,), ordering_key=owner, countdown=3)
        self.stage(thank, (1,), orderingkey=owner)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]

    @command()
    def withdraw(self, amount: int) -> dict[str, int]:
        if self.state["balance"] < amount:
            raise Rejected("The balance is too low.", code="poor")
        return {"balance": self.state["balance"]}


def withdraw() -> int:
    outcome = Account.execute("ben", "withdraw", {"amount": 7}, command_id="2")
    Account.execute("ben", "withdraw", {"amount": 7}, number=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    return outcome.version
