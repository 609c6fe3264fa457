"""Statistics: a few figures for each minute, so that no page has to count past rows.

A row is one figure about one minute. The process that counted writes the whole value; no process
adds to another one's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..database.clock import DatabaseNow
from ..database.upsert import upsert
from ..fields import CharField

#: The columns that identify a figure; they are unique together.
KEY = ("name", "minute", "source", "dimension", "label")
#: Rows per INSERT.
BATCH = 500
#: Longer than the names of subscriptions and of logs, so that none of these is cut.
LABEL_LENGTH = 300


def label_of(text: str) -> str:
    """Return a text as a label. A text that is too long is cut, and ends in a hash of the whole.

    So different texts have different labels: only one that was cut is as long as the column.
    """
    if len(text) < LABEL_LENGTH:
        return text
    hash = blake2b(text.encode(), digest_size=16).hexdigest()
    return f"{text[: LABEL_LENGTH - len(hash) - 1]}…{hash}"


class Statistic(models.Model):
    id = models.BigAutoField(primary_key=True)
    #: The process that counted.
    source = CharField(_("source"), max_length=128)
    #: The start of the minute.
    minute = models.DateTimeField(_("minute"))
    name = CharField(_("name"), max_length=40)
    #: The grouping and the group: ``subscription`` and its name. Empty for a total.
    dimension = CharField(_("dimension"), max_length=20, blank=True, default="")
    label = CharField(_("label"), max_length=LABEL_LENGTH, blank=True, default="")
    value = models.FloatField(_("value"))
    written_at = models.DateTimeField(_("written at"), db_default=DatabaseNow(), editable=False)

    class Meta:
        app_label = "outbox_app"
        db_table = "outbox_statistic"
        verbose_name = _("statistic")
        verbose_name_plural = _("statistics")
        default_permissions = ("view",)
        constraints = [
            # The order of the fields makes this the index for "this name since that minute", too.
            models.UniqueConstraint(fields=KEY, name="outbox_statistic_figure"),
        ]

    def __str__(self) -> str:
        which = f" {self.dimension}={self.label}" if self.dimension else ""
        return f"{self.source} {self.name}{which}: {self.value:g}"


def write_figures(rows: Sequence[Statistic], *, using: str) -> None:
    """Insert figures; update the value of figures that exist already."""
    table, update = Statistic.objects.using(using), ["value", "written_at"]
    upsert(table, rows, update=update, unique=KEY, batch_size=BATCH)
