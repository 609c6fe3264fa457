"""Where jobs are staged, where the project's models are written, and in which zone times are.

The checks read settings, routers and models, and query no database. They cannot predict a router
that decides by the instance, or by a value of the thread: silence the messages that such a router
makes untrue.
"""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Error, Warning
from django.db import connections, router

from ..aliases import inbox_alias, outbox_alias
from ..capability import Capability, all_doors
from .messages import listed


def written_aliases() -> set[str]:
    """Return the aliases of the outbox and the inbox, if they exist."""
    return {outbox_alias(), inbox_alias()}.intersection(connections.settings)


def check_business(**kwargs: Any) -> list[CheckMessage]:
    """Report that no model is written where jobs are staged: jobs would be atomic with nothing."""
    models = [each for each in apps.get_models() if each._meta.managed]
    own = [each for each in models if not _is_foreign(each._meta.app_config)]
    written, outbox = sorted(set(map(router.db_for_write, own))), outbox_alias()
    if not written or outbox in written:
        return []
    return [
        Error(
            f"Jobs are staged on {outbox!r}, but the routers write the project's models to "
            f"{listed(list(map(repr, written)))} only: delay() in a transaction there is refused, "
            "because the job would not be atomic with it.",
            hint="Set OUTBOX['DATABASE'] to the alias of your models. Silence this if your router "
            "decides by the instance or by the thread, or if each call passes using=.",
            id="outbox.E024",
        )
    ]


def _is_foreign(config: AppConfig | None) -> bool:
    return config is None or isinstance(config, Capability) or config.name.startswith("django.")


def check_autocommit(**kwargs: Any) -> list[CheckMessage]:
    """Report aliases with autocommit off: drainers would commit nothing there."""
    return [
        Error(
            f"DATABASES[{alias!r}]['AUTOCOMMIT'] is False: rows that drainers "
            "and idempotent tasks write there would not be committed, and delay() outside atomic() "
            "is refused.",
            hint="Set it to True, Django's default, and use transaction.atomic().",
            id="outbox.E037",
        )
        for alias in _aliases()
        if not connections.settings[alias]["AUTOCOMMIT"]
    ]


def check_zones(**kwargs: Any) -> list[CheckMessage]:
    """Report aliases where Django stores times in another zone than the database's clock has."""
    return [
        Warning(
            f"DATABASES[{alias!r}]['TIME_ZONE'] is {zone!r}, but the database's clock is read in "
            "UTC: held jobs leave hours too early or too late, and ages are wrong.",
            hint="Remove the key, so that Django stores UTC there.",
            id="outbox.W045",
        )
        for alias in _aliases()
        if (zone := connections.settings[alias]["TIME_ZONE"]) not in (None, "UTC")
        and not connections[alias].features.supports_timezones
    ]


def _aliases() -> list[str]:
    found = {alias for doors in all_doors() for alias in doors.aliases()}
    return sorted(found.intersection(connections))
