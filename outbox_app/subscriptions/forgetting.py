"""Forgetting a subscription: what is left of one that the code no longer declares.

Its cursors would hold the events that ``outbox_prune`` may not remove, for ever. What its handler
has done to the database stays.
"""

from __future__ import annotations

from django.db import transaction

from ..aliases import log_alias
from ..exceptions import ReplayRefused, UnknownSubscription
from ..models import (
    Cursor,
    DeliveredVersion,
    Event,
    Gap,
    Lease,
    ParkedStream,
    Subscription,
)
from .lag import served
from .subscriber import all_subscribers


def forget(name: str, *, using: str | None = None) -> None:
    """Delete the cursors of a subscription, with its parked streams and gaps.

    Args:
        name: A subscription that no code declares and no process runs.
        using: Database alias. Default: the log's.

    Raises:
        UnknownSubscription: Nothing is known of it there.
        ReplayRefused: It is declared, or a process runs it. Nothing was changed.
    """
    using = using or log_alias(Event)
    if any(each.name == name and (each.fault or each.using == using) for each in all_subscribers()):
        raise ReplayRefused(
            f"Subscription {name!r} is declared: it would begin anew. Remove it from the code "
            "first, and from every process; or pause it."
        )
    if served([name], using):
        raise ReplayRefused(f"A process runs subscription {name!r}. Stop it, or deploy, first.")
    with transaction.atomic(using=using):
        rows = Subscription.objects.using(using).select_for_update().filter(pk=name)
        if not rows.exists():
            raise UnknownSubscription(f"Nothing is known of a subscription {name!r} on {using!r}.")
        for model in (Cursor, ParkedStream, Gap, DeliveredVersion):
            model._default_manager.using(using).filter(subscription=name).delete()
        Lease.objects.using(using).filter(resource=f"subscription:{name}").delete()
        rows.delete()
