"""What ``make up`` has to look at in the admin: one of each thing that needs a person.

The rows are written as a bad night would have left them. Their messages and events are real: a
dead job can be requeued, the gap skipped, the stream released, and the event confirmed.
"""

from datetime import timedelta
from uuid import uuid4

from django.db import transaction
from django.utils import timezone

from outbox_app.events import publish
from outbox_app.events.models import Event, Gap, ParkedStream
from outbox_app.models import DeadJob, Incident, StagedJob
from outbox_app.prepared.models import PreparedEvent

from .shop.models import Stock
from .shop.services import place_order
from .shop.tasks import reorder, send_receipt

LOG, BASKET = Event._meta.db_table, "basket-7"
HOUR = timedelta(hours=1)


@transaction.atomic
def make():
    """Write the rows, unless there is trouble already, other than the incidents of the demo."""
    if any(model.objects.exists() for model in (DeadJob, Gap, PreparedEvent)):
        return
    stock = Stock.objects.first()
    for number in range(3):
        order = place_order(f"customer-{number}@shop.example", stock)
        _kill(send_receipt.delay(order.pk).id)
    reorder.apply_async((stock.pk,), countdown=5 * HOUR.total_seconds())  # held until then
    for step in range(1, 5):
        publish(BASKET, "basket.changed", {"step": step})
    first, *_ = Event.objects.filter(stream=BASKET).order_by("version")
    Event.objects.filter(stream=BASKET, version__in=(2, 3)).delete()
    Gap.objects.create(subscription="article-sales", kind="version", log=LOG, stream=BASKET,
                       first=2, last=3, attempts=20)  # fmt: skip
    ParkedStream.objects.create(
        subscription="article-sales", partition=0, log=LOG, stream=BASKET, version=2,
        position=first.pk, error="Versions 2 to 3 are missing.",
    )  # fmt: skip
    PreparedEvent.objects.create(
        sender="alias:billing", event_id=uuid4(), log=LOG, stream="invoice-1", type="invoice.paid",
        content={"data": {"total": 30}, "metadata": {}}, state="undecided", asked=290,
        unreachable=290, last_answer="OperationalError: connection to billing refused",
        decide_by=timezone.now() - HOUR,
    )  # fmt: skip
    Incident.objects.create(
        kind="takeover", drainer="shop-2:311 (a drainer)", shards=[*range(40, 61)], first_id=1,
        last_id=12, detail="Taken over by shop-1:84: the lease of shop-2:311 had run out.",
    )  # fmt: skip


def _kill(task_id):
    """Make a staged job a dead one, as a drainer does that finds no queue."""
    row = StagedJob.objects.get(task_id=task_id)
    row.as_dead(
        error="outbox_app.exceptions.Unroutable",
        reason="No queue is bound for exchange 'receipts' and routing key 'mail'.",
    ).save()
    row.delete()
