"""Statistics: small figures a minute, so that no page has to count history.

A row is one figure about one minute. Rows are written whole, by the process that counted: none
adds to the row of another. What a log's statistics mean is in the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from django.db import models
from django.utils.translation import gettext_lazy as _

from .clock import DatabaseNow
from .upsert import upsert

#: Of a figure; no two rows have the same.
KEY = ("name", "minute", "source", "dimension", "label")
#: Rows an INSERT.
BATCH = 500
#: More than any name in a log or of a task has, so that those stay as they are.
LABEL_LENGTH = 300


def label_of(text: str) -> str:
    """Return a text as a label: a longer one is cut, and ends in a hash of the whole.

    Two texts never have the same label: only what was cut is as long as the column.
    """
    if len(text) < LABEL_LENGTH:
        return text
    hash = blake2b(text.encode(), digest_size=16).hexdigest()
    return f"{text[: LABEL_LENGTH - len(hash) - 1]}…{hash}"


class Statistic(models.Model):
    id = models.BigAutoField(primary_key=True)
    #: Of what: the table of a log.
    source = models.CharField(_("source"), max_length=128)
    #: Its beginning. What is about a whole log bears the minute of the newest event.
    minute = models.DateTimeField(_("minute"))
    name = models.CharField(_("name"), max_length=40)
    #: By what it is counted, and which of those: ``type`` and ``OrderPlaced``. Empty: all.
    dimension = models.CharField(_("dimension"), max_length=20, blank=True, default="")
    label = models.CharField(_("label"), max_length=LABEL_LENGTH, blank=True, default="")
    value = models.FloatField(_("value"))
    written_at = models.DateTimeField(_("written at"), db_default=DatabaseNow(), editable=False)

    class Meta:
        db_table = "outbox_statistic"
        verbose_name = _("statistic")
        verbose_name_plural = _("statistics")
        default_permissions = ("view",)
        constraints = [
            # In this order it is also the index for "this name since that minute".
            models.UniqueConstraint(fields=KEY, name="outbox_statistic_figure"),
        ]

    def __str__(self) -> str:
        which = f" {self.dimension}={self.label}" if self.dimension else ""
        return f"{self.source} {self.name}{which}: {self.value:g}"


def write_figures(rows: Sequence[Statistic], *, using: str) -> None:
    """Insert figures; those that are there already get the new value."""
    table, update = Statistic.objects.using(using), ["value", "written_at"]
    upsert(table, rows, update=update, unique=KEY, batch_size=BATCH)
