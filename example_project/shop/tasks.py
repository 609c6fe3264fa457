"""The work that follows an order. Ordinary Celery tasks: nothing in them knows of the outbox.

A job is delivered at least once, so each task must bear being run twice. Taking from the shelf
would count twice, so ``idempotent`` notes the job's id in the same transaction. The others can be
made only once anyway: an order has one payment and one receipt, and a command is executed once for
its id. What has happened is published in the same transaction, once as well.
"""

from celery import shared_task
from django.db import transaction
from django.utils import timezone

from outbox_app import idempotent, publish

from .models import Order, Payment, Receipt, Shelf

#: How many of an article are on hand after it was ordered anew.
FULL = 1000


@shared_task
@idempotent
def reserve_stock(order_id):
    """Take the ordered articles from their shelf."""
    order = Order.objects.get(pk=order_id)
    taken = {"pieces": order.quantity}
    Shelf.execute(str(order.stock_id), "take", taken, command_id=f"order:{order.pk}")
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


@shared_task(bind=True)
def reorder(self, stock_id):
    """Fill up the shelf of an article."""
    reordered = f"reorder:{self.request.id}"
    Shelf.execute(str(stock_id), "refill", {"pieces": FULL}, command_id=reordered)


@shared_task
def send_sale_receipt(sale):
    """Send the receipt of a sale; the note of the task's execution is all that is written."""
