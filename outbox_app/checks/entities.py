"""Entity types: a log of versions that is theirs alone, with its second unique index, beside them.

Without a database. A type that is declared wrongly would fail at its first command, or, without the
index, execute a repeated command twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Error
from django.db import router
from django.db.models import UniqueConstraint

from ..aliases import log_alias
from ..models import EntityRow, EntityVersion


def check_entities(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Say what is wrong with the declarations of entity types."""
    models = [model for model in apps.get_models() if issubclass(model, EntityRow)]
    types = [model for model in models if not model._meta.proxy]
    return [
        message
        for entity in types
        if app_configs is None or entity._meta.app_config in app_configs
        for message in _check(entity, types)
    ]


def _check(entity: Any, types: list[Any]) -> Iterator[CheckMessage]:
    versions = getattr(entity, "versions", None)
    if (
        not isinstance(versions, type)
        or not issubclass(versions, EntityVersion)
        or versions._meta.abstract
    ):
        yield Error(
            f"versions must be a concrete model derived from EntityVersion; it is {versions!r}.",
            hint="class AccountVersion(EntityVersion): …, and versions = AccountVersion.",
            obj=entity,
            id="outbox.E034",
        )
        return
    if any(issubclass(parent, EntityRow) for parent in entity._meta.parents):
        yield Error(
            "The type is derived from another type: its rows would be split between two tables.",
            hint="Put what they share into an abstract model, and give each versions of its own.",
            obj=entity,
            id="outbox.E034",
        )
    if others := [each.__name__ for each in types if each is not entity and _shares(each, entity)]:
        yield Error(
            f"{', '.join(others)} has the same versions: ids of the one would be ids of the other.",
            hint="Give each type a model of versions of its own.",
            obj=entity,
            id="outbox.E034",
        )
    unique = [c for c in versions._meta.constraints if isinstance(c, UniqueConstraint)]
    if {"stream", "command_id"} not in [set(c.fields) for c in unique if c.condition is None]:
        yield Error(
            "The versions lack the unique constraint on (stream, command_id).",
            hint="Write `class Meta(EntityVersion.Meta):` and, where it has constraints of its "
            "own, `constraints = [*EntityVersion.Meta.constraints, …]`.",
            obj=versions,
            id="outbox.E039",
        )
    own, log = router.db_for_write(entity), log_alias(versions)
    if own != log:
        yield Error(
            f"The entity is written to {own!r} and its versions to {log!r}: no transaction holds "
            "both.",
            hint="Let the routers write both to one alias, that of OUTBOX['DATABASE'] if it is "
            "set.",
            obj=entity,
            id="outbox.E040",
        )


def _shares(one: Any, other: Any) -> bool:
    return getattr(one, "versions", None) is getattr(other, "versions", None)
