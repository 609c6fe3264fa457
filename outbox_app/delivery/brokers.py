"""What is known of single brokers: timeouts, unsafe configurations, errors that are nobody's row.

Everything else goes through kombu's common interface, so any transport works; these are the two
that are first-class.
"""

from __future__ import annotations

import logging
from typing import Any

from ..exceptions import UnsafeBroker

logger = logging.getLogger("outbox_app.drain")

#: Redis replies that speak of the server's state, not of the command.
_REDIS_TROUBLE = (
    "OOM",
    "READONLY",
    "LOADING",
    "MASTERDOWN",
    "NOREPLICAS",
    "MISCONF",
    "BUSY",
    "NOAUTH",
    "NOPERM",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "command not allowed when used memory",
)


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
        _check_eviction(channel.client)
    elif driver_type == "amqp":
        capabilities = connection.connection.server_properties.get("capabilities", {})
        if not capabilities.get("publisher_confirms"):
            raise UnsafeBroker(
                f"The broker at {connection.as_uri()} has no publisher confirms, so nobody "
                "can know what it took. Use RabbitMQ, or another transport."
            )


def _check_eviction(client: Any) -> None:
    try:
        policy = client.info("memory").get("maxmemory_policy")
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


def broker_at_fault(error: BaseException) -> bool:
    """Say whether an error speaks of the broker's state, so that no row is to blame for it."""
    name = type(error).__name__
    if name in ("MessageNacked", "ResourceError", "OutOfMemoryError", "ReadOnlyError"):
        return True
    # redis-py puts "Command # 3 (LPUSH …) of pipeline caused error: " before what the server said.
    said = str(error).rpartition("caused error: ")[2]
    return name == "ResponseError" and said.startswith(_REDIS_TROUBLE)
