"""Commands whose versions retention has removed: they are never executed again.

The transaction that deletes versions inserts the ids of their commands: whichever way it ends, an
id is in one of the two tables, and in one only. The look-up of command ids finds such a command in
the table of ``PrunedCommand``. Its answer is in the archive of the log, unless the version was not
archived, or its entity was erased. Ids are removed by ``prune("commands")``, by
ENTITY_COMMAND_DAYS.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache, partial
from typing import Any

from django.db.models import QuerySet

from ..database.upsert import upsert
from ..pipeline.driver.archive_lookup import archived_versions
from ..pipeline.exceptions import ArchiveRefused
from ..text import without_passwords
from .conf import entity_settings
from .exceptions import AnswerArchived, AnswerGone
from .maintenance import ERASED
from .models import PrunedCommand, command_key, log_number
from .request import Call, Command, Outcome, stored_answer


def keep_commands(versions: Any, now: datetime, *, is_archived: bool) -> None:
    """Insert the ids of the commands of versions that the open transaction deletes.

    ``versions`` is a query set in a fixed order: others may insert the same ids. ``now`` is the
    database's time. An erased version has no answer, in an archive either.
    """
    days, log = entity_settings().ENTITY_COMMAND_DAYS, log_number(versions.model._meta.db_table)
    written = versions.filter(command__isnull=False)
    if days is not None:
        written = written.filter(recorded_at__gte=now - timedelta(days=days))
    fields = ("stream", "command_id", "version", "request_hash", "recorded_at")
    rows = [
        PrunedCommand(
            log=log,
            key=command_key(stream, command_id),
            version=version if is_archived and request_hash else -version,
            executed_on=day_of(at),
        )
        for stream, command_id, version, request_hash, at in written.values_list(*fields)
    ]
    # A version that was restored from an archive has its id there, which stays as it is. MySQL's
    # INSERT IGNORE would ignore other errors, too.
    table = PrunedCommand.objects.using(versions.db)
    upsert(table, rows, update=["executed_on"], unique=["log", "key"])


def day_of(moment: datetime) -> date:
    """Return the date of a time that the database has returned, in UTC if it has a zone."""
    return (moment.astimezone(UTC) if moment.tzinfo else moment).date()


def pruned_answer(call: Call, version: int) -> AnswerGone:
    """Return the error of a repeated command. ``version`` is that of its ``PrunedCommand``."""
    text = (
        f"The command {call.command_id!r} of {call.id!r} was executed at version {abs(version)}, "
        "which the database no longer has. It is not executed again."
    )
    if version < 0:
        return AnswerGone(f"{text} No archive has its answer.", version=-version)
    hint = "To read its answer from the archive of the versions, call execute(…, archive=…)."
    return AnswerArchived(f"{text} {hint}", version=version)


class ArchivedAnswers:
    """First answers to commands of one type, from an archive of its versions."""

    def __init__(self, entity: Any, archive: str, *, using: str) -> None:
        self.entity, self.archive, self.using = entity, archive, using
        read = partial(archived_versions, entity.versions, folder=archive, using=using)
        #: The archived versions of an entity. Several commands may ask for one entity.
        self.versions_of = lru_cache(maxsize=8)(read)

    def get(self, asked: Command, error: AnswerArchived) -> Outcome:
        """Return the first answer to a command, which ``error`` refused.

        Raises ``ArchiveRefused`` if the archive lacks the version, ``AnswerGone`` if the entity was
        erased, and ``CommandIdConflict``.
        """
        call, version, versions = Call(asked), error.version, self.versions_of(asked.id)
        for row in versions:
            if row.version == version and row.command_id == call.command_id:
                break
        else:
            raise ArchiveRefused(
                f"The archive {without_passwords(self.archive)} has no version {version} of "
                f"{self.entity.__name__} {call.id!r} with the command id {call.command_id!r}. "
                "Give the archive into which the version has sunk."
            ) from error
        if any(ERASED in metadata for metadata in self._metadata_from(version, versions)):
            raise AnswerGone(
                f"The answer to {call.command_id!r} of {call.id!r}, at version {version}, was "
                "erased with the entity.",
                version=version,
            ) from error
        if row.request_hash != call.hash:
            raise call.conflict(str(row.command), version) from error
        return replace(stored_answer(version, row.rejected, row.response), replayed=True)

    def fill(self, commands: Sequence[Command], answers: list[Any]) -> None:
        """Replace each ``AnswerArchived`` by the first answer, or by the error of reading it."""
        for number, (asked, answer) in enumerate(zip(commands, answers, strict=True)):
            if isinstance(answer, AnswerArchived):
                try:
                    answers[number] = self.get(asked, answer)
                except Exception as error:
                    answers[number] = error

    def _metadata_from(self, version: int, archived: Sequence[Any]) -> Iterator[Any]:
        """Yield the metadata of versions that no command wrote, and of all archived ones."""
        yield from (row.metadata for row in archived if row.version >= version)
        rows: Any = QuerySet(self.entity.versions, using=self.using)
        rows = rows.filter(stream=archived[0].stream, version__gt=version, command__isnull=True)
        yield from rows.values_list("metadata", flat=True)
