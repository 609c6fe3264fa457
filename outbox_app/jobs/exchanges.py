"""Which messages RabbitMQ has to return if no queue takes them, by the types of their exchanges.

All but two sorts are: a broadcast may have no listeners, and RabbitMQ's delayed-message plugin says
"no route" of a message that it holds, and routes it later. Such a job would be dead, and executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from celery import Celery
from kombu import Exchange, Queue
from kombu.common import Broadcast
from kombu.transport import virtual

from ..exceptions import Undeliverable
from .message import Message

#: What ``exchange_types`` says of the exchange of a ``Broadcast`` queue.
_BROADCAST = "broadcast"
#: The delayed-message plugin's type of exchange, its header, and the longest delay in milliseconds.
_DELAYED, _DELAY, _LONGEST_DELAY = "x-delayed-message", "x-delay", 2**32 - 1


def declare_exchanges(app: Celery, channel: Any) -> dict[str, str]:
    """Return the types of the exchanges of the app's queues: see ``exchange_types``.

    A transport that routes in the client (Redis, …) takes an unknown exchange for a direct one: for
    a topic it would find no queue, for a broadcast it would use lists that no worker reads. So the
    drainer declares the exchanges of the app's queues first. Celery declares an exchange only with
    its queue, and that of a broadcast only in workers.
    """
    # A refused call, as with queue=5, leaves a queue in this process that has no text for a name.
    queues: Any = [each for each in app.amqp.queues.values() if isinstance(each.name, str)]
    if isinstance(channel, virtual.Channel):
        known: Any = channel.state.exchanges
        for queue in queues:
            if queue.exchange.name not in known:
                queue.exchange(channel).declare()  # in this process, not at the broker
    return exchange_types(queues)


def exchange_types(entities: Iterable[Queue | Exchange]) -> dict[str, str]:
    """Return the types of exchanges, by name; for one with a ``Broadcast`` queue that word."""
    types: dict[str, str] = {}
    for each in entities:
        exchange = each.exchange if isinstance(each, Queue) else each
        if exchange is not None and types.get(exchange.name) != _BROADCAST:
            types[exchange.name] = _BROADCAST if isinstance(each, Broadcast) else exchange.type
    return types


def needs_route(message: Message, types: Mapping[str, str]) -> bool:
    """Return whether RabbitMQ has to return a message that no queue takes at once."""
    type_ = types.get(message.exchange, "")
    delay = message.headers.get(_DELAY)
    if type_ == _BROADCAST or delay is None:
        return type_ != _BROADCAST
    is_own = not message.exchange or message.exchange.startswith("amq.")
    if is_own or type_ not in ("", _DELAYED):
        return True
    is_held = _is_held(delay)
    if is_held and not type_:
        raise Undeliverable(
            f"The message has a header {_DELAY}, and no queue of the Celery app names exchange "
            f"{message.exchange!r}. If its type is {_DELAYED}, RabbitMQ answers as if the message "
            "had no queue, and delivers it later. Declare the exchange with its type in "
            "task_queues, then requeue the job."
        )
    return not is_held


def _is_held(delay: Any) -> bool:
    """Return whether the delayed-message plugin holds a message with this delay."""
    if isinstance(delay, bool):
        return False
    is_text = isinstance(delay, str) and re.fullmatch(r"[+-]?\d{1,99}", delay, re.ASCII)
    if not is_text and not isinstance(delay, int | float):
        raise Undeliverable(
            f"Header {_DELAY} is {repr(delay)[:99]}, and must be a number of milliseconds: "
            "RabbitMQ would close the connection. Correct the call, and send the job again."
        )
    return 0 < int(delay) <= _LONGEST_DELAY
