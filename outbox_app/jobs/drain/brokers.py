"""What Redis and RabbitMQ need: timeouts, unsafe configurations, and whose fault an error is.

These two are first-class. Everything else goes through kombu's common interface, so any transport
works.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from amqp.exceptions import AccessRefused
from celery import Celery
from kombu import Producer
from kombu.transport import virtual

from ...exceptions import Undeliverable, Unroutable, UnsafeBroker
from ...text import get_logger
from ..message import Message

logger = get_logger("outbox_app.drain")

#: Refusals by Redis itself, by redis-py's classes or Redis' words: it has not taken the message.
#: After other answers, a proxy's for example, it may have taken it.
_REFUSING_CLASSES = {
    *("OutOfMemoryError", "ReadOnlyError", "NoPermissionError", "ExecAbortError"),
    *("ClusterDownError", "MasterDownError", "ClusterCrossSlotError"),
    *("TryAgainError", "MovedError", "AskError"),
}
_REFUSING_WORDS = (
    *("OOM", "READONLY", "NOPERM", "MISCONF", "BUSY"),
    *("MASTERDOWN", "NOREPLICAS", "CROSSSLOT"),
)
#: The only errors of Redis that concern a message: its queue is no list, or it is larger than
#: proto-max-bulk-len. Any other error, known or not, concerns the state of Redis or of a proxy.
_REDIS_ROW_AT_FAULT = ("WRONGTYPE", "Protocol error: invalid bulk length")
#: RabbitMQ's codes that concern a message: too large, no route, no consumer, no exchange, a refused
#: property. Other codes concern its state: 403, for example, comes and goes with permissions.
_AMQP_CHANNEL_ROW_AT_FAULT = (311, 312, 313, 404, 406)
_NO_ROUTE = (312, 404)
#: With these codes AMQP closes the whole connection, yet they concern the message: a frame that is
#: too large, a header that cannot be encoded, an exchange type or a flag that is not implemented.
_AMQP_ROW_AT_FAULT = (501, 502, 503, 540)

#: Packages whose errors this module knows, or that concern no broker. An error of another
#: transport's library may concern the message or the broker's state: see ``SendBudget.gives_up``.
_KNOWN_PACKAGES = {
    *sys.stdlib_module_names,
    *("amqp", "celery", "django", "kombu", "outbox_app", "redis", "vine"),
}


def transport_options(app: Celery, driver_type: str, timeout: float) -> dict[str, Any]:
    """Return the transport options that bound every wait of the drain's own connection.

    kombu sets no bounds by default. Any other transport keeps the project's own options.
    """
    if driver_type == "redis":
        bounds = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        sentinels = app.conf.broker_transport_options.get("sentinel_kwargs") or {}
        return {
            **bounds,
            # redis-py would resend a pipeline whose reply was lost, and so make duplicates.
            "retry_on_timeout": False,
            # A sentinel has a client of its own, which would retry by itself.
            "sentinel_kwargs": {**sentinels, **bounds, "retry": None},
        }
    if driver_type == "amqp":
        return {"read_timeout": timeout, "write_timeout": timeout, "confirm_publish": True}
    return {}


def has_ended(connection: Any) -> bool:
    """Return whether RabbitMQ has closed a connection, or is about to: it has sent data unasked.

    redis-py checks its connections by itself: see ``reconnect``.
    """
    is_connected = connection is not None and connection.connected
    socket = getattr(connection.connection, "sock", None) if is_connected else None
    return socket is not None and bool(wait([socket], timeout=0))


def reconnect(connection: Any, channel: Any) -> None:
    """Replace a connection to Redis that has ended. redis-py would do so as it sends a message."""
    if connection.transport.driver_type == "redis":
        with channel.conn_or_acquire() as client:
            client.client().close()


def refuse_unsafe(connection: Any, channel: Any) -> None:
    """Refuse a broker that is configured to lose messages, and warn of one that may be."""
    driver_type = connection.transport.driver_type
    if driver_type == "redis":
        policy = redis_info(connection, channel, "memory", "maxmemory_policy")
        effect, is_unsafe = eviction(policy or "")
        if is_unsafe:
            raise UnsafeBroker(f"Redis {effect} Set maxmemory-policy to noeviction.")
        if policy is None:
            logger.warning("Redis does not tell its eviction policy")
        elif effect:
            logger.warning(
                "Redis may evict keys with a TTL policy=%s hint=%s", policy, "noeviction"
            )
    elif driver_type == "amqp":
        capabilities = connection.connection.server_properties.get("capabilities", {})
        if not capabilities.get("publisher_confirms"):
            raise UnsafeBroker(
                f"The broker at {connection.as_uri()} has no publisher confirms, so it "
                "does not say what it took. Use RabbitMQ, or another transport."
            )


def redis_info(connection: Any, channel: Any, section: str, name: str) -> Any:
    """Return a value of Redis' INFO, or None if Redis refuses it."""
    try:
        return channel.client.info(section).get(name)
    except connection.connection_errors:
        raise  # Redis does not answer: a message sent now might be taken much later
    except Exception as error:  # INFO may be forbidden, or renamed away
        logger.warning("Redis refuses INFO section=%s error=%s", section, error)


def eviction(policy: str) -> tuple[str, bool]:
    """Return what Redis evicts when its memory is full (empty: nothing), and whether queues are."""
    effects = {
        "allkeys": "evicts queues when its memory is full",
        "volatile": "may evict keys that have a TTL",
    }
    kind = policy.partition("-")[0]
    effect = f"{effects[kind]}: maxmemory-policy is {policy!r}." if kind in effects else ""
    return effect, kind == "allkeys"


def probe(connection: Any, channel: Any, *, timeout: float) -> bool:
    """Check that the broker takes messages, by sending one that leaves nothing behind.

    Under an alarm RabbitMQ reads no messages, but takes those in the socket when the alarm is over,
    however long ago the sender has given up: each attempt with a job would leave a copy. Raises if
    the broker takes no messages; returns False if it cannot be probed.
    """
    driver_type = connection.transport.driver_type
    if driver_type == "amqp":
        # On another channel: a refusal closes it. Not empty: an alarm lets empty messages pass.
        producer = Producer(connection.channel(), auto_declare=False)
        bounds: dict[str, Any] = {"timeout": timeout, "confirm_timeout": timeout}
        try:
            producer.publish(b"?", routing_key="outbox.probe", **bounds)
        except AccessRefused:  # RabbitMQ reads; the user may write to some exchanges only
            return False
    elif driver_type == "redis":
        key = f"{channel.global_keyprefix}outbox.probe"
        try:
            channel.client.lpushx(key, "?")  # a write without effect: the list does not exist
        except connection.channel_errors as error:
            if "NoPermissionError" in _classes(error) or lacks_command(error):
                return False
            raise
    return driver_type in ("amqp", "redis")


def waiting(connection: Any, channel: Any, queue: str) -> int:
    """Return how many messages wait in a queue: none if there is no such queue.

    Messages that a worker has fetched and not begun do not count.
    """
    if connection.transport.driver_type == "redis":  # without the MULTI of kombu's own method
        keys = [channel._q_for_pri(queue, step) for step in channel.priority_steps]
        return sum(channel.client.llen(key) for key in dict.fromkeys(keys))
    asked = connection.channel()  # RabbitMQ closes it if there is no such queue
    try:
        return int(asked.queue_declare(queue, passive=True).message_count)
    except connection.channel_errors as error:
        if getattr(error, "code", None) == 404 or getattr(error, "reply_code", None) == 404:
            return 0
        raise
    finally:
        with suppress(Exception):
            asked.close()


def check_route(channel: Any, exchange: str, routing_key: str) -> None:
    """Refuse a message for which a transport that routes in the client (Redis, …) finds no queue.

    RabbitMQ returns such a message; these transports drop it.
    """
    if not exchange or not isinstance(channel, virtual.Channel):
        return
    # A fanout may have no listeners.
    if channel.typeof(exchange).type != "fanout" and not channel._lookup(exchange, routing_key):
        raise Unroutable(
            f"No queue is bound to exchange {exchange!r} for routing key {routing_key!r}. "
            "Declare the queue in task_queues, or correct the route, then requeue the job."
        )


def is_plain(envelope: str) -> bool:
    """Return whether ``check_frame`` accepts an envelope on every connection."""
    # 4,096 bytes are the lowest limit that AMQP allows for a frame.
    return len(envelope) <= 4 * 4096 and "NaN" not in envelope and "Infinity" not in envelope


def check_frame(connection: Any, envelope: str, message: Message) -> None:
    """Refuse headers and properties that do not fit the one frame that AMQP has for them.

    RabbitMQ closes the connection for such a message: if it is much too large, while it is still
    being sent, so that no error says why; for a number that Erlang cannot represent, with an error
    that reports a failure of RabbitMQ itself.
    """
    if connection.transport.driver_type != "amqp":
        return
    limit = connection.connection.frame_max
    # Near the limit, leave the refusal to RabbitMQ: text has up to three times as many bytes in
    # JSON as in a frame.
    if limit and len(envelope) > 4 * limit:
        raise Undeliverable(
            f"Headers and properties of {len(envelope)} bytes do not fit AMQP's frame of {limit} "
            "bytes. Pass large data as arguments, or store it elsewhere and pass its key."
        )
    try:
        json.dumps([message.headers, message.properties], allow_nan=False, default=str)
    except ValueError as error:
        raise Undeliverable(
            "A header or property is NaN or infinite, which RabbitMQ cannot read. Leave it out, or "
            "pass it as text or as an argument."
        ) from error


def row_at_fault(error: BaseException) -> bool:
    """Return whether an error that closed the connection was caused by the message just sent."""
    return getattr(error, "reply_code", None) in _AMQP_ROW_AT_FAULT


def broker_at_fault(error: BaseException) -> bool:
    """Return whether a broker that answers has refused because of its state, not of a row."""
    classes = _classes(error)
    if "AMQPError" in classes:
        code = getattr(error, "reply_code", None)
        return code not in (*_AMQP_CHANNEL_ROW_AT_FAULT, *_AMQP_ROW_AT_FAULT)
    if "ResponseError" in classes:
        return not _reply_of(error).startswith(_REDIS_ROW_AT_FAULT)
    return bool(classes & {"MessageNacked", "InvalidResponse"}) or is_foreign(error)


def is_foreign(error: BaseException) -> bool:
    """Return whether an error comes from a transport's library that this module does not know."""
    return type(error).__module__.partition(".")[0] not in _KNOWN_PACKAGES


def has_no_route(error: BaseException) -> bool:
    """Return whether a message was refused because it has no queue or no exchange."""
    return isinstance(error, Unroutable) or getattr(error, "reply_code", None) in _NO_ROUTE


def refuses_declaration(error: BaseException, connection: Any) -> bool:
    """Return whether a broker refused a declaration, but may take messages all the same."""
    # On Redis kombu binds in a MULTI, which a proxy may lack.
    is_known = hasattr(error, "reply_code") or lacks_command(error) or not broker_at_fault(error)
    return is_foreign(error) or (is_known and isinstance(error, connection.channel_errors))


def refused_for_certain(error: BaseException) -> bool:
    """Return whether a broker at fault has certainly not taken the message."""
    classes = _classes(error)
    if "ResponseError" in classes:
        return bool(classes & _REFUSING_CLASSES) or _reply_of(error).startswith(_REFUSING_WORDS)
    if "ClientError" in classes:  # an HTTP answer of SQS
        answer = getattr(error, "response", {}).get("ResponseMetadata", {})
        return bool(400 <= answer.get("HTTPStatusCode", 0) < 500)
    return bool(classes & {"AccessRefused", "MessageNacked"}) or has_no_route(error)


def lacks_command(error: BaseException) -> bool:
    """Return whether Redis, or a proxy before it, refused a command that it does not offer."""
    return _reply_of(error).startswith(("unknown command", "EXEC without MULTI"))


def spans_slots(error: BaseException) -> bool:
    """Return whether Redis Cluster refused a transaction: its queues are in several slots."""
    return "ClusterCrossSlotError" in _classes(error) or "CROSSSLOT" in str(error)


def _classes(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}


def _reply_of(error: BaseException) -> str:
    # redis-py puts "Command # 3 (LPUSH …) of pipeline caused error: " before the server's text.
    return str(error).rpartition("caused error: ")[2]
