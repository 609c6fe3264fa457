"""The top of the overview: whether work is leaving, in one sentence, and what needs a person.

It renders what ``monitoring.diagnosis`` has found in the parts of the status that this person may
view; each problem links to the page where it is fixed. Exceptions' words are masked.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..monitoring.diagnosis import BAD, Problem, Subject
from ..monitoring.status import OutboxStatus
from ..text import duration, one_line
from .masking import masked_line

#: Without these problems work is leaving.
STOPPED = ("no_drainer", "trouble", "not_leaving")
#: The list where a problem is fixed: a model and a filter. None: a table of the overview.
LISTS: dict[str, tuple[str, dict[str, str]] | None] = {
    "not_leaving": ("stagedjob", {"state": "ready"}),
    "late": ("stagedjob", {"state": "ready"}),
    "subscription": ("subscription", {}),
    "paused": ("subscription", {}),
    "parked": ("parkedstream", {}),
    "dead": ("deadjob", {"died": "1h"}),
    "gaps": ("gap", {"state": "open"}),
    "transaction": None,
    "snapshot": None,
}


@dataclass(frozen=True, slots=True)
class Headline:
    """The sentence, and its tone: ``good``, or the severity of the gravest problem."""

    tone: str
    text: str


def headline(status: OutboxStatus, found: list[Problem], parts: Collection[str]) -> Headline:
    """Say whether work is leaving."""
    tone = found[0].severity if found else "good"
    by_code = {each.code: each for each in found}
    for problem in (by_code[code] for code in STOPPED if code in by_code):
        words = f"{problem.text[:1].lower()}{problem.text[1:]} {problem.action}"
        return Headline(tone, _("Work is not leaving: %(problem)s") % {"problem": words})
    if late := by_code.get("late"):
        text = _("Work is leaving, late: %(problem)s") % {"problem": late.text}
    elif not status.alive:
        text = _("This project stages nothing, and needs no drainer.")
    elif "jobs" not in parts:
        text = _("Drainers are running.")
    elif not status.backlog.rows:
        text = _("All staged work has left. Nothing is waiting.")
    else:
        text = _("Work is leaving. The oldest ready job waits %(age)s.") % {
            "age": duration(status.backlog.oldest_seconds)
        }
    if urgent := sum(each.severity == BAD for each in found):
        more = ngettext("%d other problem is urgent.", "%d other problems are urgent.", urgent)
        text = f"{text} {more % urgent}"
    return Headline(tone, text)


def lines(found: list[Problem]) -> list[tuple[Problem, str, list[tuple[str, str, str]]]]:
    """Return each problem with its link, and name, why, and link of each of its subjects."""
    return [(p, _list(p.code), [_subject(p.code, each) for each in p.subjects]) for p in found]


def _subject(code: str, subject: Subject) -> tuple[str, str, str]:
    link = ""
    if code in ("subscription", "paused"):
        link = reverse("admin:outbox_app_subscription_change", args=[quote(subject.key)])
    elif code == "parked":
        link = _list(code, subscription=subject.key)
    return one_line(subject.name, 100), masked_line(subject.why, 300), link


def _list(code: str, **filters: str) -> str:
    place = LISTS.get(code, ("process", {}))
    if place is None:
        return "#outbox-blocking"
    model, given = place
    address = reverse(f"admin:outbox_app_{model}_changelist")
    return f"{address}?{urlencode(given | filters)}" if given or filters else address
