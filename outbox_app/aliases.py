"""Which database alias holds the outbox, the inbox and a log.

The settings decide, or without them the project's routers. A job or an event is atomic with a
transaction only if that is open on the same alias. Nothing here opens a connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured
from django.db import router

from .conf import outbox_settings

if TYPE_CHECKING:  # a project's celery.py is imported before Django can load models
    from .models import EventLog


#: The alias that a page of the admin shows. It overrides the setting DATABASE.
_chosen: ContextVar[str | None] = ContextVar("outbox_alias", default=None)


@contextmanager
def chosen(alias: str) -> Iterator[None]:
    """Use the outbox and the logs on this alias inside the block, in this thread or coroutine."""
    token = _chosen.set(alias)
    try:
        yield
    finally:
        _chosen.reset(token)


def _setting() -> str | None:
    return _chosen.get() or outbox_settings().DATABASE


def outbox_alias() -> str:
    """Return the alias of the outbox: the setting DATABASE, else what the routers say."""
    if alias := _setting():
        return alias
    try:
        from .models import StagedJob
    except RuntimeError as error:  # Django's message names the model, not the remedy
        raise ImproperlyConfigured("Add 'outbox_app' to INSTALLED_APPS, and migrate.") from error
    return router.db_for_write(StagedJob)


def inbox_alias() -> str:
    """Return the alias of the inbox: the setting INBOX_DATABASE, else the alias of the outbox."""
    return outbox_settings().INBOX_DATABASE or outbox_alias()


def log_alias(log: type[EventLog]) -> str:
    """Return the alias of a log: the setting DATABASE, else what the routers say."""
    return _setting() or router.db_for_write(log)
