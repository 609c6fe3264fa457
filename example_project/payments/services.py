"""Takes payments. The shop learns of a payment if and only if its transaction has committed."""

from outbox_app.prepared import prepared

from .models import Payment


def pay(order, amount, *, meanwhile=lambda: None):
    """Take the money for an order. ``meanwhile`` is called before the transaction ends."""
    data = {"amount": str(amount)}
    # The transaction begins at once, so the shop may ask after a second.
    with prepared(order, "payment.taken", data, using="default", to="shop", immune=1):
        Payment.objects.create(order=order, amount=amount)
        meanwhile()
