"""What the brokers themselves report: Redis that drops queues, RabbitMQ that confirms nothing.

``check --deploy --database ALIAS`` runs this check. Each wait is bounded, a broker that does not
answer is a warning, and nothing is sent or declared. The check connects to Redis and RabbitMQ only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from celery import Celery
from django.core.checks import CheckMessage, Error, Warning

from ..exceptions import UnsafeBroker
from ..jobs.drain.brokers import eviction, redis_info, refuse_unsafe, transport_options
from ..jobs.drain.misconfiguration import public_url
from ..jobs.staging.sending import staging_apps
from .brokers import transport_of, unasked

#: Timeout of each network operation, in seconds.
TIMEOUT = 4.0


def check_servers(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    if not databases:
        return []
    return [message for app in staging_apps() for message in _ask(app)]


def _ask(app: Celery) -> list[CheckMessage]:
    # The checks in ``brokers`` report errors in a broker's settings.
    driver_type = getattr(transport_of(app), "driver_type", None)
    questions = {"redis": _ask_redis, "amqp": _ask_rabbitmq}
    if driver_type not in questions:
        return []
    connection: Any = app.connection_for_write(
        connect_timeout=TIMEOUT, transport_options=transport_options(app, driver_type, TIMEOUT)
    )
    try:
        connection.ensure_connection(
            max_retries=max(0, len(connection.alt) - 1), interval_start=0, interval_step=0
        )
        found = list(questions[driver_type](app, connection, connection.channel()))
        connection.release()  # RabbitMQ logs a warning if a client does not close
    except Exception as error:  # the network, the server and the driver may raise anything
        why = f"{type(error).__name__}: {error}".rstrip(".")
        return [unasked(app, why, at=f" at {public_url(app)}")]
    finally:
        with suppress(Exception):
            connection.collect()
    return found


def _ask_redis(app: Celery, connection: Any, channel: Any) -> Iterator[CheckMessage]:
    redis = f"Redis of Celery app {app.main!r}"
    policy = redis_info(connection, channel, "memory", "maxmemory_policy")
    append_only = redis_info(connection, channel, "persistence", "aof_enabled")
    for name, value in (("maxmemory-policy", policy), ("appendonly", append_only)):
        if value is None:
            yield Warning(
                f"{redis} does not report its {name}: INFO is forbidden or incomplete.",
                hint=f"Allow its user the command INFO, or check {name} and silence this.",
                id="outbox.W016",
            )
    effect, is_unsafe = eviction(policy or "")
    advised = "Set maxmemory-policy to noeviction."
    if is_unsafe:
        hint = f"{advised} Until then no drainer starts."
        yield Error(f"{redis} {effect}", hint=hint, id="outbox.E030")
    elif effect:
        yield Warning(f"{redis} {effect}", hint=advised, id="outbox.W017")
    if append_only == 0:
        yield Warning(
            f"{redis} has no append-only file: a restart loses the jobs in its queues, which the "
            "outbox has already deleted.",
            hint="Set appendonly to yes.",
            id="outbox.W018",
        )


def _ask_rabbitmq(app: Celery, connection: Any, channel: Any) -> Iterator[CheckMessage]:
    try:
        refuse_unsafe(connection, channel)
    except UnsafeBroker as error:
        hint = "No drainer starts with this broker."
        yield Error(f"Celery app {app.main!r}: {error}", hint=hint, id="outbox.E029")
