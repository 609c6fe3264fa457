"""Whether work is leaving, in one sentence, and what needs a person, each with what to press.

Made of what the overview has read anyway: no statement of its own. What a person may not view is
None, and nothing is said of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..conf import outbox_settings
from ..eventlog.long_transactions import LongTransactions
from ..jobs.dead_summary import DeadMatrix
from ..jobs.drain import status
from ..subscriptions import lag
from ..text import one_line
from .durations import duration
from .masking import masked_line

#: A ready job that is older than so many polls of an idle drainer should have left.
POLLS = 10
#: A transaction in flight that is so old is told, in seconds.
OLD_WRITER = 60.0


@dataclass(slots=True)
class Seen:
    """What the overview has read; None: not for this person."""

    drainers: list[status.DrainerStatus]
    #: Shards without an owner.
    unowned: list[int]
    #: Published a minute, by source.
    rates: dict[str, float]
    snapshots: LongTransactions
    backlog: status.Backlog | None = None
    held: status.Held | None = None
    dead: DeadMatrix | None = None
    lags: list[lag.SubscriptionLag] | None = None
    #: Open gaps, counted up to MANY + 1.
    gaps: int | None = None
    #: Transactions in flight, by table.
    in_flight: dict[str, LongTransactions] = field(default_factory=dict)

    @property
    def published(self) -> float:
        """Jobs published in the last minute."""
        return sum(self.rates.values())


@dataclass(frozen=True, slots=True)
class Verdict:
    """The sentence, and how grave it is: ``good``, ``warning`` or ``bad``."""

    tone: str
    text: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that needs a person, and where to go for it."""

    tone: str
    text: str
    link: str = ""


def verdict(seen: Seen) -> Verdict:
    """Say whether work is leaving."""
    backlog = seen.backlog
    if all(each.is_silent for each in seen.drainers):
        return Verdict(
            "bad", _("Work is not leaving: no drainer is running. Start manage.py drain_outbox.")
        )
    if backlog is None:
        return Verdict("good", _("Drainers are running."))
    if not backlog.rows:
        return Verdict("good", _("All staged work has left. Nothing is waiting."))
    waits = {"count": backlog.shown, "age": duration(backlog.oldest_seconds)}
    if backlog.oldest_seconds <= (outbox_settings().INTERVAL or 1.0) * POLLS:
        return Verdict("good", _("Work is leaving. The oldest ready job waits %(age)s.") % waits)
    if seen.published:
        return Verdict(
            "warning",
            _("Work is leaving, late: %(count)s jobs are ready, the oldest for %(age)s.") % waits,
        )
    return Verdict(
        "bad", _("Work is not leaving: %(count)s jobs are ready, the oldest for %(age)s.") % waits
    )


def problems(seen: Seen) -> Iterator[Problem]:
    """Yield what needs a person."""
    yield from _of_drainers(seen)
    if seen.lags is not None:
        yield from _of_subscriptions(seen.lags)
    yield from _of_transactions(seen)
    if seen.dead and (died := seen.dead.tasks and sum(row.counts[0] for row in seen.dead.tasks)):
        text = ngettext(
            "%d job has died in the last hour.", "%d jobs have died in the last hour.", died
        )
        yield Problem("warning", text % died, _list("deadjob", died="1h"))
    if seen.gaps:
        text = ngettext("%d gap is open.", "%d gaps are open.", seen.gaps)
        yield Problem("warning", text % seen.gaps, _list("gap", state="open"))


def _of_drainers(seen: Seen) -> Iterator[Problem]:
    if seen.drainers and seen.unowned:
        text = ngettext(
            "%d shard has no owner: its jobs do not leave until a drainer takes it.",
            "%d shards have no owner: their jobs do not leave until a drainer takes them.",
            len(seen.unowned),
        )
        yield Problem("bad", text % len(seen.unowned), _list("process"))
    for row in seen.drainers:
        name = one_line(row.drainer, 100)
        if row.is_silent:
            text = _(
                "%(drainer)s is silent beyond its lease: its jobs wait until another drainer takes "
                "its shards. Start one, or this one again."
            ) % {"drainer": name}
            yield Problem("bad", text, _list("process"))
        if row.drainer.trouble:
            text = _("%(drainer)s is in trouble: %(trouble)s") % {
                "drainer": name,
                "trouble": masked_line(row.drainer.trouble, 300),
            }
            yield Problem("bad", text, _list("process"))


def _of_subscriptions(lags: list[lag.SubscriptionLag]) -> Iterator[Problem]:
    unserved = [each for each in lags if each.declared and not each.served]
    names = ", ".join(each.name for each in unserved if each.state != "paused")
    if names:
        text = _("No process runs %(names)s. Start manage.py run_subscriptions.") % {
            "names": one_line(names, 300)
        }
        yield Problem("bad", text, _list("subscription"))
    for each in lags:
        if each.state == "failing":
            text = _("%(name)s stands still: %(error)s") % {
                "name": one_line(each.name, 80),
                "error": masked_line(each.error, 300),
            }
            yield Problem("bad", text, _row("subscription", each.name))
        elif each.state == "paused" and each.behind:
            text = _("%(name)s is paused; events behind: %(behind)s.") % {
                "name": one_line(each.name, 80),
                "behind": each.shown,
            }
            yield Problem("warning", text, _row("subscription", each.name))
        if each.parked:
            text = ngettext(
                "%(name)s has set %(count)d stream aside.",
                "%(name)s has set %(count)d streams aside.",
                each.parked,
            )
            values = {"name": one_line(each.name, 80), "count": each.parked}
            link = _list("parkedstream", subscription=each.name)
            yield Problem("warning", text % values, link)


def _of_transactions(seen: Seen) -> Iterator[Problem]:
    for table, holders in seen.in_flight.items():
        old = [each for each in holders.transactions if (each.seconds or 0) > OLD_WRITER]
        if old:
            text = _("A transaction that writes to %(table)s has been open for %(age)s.")
            values = {"table": table, "age": duration(old[0].seconds or 0)}
            yield Problem("warning", text % values, "#outbox-blocking")
    if seen.snapshots.transactions:
        text = _("A transaction has been open for %(age)s: it keeps deleted rows in the tables.")
        age = duration(seen.snapshots.transactions[0].seconds or 0)
        yield Problem("warning", text % {"age": age}, "#outbox-blocking")


def _list(model: str, **filters: str) -> str:
    address = reverse(f"admin:outbox_app_{model}_changelist")
    return f"{address}?{urlencode(filters)}" if filters else address


def _row(model: str, key: str) -> str:
    return reverse(f"admin:outbox_app_{model}_change", args=[quote(key)])
