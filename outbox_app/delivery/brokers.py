"""What is known of single brokers: timeouts, unsafe configurations, whose fault an error is.

Everything else goes through kombu's common interface, so any transport works; these are the two
that are first-class.
"""

from __future__ import annotations

import logging
from typing import Any

from kombu import Producer
from kombu.transport import virtual

from ..exceptions import Undeliverable, Unroutable, UnsafeBroker

logger = logging.getLogger("outbox_app.drain")

#: Answers that speak of the broker's state, not of the message, by the names of their classes …
_STATES = {
    "MessageNacked",
    "OutOfMemoryError",
    "ReadOnlyError",
    "NoPermissionError",
    "ClusterDownError",
    "MasterDownError",
    "TryAgainError",
    "MovedError",
    "AskError",
}
#: … and by Redis' own words, where redis-py has no class for them.
_REDIS_STATES = ("OOM", "READONLY", "MASTERDOWN", "NOREPLICAS", "MISCONF", "BUSY", "NOPERM")
#: AMQP closes the whole connection for these, yet they speak of what was sent: a frame that is too
#: large, a header that cannot be encoded, an exchange type or a flag that is not implemented.
_AMQP_ROW_AT_FAULT = (501, 502, 503, 540)


def transport_options(driver_type: str, timeout: float) -> dict[str, Any]:
    """Return the transport options that bound every wait of the drain's own connection.

    kombu's defaults are none. A transport that is not known here keeps the project's own options.
    """
    if driver_type == "redis":
        return {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            # A pipeline that is sent again by itself makes duplicates when a reply is lost.
            "retry_on_timeout": False,
        }
    if driver_type == "amqp":
        return {"read_timeout": timeout, "write_timeout": timeout, "confirm_publish": True}
    return {}


def refuse_unsafe(connection: Any, channel: Any) -> None:
    """Refuse a broker that is set up to lose messages, and warn of one that may be.

    Raises:
        UnsafeBroker: Redis evicts keys (``allkeys-*``), or RabbitMQ has no publisher confirms.
    """
    driver_type = connection.transport.driver_type
    if driver_type == "redis":
        _check_eviction(channel.client, connection.connection_errors)
    elif driver_type == "amqp":
        capabilities = connection.connection.server_properties.get("capabilities", {})
        if not capabilities.get("publisher_confirms"):
            raise UnsafeBroker(
                f"The broker at {connection.as_uri()} has no publisher confirms, so nobody "
                "can know what it took. Use RabbitMQ, or another transport."
            )


def _check_eviction(client: Any, connection_errors: tuple[type[BaseException], ...]) -> None:
    try:
        policy = client.info("memory").get("maxmemory_policy")
    except connection_errors:
        raise  # it does not answer: whatever was sent now might be taken much later
    except Exception as error:  # INFO may be forbidden, or renamed away
        logger.warning("Redis does not tell its eviction policy error=%r", error)
        return
    if policy is None:
        logger.warning("Redis does not tell its eviction policy")
    elif policy.startswith("allkeys-"):
        raise UnsafeBroker(
            f"Redis evicts queues when its memory is full: maxmemory-policy is {policy!r}. "
            "Set maxmemory-policy to noeviction."
        )
    elif policy.startswith("volatile-"):
        logger.warning("Redis may evict keys with a TTL policy=%s hint=noeviction", policy)


def probe(connection: Any, channel: Any, *, timeout: float) -> None:
    """See whether RabbitMQ takes messages at all, by one that has no route.

    While an alarm is on, it reads no message, but one that waits in the socket is taken when the
    alarm is over, however long ago its sender has given up. Each attempt would leave a copy.

    Raises:
        Exception: One of the connection's errors: it does not.
    """
    if connection.transport.driver_type == "amqp":
        producer = Producer(channel, auto_declare=False)
        # Not an empty one: that is confirmed under an alarm too.
        producer.publish(b"?", routing_key="outbox.probe", timeout=timeout, confirm_timeout=timeout)


def check_route(channel: Any, exchange: str, routing_key: str) -> None:
    """Refuse a message for which a transport that routes by itself (Redis, SQS, …) finds no queue.

    RabbitMQ returns such a message; these drop it.

    Raises:
        Unroutable: See above.
    """
    if not exchange or not isinstance(channel, virtual.Channel):
        return
    if channel.typeof(exchange).type == "fanout":
        return  # for whoever listens, which may be nobody
    if not channel._lookup(exchange, routing_key):
        raise Unroutable(
            f"No queue is bound to exchange {exchange!r} for routing key {routing_key!r}. "
            "Declare the queue in task_queues, or correct the route, then requeue the job."
        )


def check_frame(connection: Any, envelope: str) -> None:
    """Refuse headers and properties that cannot fit the one frame that AMQP has for them.

    RabbitMQ closes the connection for these. Where they are much larger it does so while they are
    still being sent, and then nothing says why.

    Raises:
        Undeliverable: See above.
    """
    if connection.transport.driver_type != "amqp":
        return
    limit = connection.connection.frame_max
    # What is nearer to the limit RabbitMQ itself refuses: text in JSON has up to three times the
    # bytes that it has in a frame.
    if limit and len(envelope) > 4 * limit:
        raise Undeliverable(
            f"Headers and properties of {len(envelope)} bytes do not fit AMQP's frame of {limit} "
            "bytes. Pass large data as arguments, or store it elsewhere and pass its key."
        )


def row_at_fault(error: BaseException) -> bool:
    """Say whether an error that cost the connection speaks of the one message that was sent."""
    return getattr(error, "reply_code", None) in _AMQP_ROW_AT_FAULT


def broker_at_fault(error: BaseException) -> bool:
    """Say whether a broker that answers refused because of its state: no row is to blame for it."""
    if any(cls.__name__ in _STATES for cls in type(error).__mro__):
        return True
    # redis-py puts "Command # 3 (LPUSH …) of pipeline caused error: " before what the server said.
    said = str(error).rpartition("caused error: ")[2]
    return type(error).__name__ == "ResponseError" and said.startswith(_REDIS_STATES)
