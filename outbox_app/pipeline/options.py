"""The options of the data source ``outbox``, and where the password comes from.

An option is text, as all options of Spark are. A password should not be one: options are part of
plans, and are sent to executors. Each process that connects reads the password itself, from a file
or its environment. If neither is named, libpq or MySQL's option files find it as usual.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ..events.log.filter import EventFilter
from .exceptions import InvalidOption, Unreachable

#: The log that every project has.
EVENTS = "outbox_event"

_VENDORS = {
    "postgres": "postgresql",
    "postgresql": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``spark.read.format("outbox").option(…)``, whose names have no ``_``."""

    #: postgresql://USER@HOST:PORT/NAME?PARAMETER=VALUE, mysql://…, or sqlite:///FILE.
    url: str
    #: The table of the log.
    log: str = EVENTS
    #: "events", "heads" (latest version of each stream), "inbox" (executed jobs).
    read: str = "events"
    #: A file that holds the password, on every machine that connects.
    password_file: str = ""
    #: An environment variable that holds the password, in every process that connects.
    password_env: str = ""
    #: The password itself. Only for experiments, as it is part of plans.
    password: str = field(default="", repr=False)
    #: The number of parallel readers.
    partitions: int = field(default_factory=lambda: os.cpu_count() or 1)
    #: The most rows of a micro-batch; 0 for no limit.
    max_rows_per_batch: int = 0
    #: Topics, and types (or prefixes with ``*``), separated by commas. Empty for all.
    topics: str = ""
    types: str = ""
    #: Offsets in JSON. Default: from the beginning, up to now.
    start: str = ""
    end: str = ""
    #: A position that the log must still have after the reading: else it was pruned meanwhile.
    lowest: str = ""
    #: The folder of an archive, whose events are read, and then the log's events after them.
    archive: str = ""
    #: Seconds after which a statement is cancelled; 0 for never.
    statement_timeout: float = 0.0
    #: How many seconds to wait for a database that is unavailable.
    connect_timeout: float = 30.0
    #: MySQL: see OUTBOX["SETTLE_SECONDS"] …
    settle_seconds: float = 5.0
    #: … and OUTBOX["TOMBSTONES"]: a missing position counts as never used only when it is sealed.
    tombstones: bool = False
    #: MySQL, SQLite: the time zone of stored times, if it is not UTC.
    time_zone: str = "UTC"

    def __post_init__(self) -> None:
        if self.archive and "://" not in self.archive:
            # Executors have working folders of their own.
            object.__setattr__(self, "archive", os.path.abspath(self.archive))
        try:
            parameters = self.parameters
        except ValueError:  # whose text may have a part of a password
            text = "The url is invalid: percent-encode its parts, and give a number as its port."
            raise InvalidOption(text) from None
        if self.address.password is not None or not _SECRETS.isdisjoint(map(str.lower, parameters)):
            raise InvalidOption(
                "The url holds a password, which would be shown in plans and logs. Leave it out. "
                "Name a file (passwordFile) or an environment variable (passwordEnv) that holds it."
            )
        if self.read not in ("events", "heads", "inbox"):
            raise InvalidOption(f"read must be events, heads or inbox; got {self.read!r}.")
        if self.vendor == "sqlite" and not self.address.path.strip("/"):
            raise InvalidOption("An SQLite url must name a file: sqlite:///rel or sqlite:////abs.")
        if self.archive and self.start:
            raise InvalidOption("An archive is read from its start: leave out start or archive.")
        if self.archive and self.read != "events":
            raise InvalidOption("An archive has events only: leave out read or archive.")
        if self.lowest and not self.lowest.isdecimal():
            raise InvalidOption(f"lowest must be a position; got {self.lowest!r:.50}.")
        if self.partitions < 1:
            raise InvalidOption("partitions must be at least 1.")

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Options:
        names = {each.name.replace("_", ""): each for each in fields(cls)}
        values: dict[str, Any] = {}
        for name, text in texts.items():
            key = name.lower().replace("_", "")
            if key not in names:
                known = ", ".join(_spelled(each.name) for each in fields(cls))
                raise InvalidOption(f"There is no option {name!r}. Known: {known}.")
            values[names[key].name] = _parsed(str(names[key].type), name, text)
        if "url" not in values:
            raise InvalidOption(
                'Name the database: .option("url", "postgresql://user@host/name"), or mysql://…, '
                "or sqlite:///file."
            )
        return cls(**values)

    def texts(self) -> dict[str, str]:
        return {
            each.name.replace("_", ""): str(getattr(self, each.name))
            for each in fields(self)
            if getattr(self, each.name) != each.default
        }

    @property
    def address(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def vendor(self) -> str:
        """``"postgresql"``, ``"mysql"`` or ``"sqlite"``. Raises ``InvalidOption``."""
        scheme = self.address.scheme
        if scheme not in _VENDORS:
            raise InvalidOption(
                f"The url begins with {scheme!r}; expected postgresql://, mysql:// or sqlite:///."
            )
        return _VENDORS[scheme]

    @property
    def only(self) -> EventFilter:
        return EventFilter(
            re.split(", *", self.topics) if self.topics else None,
            re.split(", *", self.types) if self.types else None,
        )

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters of the connection in the url, by libpq's names, without the password."""
        address = self.address
        values = {
            "host": address.hostname and unquote(address.hostname),
            "port": address.port,
            "user": address.username and unquote(address.username),
            "dbname": unquote(address.path.removeprefix("/")),
        }
        return {name: str(value) for name, value in values.items() if value} | dict(
            parse_qsl(address.query)
        )

    def secret(self) -> str | None:
        """Return the password that this process knows, or None to leave it to the driver.

        Raises ``Unreachable``.
        """
        if self.password_file:
            try:
                return Path(self.password_file).read_text().rstrip("\r\n")
            except OSError as error:
                raise Unreachable(
                    f"The file with the password of {self.url}, {self.password_file}, cannot be "
                    f"read here: {error.strerror}. Mount the file on the driver and on every "
                    "executor."
                ) from error
        if self.password_env:
            try:
                return os.environ[self.password_env]
            except KeyError:
                raise Unreachable(
                    f"The environment variable with the password of {self.url}, "
                    f"{self.password_env}, is not set in this process. Set the variable where the "
                    "driver and the executors are started."
                ) from None
        return self.password or None


#: Parameters of connections that are secret.
_SECRETS = {"password", "passwd", "sslpassword"}


def _spelled(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _parsed(kind: str, name: str, text: str) -> Any:
    if kind == "str":
        return str(text)
    if kind == "bool":
        if str(text).lower() not in ("true", "false"):
            raise InvalidOption(f"{name} must be true or false; got {text!r}.")
        return str(text).lower() == "true"
    try:
        number = int(text) if kind == "int" else float(text)
    except ValueError:
        number = -1
    if not 0 <= number < 2**31:
        raise InvalidOption(f"{name} must be a number from 0 on; got {text!r}.")
    return number
