"""Starts pipelines for commands, and turns Django's databases into addresses for Spark.

A session that is started here gets passwords in the environment, which executors on this machine
inherit. On other machines each process must find its password itself, in the file or variable that
options of the command name.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from django.db import connections

from ...aliases import model_alias
from ...events.conf import event_settings
from ...events.log.registry import log_named
from ...events.models import Event, EventLog
from ...process.preflight import require_alias
from ..exceptions import InvalidOption, PipelineError
from ..options import Options
from ..session import is_local, is_running, reason, spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The environment variable with an alias's password starts with this; the alias follows.
PASSWORD = "OUTBOX_PIPELINE_PASSWORD"

#: Options of Django's PostgreSQL backend that libpq does not know.
_NOT_LIBPQ = {"assume_role", "isolation_level", "pool", "prepare_threshold", "server_side_binding"}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A session, and the log that it reads."""

    session: SparkSession
    options: Options
    log: type[EventLog]
    using: str

    def read(self, schema: str | None = None, **overrides: Any) -> DataFrame:
        """Return the log, or what the options name, as a frame.

        Args:
            schema: The columns to read, in Spark's SQL. Default: all.
            overrides: Options that override those of the log: ``archive="DIR"``, ``read="heads"`` …
        """
        from ..archive_reader import frame, read

        archive = str(overrides.pop("archive", None) or "")
        options = Options.of({**self.options.texts(), **overrides})
        if archive:
            return read(self.session, log=options, archive=archive, schema=schema)
        return frame(self.session, options, schema)

    def elsewhere(self, using: str) -> Pipeline:
        """Return a pipeline for another alias: maybe this one, if that is the same database."""
        variable = _password_variable(using)
        password = {"password_env": variable} if _has_password(using) else {}
        if variable not in os.environ:  # the executors do not inherit from this process
            here, there = (connections[each].settings_dict for each in (self.using, using))
            if all(here.get(n) == there.get(n) for n in ("NAME", "HOST", "PORT", "OPTIONS")):
                return self
            if all(here.get(n) == there.get(n) for n in ("USER", "PASSWORD")):
                named = ("password_file", "password_env")
                password = {name: getattr(self.options, name) for name in named}
        return replace(self, options=log_options(self.log, using=using, **password), using=using)


@contextmanager
def pipeline(
    *,
    log: str | None = None,
    using: str | None = None,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    password_file: str = "",
    password_env: str = "",
) -> Iterator[Pipeline]:
    """Yield a ``Pipeline`` that reads a log. At the end stop its session, if it was started here.

    Args:
        log: Table or label. Default: ``Event``.
        using: Database alias. Default: the log's.
        master: As in ``spark_session``.
        conf: Settings of Spark.
        password_file: The file that has the password on every machine.
        password_env: The environment variable that has the password in every process.

    Raises:
        PipelineError, ReadRefused, UnknownLog: The reason for a failure, in one message. Errors of
            Spark become a ``PipelineError``.
    """
    model = log_named(log or Event._meta.db_table)
    alias = using or model_alias(model)
    require_alias(alias)
    overrides = {"password_file": password_file, "password_env": password_env}
    borrowed = is_running()
    # Only processes that are started from now on inherit this one's environment.
    inherited = is_local(master) and not borrowed
    if not any(overrides.values()) and _has_password(alias):
        if not inherited:
            raise InvalidOption(
                f"Spark's processes do not know the password of {alias!r}. Name a file "
                "(--password-file) or an environment variable (--password-env) that holds it for "
                "each of these processes."
            )
        overrides["password_env"] = _password_variable(alias)
    if inherited:
        for each in connections:
            if _has_password(each):
                password = connections[each].settings_dict["PASSWORD"]
                os.environ[_password_variable(each)] = str(password)
    options = log_options(model, using=alias, **overrides)
    interrupt: Any = signal.getsignal(signal.SIGINT)
    session = spark_session(master=master, settings=conf)
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from ..database import database_class

    disconnect(alias)
    try:
        yield Pipeline(session, options, model, alias)
    except (PySparkException, Py4JError, OSError, *database_class(options).errors) as error:
        raise PipelineError(reason(error)) from error
    finally:
        if not borrowed:
            # Spark may be gone: killed, or ended by the signal that this process received, too.
            with suppress(Py4JError, OSError):
                session.stop()
            # In the main thread PySpark has set its own handler.
            with suppress(ValueError, TypeError):
                signal.signal(signal.SIGINT, interrupt)


def disconnect(using: str) -> None:
    """Close this thread's connection, which may be cut off before it is needed again."""
    if not connections[using].in_atomic_block:  # closing would roll it back
        connections[using].close()


def _has_password(using: str) -> bool:
    return bool(connections[using].settings_dict.get("PASSWORD"))


def _password_variable(using: str) -> str:
    return f"{PASSWORD}_{using.upper()}"


def log_options(log: type[EventLog], *, using: str, **overrides: str) -> Options:
    """Return the options with which Spark reads a log. Raises ``InvalidOption``."""
    conf = event_settings()
    values = {
        "url": database_url(using),
        "log": log._meta.db_table,
        "settle_seconds": str(conf.SETTLE_SECONDS),
        "tombstones": str(conf.TOMBSTONES),
        **{name: value for name, value in overrides.items() if value},
    }
    zone = connections[using].settings_dict.get("TIME_ZONE")
    if zone and connections[using].vendor != "postgresql":
        values["time_zone"] = zone
    return Options.of(values)


def database_url(using: str) -> str:
    connection = connections[using]
    settings = connection.settings_dict
    name, vendor = str(settings["NAME"]), connection.vendor
    if vendor == "sqlite":
        return f"sqlite:////{quote(os.path.abspath(name).lstrip('/'))}"
    extra = {"postgresql": _postgres, "mysql": _mysql}[vendor](dict(settings.get("OPTIONS") or {}))
    host, port = str(settings.get("HOST") or ""), str(settings.get("PORT") or "")
    if "/" in host or ":" in host:  # a folder of sockets, or a socket; IPv6
        is_socket = vendor == "mysql" and host.startswith("/")
        extra["unix_socket" if is_socket else "host"] = host
        host = ""
    if "," in port:  # of several hosts
        extra["port"] = port
        port = ""
    user = str(settings.get("USER") or "")
    place = f"{quote(user, safe='')}@" if user else ""
    place += f"{host}:{port}" if port else host
    query = f"?{urlencode(extra)}" if extra else ""
    return f"{vendor}://{place}/{quote(name, safe='')}{query}"


def _postgres(options: dict[str, Any]) -> dict[str, str]:
    return {
        name: str(value)
        for name, value in options.items()
        if name not in _NOT_LIBPQ and isinstance(value, str | int | os.PathLike)
    }


def _mysql(options: dict[str, Any]) -> dict[str, str]:
    if options.get("ssl") is True:  # as mysqlclient has it
        options = {"ssl_mode": "REQUIRED", **options, "ssl": {}}
    ssl = {f"ssl_{name}": value for name, value in (options.get("ssl") or {}).items()}
    names = ("unix_socket", "read_default_file", "read_default_group", "ssl_mode")
    plain = {name: options[name] for name in names if name in options}
    return {name: str(value) for name, value in {**plain, **ssl}.items()}
