"""What the browser finds: a shop at work, with something of everything in trouble.

Names and numbers are fixed, as the pictures of the documentation are made of them; times are
relative to now.
"""

from __future__ import annotations

import math
from datetime import datetime
from uuid import NAMESPACE_URL, UUID, uuid5

from django.core.management import call_command
from django.db import transaction
from django.utils.timezone import now

from outbox_app.django_tasks.models import TaskResult
from outbox_app.events import publish
from outbox_app.events.models import Event, Gap, Subscription
from outbox_app.fleet.models import Server
from outbox_app.models import Incident, Statistic
from outbox_app.prepared.models import PreparedEvent

from .data import MINUTE, die, gap, hold, wait_for
from .poison import POISON

ORDERS = 12
#: Dead jobs: task, error, reason, how many, and how many minutes ago the newest of them died.
DEAD = (
    ("shop.tasks.send_receipt", "amqp.exceptions.ChannelError",
     "Basic.return: (312) NO_ROUTE", 9, 4),
    ("shop.tasks.send_receipt", "outbox_app.exceptions.KeyBlocked",
     "An earlier job of the ordering key 'customer-7' is dead: id 17.", 3, 100),
    ("shop.tasks.capture_payment", "outbox_app.exceptions.Unroutable",
     "No queue is bound for exchange 'payments' and routing key 'capture'.", 5, 700),
    ("legacy.tasks.rebuild_catalogue", "outbox_app.exceptions.UnknownApp",
     "The Celery app 'legacy' is not loaded in this process.", 7, 3000),
    ("shop.tasks.reserve_stock", "builtins.KeyError", "'warehouse-eu'", 2, 8000),
)  # fmt: skip
#: Held jobs: task, ordering key, minutes until they are due.
HELD = (
    *(("shop.tasks.remind_customer", f"customer-{n}", 25 + n) for n in range(6)),
    *(("shop.tasks.close_basket", f"customer-{n}", 400 + 60 * n) for n in range(8)),
)


def prepare() -> None:
    """Make the database and all that is in it before the first process starts."""
    call_command("migrate", verbosity=0)
    _jobs()
    _log()
    _in_doubt()
    _figures()
    Incident.objects.create(
        kind="takeover", drainer="shop-2:311 (a drainer)", shards=list(range(40, 61)),
        first_id=4021, last_id=4188,
        detail="Taken over by shop-1:84: the lease of shop-2:311 had run out.",
    )  # fmt: skip
    Incident.objects.create(
        kind="unknown", drainer="shop-1:84 (a drainer)", shards=[3], first_id=5120, last_id=5120,
        detail="BrokerUnavailable: connection reset by peer",
    )  # fmt: skip
    Incident.objects.update(created_at=now() - 50 * MINUTE)


def settle() -> None:
    """Wait until all processes are at work, and what must fail has failed."""
    wait_for("outbox_app.Process", resource="jobs")
    wait_for("outbox_events.Cursor", subscription="warehouse-export", failures__gt=0)
    wait_for("outbox_events.Cursor", subscription="loyalty-points", handled__gt=0)
    wait_for("outbox_events.ParkedStream", subscription="invoice-mails", stream=POISON)
    wait_for("shop.Receipt")


def _jobs() -> None:
    number = 0
    for task, error, reason, count, ago in reversed(DEAD):
        for each in reversed(range(count)):
            number += 1
            queue = "payments" if error.endswith("Unroutable") else "celery"
            die(task, error=error, reason=reason, task_id=f"a3f1c9d2-0000-4000-8000-{number:012d}",
                queue=queue, died_at=now() - (ago + 3 * each) * MINUTE)  # fmt: skip
    for number, (task, key, due) in enumerate(HELD, start=900):
        hold(task, key=key, minutes=due, task_id=f"b71e02aa-0000-4000-8000-{number:012d}")


def _log() -> None:
    from example_project.shop.models import Stock
    from example_project.shop.services import place_order

    stocks = list(Stock.objects.order_by("pk"))
    for number in range(ORDERS):
        stock = stocks[number % len(stocks)]
        place_order(f"customer-{number}@shop.example", stock, quantity=1 + number % 3)
    with transaction.atomic():
        for number in range(1040, 1045):
            publish(f"order-{number}", "invoice.made", {"amount": f"{number}.50"})
            publish(f"order-{number}", "invoice.sent", {"to": f"customer-{number}@shop.example"},
                    metadata={"request_id": f"req-{number}", "user": "till-3"})  # fmt: skip
        for number in range(1, 5):
            publish("order-2001", "basket.changed", {"step": number})
        Event.objects.filter(stream="order-2001", version__in=(2, 3)).delete()
        publish("customer-7", "customer.registered", {"email": "customer-7@shop.example"})
    Subscription.objects.create(name="newsletter", paused=True)
    gap("order-2001")
    Gap.objects.create(subscription="", kind="version", log="outbox_event", stream="order-1991",
                       first=4, last=4, attempts=1)  # fmt: skip


def _in_doubt() -> None:
    """An undecided event, one that was confirmed, a server, a task's result."""
    for number, columns in enumerate((
        {"state": "confirmed", "decided_at": now() - 30 * MINUTE, "decided_by": "call"},
        {"state": "undecided", "asked": 290, "answered": 12, "unreachable": 278,
         "last_answer": "OperationalError: connection to server at 10.0.3.7 failed",
         "reason": "The sender could not say in time what became of the transaction."},
    )):  # fmt: skip
        event = PreparedEvent.objects.create(
            sender="alias:billing", event_id=_id(f"invoice-{number}"), log="outbox_event",
            stream=f"invoice-{number}", type="invoice.paid", policy="ask",
            content={"data": {"total": 30}, "metadata": {}},
            decide_by=now() - 60 * MINUTE, **columns)  # fmt: skip
        PreparedEvent.objects.filter(pk=event.pk).update(prepared_at=now() - 1500 * MINUTE)
    Server.objects.create(
        service="shop", address="https://shop-1.example/outbox/", node="shop-1:84",
        version="0.1.0", weight=60, lease_seconds=10)  # fmt: skip
    begun, done = now() - 4 * MINUTE, now() - 3 * MINUTE
    TaskResult.objects.create(
        task_id="b71e02aa-0000-4000-8000-000000000700", task="shop.tasks.pack", call="{}",
        status="SUCCESSFUL", enqueued_at=now() - 5 * MINUTE, started_at=begun,
        last_attempted_at=begun, finished_at=done, kept_from=done,
        worker_ids='["celery@shop-1:91"]', return_value='{"parcels": 2}')  # fmt: skip


def _id(name: str) -> UUID:
    """Return an id that is the same in each run, and looks like any other."""
    return uuid5(NAMESPACE_URL, name)


def _figures() -> None:
    """Minutes of one day, as a drainer and a subscription that were here before have left them."""
    drainer, runner = _id("drainer"), _id("runner")
    this = now().replace(second=0, microsecond=0)
    rows = []
    for ago in range(1440, 0, -1):
        minute = this - ago * MINUTE
        wave = 1 + math.sin(ago / 17) / 3 + math.sin(ago / 131) / 2
        jam = 300 * max(0, 8 - abs(ago - 31))  # nothing left for a while, half an hour ago
        published = 40 * wave if not jam else 5.0
        values = {
            "published": published, "dead": 2.0 if ago % 37 == 0 else 0.0,
            "ready": 15 * wave + jam,
        }  # fmt: skip
        rows += [_figure(drainer, minute, name, value) for name, value in values.items()]
        if ago <= 60:
            rows += [
                _figure(runner, minute, "handled", 30 * wave, "subscription", "article-sales"),
                _figure(runner, minute, "handled", 88 * wave, "subscription", "order-progress"),
                _figure(runner, minute, "failed", 1.0, "subscription", "warehouse-export"),
            ]
        if ago <= 5:
            # So many that the jobs which wait for the first drainer are few among them.
            delays = {"0.1": 480.0, "0.25": 260.0, "0.5": 80.0, "1": 20.0}
            rows += [_figure(drainer, minute, "delay", n, "le", le) for le, n in delays.items()]
    Statistic.objects.bulk_create(rows, batch_size=1000)


def _figure(
    source: UUID, minute: datetime, name: str, value: float, dimension: str = "", label: str = ""
) -> Statistic:
    return Statistic(source=str(source), minute=minute, name=name, value=round(value),
                     dimension=dimension, label=label)  # fmt: skip
