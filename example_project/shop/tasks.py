"""The work that follows an order. Ordinary Celery tasks: nothing in them knows of the outbox.

A job is delivered at least once, so each task must bear being run twice: it looks for what it made
the first time, and everything it writes is in one transaction.
"""

from celery import shared_task
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from .models import Order, Payment, Receipt, Stock

#: How many of an article are on hand after it was ordered anew.
FULL = 1000


@shared_task
@transaction.atomic
def reserve_stock(order_id):
    """Take the ordered articles from the stock."""
    order = Order.objects.get(pk=order_id)
    # The condition is part of the UPDATE: of two runs at the same moment only one changes the row.
    first_time = Order.objects.filter(pk=order_id, reserved_at=None).update(
        reserved_at=timezone.now()
    )
    if first_time:
        Stock.objects.filter(pk=order.stock_id).update(on_hand=F("on_hand") - order.quantity)


@shared_task
@transaction.atomic
def capture_payment(order_id):
    """Take the money. The order is the payment's primary key: there cannot be two."""
    order = Order.objects.get(pk=order_id)
    Payment.objects.get_or_create(order=order, defaults={"amount": order.total})


@shared_task
@transaction.atomic
def send_receipt(order_id):
    """Send the receipt for a payment; in this example sending means writing it down."""
    payment = Payment.objects.select_related("order__stock").get(pk=order_id)
    Receipt.objects.get_or_create(
        order=payment.order, defaults={"text": f"{payment.order}: {payment.amount} paid."}
    )


@shared_task
@transaction.atomic
def reorder(stock_id):
    """Fill up the stock of an article."""
    Stock.objects.filter(pk=stock_id, on_hand__lt=FULL).update(on_hand=FULL)
