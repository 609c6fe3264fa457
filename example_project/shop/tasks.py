"""The work that follows an order, as ordinary Celery tasks that do not know of the outbox.

A job is delivered at least once, so each task must be safe to run twice. Setting ``reserved_at``
and publishing its event would happen twice, so ``idempotent`` notes the job's id in the same
transaction. The other effects are unique anyway: an order has one payment and one receipt, and a
command is executed once for its id. Each event is published in its effect's transaction, also once.
"""

from celery import shared_task
from django.db import transaction
from django.utils import timezone

from outbox_app import idempotent
from outbox_app.events import publish

from .models import Order, Payment, Receipt, Shelf

#: Pieces of an article on hand after it was reordered.
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
    """Take the money. The order is the payment's primary key, so there is one payment at most."""
    order = Order.objects.get(pk=order_id)
    _, is_new = Payment.objects.get_or_create(order=order, defaults={"amount": order.total})
    if is_new:
        publish(str(order.pk), "order.paid")


@shared_task
@transaction.atomic
def send_receipt(order_id):
    """Send the receipt for a payment; in this example, sending stores a row."""
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
    """Send the receipt of a sale; in this example only the note of the execution is written."""
