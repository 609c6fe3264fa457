"""Subscriptions to look at: one that fails, one that sets a stream aside, one that is paused."""

from __future__ import annotations

from outbox_app.events import subscriber

from .poison import POISON


@subscriber("warehouse-export", types=["order.placed"])
def export(events):
    raise ConnectionError("warehouse.example:443 does not answer: timed out after 10 s")


@subscriber("invoice-mails", types=["invoice.*"], on_error="park")
def send_invoices(events):
    if any(event.stream == POISON for event in events):
        raise ValueError("invoice has no address")


@subscriber("newsletter", types=["customer.*"])
def note_customers(events):
    pass


@subscriber("loyalty-points", types=["customer.*"])
def count_points(events):
    pass
