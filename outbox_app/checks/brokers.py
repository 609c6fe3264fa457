"""Broker settings that lose jobs, run them twice, or let a process hang: checked before a deploy.

The checks read settings only; ``servers`` asks the servers. The settings concern plain Celery: a
send outside transactions, a worker's ``retry()``. The drainer's own
connection has timeouts and confirms, even if the project's options turn them off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from celery import Celery
from django.core.checks import CheckMessage, Error, Warning

from ..conf import outbox_settings
from ..jobs.drain.misconfiguration import LIBRARY_MISSING, unusable, without_batches
from ..jobs.staging.sending import load_tasks, staging_apps
from .apps import configuration_error

#: By driver, transport options without which it waits without limit, and values for them.
UNBOUNDED = {
    "redis": {"socket_timeout": 30},
    "py-amqp": {"read_timeout": 30, "write_timeout": 30},
}
#: By transport, the default seconds after which it hands a message to another worker as well.
VISIBILITY = {"redis": 3600, "sqs": 1800}


def check_brokers(**kwargs: Any) -> Iterator[CheckMessage]:
    if slow := without_batches():
        yield Warning(f"{slow}.", hint="Upgrade kombu with Celery.", id="outbox.W038")
    for app in staging_apps():
        transport = transport_of(app)
        if isinstance(transport, Exception):
            if configuration_error(app):  # else check_transports reports it
                yield unasked(app, type(transport).__name__)
            continue
        with suppress(Exception):  # reported by the check of the apps
            load_tasks(app)
        yield from _check_timeouts(app, transport)
        if transport.driver_type == "amqp":
            yield from _check_confirms(app, transport)
        yield from _check_visibility(app, transport)


def check_transports(**kwargs: Any) -> Iterator[CheckMessage]:
    """Report each ``broker_url`` of which no connection can be made. No connection is opened."""
    for app in staging_apps():
        error = transport_of(app)
        if isinstance(error, Exception) and not configuration_error(app):
            message, advised = unusable(app, error)
            if isinstance(error, LIBRARY_MISSING):  # a process that only stages needs no library
                yield Warning(message, hint=advised, id="outbox.W028")
            else:
                yield Error(message, hint=advised, id="outbox.E033")


def transport_of(app: Celery) -> Any:
    """Return the transport of an app's broker, or the error. No connection is opened."""
    try:
        return app.connection_for_write().transport  # imports the transport
    except Exception as error:  # an unknown transport, a missing library, an invalid URL
        return error


def unasked(app: Celery, why: str, *, at: str = "") -> CheckMessage:
    text = f"The broker of Celery app {app.main!r}{at} could not be checked: {why}."
    hint = "Correct broker_url, or run this command where the drainers run."
    return Warning(text, hint=hint, id="outbox.W015")


def _check_timeouts(app: Celery, transport: Any) -> Iterator[CheckMessage]:
    options = app.conf.broker_transport_options
    wanted = UNBOUNDED.get(transport.driver_name, {})
    missing = {name: value for name, value in wanted.items() if not options.get(name)}
    if missing:
        yield Warning(
            f"The broker connections of Celery app {app.main!r} have no {' and no '.join(missing)}:"
            " if the broker is reachable but does not answer, a send outside a transaction waits "
            "for ever, and so does a worker.",
            hint=f"Add {str(missing)[1:-1]} to broker_transport_options.".replace("'", '"'),
            id="outbox.W052",
        )


def _check_confirms(app: Celery, transport: Any) -> Iterator[CheckMessage]:
    if transport.driver_name != "py-amqp":
        yield Error(
            f"The transport {transport.driver_name} of Celery app {app.main!r} has no publisher "
            "confirms: a sender cannot know which messages RabbitMQ has accepted.",
            hint="Begin broker_url with pyamqp:// instead.",
            id="outbox.E029",
        )
    elif not app.conf.broker_transport_options.get("confirm_publish", True):
        yield Error(
            f"broker_transport_options of Celery app {app.main!r} turn publisher confirms off: "
            "a job that is sent outside a transaction, or that a worker retries, may be lost "
            "without an error. (The drainer's own connection has confirms in any case.)",
            hint='Set "confirm_publish": True.',
            id="outbox.E029",
        )


def _check_visibility(app: Celery, transport: Any) -> Iterator[CheckMessage]:
    if transport.driver_type not in VISIBILITY:
        return
    horizon, conf = outbox_settings().HOLD_HORIZON, app.conf
    any_limit = conf.task_time_limit or conf.task_soft_time_limit or 0
    limits = {"a task": any_limit if conf.task_acks_late else 0}
    for name, task in _own_tasks(app).items():
        if task.acks_late:  # else the job is acknowledged when it begins
            limits[f"task {name!r}"] = task.time_limit or task.soft_time_limit or any_limit
    slowest = max(limits, key=limits.__getitem__)
    needed = horizon + limits[slowest]
    options = conf.broker_transport_options
    timeout = options.get("visibility_timeout", VISIBILITY[transport.driver_type])
    if needed <= timeout:
        return
    reason = f", and {slowest} may take {limits[slowest]:.8g}" if limits[slowest] else ""
    yield Warning(
        f"The visibility timeout of Celery app {app.main!r} is {timeout:.8g} seconds. A worker may "
        f"hold a job for {horizon:.8g} seconds until it is due (HOLD_HORIZON){reason}: another "
        "worker would execute it as well.",
        hint=f'Set "visibility_timeout": {needed:.8g} or more in broker_transport_options.',
        id="outbox.W020",
    )


def _own_tasks(app: Celery) -> dict[str, Any]:
    return {
        name: task
        for name, task in app.tasks.items()
        if not name.startswith(("celery.", "outbox_app."))
    }
