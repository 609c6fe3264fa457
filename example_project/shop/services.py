"""What the shop does, each in one transaction: rows, jobs and events commit together or not at all.

The calls are Celery's own. Inside ``atomic()`` they write a row instead of speaking to the broker,
and the drainer sends that row after the commit. Outside a transaction they would be sent at once.
"""

from celery import chain, group
from django.db import transaction

from outbox_app import publish

from .models import Order, Shelf, Stock
from .tasks import capture_payment, reorder, reserve_stock, send_receipt

#: Articles of which fewer are on hand are ordered anew.
LOW = 600


@transaction.atomic
def place_order(customer, stock, quantity=1):
    """Store an order, stage all that has to follow, and tell whoever wants to know.

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
    """Stage one task for each article that runs low; return how many there are."""
    low = set(Shelf.objects.filter(on_hand__lt=LOW).values_list("pk", flat=True))
    jobs = [reorder.s(pk) for pk in Stock.objects.values_list("pk", flat=True) if str(pk) in low]
    group(jobs).delay()
    return len(jobs)
