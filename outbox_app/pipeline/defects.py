"""The defects that an audit finds, its result, and a readable line for each defect.

This is plain Python: commands, the report and tests use it without Spark. Names of streams are
untrusted text: invisible characters are shown as escapes. HTML is not escaped here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..text import shown


class DefectKind(NamedTuple):
    title: str
    #: What to do about such a defect.
    advice: str


_RESTORE = (
    "Look for an import, a restore or a DELETE. Put the events back with their versions, from the "
    "archive or a backup; the next audit settles the gap. If they are gone for good, accept the "
    "gap in the admin, with the reason (outbox_subscriptions skip-gap); audits then leave it out."
)
#: The kind in the log of an entity type, with which the rows of entities are compared.
ENTITY = "entity"
#: Every kind, the most serious first.
KINDS: Mapping[str, DefectKind] = {
    "gap": DefectKind("Versions missing inside a stream", _RESTORE),
    "late_start": DefectKind("Versions missing at the beginning of a stream", _RESTORE),
    "tail": DefectKind("Versions missing at the end of a stream", _RESTORE),
    "only_in_archive": DefectKind(
        "Lost by the database",
        "Pruning removes only the oldest rows of a log. Put the rows back from the archive, with "
        "their ids, before a subscription passes them.",
    ),
    "not_in_archive": DefectKind(
        "Lost by the archive",
        "Do not prune. Look for files of the archive that were deleted or replaced, then archive "
        "the log into a new folder.",
    ),
    "content_differs": DefectKind(
        "Different in database and archive",
        "Events never change. Find out who edited the database or the archive, and restore the "
        "right content.",
    ),
    "archived_twice": DefectKind(
        "More than once in the archive",
        "Tasks or the disk failed. Archive to a new folder while the log still has the rows.",
    ),
    "duplicate_version": DefectKind(
        "Versions that occur more than once",
        "The unique constraint of the log prevents this: check that it exists, and REINDEX. Delete "
        "the wrong row.",
    ),
    "order": DefectKind(
        "Out of order",
        "Rows were written by hand, or imported. A new subscription gets them in the order of "
        "their positions: import the rows again in the order of their versions.",
    ),
    "invalid_version": DefectKind(
        "Versions below 1",
        "Only publish() gives out versions, and the first is 1. Number the rows anew or delete "
        "them.",
    ),
    "low_head": DefectKind(
        "Heads behind their stream",
        "The next publish() to the stream fails, because its version exists. Set the stream's row "
        "in outbox_stream to its last version in the log.",
    ),
    ENTITY: DefectKind(
        "Entities that differ from their versions",
        "A row was edited by hand, so commands raise DamagedEntity. The versions are right: "
        "manage.py outbox_entities verify --repair writes the row from the newest version.",
    ),
}
#: Kinds of missing versions, which become rows of ``outbox_gap``.
MISSING = ("gap", "late_start", "tail")


class Defect(NamedTuple):
    """One defect. Its kind decides which of the numbers are set; see ``line``."""

    kind: str
    stream: str
    #: The affected versions, both ends included.
    first: int | None
    last: int | None
    #: The position of the event that shows the defect.
    position: int | None
    detail: str

    @property
    def line(self) -> str:
        stream, detail = (shown(text, 200, but="") for text in (self.stream, self.detail))
        position, first, last = self.position, self.first, self.last
        event = f"{stream} version {first} (position {position})"
        which = f"version {first} is" if first == last else f"versions {first} to {last} are"
        match self.kind:
            case "gap":
                them = "it" if first == last else "them"
                return f"{stream}: {which} missing (position {position} waits behind {them})"
            case "late_start":
                begins = f"it begins with version {(last or 0) + 1} (position {position})"
                return f"{stream}: {which} missing; {begins}"
            case "tail" if first == 1:
                return f"{stream}: {which} missing, and the log has no event of the stream"
            case "tail":
                known = f"outbox_stream knows version {last}"
                return f"{stream}: {which} missing at the end ({known})"
            case "only_in_archive":
                missing = "but not in the database, which has earlier positions"
                return f"{event} is in the archive, {missing}"
            case "not_in_archive":
                return f"{event} is in the database, but not in the archive"
            case "content_differs":
                return f"{event} differs between database and archive"
            case "archived_twice":
                return f"{event} is in the archive {detail} times"
            case "duplicate_version":
                again = f"again at position {position}"
                return f"{stream}: version {first} occurs more than once, {again}"
            case "order":
                return f"{event} has a lower position than the version before it"
            case "invalid_version":
                return f"{event}: versions begin with 1"
            case "low_head":
                knows = f"knows version {first} only" if first else "does not know it"
                return f"{stream}: outbox_stream {knows}; the log has version {last}"
        return f"{stream}: {detail}"  # ENTITY


@dataclass(frozen=True, slots=True)
class Audit:
    log: str
    counts: Mapping[str, int]
    defects: Sequence[Defect] = field(repr=False)
    events: int
    streams: int
    seconds: float
    checked: Sequence[str] = tuple(KINDS)
    accepted: int = 0

    @property
    def total(self) -> int:
        """The number of all defects, including those that are not in ``defects``."""
        return sum(self.counts.values())

    @property
    def sound(self) -> bool:
        return not self.total
