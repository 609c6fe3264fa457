"""Gaps: positions or versions that are missing, or that may still arrive. Only evidence closes one.

An id gap (MySQL) is a range of positions that a cursor has passed without seeing them; a version
gap is a range of versions missing inside a stream. A reader that notices a gap writes its row; only
a person can skip a gap, with a name and a reason. Events that a person makes a subscription skip
are recorded as a gap by position, too.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.utils.translation import gettext_lazy as _

from ...database.clock import DatabaseNow
from ...database.encoding import replaced
from ...fields import CharField, TextField


class GapQuerySet(models.QuerySet["Gap"]):
    def open(self) -> GapQuerySet:
        return self.filter(state=Gap.State.OPEN)

    def settle(self, state: str, *, by: str = "", reason: str = "", **columns: Any) -> int:
        """Settle the open gaps; return their number."""
        return self.open().update(**_settled(state, by, reason, self.db), **columns)

    def record_missing(self, key: dict[str, Any], **columns: Any) -> Gap:
        """Return the gap with this key, opened with these columns; it may have been settled."""
        gap, created = self.get_or_create(**key, defaults=columns)
        if not created:
            if gap.state != Gap.State.OPEN:
                columns |= Gap.UNSETTLED
            for name, value in columns.items():
                setattr(gap, name, value)
            gap.save(using=self.db, update_fields=list(columns))
        return gap

    def record_skip(
        self, *, last: int, by: str, reason: str, partition: int = 0, stream: str = "", **key: Any
    ) -> Gap:
        """Record that a person has made a subscription skip events: a gap that was never open.

        A second decision about the same position keeps the first reason.
        """
        key |= {"kind": Gap.Kind.EVENT, "partition": partition, "stream": stream}
        if before := self.filter(**key).first():
            reason = f"{reason}\nBefore, to {before.last}, by {before.settled_by}: {before.reason}"
        values = {"last": last, **_settled(Gap.State.SKIPPED, by, reason, self.db)}
        return self.update_or_create(**key, defaults=values)[0]

    def accept_missing(self, gap: Gap, *, by: str, reason: str) -> None:
        """Record that a person has accepted, for audits, that the versions of a gap are missing.

        A gap of an audit that holds more than these versions stays as it is.
        """
        settled = _settled(Gap.State.SKIPPED, by, reason, self.db)
        key: dict[str, Any] = {"kind": Gap.Kind.VERSION, "subscription": ""}
        key |= {"log": gap.log, "stream": gap.stream}
        audits = self.filter(**key)
        audits.open().filter(first__gte=gap.first, last__lte=gap.last).update(**settled)
        if not audits.filter(first=gap.first, last__gt=gap.last).exists():
            values = {"last": gap.last, **settled}
            self.update_or_create(**key, first=gap.first, defaults=values)


def _settled(state: str, by: str, reason: str, using: str) -> dict[str, Any]:
    by, reason = replaced(by, using=using)[:255], replaced(reason, using=using)[:10_000]
    return {"state": state, "settled_at": DatabaseNow(), "settled_by": by, "reason": reason}


class Gap(models.Model):
    """A range of positions or versions that a reader has missed."""

    class Kind(models.TextChoices):
        ID = "id", _("positions of a log")
        VERSION = "version", _("versions of a stream")
        EVENT = "event", _("events that a subscription was told to skip")

    class State(models.TextChoices):
        OPEN = "open", _("open")
        FILLED = "filled", _("filled: the rows came")
        CLOSED = "closed", _("closed: never written, or rolled back")
        TOMBSTONE = "tombstone", _("sealed with a tombstone")
        SKIPPED = "skipped", _("skipped")

    #: The columns that open a settled gap again.
    UNSETTLED: ClassVar = {
        "state": State.OPEN,
        "attempts": 0,
        "settled_at": None,
        "settled_by": "",
        "reason": "",
    }

    id = models.BigAutoField(primary_key=True)
    kind = CharField(_("kind"), max_length=10, choices=Kind.choices)
    state = CharField(_("state"), max_length=10, choices=State.choices, default=State.OPEN)
    subscription = CharField(_("subscription"), max_length=80, blank=True, default="")
    partition = models.PositiveSmallIntegerField(_("partition"), default=0)
    log = CharField(_("log"), max_length=128)
    #: Empty for a gap in positions.
    stream = CharField(_("stream"), max_length=255, blank=True, default="")
    #: Positions or versions that are missing, both ends included.
    first = models.BigIntegerField(_("first"))
    last = models.BigIntegerField(_("last"))
    seen_at = models.DateTimeField(_("first seen"), db_default=DatabaseNow(), editable=False)
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    settled_at = models.DateTimeField(_("settled at"), null=True, blank=True)
    settled_by = CharField(_("settled by"), max_length=255, blank=True, default="")
    reason = TextField(_("reason"), blank=True, default="")

    objects = GapQuerySet.as_manager()

    class Meta:
        app_label = "outbox_events"
        db_table = "outbox_gap"
        verbose_name = _("gap")
        verbose_name_plural = _("gaps")
        permissions = [("skip_gap", _("Can skip gaps"))]
        indexes = [models.Index(fields=["state", "seen_at"], name="outbox_gap_state")]
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "subscription", "partition", "log", "stream", "first"],
                name="outbox_gap_first",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.stream or self.log}, {self.missing}"

    @property
    def missing(self) -> str:
        """What is missing, for people: ``version 4``, ``positions 5 to 9``."""
        unit = "version" if self.kind == self.Kind.VERSION else "position"
        if self.first == self.last:
            return f"{unit} {self.first}"
        return f"{unit}s {self.first} to {self.last}"
