"""What the payments do. The shop learns of a payment if and only if its transaction committed."""

from django.conf import settings

from outbox_app.prepared import prepared

from .models import Payment


def pay(order, amount, *, meanwhile=lambda: None):
    """Take the money for an order. ``meanwhile`` is what happens before the transaction ends."""
    data = {"amount": str(amount)}
    where = {"using": settings.PAYMENTS_DATABASE, "to": settings.PAYMENTS_KEEPER}
    with prepared(order, "payment.taken", data, **where):
        Payment.objects.using(settings.PAYMENTS_DATABASE).create(order=order, amount=amount)
        meanwhile()
