"""Tables of figures for the template ``table.html``, among them most tables of the overview.

``staged`` and ``dead`` make the tables of their jobs. The code that makes a table cuts, masks and
escapes untrusted text; the template escapes HTML.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from django.template.defaultfilters import length
from django.utils.formats import localize, number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ..jobs.drain.status import DrainerStatus
from ..models import Incident
from ..monitoring.figures import number
from ..monitoring.status import OutboxStatus
from ..text import duration, one_line
from .base import address
from .masking import masked_line

#: Classes of cells: text that may break anywhere, text that stays on one line, and numbers.
WORDS, SHORT, COUNT = "outbox-words", "outbox-short", "outbox-count"


@dataclass(frozen=True, slots=True)
class Group:
    """Rows under headings of their own."""

    #: Headings, each with the class of its cells.
    columns: dict[str, str]
    #: The cells of each row. The first cell is its heading.
    rows: Sequence[Sequence[Any]]
    #: For each row, whether it is shown in red.
    alarms: Collection[bool] = ()

    @property
    def lines(self) -> Iterator[tuple[bool, list[tuple[Any, str]]]]:
        """Yield for each row whether it is red, and its cells, each with its class."""
        for row, is_red in zip(self.rows, chain(self.alarms, repeat(False)), strict=False):
            yield is_red, list(zip(row, self.columns.values(), strict=False))


@dataclass(frozen=True, slots=True)
class Table:
    caption: str
    groups: list[Group]
    #: Address of the list that has all rows.
    link: str = ""
    #: Name of the anchor on the page to which problems link.
    anchor: str = ""
    note: str = ""
    #: Text that is shown if there are no rows. Default: "None.".
    empty: str = ""

    @property
    def has_rows(self) -> bool:
        return any(group.rows for group in self.groups)

    @property
    def shown(self) -> list[Group]:
        """Return the groups that have rows, or one that says there are none."""
        return [group for group in self.groups if group.rows] or self.groups[:1]


def link(address: str, words: Any) -> SafeString:
    shown = localize(words)
    return format_html('<a href="{}">{}</a>' if address else "{1}", address, shown)


def drainers(site: str, facts: OutboxStatus) -> Table:
    columns = {_("Host"): "", _("Process id"): "", _("Shards"): WORDS, _("Last heartbeat"): SHORT,
               _("Per minute"): "", _("Published"): "", _("Trouble"): WORDS}  # fmt: skip
    rows: list[tuple[Any, ...]] = [
        (
            one_line(each.drainer.host, 100),
            str(each.drainer.pid),
            shards(each.owned),
            _heartbeat(each),
            number(facts.rate(each)),
            each.drainer.done,
            masked_line(each.drainer.trouble, 200) or "-",
        )
        for each in facts.drainers
    ]
    if rows and facts.unowned_shards:
        rows.append((_("Unowned shards"), "", shards(facts.unowned_shards), "", "", "", ""))
    group = Group(columns, rows, [each.is_silent for each in facts.drainers])
    return Table(_("Drainers"), [group], address(site, "outbox_app.process"))


def _heartbeat(drainer: DrainerStatus) -> str:
    words = _("%(seconds)s s ago") % {"seconds": number_format(drainer.silent_seconds, 1)}
    return f"{words} ({_('silent')})" if drainer.is_silent else words


def shards(shards: list[int]) -> SafeString:
    """Return how many shards there are, and their ascending numbers: ``65 (0-63, 70)``."""
    runs: list[list[int]] = []
    for shard in shards:
        if runs and shard == runs[-1][1] + 1:
            runs[-1][1] = shard
        else:
            runs.append([shard, shard])
    which = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
    note = format_html(' <span class="outbox-note">({})</span>', which) if which else ""
    return format_html("{}{}", len(shards), note)


def pairs(heading: str, column: str, rows: list[tuple[str, str]], kind: str = "") -> Group:
    return Group({heading: "", column: kind}, rows)


def numbers(counts: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one_line(name, 100) or "-", number(count)) for name, count in counts.items()]


def durations(seconds: Iterable[float | None]) -> str:
    return listed(None if each is None else duration(each, fine=True) for each in seconds)


def listed(figures: Iterable[str | None]) -> str:
    """Return percentiles as one text, with a dash for what nothing is known of."""
    known = list(figures)
    return ", ".join(each or "-" for each in known) if any(known) else "-"


def incidents(site: str, found: Iterable[Incident]) -> Table:
    columns = {_("Recorded at"): SHORT, _("What happened"): "", _("Ids"): SHORT, _("Shards"): "",
               _("Detail"): WORDS}  # fmt: skip
    rows = [
        (
            incident.created_at,
            one_line(incident.get_kind_display(), 100),
            f"{incident.first_id} - {incident.last_id}",
            length(incident.shards),
            masked_line(incident.detail, 200),
        )
        for incident in found
    ]
    return Table(
        _("Latest incidents"), [Group(columns, rows)], address(site, "outbox_app.incident")
    )
