"""The shop's transactions. The rows, jobs and events of one commit together or not at all.

The calls are Celery's own. Inside ``atomic()`` a call writes a row instead of speaking to the
broker, and the drainer sends the job after the commit. Outside ``atomic()`` it is sent at once.
"""

from celery import chain, group
from django.db import transaction

from outbox_app.events import publish

from .models import Order, Shelf, Stock
from .tasks import capture_payment, reorder, reserve_stock, send_receipt

#: An article is reordered when fewer pieces than this are on hand.
LOW = 600


@transaction.atomic
def place_order(customer, stock, quantity=1):
    """Store an order, stage the tasks that follow it, and publish an event about it.

    Returns:
        The stored order. If the transaction around this call is rolled back, no task will ever run.
    """
    order = Order.objects.create(
        customer=customer, stock=stock, quantity=quantity, total=quantity * stock.price
    )
    reserve_stock.delay(order.pk)
    chain(capture_payment.si(order.pk), send_receipt.si(order.pk)).delay()
    publish(str(order.pk), "order.placed", {"article": stock.pk, "quantity": quantity})
    return order


@transaction.atomic
def reorder_low_stock():
    """Stage one task for each article that runs low; return the number of these articles."""
    low = set(Shelf.objects.filter(on_hand__lt=LOW).values_list("pk", flat=True))
    jobs = [reorder.s(pk) for pk in Stock.objects.values_list("pk", flat=True) if str(pk) in low]
    group(jobs).delay()
    return len(jobs)
