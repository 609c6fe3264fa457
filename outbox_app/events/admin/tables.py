"""Tables and the chart of events on the overview.

``events.doors`` imports this module only when the overview asks for its tables: the status, the
metrics and the commands need no admin.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from ...admin.base import address
from ...admin.charts import Line, chart
from ...admin.masking import masked_line, masked_text
from ...admin.tables import SHORT, WORDS, Group, Table, link, pairs
from ...aliases import model_alias
from ...models.statistic import label_of
from ...monitoring.figures import number
from ...text import duration, one_line, shown
from .. import series
from ..models import Event, Gap
from ..sink import DAY, SinkStatus
from ..subscriptions.lag import SubscriptionLag


def subscriptions(site: str, lags: list[SubscriptionLag]) -> Table:
    columns = {_("Name"): "", _("State"): "", _("Behind"): "", _("Oldest"): SHORT,
               _("Per minute"): "", _("Parked"): "", _("Gaps"): "", _("Error"): WORDS}  # fmt: skip
    # By subscription, the last full minute (which is shown) and the current one.
    handled = series.handled(using=model_alias(Event), minutes=2)
    rows = [
        (
            link(address(site, "outbox_events.subscription", each.key), name) if each.key else name,
            each.state,
            each.shown,
            duration(each.oldest_seconds) if each.behind else "-",
            number(handled.get(label_of(each.name), [0.0])[0]),
            each.parked,
            each.gaps,
            masked_line(each.error, 200) or "-",
        )
        for each in lags
        for name in [one_line(each.name, 80)]
    ]
    group = Group(columns, rows, [bool(each.error) for each in lags])
    return Table(_("Subscriptions"), [group], address(site, "outbox_events.subscription"))


def sinks(found: list[SinkStatus]) -> Table:
    groups = [
        pairs(
            one_line(each.log, 100),
            _("Value"),
            [
                (_("Archive"), one_line(each.archive, 200)),
                (_("Events sink after"), duration(each.days * DAY)),
                (_("Oldest in the database"), duration(each.oldest_seconds)),
                (_("Position of the oldest"), str(each.position or "-")),
                (_("Behind"), duration(each.behind_seconds) if each.behind_seconds else "-"),
                (_("Waits for"), masked_line(each.waits_for, 200) or "-"),
            ],
            WORDS,
        )
        for each in found
    ]
    return Table(_("Logs that sink"), groups, anchor="sinks")


def gaps(site: str, found: Iterable[Gap]) -> Table:
    columns = {_("First seen"): SHORT, _("What is missing"): WORDS, _("Found by"): "",
               _("Attempts"): ""}  # fmt: skip
    rows = [
        (
            gap.seen_at,
            link(address(site, "outbox_events.gap", gap.pk), one_line(gap, 200)),
            one_line(gap.subscription, 80) or _("an audit"),
            gap.attempts,
        )
        for gap in found
    ]
    return Table(
        _("Open gaps"), [Group(columns, rows)], address(site, "outbox_events.gap", state="open")
    )


def events_chart() -> SafeString:
    using = model_alias(Event)
    handled = _sums(series.handled(using=using, minutes=61).values())
    published = _sums(series.published(using=using, minutes=61).values())
    # Without the current minute, which is not over. Samples of the last one may still be missing.
    return chart(
        "outbox-events-hour",
        _("Events per minute, last hour"),
        series.starts(using=using, minutes=61)[:-1],
        [
            Line(_("published, estimated"), published[:-1], 2),
            Line(_("handled, by all subscriptions"), handled[:-1], 1),
        ],
    )


def _sums(lists: Iterable[list[Any]]) -> list[float | None]:
    """Add series up, minute by minute; None where none of them has a figure."""
    known = [[each for each in figures if each is not None] for figures in zip(*lists, strict=True)]
    return [sum(each) if each else None for each in known] or [None] * 61


def failed_event(row: Any, site: str) -> str:
    """Return the event that a cursor or a parked stream fails at, as a link."""
    failed = row.failed_event
    if not failed:
        return ""
    text = one_line(f"{failed['position']}: {failed['type']} {failed['stream']}", 300)
    if row.log == Event._meta.db_table:
        text = link(address(site, "outbox_events.event", failed["position"]), text)
    return text


def traceback_of(row: Any) -> str:
    """Return the traceback of the error of a cursor or a parked stream, as HTML."""
    if not row.failed_event:
        return ""
    trace = shown(masked_text(row.failed_event["traceback"]), 10_000)
    return format_html('<pre class="outbox-words">{}</pre>', trace)
