"""System checks: ``manage.py check`` says what cannot work, and what to do instead.

Ids ``outbox.E001`` and up are errors, ``outbox.W001`` and up warnings; the reference page of each
app lists its own. ``check --deploy`` also checks settings that matter in production only. Only the
checks of databases and servers open connections. They run for the aliases that ``--database`` names
(``migrate`` names its own, ``--tag`` with Django 6.1 all); those of brokers need ``--deploy``.
"""

from __future__ import annotations

from types import ModuleType

from django.core import checks
from django.core.checks import Tags

from .aliases import check_autocommit, check_business, check_zones
from .apps import check_apps
from .brokers import check_brokers, check_transports
from .databases import (
    check_databases,
    check_keys,
    check_sessions,
    check_sqlite,
    check_sqlite_settings,
    check_tables,
)
from .messages import guarded
from .models import check_models
from .receipts import check_receipts
from .servers import check_servers
from .values import check_settings

#: Settings, models and routers.
ALWAYS = (
    check_settings,
    check_apps,
    check_receipts,
    check_transports,
    check_models,
    check_autocommit,
    check_zones,
    check_sqlite_settings,
    check_keys,
)
#: These matter in production, and hardly on a developer's machine.
DEPLOY = (check_business, check_sqlite, check_brokers)
#: These open connections.
DATABASE = (check_tables, check_databases)
DEPLOY_DATABASE = (check_sessions, check_servers)


def register(module: ModuleType) -> None:
    """Register the checks of a module: its ALWAYS, DEPLOY, DATABASE and DEPLOY_DATABASE."""
    tags = {"ALWAYS": (), "DEPLOY": (), "DATABASE": (Tags.database,)}
    tags["DEPLOY_DATABASE"] = (Tags.database,)
    for name, further in tags.items():
        for check in getattr(module, name, ()):
            deploy = name.startswith("DEPLOY")
            checks.register(guarded(check), "outbox", *further, deploy=deploy)
