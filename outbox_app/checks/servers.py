"""What the brokers themselves say: Redis that drops queues, RabbitMQ that confirms nothing.

Asked for by ``check --deploy --database ALIAS``. Each wait is bounded, a broker that does not
answer is a warning, and nothing is sent or declared. Transports of which nothing is known are not
opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from celery import Celery
from django.core.checks import CheckMessage, Error, Warning

from ..exceptions import UnsafeBroker
from ..jobs.drain.brokers import eviction, refuse_unsafe, transport_options
from ..jobs.staging.sending import staging_apps
from .brokers import unasked

#: Bound of each network operation, in seconds.
TIMEOUT = 4.0


def check_servers(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    if not databases:
        return []
    return [message for app in staging_apps() for message in _ask(app)]


def _ask(app: Celery) -> list[CheckMessage]:
    try:
        driver_type = app.connection_for_write().transport.driver_type
    except Exception:  # said by the check of the brokers' settings
        return []
    questions = {"redis": _ask_redis, "amqp": _ask_rabbitmq}
    if driver_type not in questions:
        return []
    connection: Any = app.connection_for_write(
        connect_timeout=TIMEOUT, transport_options=transport_options(driver_type, TIMEOUT)
    )
    try:
        connection.ensure_connection(
            max_retries=max(0, len(connection.alt) - 1), interval_start=0, interval_step=0
        )
        found = list(questions[driver_type](app, connection, connection.channel()))
        connection.release()  # RabbitMQ logs a warning of who leaves without a word
    except Exception as error:  # the network, the server and the driver may raise anything
        return [unasked(app, f"{type(error).__name__}: {error}".rstrip("."))]
    finally:
        with suppress(Exception):
            connection.collect()
    return found


def _ask_redis(app: Celery, connection: Any, channel: Any) -> Iterator[CheckMessage]:
    policy = _info(connection, channel, "memory", "maxmemory_policy")
    append_only = _info(connection, channel, "persistence", "aof_enabled")
    unknown = {"maxmemory-policy": policy, "appendonly": append_only}
    for name in (name for name, value in unknown.items() if value is None):
        yield Warning(
            f"Redis of Celery app {app.main!r} does not tell its {name}: INFO is forbidden or cut.",
            hint="Allow its user the command INFO, or look yourself and silence this.",
            id="outbox.W016",
        )
    if effect := eviction(policy or ""):
        message = f"Redis of Celery app {app.main!r} {effect}"
        advised = "Set maxmemory-policy to noeviction."
        if policy.startswith("allkeys-"):
            yield Error(message, hint=f"{advised} No drainer starts before.", id="outbox.E030")
        else:
            yield Warning(message, hint=advised, id="outbox.W017")
    if append_only == 0:
        yield Warning(
            f"Redis of Celery app {app.main!r} has no append-only file: a restart loses the jobs "
            "in its queues, which the outbox has forgotten by then.",
            hint="Set appendonly to yes.",
            id="outbox.W018",
        )


def _info(connection: Any, channel: Any, section: str, name: str) -> Any:
    try:
        return channel.client.info(section).get(name)
    except connection.connection_errors:
        raise  # it does not answer
    except Exception:  # INFO may be forbidden, or renamed away
        return None


def _ask_rabbitmq(app: Celery, connection: Any, channel: Any) -> Iterator[CheckMessage]:
    try:
        refuse_unsafe(connection, channel)
    except UnsafeBroker as error:
        yield Error(
            f"Celery app {app.main!r}: {error}",
            hint="No drainer starts with this broker.",
            id="outbox.E029",
        )
