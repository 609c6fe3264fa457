"""Which database alias holds the outbox, the inbox, and each log.

The settings decide, or without them the project's routers. A job is atomic with a transaction
only if that is open on the same alias. Nothing here opens a connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from django.db import router

from .conf import outbox_settings

if TYPE_CHECKING:
    from django.db.models import Model

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


def chosen_alias() -> str | None:
    """Return the alias that a page of the admin shows, else the setting DATABASE, else None."""
    return _chosen.get() or outbox_settings().DATABASE


def model_alias(model: type[Model]) -> str:
    """Return the alias of a model, such as a log: the setting DATABASE, else the routers'."""
    return chosen_alias() or router.db_for_write(model)


def outbox_alias() -> str:
    """Return the alias of the outbox: the setting DATABASE, else what the routers say."""
    if alias := chosen_alias():
        return alias
    from .models import StagedJob

    return router.db_for_write(StagedJob)


def inbox_alias() -> str:
    """Return the alias of the inbox: the setting INBOX_DATABASE, else the alias of the outbox."""
    return outbox_settings().INBOX_DATABASE or outbox_alias()
