"""The work that follows an order. Ordinary Celery tasks: nothing in them knows of the outbox.

A job is delivered at least once, so each task must bear being run twice. Taking from the stock
would count twice, so ``idempotent`` notes the job's id in the same transaction. The others can be
made only once anyway: an order has one payment and one receipt, and a full stock is full. What has
happened is published in the same transaction, once as well.
"""

from celery import shared_task
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from outbox_app import idempotent, publish

from .models import Order, Payment, Receipt, Stock

#: How many of an article are on hand after it was ordered anew.
FULL = 1000


@shared_task
@idempotent
def reserve_stock(order_id):
    """Take the ordered articles from the stock."""
    order = Order.objects.get(pk=order_id)
    Stock.objects.filter(pk=order.stock_id).update(on_hand=F("on_hand") - order.quantity)
    order.reserved_at = timezone.now()
    order.save(update_fields=["reserved_at"])
    publish(str(order.pk), "order.reserved")


@shared_task
@transaction.atomic
def capture_payment(order_id):
    """Take the money. The order is the payment's primary key: there cannot be two."""
    order = Order.objects.get(pk=order_id)
    _, is_new = Payment.objects.get_or_create(order=order, defaults={"amount": order.total})
    if is_new:
        publish(str(order.pk), "order.paid")


@shared_task
@transaction.atomic
def send_receipt(order_id):
    """Send the receipt for a payment; in this example sending means writing it down."""
    payment = Payment.objects.select_related("order__stock").get(pk=order_id)
    _, is_new = Receipt.objects.get_or_create(
        order=payment.order, defaults={"text": f"{payment.order}: {payment.amount} paid."}
    )
    if is_new:
        publish(str(payment.order_id), "order.receipt_sent")


@shared_task
@transaction.atomic
def reorder(stock_id):
    """Fill up the stock of an article."""
    Stock.objects.filter(pk=stock_id, on_hand__lt=FULL).update(on_hand=FULL)
