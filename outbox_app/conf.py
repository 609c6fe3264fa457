"""Settings: the dictionary ``OUTBOX`` of the Django project, typed and read lazily.

Every setting has a default, so the dictionary may be absent. Nothing is read at import.
``outbox_settings()`` raises ``ImproperlyConfigured`` for a key that does not exist. The system
checks (``outbox_app.checks``) find values that contradict each other, so that ``manage.py check``
names all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, Literal

import celery
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver

#: Number of shards. Rows keep the shard they were staged with, so this is not a setting.
SHARDS = 128
#: Number of slices of a log. Rows keep the slice they were published with.
SLICES = 1024
#: Heartbeats in one lease.
BEATS = 5
#: The longest retention, in days. Python's dates begin in year 1, so it cannot be much longer.
MAX_DAYS = 365_000
#: The oldest Celery that is supported.
CELERY = (5, 5)


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
    """The keys of ``OUTBOX``, with the defaults that the documentation names."""

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
    #: Find tasks that are sent inside a transaction, by plain Celery apps too: log each place once,
    #: warn, or raise in the caller's line. For development and CI.
    DETECT: Literal["log", "warn", "raise"] | None = None
    #: Largest message that is staged, in bytes (body and headers).
    MAX_MESSAGE_BYTES: int = 16 * 1024 * 1024
    #: A message larger than this is staged with a warning in the log, in bytes.
    WARN_MESSAGE_BYTES: int = 256 * 1024
    #: Jobs due later than this stay in the table until they are due, in seconds.
    HOLD_HORIZON: float = 300.0
    #: An ``eta`` further away than this is refused, in seconds.
    MAX_ETA: float = 366 * 86400.0
    #: Refuse task names that the loaded Celery app does not know.
    STRICT_TASK_NAMES: bool = False
    #: Seconds between two polls of an idle drainer. None: 1 where commits wake it, else 0.1.
    INTERVAL: float | None = None
    #: Seconds between two polls of an idle subscription. None: as for INTERVAL.
    SUBSCRIPTION_INTERVAL: float | None = None
    #: Rows read, published and deleted at once.
    BATCH_SIZE: int = 1000
    #: Seconds after which a silent drainer loses its shards.
    LEASE_SECONDS: float = 10.0
    #: Timeout of each network operation with the broker, in seconds. Shorter than the lease.
    PUBLISH_TIMEOUT: float = 4.0
    #: Longest pause between two attempts while the broker or database is unreachable, in seconds.
    MAX_BACKOFF: float = 5.0
    #: Seconds between two progress lines of ``drain_outbox``; 0 turns them off.
    PROGRESS_INTERVAL: float = 10.0
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
    #: Days for which results of ``django.tasks`` are kept.
    TASK_RESULT_RETENTION_DAYS: int = 30
    #: Hours for which the counters of drainers and subscriptions are kept.
    STATISTICS_RETENTION_HOURS: int = 48
    #: Days for which events are kept once every subscription has passed them. None: without limit.
    EVENT_RETENTION_DAYS: int | None = None
    #: Logs whose old events are pruned automatically: by table, the archive's folder or address and
    #: the age in days. An event stays until it is archived and every subscription has passed it.
    SINK: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    #: Days for which the ids of commands are kept once retention has removed their versions,
    #: counted from the command. A later repeat is executed again. None: without limit.
    ENTITY_COMMAND_DAYS: int | None = None
    #: Largest data and metadata of an event, in bytes of JSON each.
    MAX_EVENT_BYTES: int = 256 * 1024
    #: Dotted paths of window classes by database vendor. They replace the built-in ones.
    WINDOWS: Mapping[str, str] = field(default_factory=dict)
    #: MySQL: seconds after which a missing position whose row was never seen counts as never used.
    SETTLE_SECONDS: float = 5.0
    #: MySQL: seal positions that were never used with a tombstone row.
    TOMBSTONES: bool = False
    #: Events handed to a subscriber at once.
    PAGE_SIZE: int = 500
    #: Commands that may wait for one entity in one process.
    ENTITY_QUEUE: int = 10_000
    #: Threads that execute the commands of coroutines, in one process.
    ENTITY_THREADS: int = 4
    #: Dotted path of a function that names the scope of the caller's session, such as its tenant:
    #: only commands of one scope share a transaction. None: all of them may.
    ENTITY_SCOPE: str | None = None
    #: The most seconds that a sender may ask for until the policy of a prepared event decides.
    PREPARED_MAX_DECIDE_BY: float = 14 * 86400.0
    #: Days for which the keeper keeps decided events.
    PREPARED_RETENTION_DAYS: int = 30
    #: Days for which a sender keeps fences. Longer than any keeper may still ask about one.
    FENCE_RETENTION_DAYS: int = 30
    #: The services that prepare events here, or that keep events of this one, over HTTP: by name,
    #: the fields of ``Peer``. An entry here takes precedence over the table.
    PEERS: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: This process as a server or a client of a service's doors: the fields of ``FleetSettings``.
    FLEET: Mapping[str, Any] = field(default_factory=dict)
    #: Longest pause before a failed page is tried again, in seconds.
    MAX_RETRY_DELAY: float = 60.0
    #: The admin masks the values of keys whose names contain one of these, for every user.
    SENSITIVE_KEYS: tuple[str, ...] = (
        *("password", "passwd", "secret", "token", "api_key", "apikey", "authorization", "cookie"),
        *("credential", "private_key", "card", "cvv", "iban", "ssn"),
    )


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The keys of ``OUTBOX["FLEET"]``."""

    #: The service that processes of this project belong to. Empty: they register nowhere.
    SERVICE: str = ""
    #: Address at which others call the door of this process. Empty: it is a client, never called.
    ADDRESS: str = ""
    #: Its share of the calls, relative to the weights of the other servers: 0 (drained) to 100.
    WEIGHT: int = 100
    #: Dotted path of a ``Registry``.
    REGISTRY: str = "outbox_app.fleet.registries.DatabaseRegistry"
    #: For ToozRegistry: the address of Redis, ZooKeeper, …
    REGISTRY_URL: str = ""
    #: For StaticRegistry: the servers' addresses by service.
    SERVERS: Mapping[str, Sequence[str]] = field(default_factory=dict)
    BALANCE: Literal["random", "round_robin", "weighted_random"] = "weighted_random"
    #: Whether a call tries one server only, or several one after the other.
    CLUSTER: Literal["fail_fast", "fail_over"] = "fail_over"
    #: Seconds for all attempts of a call together.
    DEADLINE: float = 5.0
    #: Which servers lead the entities of routed types: "elected" means the registered ones, a list
    #: names them. None: no server leads, and each command is executed where it arrives.
    TOPOLOGY: Literal["elected"] | Sequence[str] | None = "elected"
    #: Number of the datacentre, 0 to 7: ids are made with its 32 nodes. None: with any of all 256.
    DATACENTRE: int | None = None


NAMES = tuple(each.name for each in fields(OutboxSettings))


@lru_cache(maxsize=1)
def outbox_settings() -> OutboxSettings:
    """Return the values of ``django.conf.settings.OUTBOX`` over the defaults."""
    given: Any = getattr(settings, "OUTBOX", {})
    if not isinstance(given, dict):
        raise ImproperlyConfigured(
            f"The setting OUTBOX must be a dictionary; it is {type(given).__name__}."
        )
    unknown = sorted(set(given) - set(NAMES))
    if unknown:
        raise ImproperlyConfigured(
            f"The setting OUTBOX has no key {', '.join(map(repr, unknown))}. "
            f"Known keys: {', '.join(NAMES)}."
        )
    return OutboxSettings(**given)


def fleet_settings() -> FleetSettings:
    """Return the values of ``OUTBOX["FLEET"]`` over the defaults."""
    try:
        return FleetSettings(**outbox_settings().FLEET)
    except TypeError as error:
        known = ", ".join(each.name for each in fields(FleetSettings))
        raise ImproperlyConfigured(f"OUTBOX['FLEET']: {error}. Known keys: {known}.") from error


@receiver(setting_changed, dispatch_uid="outbox_app.conf")
def _clear_cache(**kwargs: Any) -> None:
    outbox_settings.cache_clear()
