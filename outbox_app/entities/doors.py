"""What entities add to the core: figures of their commands.

Entities have no problems of their own: a caller gets the error of its command. Versions are events
of a log, and are pruned as such; the ids of their commands outlive them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from django.urls import path
from django.utils.translation import gettext as _

from ..aliases import model_alias, outbox_alias
from ..capability import Doors, Figure, Section
from ..events.log.registry import all_logs
from ..exceptions import InvalidArgument
from ..monitoring.figures import number, percentiles
from ..monitoring.status import Question
from ..retention.rows import Kept, prune
from . import series
from .conf import EntitySettings, entity_settings
from .maintenance import declared_types, entity_types
from .models import EntityVersion, PrunedCommand
from .pruned import day_of
from .series import Commands

if TYPE_CHECKING:
    from django.urls import URLPattern

    from ..admin.tables import Table


@dataclass(frozen=True, slots=True)
class EntitiesSection(Section):
    commands: Commands

    def figures(self) -> Iterator[Figure]:
        found = self.commands
        routed = {"passed_on": found.passed_on, "elsewhere": found.elsewhere}
        # fmt: off
        yield Figure(found.recorded, "outbox_entity_commands_per_minute",
                     "Commands recorded in the last full minute.")
        yield Figure(found.rejected, "outbox_entity_rejections_per_minute",
                     "Rejections of the last full minute.", ("code",))
        yield Figure(found.conflicts, "outbox_entity_conflicts_per_minute",
                     "Attempts repeated in the last full minute.")
        yield Figure(routed, "outbox_entity_routed_per_minute", "Commands of routed types in the "
                     "last full minute: passed on, executed elsewhere.", ("route",))
        yield Figure(percentiles(*found.batch_size), "outbox_entity_batch_size",
                     "Commands per batch, of the last minutes.", ("percentile",))
        yield Figure(percentiles(*found.commit_seconds), "outbox_entity_commit_seconds",
                     "Seconds of a batch's transaction.", ("percentile",))
        yield Figure(found.waiting, "outbox_entity_waiting",
                     "Commands that wait in the processes for their batch.")
        # fmt: on

    def tables(self, site: str) -> Iterator[Table]:
        if self.commands != Commands():
            yield _table(self.commands)


def _table(found: Commands) -> Table:
    """Return the table on the overview, of the commands of all types."""
    from ..admin.tables import Table, durations, listed, numbers, pairs

    sizes = listed(None if each is None else number(each) for each in found.batch_size)
    times = durations(found.commit_seconds)
    figures = [
        (_("Commands per minute"), number(found.recorded)),
        (_("Conflicts per minute"), number(found.conflicts)),
        (_("Waiting now"), number(found.waiting)),
        (_("Commands per batch, p50 and p95"), sizes),
        (_("Time of a batch's transaction, p50 and p95"), times),
    ]
    groups = [
        pairs(_("Figure"), _("Value"), figures),
        pairs(_("Code of rejections"), _("Per minute"), numbers(found.rejected)),
    ]
    if found.passed_on or found.elsewhere:
        figures += [
            (_("Passed on to the leading server, per minute"), number(found.passed_on)),
            (_("Executed by a server that does not lead, per minute"), number(found.elsewhere)),
        ]
    return Table(_("Entities"), groups)


class EntitiesDoors(Doors):
    name = "entities"
    rank = 20
    settings = EntitySettings
    counters = series.NAMES
    empty = EntitiesSection(Commands())

    def parts(self) -> Mapping[str, Any]:
        return {"entities": entity_types()}

    def models(self) -> list[Any]:
        return declared_types()

    def read(self, question: Question) -> EntitiesSection | None:
        if not question.wants("entities"):
            return None
        of_types = {question.using or model_alias(each.versions) for each in entity_types()}
        aliases = sorted(filter(question.can_read, of_types))
        return EntitiesSection(series.commands(aliases)) if aliases else None

    def kept(self) -> Mapping[str, Kept]:
        commands = (
            "remove old ids of commands whose versions --events, --archived or SINK have removed "
            "(table outbox_prunedcommand). While an id is there, a repeat of its command raises "
            "AnswerArchived or AnswerGone; once it is gone, the command would be executed again"
        )
        return {
            "commands": Kept(
                *(PrunedCommand, "executed_on", _versions_alias, "ENTITY_COMMAND_DAYS", commands),
                bound=day_of,
            )
        }

    def routes(self) -> list[URLPattern]:
        """Return the addresses that peers with granted commands call."""
        from . import views

        return [
            path("entities/<str:type>/<path:id>/<str:command>", views.execute, name="execute"),
            path("entities/<str:type>", views.execute_many, name="execute_many"),
            path("routed/<str:type>", views.routed, name="routed"),
            path("openapi.json", views.openapi, name="openapi"),
        ]

    def removals(self, using: str) -> Mapping[str, Callable[..., int]]:
        if entity_settings().ENTITY_COMMAND_DAYS is None:
            return {}
        aliases = _versions_aliases()
        return {f"commands:{alias}": partial(prune, "commands", alias) for alias in aliases}


def _versions_aliases() -> set[str]:
    return {model_alias(log) for log in all_logs() if issubclass(log, EntityVersion)}


def _versions_alias() -> str:
    aliases = _versions_aliases()
    if len(aliases) > 1:
        raise InvalidArgument(
            "The versions of entities are in several databases: "
            f"{', '.join(sorted(aliases))}. Run this with --database ALIAS for each of them."
        )
    return aliases.pop() if aliases else outbox_alias()


DOORS = EntitiesDoors()
