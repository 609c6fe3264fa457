"""System checks: ``manage.py check`` says what cannot work, and what to do instead.

Ids ``outbox.E001`` and up are errors, ``outbox.W001`` and up warnings; ``docs/reference/checks.md``
lists them. ``check --deploy`` also checks settings that matter in production only. Only the checks
of databases and servers open connections. They run for the aliases that ``--database`` names
(``migrate`` names its own, ``--tag`` with Django 6.1 all); those of brokers need ``--deploy``.
"""

from __future__ import annotations

from django.core import checks

from .aliases import check_autocommit, check_business, check_connections, check_zones
from .apps import check_apps
from .brokers import check_brokers, check_transports
from .databases import (
    check_databases,
    check_keys,
    check_sessions,
    check_sqlite,
    check_sqlite_settings,
)
from .entities import check_entities, check_requests
from .fleet import check_fleet, check_reach
from .logs import check_declared_logs, check_log_tables, check_logs
from .messages import linked
from .models import check_models
from .peers import check_fences, check_peer_table, check_peers
from .servers import check_servers
from .values import check_settings

#: Settings, models and routers.
ALWAYS = (
    check_settings,
    check_apps,
    check_transports,
    check_models,
    check_autocommit,
    check_zones,
    check_sqlite_settings,
    check_peers,
    check_fleet,
    check_logs,
    check_entities,
    check_declared_logs,
    check_keys,
)
#: These matter in production, and hardly on a developer's machine.
DEPLOY = (
    check_business,
    check_connections,
    check_sqlite,
    check_requests,
    check_reach,
    check_brokers,
)
#: These open connections.
DATABASE = (check_databases, check_log_tables, check_peer_table, check_fences)
DEPLOY_DATABASE = (check_sessions, check_servers)


def register() -> None:
    for check in ALWAYS:
        checks.register(linked(check), "outbox")
    for check in DATABASE:
        checks.register(linked(check), "outbox", checks.Tags.database)
    for check in DEPLOY:
        checks.register(linked(check), "outbox", deploy=True)
    for check in DEPLOY_DATABASE:
        checks.register(linked(check), "outbox", checks.Tags.database, deploy=True)
