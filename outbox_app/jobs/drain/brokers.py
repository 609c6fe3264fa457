"""What is known of single brokers: timeouts, unsafe configurations, whose fault an error is.

Everything else goes through kombu's common interface, so any transport works; these are the two
that are first-class.
"""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import wait
from typing import Any

from amqp.exceptions import AccessRefused
from celery import Celery
from kombu import Producer
from kombu.common import Broadcast
from kombu.transport import virtual

from ...exceptions import Undeliverable, Unroutable, UnsafeBroker
from ...text import get_logger
from ..message import Message

logger = get_logger("outbox_app.drain")

#: Redis' own refusals, by redis-py's classes or Redis' words: it has not taken the message. Other
#: answers, a proxy's for example, leave it open.
_REFUSING_CLASSES = {
    *("OutOfMemoryError", "ReadOnlyError", "NoPermissionError", "ExecAbortError"),
    *("ClusterDownError", "MasterDownError", "ClusterCrossSlotError"),
    *("TryAgainError", "MovedError", "AskError"),
}
_REFUSING_WORDS = (
    *("OOM", "READONLY", "NOPERM", "MISCONF", "BUSY"),
    *("MASTERDOWN", "NOREPLICAS", "CROSSSLOT"),
)
#: All that Redis says of a message: its queue is no list, or it is larger than proto-max-bulk-len.
#: Any other answer, known or not, speaks of the broker's state, or of a proxy's.
_REDIS_ROW_AT_FAULT = ("WRONGTYPE", "Protocol error: invalid bulk length")
#: What RabbitMQ says of a message: too large, no route, no consumer, no exchange, a property that
#: it refuses. Other codes speak of its state: 403, for example, comes and goes with permissions.
_AMQP_CHANNEL_ROW_AT_FAULT = (311, 312, 313, 404, 406)
_NO_ROUTE = (312, 404)
#: AMQP closes the whole connection for these, yet they speak of what was sent: a frame that is too
#: large, a header that cannot be encoded, an exchange type or a flag that is not implemented.
_AMQP_ROW_AT_FAULT = (501, 502, 503, 540)

#: Packages whose errors are judged here by themselves, or speak of no broker. Those of any other
#: transport's library may mean the message or the broker's state: see ``Wire.gives_up``.
_KNOWN_PACKAGES = {
    *sys.stdlib_module_names,
    *("amqp", "celery", "django", "kombu", "outbox_app", "redis", "vine"),
}


def transport_options(app: Celery, driver_type: str, timeout: float) -> dict[str, Any]:
    """Return the transport options that bound every wait of the drain's own connection.

    kombu's defaults are none. A transport that is not known here keeps the project's own options.
    """
    if driver_type == "redis":
        bounds = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        sentinels = app.conf.broker_transport_options.get("sentinel_kwargs") or {}
        return {
            **bounds,
            # A pipeline that is sent again by itself makes duplicates when a reply is lost.
            "retry_on_timeout": False,
            # A sentinel has a client of its own, which asks again and again by itself.
            "sentinel_kwargs": {**sentinels, **bounds, "retry": None},
        }
    if driver_type == "amqp":
        return {"read_timeout": timeout, "write_timeout": timeout, "confirm_publish": True}
    return {}


def has_ended(connection: Any) -> bool:
    """Say whether RabbitMQ has closed a connection, or is about to: then it speaks unasked.

    Redis' client looks for that by itself.
    """
    is_connected = connection is not None and connection.connected
    socket = getattr(connection.connection, "sock", None) if is_connected else None
    return socket is not None and bool(wait([socket], timeout=0))


def refuse_unsafe(connection: Any, channel: Any) -> None:
    """Refuse a broker that is set up to lose messages, and warn of one that may be."""
    driver_type = connection.transport.driver_type
    if driver_type == "redis":
        policy = redis_info(connection, channel, "memory", "maxmemory_policy")
        effect, is_unsafe = eviction(policy or "")
        if is_unsafe:
            raise UnsafeBroker(f"Redis {effect} Set maxmemory-policy to noeviction.")
        if policy is None:
            logger.warning("Redis does not tell its eviction policy")
        elif effect:
            logger.warning("Redis may evict keys with a TTL policy=%s hint=noeviction", policy)
    elif driver_type == "amqp":
        capabilities = connection.connection.server_properties.get("capabilities", {})
        if not capabilities.get("publisher_confirms"):
            raise UnsafeBroker(
                f"The broker at {connection.as_uri()} has no publisher confirms, so it "
                "does not say what it took. Use RabbitMQ, or another transport."
            )


def redis_info(connection: Any, channel: Any, section: str, name: str) -> Any:
    """Return what Redis says of itself; None where it does not."""
    try:
        return channel.client.info(section).get(name)
    except connection.connection_errors:
        raise  # it does not answer: what was sent now might be taken much later
    except Exception as error:  # INFO may be forbidden, or renamed away
        logger.warning("Redis refuses INFO section=%s error=%r", section, error)


def eviction(policy: str) -> tuple[str, bool]:
    """Return what Redis evicts when its memory is full (empty: nothing), and if it is queues."""
    effects = {
        "allkeys": "evicts queues when its memory is full",
        "volatile": "may evict keys that have a TTL",
    }
    kind = policy.partition("-")[0]
    effect = f"{effects[kind]}: maxmemory-policy is {policy!r}." if kind in effects else ""
    return effect, kind == "allkeys"


def probe(connection: Any, channel: Any, *, timeout: float) -> bool:
    """See whether the broker takes messages, by one that leaves nothing behind.

    Under an alarm RabbitMQ reads no message, but one that waits in the socket is taken when the
    alarm is over, however long ago its sender has given up. Each attempt would leave a copy. Raises
    where it takes none; returns False where it cannot be asked.
    """
    driver_type = connection.transport.driver_type
    if driver_type == "amqp":
        # On a channel of its own: a refusal closes it. Not empty: that is confirmed under an alarm.
        producer = Producer(connection.channel(), auto_declare=False)
        bounds: dict[str, Any] = {"timeout": timeout, "confirm_timeout": timeout}
        try:
            producer.publish(b"?", routing_key="outbox.probe", **bounds)
        except AccessRefused:  # it reads; the user may write to some exchanges only
            return False
    elif driver_type == "redis":
        key = f"{channel.global_keyprefix}outbox.probe"
        try:
            channel.client.lpushx(key, "?")  # a write that does nothing, as there is no such list
        except connection.channel_errors as error:
            if "NoPermissionError" in _classes(error) or lacks_command(error):
                return False
            raise
    return driver_type in ("amqp", "redis")


def declare_exchanges(app: Celery, channel: Any) -> set[str]:
    """Return the exchanges of ``Broadcast`` queues: to have no listener is no error there.

    A transport that routes by itself (Redis, …) takes an exchange that it does not know for a
    direct one: it finds no queue of a topic, and lists of a broadcast that no worker reads. So the
    drainer declares those of the app's queues to it. Celery does so with a queue, and in workers
    only with one of a broadcast.
    """
    queues: Any = app.amqp.queues.values()
    if isinstance(channel, virtual.Channel):
        known: Any = channel.state.exchanges
        for queue in queues:
            if queue.exchange.name not in known:
                queue.exchange(channel).declare()  # for this process: no broker is asked
    return {queue.exchange.name for queue in queues if isinstance(queue, Broadcast)}


def check_route(channel: Any, exchange: str, routing_key: str) -> None:
    """Refuse a message for which a transport that routes by itself (Redis, SQS, …) finds no queue.

    RabbitMQ returns such a message; these drop it.
    """
    if not exchange or not isinstance(channel, virtual.Channel):
        return
    if channel.typeof(exchange).type == "fanout":
        return  # for all listeners, of which there may be none
    if not channel._lookup(exchange, routing_key):
        raise Unroutable(
            f"No queue is bound to exchange {exchange!r} for routing key {routing_key!r}. "
            "Declare the queue in task_queues, or correct the route, then requeue the job."
        )


def is_plain(envelope: str) -> bool:
    """Say whether ``check_frame`` refuses an envelope on no connection."""
    # 4,096 bytes are the least that AMQP allows for a frame.
    return len(envelope) <= 4 * 4096 and "NaN" not in envelope and "Infinity" not in envelope


def check_frame(connection: Any, envelope: str, message: Message) -> None:
    """Refuse headers and properties that cannot be in the one frame that AMQP has for them.

    RabbitMQ closes the connection for these. Where they are much larger it does so while they are
    still being sent, and then nothing says why. For numbers that Erlang does not have it says that
    it has failed itself.
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
    try:
        json.dumps([message.headers, message.properties], allow_nan=False, default=str)
    except ValueError as error:
        raise Undeliverable(
            "A header or property is NaN or infinite, which RabbitMQ cannot read. Leave it out, or "
            "pass it as text or as an argument."
        ) from error


def row_at_fault(error: BaseException) -> bool:
    """Say whether an error that cost the connection speaks of the one message that was sent."""
    return getattr(error, "reply_code", None) in _AMQP_ROW_AT_FAULT


def broker_at_fault(error: BaseException) -> bool:
    """Say whether a broker that answers refused because of its state: no row is to blame for it."""
    classes = _classes(error)
    if "AMQPError" in classes:
        code = getattr(error, "reply_code", None)
        return code not in (*_AMQP_CHANNEL_ROW_AT_FAULT, *_AMQP_ROW_AT_FAULT)
    if "ResponseError" in classes:
        return not _said(error).startswith(_REDIS_ROW_AT_FAULT)
    return bool(classes & {"MessageNacked", "InvalidResponse"}) or is_foreign(error)


def is_foreign(error: BaseException) -> bool:
    """Say whether an error is that of a transport's library of which nothing is known here."""
    return type(error).__module__.partition(".")[0] not in _KNOWN_PACKAGES


def has_no_route(error: BaseException) -> bool:
    """Say whether there is no queue for a message, or no exchange."""
    return isinstance(error, Unroutable) or getattr(error, "reply_code", None) in _NO_ROUTE


def refuses_declaration(error: BaseException, connection: Any) -> bool:
    """Say whether a declaration was refused by a broker that may take messages all the same."""
    # kombu binds in a MULTI.
    is_known = hasattr(error, "reply_code") or lacks_command(error) or not broker_at_fault(error)
    return is_foreign(error) or (is_known and isinstance(error, connection.channel_errors))


def refused_for_certain(error: BaseException) -> bool:
    """Say whether a broker at fault has certainly not taken what it was sent."""
    classes = _classes(error)
    if "ResponseError" in classes:
        return bool(classes & _REFUSING_CLASSES) or _said(error).startswith(_REFUSING_WORDS)
    if "ClientError" in classes:  # what SQS has answered, over HTTP
        answer = getattr(error, "response", {}).get("ResponseMetadata", {})
        return bool(400 <= answer.get("HTTPStatusCode", 0) < 500)
    return bool(classes & {"AccessRefused", "MessageNacked"}) or has_no_route(error)


def lacks_command(error: BaseException) -> bool:
    """Say whether Redis, or a proxy before it, refused a command that it does not offer."""
    return _said(error).startswith(("unknown command", "EXEC without MULTI"))


def spans_slots(error: BaseException) -> bool:
    """Say whether Redis Cluster refused a transaction because its queues are in several slots."""
    return "ClusterCrossSlotError" in _classes(error) or "CROSSSLOT" in str(error)


def _classes(error: BaseException) -> set[str]:
    return {cls.__name__ for cls in type(error).__mro__}


def _said(error: BaseException) -> str:
    # redis-py puts "Command # 3 (LPUSH …) of pipeline caused error: " before what the server said.
    return str(error).rpartition("caused error: ")[2]
