"""Which database alias holds the outbox, the inbox and a log.

A setting decides, else the project's routers. A transaction makes a job or an event atomic only
where it is open on that alias. Nothing here opens a connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from django.core.exceptions import ImproperlyConfigured
from django.db import router

from .conf import outbox_settings

if TYPE_CHECKING:  # a project's celery.py is imported before Django's models may be
    from .models import EventLog


#: The alias that a page of the admin shows, in the place of the setting.
_chosen: ContextVar[str | None] = ContextVar("outbox_alias", default=None)


@contextmanager
def chosen(alias: str) -> Iterator[None]:
    """Let the block work with the outbox and the logs on this alias: this thread or coroutine."""
    token = _chosen.set(alias)
    try:
        yield
    finally:
        _chosen.reset(token)


def _setting() -> str | None:
    return _chosen.get() or outbox_settings().DATABASE


def outbox_alias() -> str:
    """Return the alias that the outbox lives on: the setting, else what the routers say."""
    if alias := _setting():
        return alias
    try:
        from .models import StagedJob
    except RuntimeError as error:  # Django's words for it name the model, not the remedy
        raise ImproperlyConfigured("Add 'outbox_app' to INSTALLED_APPS, and migrate.") from error
    return router.db_for_write(StagedJob)


def inbox_alias() -> str:
    """Return the alias that the inbox lives on: the setting, else the alias of the outbox."""
    return outbox_settings().INBOX_DATABASE or outbox_alias()


def log_alias(log: type[EventLog]) -> str:
    """Return the alias that a log lives on: the setting DATABASE, else what the routers say."""
    return _setting() or router.db_for_write(log)
