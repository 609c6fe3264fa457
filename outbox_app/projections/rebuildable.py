"""What a rebuild needs: a projection whose rows can be taken away, and a log with its beginning.

What cannot be rebuilt is refused before anything is written, with what to do instead. A rebuild
that ends with an error has changed nothing, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import models
from django.db.models import Exists, OuterRef

from ..exceptions import RebuildFailed, RebuildRefused
from ..models import EventLog, StreamHead
from ..process.tables import require_tables
from ..subscriptions.subscriber import subscriber_named
from .projection import Projection


def rebuildable(name: str) -> tuple[Projection, str]:
    """Return a projection that can be rebuilt, and its database alias.

    Args:
        name: The projection's.

    Raises:
        RebuildRefused: It cannot be.
        InvalidSubscriber, UnknownSubscription: It is not declared, or in a way that cannot work.
    """
    declared = subscriber_named(name)
    using = declared.using
    projection: Any = declared.handle
    if not isinstance(projection, Projection):
        raise RebuildRefused(
            f"Subscription {name!r} is no projection: {declared.handle!r} handles its events, and "
            "nobody knows what it has written. Replay it: manage.py outbox_subscriptions replay."
        )
    _require_unreferenced(projection.model)
    require_tables(using)
    return projection, using


def require_whole(log: type[EventLog], *, using: str) -> None:
    """Check that no event was removed: heads of streams stay when their events go.

    Raises:
        RebuildRefused: A stream has lost its beginning.
    """
    table = log._meta.db_table
    first = log._default_manager.using(using).filter(stream=OuterRef("stream"), version=1)
    heads = StreamHead.objects.using(using).filter(~Exists(first), log=table)
    stream = heads.values_list("stream", flat=True).first()
    if stream is not None:
        raise RebuildRefused(
            f"{table} has no version 1 of {stream!r} any more: events were pruned. The view knows "
            "them, and a replay would not. With an archive: manage.py outbox_pipeline rebuild "
            "--archive DIR. Without one leave the view."
        )


def _require_unreferenced(model: type[models.Model]) -> None:
    pointing = [relation.related_model._meta.label for relation in model._meta.related_objects]
    if pointing:
        raise RebuildRefused(
            f"{', '.join(sorted(map(str, pointing)))} points at {model._meta.label} with a foreign "
            "key, so its rows cannot be taken away and put back. Point at what the rows are about, "
            "or keep the key in a plain column."
        )


@contextmanager
def told(name: str, *, say: Callable[[BaseException], str] | None = None) -> Iterator[None]:
    """Make one error of whatever ends a rebuild.

    Args:
        name: The projection's.
        say: Describes an error. Default: its class and its text.

    Raises:
        RebuildFailed: What was raised, but for what refuses the rebuild.
    """
    try:
        yield
    except RebuildRefused:
        raise
    except Exception as error:
        text = say(error) if say else f"{type(error).__name__}: {error}"
        raise RebuildFailed(
            f"The rebuild of {name!r} ended with {text}. The view and its subscription are as they "
            "were. Run it again."
        ) from error
