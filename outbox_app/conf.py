"""Settings: the dictionary ``OUTBOX`` of the Django project, typed and read lazily.

Every key has a default, so the dictionary may be absent. Nothing is read at import. Each app has
its keys in its ``conf``. A key that does not exist raises ``ImproperlyConfigured``, and so does one
of an app that is not installed. The system checks (``outbox_app.checks``) find values that
contradict each other, so that ``manage.py check`` names all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar

import celery
from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver

T = TypeVar("T")


class Rule(NamedTuple):
    """What a value must be, in place of the rule for its type: ``metadata={"rule": Rule(…)}``."""

    fits: Callable[[Any], bool]
    #: Words for the error: "expected …".
    expected: str


def _are_receipts(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(pattern, str)
        and pattern
        and isinstance(receipt, dict)
        and {"limit"} <= receipt.keys() <= {"limit", "attempts"}
        and all(type(number) is int for number in receipt.values())
        and 1 <= receipt["limit"] <= MOST_LIMIT
        and 1 <= receipt.get("attempts", 1) <= MOST_ATTEMPTS
        for pattern, receipt in value.items()
    )


#: The longest limit of a receipt, in seconds, and the most attempts.
MOST_LIMIT, MOST_ATTEMPTS = 31 * 86400, 1000
RECEIPTS = Rule(
    _are_receipts,
    f'a dictionary of patterns, each with {{"limit": seconds (1 to {MOST_LIMIT}), '
    f'"attempts": 1 to {MOST_ATTEMPTS} (or without)}}',
)
#: Number of shards. Rows keep the shard they were staged with, so this is not a setting.
SHARDS = 128
#: Heartbeats in one lease.
BEATS = 5
#: The longest retention, in days. Python's dates begin in year 1, so it cannot be much longer.
MAX_DAYS = 365_000
#: The oldest Celery that is supported.
CELERY = (5, 5)
#: The keys of the other apps, to name the app of a key that is not installed. A test compares them.
KEYS_OF_APPS = {
    "outbox_app.events": (
        "SUBSCRIPTION_INTERVAL",
        "EVENT_RETENTION_DAYS",
        "SINK",
        "MAX_EVENT_BYTES",
        "SETTLE_SECONDS",
        "TOMBSTONES",
        "PAGE_SIZE",
        "MAX_RETRY_DELAY",
    ),
    "outbox_app.entities": (
        "ENTITY_COMMAND_DAYS",
        "ENTITY_QUEUE",
        "ENTITY_THREADS",
        "ENTITY_SCOPE",
    ),
    "outbox_app.prepared": (
        "PREPARED_MAX_DECIDE_BY",
        "PREPARED_RETENTION_DAYS",
        "FENCE_RETENTION_DAYS",
    ),
    "outbox_app.door": ("PEERS",),
    "outbox_app.fleet": ("FLEET",),
    "outbox_app.ids": ("DATACENTRE",),
    "outbox_app.django_tasks": ("TASK_RESULT_RETENTION_DAYS",),
}


def require_celery() -> None:
    """Raise ``ImproperlyConfigured`` if the installed Celery is older than ``CELERY``."""
    if celery.VERSION < CELERY:
        needed = ".".join(map(str, CELERY))
        raise ImproperlyConfigured(
            f"outbox_app needs Celery {needed} or later, and {celery.__version__} is installed. "
            f"Install it with: pip install 'celery>={needed}'"
        )


@dataclass(frozen=True, slots=True)
class OutboxSettings:
    """The keys of ``OUTBOX`` for jobs, with the defaults that the documentation names."""

    #: Alias whose ``atomic()`` blocks stage jobs. None: the alias to which the routers write
    #: StagedJob.
    DATABASE: str | None = None
    #: Aliases whose outboxes the admin offers, beside that of DATABASE.
    ADMIN_DATABASES: tuple[str, ...] = ()
    #: What ``.delay()`` does outside any transaction: "send" as Celery does, "stage" in a
    #: transaction of its own, or "refuse" with an error.
    OUTSIDE: Literal["send", "stage", "refuse"] = "send"
    #: Patterns of task names, each with "stage", "send" or "shadow". The first pattern that matches
    #: decides; without a match it is "stage". The attribute ``outbox`` of a task takes precedence.
    TASK_MODES: Mapping[str, Literal["stage", "send", "shadow"]] = field(default_factory=dict)
    #: Patterns of task names whose jobs have a receipt, each with "limit", the seconds within which
    #: a worker must start one, and "attempts" (5), the starts without an end until it is dead. The
    #: first pattern that matches decides. The attribute ``receipt`` of a task takes precedence.
    RECEIPTS: Mapping[str, Mapping[str, int]] = field(
        default_factory=dict, metadata={"rule": RECEIPTS}
    )
    #: Seconds after which a silent worker loses the jobs with receipts that it runs.
    RECEIPT_LEASE_SECONDS: float = 30.0
    #: Find tasks that are sent inside a transaction, by plain Celery apps too: log each place once,
    #: warn, or raise in the caller's line. For development and CI.
    DETECT: Literal["log", "warn", "raise"] | None = None
    #: Largest message that is staged, in bytes (body and headers).
    MAX_MESSAGE_BYTES: int = 16 * 1024 * 1024
    #: Jobs due later than this stay in the table until they are due, in seconds.
    HOLD_HORIZON: float = 300.0
    #: Seconds between two polls of an idle drainer. None: 1 where commits wake it, else 0.1.
    INTERVAL: float | None = None
    #: Rows read, published and deleted at once.
    BATCH_SIZE: int = 1000
    #: Seconds after which a silent drainer loses its shards.
    LEASE_SECONDS: float = 10.0
    #: Timeout of each network operation with the broker, in seconds. Shorter than the lease.
    PUBLISH_TIMEOUT: float = 4.0
    #: When a job with an ordering key dies, "pass" still sends the later jobs of its key; "block"
    #: makes them die, too, so that a person requeues all of them in order.
    DEAD_KEY: Literal["pass", "block"] = "pass"
    #: Publish jobs right after the commit, from the process that committed; the drain publishes the
    #: jobs for which that failed. ``immediate=`` decides for one task or one call.
    IMMEDIATE: bool = False
    #: Timeout of an immediate publish, in seconds: the caller waits for it.
    IMMEDIATE_TIMEOUT: float = 0.2
    #: Seconds after which the drain takes over a job that its own process has not settled.
    IMMEDIATE_HOLD: float = 5.0
    #: Wake the drainers after a commit (NOTIFY on PostgreSQL; elsewhere they poll).
    WAKE: bool = True
    #: Alias of the inbox, the table of executed job ids. None: the alias of the outbox.
    INBOX_DATABASE: str | None = None
    #: Days for which the inbox keeps a job id.
    INBOX_RETENTION_DAYS: int = 30
    #: Days for which incidents are kept.
    INCIDENT_RETENTION_DAYS: int = 30
    #: The admin masks the values of keys whose names contain one of these, for every user.
    SENSITIVE_KEYS: tuple[str, ...] = (
        *("password", "passwd", "secret", "token", "api_key", "apikey", "authorization", "cookie"),
        *("credential", "private_key", "card", "cvv", "iban", "ssn"),
    )


def read(keys: type[T]) -> T:
    """Return the values of ``OUTBOX`` for the keys of one app, a dataclass, over its defaults.

    Raises:
        ImproperlyConfigured: ``OUTBOX`` is no dictionary, or has a key that no installed app has.
    """
    found: T = _read(keys, apps.apps_ready)  # type: ignore[arg-type]
    return found


@lru_cache
def _read(keys: Any, is_ready: bool) -> Any:
    values: Any = getattr(settings, "OUTBOX", {})
    if not isinstance(values, dict):
        raise ImproperlyConfigured(
            f"The setting OUTBOX must be a dictionary; it is {type(values).__name__}."
        )
    _refuse_unknown(values, is_ready)
    names = {each.name for each in fields(keys)}
    return keys(**{name: value for name, value in values.items() if name in names})


def _refuse_unknown(values: dict[str, Any], is_ready: bool) -> None:
    """Before the apps are ready it is unknown which of them are installed: all keys are known."""
    known = [each.name for each in fields(OutboxSettings)]
    for app, names in KEYS_OF_APPS.items():
        if not is_ready or apps.is_installed(app):
            known += names
        elif strange := sorted(values.keys() & names):
            raise ImproperlyConfigured(
                f"The setting OUTBOX has {', '.join(map(repr, strange))} of {app}: add {app!r} to "
                "INSTALLED_APPS, or remove the key."
            )
    if unknown := sorted(values.keys() - {*known}, key=str):
        every = {*known, *chain.from_iterable(KEYS_OF_APPS.values())}
        near = [get_close_matches(str(name).upper(), every, 1, cutoff=0.75) for name in unknown]
        hint = f"Known keys: {', '.join(known)}."
        if all(near):
            hint = f"Did you mean {', '.join(repr(each) for [each] in near)}?"
        listed = ", ".join(map(repr, unknown))
        raise ImproperlyConfigured(f"The setting OUTBOX has no key {listed}. {hint}")


def outbox_settings() -> OutboxSettings:
    """Return the settings of jobs."""
    found: OutboxSettings = _read(OutboxSettings, apps.apps_ready)  # on the way of each job
    return found


@receiver(setting_changed, dispatch_uid="outbox_app.conf")
def _clear_cache(**kwargs: Any) -> None:
    _read.cache_clear()
