"""A finished message, between kombu's ``Producer.publish`` and a row.

The body is kept as the bytes that the broker gets. Everything else (headers, properties, route,
declarations) is kept as kombu's own JSON in ASCII, which gives datetimes, UUIDs, Decimals and bytes
back as they were. Nothing here decodes a body: a pickled job passes through untouched.
"""

from __future__ import annotations

import json as stdlib_json
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from typing import Any

from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import Exchange, Queue, binding
from kombu.utils import json

from ..exceptions import Undeliverable

#: An item of ``declare``: the name of a queue of ``app.amqp.queues``, or a whole ad-hoc entity.
Declaration = str | dict[str, Any]
#: The header of a published job with a receipt: the id of its row, "@" and the alias.
ADDRESS = "outbox_row"
#: Properties that Celery gives a message.
_FINISHED = {"correlation_id", "reply_to", "delivery_mode"}
#: Attributes that ``Queue.__eq__`` does not compare.
_not_compared = attrgetter(
    *("bindings", "expires", "message_ttl", "max_length", "max_length_bytes", "max_priority")
)


@dataclass(slots=True)
class Message:
    """A message without its body: all else that one publish needs."""

    exchange: str = ""
    routing_key: str = ""
    headers: dict[str, Any] = field(default_factory=dict)
    #: ``delivery_mode``, ``correlation_id``, ``reply_to`` and any others that the caller gave.
    properties: dict[str, Any] = field(default_factory=dict)
    #: None: the message has no priority, and the queue's default applies.
    priority: int | None = None
    content_type: str = ""
    content_encoding: str = ""
    declare: list[Declaration] = field(default_factory=list)
    #: ISO 8601; the TTL is computed from it when the message is published.
    expires: str | None = None
    #: The ``task-sent`` event, where the app sends such events.
    sent_event: dict[str, Any] | None = None

    @property
    def is_finished(self) -> bool:
        """Return whether kombu's producer would have nothing to add, except for the expiry."""
        return bool(
            self.properties.keys() <= _FINISHED
            and isinstance(self.properties.get("delivery_mode"), int)
            and self.content_type
            and self.content_encoding
        )

    def dumps(self) -> str:
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return json.dumps({name: value for name, value in values if value or value == 0})

    @classmethod
    def loads(cls, envelope: str) -> Message:
        # kombu's decoder takes three times as long as the standard one; only marked values need it.
        loads = json.loads if '"__type__"' in envelope else stdlib_json.loads
        return cls(**loads(envelope))


def moment(value: Any, app: Celery) -> datetime | None:
    """Return ``eta`` or ``expires`` as an aware datetime, read as a worker reads it."""
    parsed = maybe_iso8601(value)
    return None if parsed is None else maybe_make_aware(parsed, app.timezone)


def describe(entity: Any, app: Celery) -> Declaration:
    """Return an entity of ``declare=`` in the form that a row stores.

    A queue of the app's configuration is stored by name, so that the drain declares it as it is
    configured by then. Any other entity (added at run time, or given with the call) is stored
    whole, as a drainer does not know it.
    """
    if isinstance(entity, Queue):
        own = _configured(entity.name, app)
        if own is entity or (own == entity and _not_compared(own) == _not_compared(entity)):
            return str(entity.name)
        return {"queue": entity.as_dict(recurse=True)}
    if isinstance(entity, Exchange):
        return {"exchange": entity.as_dict(recurse=True)}
    raise TypeError(f"declare: expected kombu Queue or Exchange, got {entity!r}")


def _configured(name: str, app: Celery) -> Queue | None:
    """Return the queue of this name that the app's configuration makes in every process."""
    amqp: Any = app.amqp
    if not hasattr(amqp, "outbox_configured_queues"):
        amqp.outbox_configured_queues = amqp.Queues(app.conf.task_queues)
    try:
        return amqp.outbox_configured_queues[name]  # type: ignore[no-any-return]
    except KeyError:  # task_create_missing_queues is off
        return None


def restore(declaration: Declaration, app: Celery) -> Queue | Exchange:
    if isinstance(declaration, str):
        try:
            return app.amqp.queues[declaration]
        except KeyError:
            raise Undeliverable(
                f"Queue {declaration!r} is not in task_queues of Celery app {app.main!r}, and "
                "task_create_missing_queues is off. Declare it there, then requeue the job."
            ) from None
    if "exchange" in declaration:
        return Exchange(**declaration["exchange"])
    options = dict(declaration["queue"])
    if options.get("exchange"):
        options["exchange"] = Exchange(**options["exchange"])
    options["bindings"] = [
        binding(Exchange(**b["exchange"]), b["routing_key"], b["arguments"], b["unbind_arguments"])
        for b in options.get("bindings") or ()
    ]
    return Queue(**options)
