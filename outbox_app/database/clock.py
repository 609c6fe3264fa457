"""The database's clock, in UTC on every engine.

Leases, held jobs and ages are compared by this clock only, because the clocks of application hosts
disagree. Django's own ``Now`` is the local time of the *session* on MySQL; a server that does not
run in UTC would release held jobs too early or too late. Migrations refer to ``DatabaseNow`` by
path: do not move it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, tzinfo
from datetime import timezone as fixed
from typing import Any

from django.conf import settings
from django.db import connections
from django.db.models import BigIntegerField, Func, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

MINUTE = timedelta(minutes=1)
#: More than clocks are set back at once.
TURNED_BACK = timedelta(hours=3)


class DatabaseNow(Now):
    """Current time of the database server, in the time zone in which Django stores datetimes."""

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Use UTC instead of the session's time zone: with ``USE_TZ`` Django stores UTC."""
        function = "UTC_TIMESTAMP(6)" if settings.USE_TZ else "CURRENT_TIMESTAMP(6)"
        return self.as_sql(compiler, connection, template=function, **context)


def now_sql(using: str) -> str:
    """Return ``DatabaseNow`` as SQL, for a statement with parameters: its percents are doubled."""
    connection: Any = connections[using]
    compiler = connection.ops.compiler("SQLCompiler")(None, connection, using)
    return str(compiler.compile(DatabaseNow())[0])


def later_sql(seconds: str, using: str) -> str:
    """Return as SQL the time that is so many seconds (SQL, too) after ``DatabaseNow``."""
    now, vendor = now_sql(using), connections[using].vendor
    if vendor == "postgresql":
        return f"({now} + ({seconds}) * INTERVAL '1 second')"
    if vendor == "mysql":
        return f"({now} + INTERVAL ({seconds}) SECOND)"
    return f"{now[:-1]}, ({seconds}) || ' seconds')"


class Milliseconds(Func):
    """Milliseconds since the start of 2025, in UTC, by the clock of the database server."""

    template = "CAST((julianday('now') - 2460676.5) * 86400000 AS bigint)"
    arity = 0
    output_field = BigIntegerField()

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = "((extract(epoch from clock_timestamp()) - 1735689600) * 1000)::bigint"
        return self.as_sql(compiler, connection, template=template, **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = "(TIMESTAMPDIFF(MICROSECOND, '2025-01-01', UTC_TIMESTAMP(6)) DIV 1000)"
        return self.as_sql(compiler, connection, template=template, **context)


def stored(moment: datetime, *, using: str | None = None) -> datetime:
    """Return a time in the form of ``DatabaseNow``, so that the two can be compared.

    Without ``USE_TZ`` the result is naive: for an alias of SQLite in UTC, for one of MySQL in the
    session's time zone, else in the project's time zone.
    """
    if timezone.is_naive(moment):
        moment = timezone.make_aware(moment, timezone.get_default_timezone())
    if settings.USE_TZ:
        return moment.astimezone(UTC)
    return timezone.make_naive(moment, zone_of(using))


def due_at(moment: datetime, *, using: str) -> datetime:
    """Return a time for a column that is compared with ``DatabaseNow``: no clock shows it earlier.

    Without ``USE_TZ`` an hour occurs twice when clocks go back, and ``stored`` cannot say which is
    meant. PostgreSQL gets the time zone, too. MySQL converts the time itself, in the zone of the
    session; its clock shows a time of the second hour twice, so the result is the end of that hour.
    """
    connection = connections[using]
    if settings.USE_TZ or connection.vendor not in ("postgresql", "mysql"):
        return stored(moment, using=using)
    moment = moment.astimezone(UTC)
    if connection.vendor == "postgresql":
        return moment
    whole = moment.replace(microsecond=0)
    local, before = _local_times([whole, whole - TURNED_BACK], using=using)
    if local is None:  # the server converts no time that late
        return stored(moment, using=using)
    if local - before < TURNED_BACK:
        earlier = [whole - timedelta(minutes=n) for n in range(1, TURNED_BACK // MINUTE)]
        end = (max(_local_times(earlier, using=using)) + MINUTE).replace(second=0)
        local = max(local, end)
    return local.replace(microsecond=moment.microsecond)


def aware(moment: datetime, *, using: str | None) -> datetime:
    """Return a time from a database as an aware one: the inverse of ``stored``."""
    return moment if timezone.is_aware(moment) else timezone.make_aware(moment, zone_of(using))


def zone_of(using: str | None) -> tzinfo:
    """Return the time zone of naive times, not the one that a request has activated."""
    zone = timezone.get_default_timezone()
    if using is None or connections[using].vendor == "postgresql":
        return zone
    if settings.USE_TZ or connections[using].vendor == "sqlite":
        return UTC
    # Django does not set the session's time zone. It may have the project's offset in winter only.
    days = [datetime.now(UTC).replace(microsecond=0) + timedelta(weeks=n) for n in (0, 13, 26, 39)]
    times = _local_times(days, using=using)
    offsets = [time - day.replace(tzinfo=None) for time, day in zip(times, days, strict=True)]
    own = [day.astimezone(zone).utcoffset() for day in days]
    return zone if offsets == own else fixed(offsets[0])


def has_turning_clock(using: str) -> bool:
    """Return whether MySQL's clock, as it is read, is set back and forward in the year."""
    if settings.USE_TZ or connections[using].vendor != "mysql":
        return False
    days = [datetime.now(UTC).replace(microsecond=0) + timedelta(weeks=n) for n in range(0, 52, 4)]
    times = _local_times(days, using=using)
    return len({t - day.replace(tzinfo=None) for t, day in zip(times, days, strict=True)}) > 1


def _local_times(moments: list[datetime], *, using: str) -> Sequence[datetime]:
    """Return the times, without microseconds, in the time zone of the session of MySQL."""
    columns = ", ".join(f"FROM_UNIXTIME({moment.timestamp():.0f})" for moment in moments)
    with connections[using].cursor() as cursor:
        cursor.execute(f"SELECT {columns}")
        times: Sequence[datetime] = cursor.fetchone()
        return times


def database_time(rows: QuerySet[Any]) -> datetime | None:
    """Return the current time of the database, read with one of these rows; None if none exists."""
    time: datetime | None = rows.annotate(now=DatabaseNow()).values_list("now", flat=True).first()
    return time
