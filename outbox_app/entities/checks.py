"""Entity types: each has a version log of its own, with a second unique index, on the same alias.

The checks ask no database. Without the index a repeated command would be executed twice. A
constraint that the database checks only at COMMIT would fail a whole batch there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.db.models import CheckConstraint

from ..aliases import model_alias
from ..capability import needed
from ..checks.messages import listed
from ..fleet.conf import fleet_settings
from .declaration import TypeSpec
from .maintenance import declared_types, entity_types
from .models import EntityVersion
from .request import MAX_TIMEOUT


def check_entities(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> Iterator[CheckMessage]:
    types = declared_types()
    for entity in types:
        if app_configs is None or entity._meta.app_config in app_configs:
            found = *_check_versions(entity, types), *_check_values(entity), *_check_columns(entity)
            for message in found:
                message.obj = entity
                yield message


def check_requests(**kwargs: Any) -> list[CheckMessage]:
    """Report aliases with ATOMIC_REQUESTS: the commands of requests are not batched there."""
    by_alias: dict[str, list[str]] = defaultdict(list)
    for entity in declared_types():
        by_alias[router.db_for_write(entity)].append(entity.__name__)
    atomic = [alias for alias in connections if connections.settings[alias]["ATOMIC_REQUESTS"]]
    marks = " and ".join(f"@transaction.non_atomic_requests({alias!r})" for alias in atomic)
    return [
        Warning(
            f"DATABASES[{alias!r}]['ATOMIC_REQUESTS'] is on, and {listed(by_alias[alias])} is "
            "written there: a request's commands belong to its transaction. Each runs alone and "
            "locks its entity until the response is made.",
            hint=f"Put {marks} on the views that send commands, or turn ATOMIC_REQUESTS off. "
            "Silence this where no entity is hot.",
            id="outbox.W034",
        )
        for alias in sorted(by_alias.keys() & atomic)
    ]


def check_routes(**kwargs: Any) -> Iterator[CheckMessage]:
    """Report routed types in a project that names no service: no server can be found."""
    names = [each._meta.label for each in entity_types() if each.routed]
    with suppress(ImproperlyConfigured):  # check_fleet reports it
        if not names or fleet_settings().SERVICE:
            return
        yield Warning(
            f"{listed(names)} is routed, but OUTBOX['FLEET'] has no SERVICE: no server can be "
            "found, so commands are executed where they arrive.",
            hint="Set SERVICE and ADDRESS, or remove routed = True.",
            id="outbox.W040",
        )


def _check_values(entity: Any) -> Iterator[CheckMessage]:
    size, seconds = entity.batch_size, entity.timeout
    wrong = {
        "batch_size must be a whole number from 1 on": type(size) is not int or size < 1,
        f"timeout must be above 0, at most {MAX_TIMEOUT}": type(seconds) not in (int, float)
        or not 0 < seconds <= MAX_TIMEOUT,
        'states must be "every" or "last"': entity.states not in ("every", "last"),
        'states must be "last", because a command has batch=True': entity.states != "last"
        and any(spec.batch for spec in TypeSpec(entity).commands.values()),
    }
    for what in (what for what, is_wrong in wrong.items() if is_wrong):
        yield Error(f"{what}.", hint="Correct the attribute.", id="outbox.E041")


def _check_columns(entity: Any) -> Iterator[CheckMessage]:
    late = [c.name for c in entity._meta.constraints if getattr(c, "deferrable", None)]
    own = [f for f in entity._meta.fields if f not in entity._meta.parents.values()]
    keys = [field.name for field in own if getattr(field, "db_constraint", False)]
    if late or keys:
        yield Error(
            f"The database checks {listed(late + keys)} only at COMMIT: one command that violates "
            "a constraint there would fail its whole batch.",
            hint="Declare the constraint without deferrable=, and the foreign key with "
            "db_constraint=False.",
            id="outbox.E042",
        )
    if names := [c.name for c in entity._meta.constraints if isinstance(c, CheckConstraint)]:
        yield Warning(
            f"A command that violates {listed(names)} raises IntegrityError, which is not recorded "
            "as its answer, and its batch is executed again in halves.",
            hint="Write the same condition as a method with @rule: the command is then rejected.",
            id="outbox.W033",
        )


def _check_versions(entity: Any, types: list[Any]) -> Iterator[CheckMessage]:
    log = getattr(entity, "versions", None)
    if not isinstance(log, type) or not issubclass(log, EntityVersion) or log._meta.abstract:
        yield Error(
            f"versions must be a concrete model derived from EntityVersion; it is {log!r}.",
            hint="class AccountVersion(EntityVersion): …, and versions = AccountVersion.",
            id="outbox.E034",
        )
        return
    shared = [e.__name__ for e in types if getattr(e, "versions", None) is log and e is not entity]
    if shared:
        yield Error(
            f"{', '.join(shared)} has the same versions: an id would name an entity of each type.",
            hint="Give each type its own model of versions.",
            id="outbox.E034",
        )
    unique = [set(each.fields) for each in log._meta.total_unique_constraints]
    if {"stream", "command_id"} not in unique:
        yield Error(
            f"{log.__name__} lacks the unique constraint on (stream, command_id).",
            hint="Write `class Meta(EntityVersion.Meta):` and, if it has constraints of its own, "
            "`constraints = [*EntityVersion.Meta.constraints, …]`.",
            id="outbox.E039",
        )
    own, alias = router.db_for_write(entity), model_alias(log)
    if own != alias:
        yield Error(
            f"The entity is written to {own!r} and its versions to {alias!r}: no transaction can "
            "span both.",
            hint="Make the routers write both to one alias: OUTBOX['DATABASE'], if it is set.",
            id="outbox.E040",
        )


def check_leaders(**kwargs: Any) -> list[CheckMessage]:
    """Report routed types in a project without the fleet: their commands could not be passed on."""
    names = [each._meta.label for each in entity_types() if each.routed]
    if not names or apps.is_installed("outbox_app.fleet"):
        return []
    return [needed(f"routed = True of {listed(names)}", ["outbox_app.fleet", "outbox_app.door"])]


ALWAYS = (check_entities, check_leaders)
DEPLOY = (check_requests, check_routes)
