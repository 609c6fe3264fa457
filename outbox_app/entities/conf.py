"""The keys of ``OUTBOX`` for entities."""

from __future__ import annotations

from dataclasses import dataclass

from ..conf import read


@dataclass(frozen=True, slots=True)
class EntitySettings:
    """They have the defaults that the documentation names."""

    #: Days for which the ids of commands are kept once retention has removed their versions,
    #: counted from the command. A later repeat is executed again. None: without limit.
    ENTITY_COMMAND_DAYS: int | None = None
    #: Commands that may wait for one entity in one process.
    ENTITY_QUEUE: int = 10_000
    #: Threads that execute the commands of coroutines, in one process.
    ENTITY_THREADS: int = 4
    #: Dotted path of a function that names the scope of the caller's session, such as its tenant:
    #: only commands of one scope share a transaction. None: all of them may.
    ENTITY_SCOPE: str | None = None


def entity_settings() -> EntitySettings:
    """Return the settings of entities."""
    return read(EntitySettings)
