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

from ..aliases import log_alias
from ..jobs.drain.status import DrainerStatus
from ..models import Event, Gap, Incident, PreparedEvent
from ..models.counting import shown_count
from ..models.statistic import label_of
from ..monitoring import series
from ..monitoring.sinking import DAY, SinkStatus
from ..monitoring.status import OutboxStatus
from ..prepared.status import PreparedStatus
from ..subscriptions.lag import SubscriptionLag
from ..text import duration, one_line, shown
from .base import address
from .charts import number
from .masking import masked_line, masked_text

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


def link(address: str, words: Any) -> SafeString:
    shown = localize(words)
    return format_html('<a href="{}">{}</a>' if address else "{1}", address, shown)


def drainers(site: str, facts: OutboxStatus) -> Table:
    columns = {_("Host"): "", _("Process id"): "", _("Shards"): WORDS, _("Last heartbeat"): SHORT,
               _("Per minute"): "", _("Published"): "", _("Trouble"): WORDS}  # fmt: skip
    rows = [
        (
            one_line(each.drainer.host, 100),
            str(each.drainer.pid),
            _shards(each.owned),
            _heartbeat(each),
            number(facts.rate(each)),
            each.drainer.done,
            masked_line(each.drainer.trouble, 200) or "-",
        )
        for each in facts.drainers
    ]
    unowned = (_("Unowned shards"), "", _shards(facts.unowned_shards), *[""] * 4)
    group = Group(columns, [*rows, unowned], [each.is_silent for each in facts.drainers])
    return Table(_("Drainers"), [group], address(site, "process"))


def _heartbeat(drainer: DrainerStatus) -> str:
    words = _("%(seconds)s s ago") % {"seconds": number_format(drainer.silent_seconds, 1)}
    return f"{words} ({_('silent')})" if drainer.is_silent else words


def _shards(shards: list[int]) -> SafeString:
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


def subscriptions(site: str, lags: list[SubscriptionLag]) -> Table:
    columns = {_("Name"): "", _("State"): "", _("Behind"): "", _("Oldest"): SHORT,
               _("Per minute"): "", _("Parked"): "", _("Gaps"): "", _("Error"): WORDS}  # fmt: skip
    # By subscription, the last full minute (which is shown) and the current one.
    handled = series.handled(using=log_alias(Event), minutes=2)
    rows = [
        (
            link(address(site, "subscription", each.key), name) if each.key else name,
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
    return Table(_("Subscriptions"), [group], address(site, "subscription"))


def entities(facts: OutboxStatus, commands: series.Commands, types: Collection[str]) -> Table:
    """Return the figures of commands; of the busiest entities, only those of the given types."""
    sizes = ", ".join("-" if each is None else number(each) for each in commands.batch_size)
    times = _durations(commands.commit_seconds)
    figures = [
        (_("Commands per minute"), number(commands.recorded)),
        (_("Conflicts per minute"), number(commands.conflicts)),
        (_("Waiting now"), number(commands.waiting)),
        (_("Commands per batch, p50 and p95"), sizes),
        (_("Time of a batch's transaction, p50 and p95"), times),
    ]
    hottest = {
        name: count for name, count in commands.hottest.items() if name.partition(":")[0] in types
    }
    groups = [
        _pairs(_("Figure"), _("Value"), figures),
        _pairs(_("Code of rejections"), _("Per minute"), _numbers(commands.rejected)),
        _pairs(_("Most commands"), _("Last 5 minutes"), _numbers(hottest)),
    ]
    if facts.slices or commands.passed_on or commands.elsewhere:
        figures += [
            (_("Passed on to the leading server, per minute"), number(commands.passed_on)),
            (_("Executed by a server that does not lead, per minute"), number(commands.elsewhere)),
        ]
        groups.append(_pairs(_("Server"), _("Leads, of 1024 slices"), _numbers(facts.slices)))
    return Table(_("Entities"), groups)


def sinks(found: list[SinkStatus]) -> Table:
    groups = [
        _pairs(
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


def prepared(facts: PreparedStatus, decisions: series.Decisions) -> Table:
    times = _durations([decisions.p50, decisions.p95])
    figures = [
        (_("Prepared"), shown_count(facts.prepared)),
        (_("Oldest prepared"), duration(facts.oldest_seconds) if facts.prepared else "-"),
        (_("Undecided"), shown_count(facts.undecided)),
        (_("Processes that ask senders"), str(facts.processes)),
        (_("Time to decide, p50 and p95"), times),
        (_("Contradictions in the last day"), shown_count(facts.contradictions)),
    ]
    routes = {"call": _("by a call"), "answer": _("by an answer"), "policy": _("by its policy"),
              "person": _("by a person")}  # fmt: skip
    states = dict(PreparedEvent.State.choices)
    decided = {
        f"{states.get(outcome, outcome)} {routes.get(route, route)}": count
        for (outcome, route), count in decisions.per_minute.items()
    }
    silent = [
        (one_line(each.sender, 100), masked_line(each.last_answer, 200)) for each in facts.silent
    ]
    groups = [
        _pairs(_("Figure"), _("Value"), figures),
        _pairs(_("Decided"), _("Per minute"), _numbers(decided)),
        _pairs(_("Sender that does not answer"), _("Why"), silent, WORDS),
    ]
    return Table(_("Prepared events"), groups, anchor="prepared")


def _pairs(heading: str, column: str, rows: list[tuple[str, str]], kind: str = "") -> Group:
    return Group({heading: "", column: kind}, rows)


def _numbers(counts: dict[str, Any]) -> list[tuple[str, str]]:
    return [(one_line(name, 100) or "-", number(count)) for name, count in counts.items()]


def _durations(seconds: Iterable[float | None]) -> str:
    return ", ".join("-" if each is None else duration(each, fine=True) for each in seconds)


def gaps(site: str, found: Iterable[Gap]) -> Table:
    columns = {_("First seen"): SHORT, _("What is missing"): WORDS, _("Found by"): "",
               _("Attempts"): ""}  # fmt: skip
    rows = [
        (
            gap.seen_at,
            link(address(site, "gap", gap.pk), one_line(gap, 200)),
            one_line(gap.subscription, 80) or _("an audit"),
            gap.attempts,
        )
        for gap in found
    ]
    return Table(_("Open gaps"), [Group(columns, rows)], address(site, "gap", state="open"))


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
    return Table(_("Latest incidents"), [Group(columns, rows)], address(site, "incident"))


def failed_event(row: Any, site: str) -> SafeString:
    """Return the event that a cursor or a parked stream fails at: a link, and the traceback."""
    failed = row.failed_event
    if not failed:
        return SafeString("")
    text = one_line(f"{failed['position']}: {failed['type']} {failed['stream']}", 300)
    if row.log == Event._meta.db_table:
        text = link(address(site, "event", failed["position"]), text)
    trace = shown(masked_text(failed["traceback"]), 10_000)
    return format_html('{}<pre class="outbox-words">{}</pre>', text, trace)
