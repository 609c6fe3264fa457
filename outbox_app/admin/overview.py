"""The overview: is work leaving, how late is it, who owns what, what is dead and why, what blocks.

The page takes a constant number of statements, all of them bounded. Current figures are read from
the tables; those of the last hour and day are the counters of the processes. The page needs the
permission to view drainers, and shows each user only the rows that they may view; queries of other
sessions need a permission of their own. ``?part=live`` returns only the part that it refreshes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..capability import Problem, Subject, all_doors, kinds
from ..jobs.drain.status import incidents
from ..models import Incident
from ..models.counting import MANY
from ..monitoring.diagnosis import problems
from ..monitoring.figures import number
from ..monitoring.series import series
from ..monitoring.status import OutboxStatus, outbox_status
from ..text import duration, one_line
from . import tables
from .base import OutboxAdmin, address
from .blocking import blocking
from .charts import job_charts
from .dead import matrix_table
from .masking import masked_line
from .staged import held_table, sent_table
from .tables import Table

#: Seconds between two refreshes of an open page.
REFRESH = 10
#: How many incidents are shown here; their list has the rest.
FEW = 10
#: The problems with which no work is leaving.
STOPPED = ("no_drainer", "trouble", "not_leaving")


def overview(request: HttpRequest, model_admin: OutboxAdmin) -> TemplateResponse:
    """Return the page, or the part of it that changes.

    Raises:
        PermissionDenied: This person may not view drainers.
    """
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    site = request.current_app = model_admin.admin_site.name
    shown = {name: models for doors in all_doors() for name, models in doors.parts().items()}
    parts = {
        name for name, models in shown.items() if any(may_view(request, model) for model in models)
    }
    facts = outbox_status(parts=parts)
    found = problems(facts)
    tone, sentence, cause = headline(facts, found, parts)
    charts: list[SafeString] = []
    if "jobs" in parts:
        hour = series(using=facts.database, minutes=61)
        day = series(using=facts.database, minutes=24 * 60 + 10, step=10)
        if any([*day.published, *day.dead, *map(bool, day.ready)]):
            charts += job_charts(hour, day, now=facts.backlog.rows)
        # Of the minutes that ``facts.published`` is of: the last full one, and the current one.
        counted, at_once = (sum(each[-2:]) for each in (hour.published, hour.immediate))
        facts = replace(facts, immediate=facts.published * at_once / counted if counted else 0.0)
    for section in facts.sections.values():
        charts += filter(None, section.charts())
    context: dict[str, Any] = {
        "using": facts.database,
        "many": number(MANY),
        "refresh": REFRESH,
        "now": timezone.now(),
        "tone": tone,
        "headline": sentence,
        "problems": list(problem_lines(site, found, cause)),
        "figures": figures(site, facts),
        "charts": charts,
        "tables": [table for table in _tables(request, facts, parts, site=site) if table.has_rows],
    }
    if request.GET.get("part") == "live":
        return TemplateResponse(request, "admin/outbox_app/overview_live.html", context)
    context |= {
        **model_admin.admin_site.each_context(request),
        "title": _("Overview"),
        "opts": model_admin.opts,
        "media": model_admin.media,
    }
    return TemplateResponse(request, "admin/outbox_app/overview.html", context)


def _tables(
    request: HttpRequest, facts: OutboxStatus, parts: Collection[str], *, site: str
) -> Iterator[Table]:
    """Yield the tables that this user may view."""
    yield blocking(request, facts)
    yield tables.drainers(site, facts)
    if "dead" in parts:
        yield matrix_table(site, facts.dead)
    if "jobs" in parts and facts.held.rows:
        yield held_table(site, facts.held)
    if "jobs" in parts and facts.sent.groups:
        yield sent_table(site, facts.sent)
    for section in facts.sections.values():
        yield from section.tables(site)
    if may_view(request, Incident):
        yield tables.incidents(site, incidents(using=facts.database)[:FEW])


def may_view(request: HttpRequest, model: type[Model]) -> bool:
    return any(
        request.user.has_perm(f"{model._meta.app_label}.{get_permission_codename(a, model._meta)}")
        for a in ("view", "change")
    )


def headline(
    facts: OutboxStatus, found: list[Problem], parts: Collection[str]
) -> tuple[str, str, str]:
    """Return tone and text of the headline, and the cause that the text names.

    The text is the worst problem and its cause, or whether work is leaving.
    """
    if found:
        causes = {each.why for each in found[0].subjects if found[0].kind.has_cause}
        cause = causes.pop() if len(causes) == 1 else ""
        text = _worst(found[0])
        if cause:
            first = cause.partition("\n")[0]  # then come notes of the exception
            words = masked_line(first.removeprefix("BrokerUnavailable: "), 300)
            text = f"{text.removesuffix('.')}: {words.removesuffix('.')}."
        if more := len(found) - 1:
            words = ngettext("%d other problem.", "%d other problems.", more)
            text = f"{text} {words % more}"
        return found[0].severity, text, cause
    if not facts.alive:
        text = _("This project stages nothing, and needs no drainer.")
    elif "jobs" not in parts:
        text = _("Drainers are running.")
    elif not facts.waiting and facts.held.rows:
        text = _("All work that is due has left. Held jobs wait for their time.")
    elif not facts.waiting:
        text = _("All staged work has left. Nothing is waiting.")
    else:
        text = _("Work is leaving. The oldest ready job waits %(age)s.") % {
            "age": duration(facts.backlog.oldest_seconds)
        }
    return "good", text, ""


def _worst(problem: Problem) -> str:
    if problem.code in STOPPED:
        words = f"{problem.text[:1].lower()}{problem.text[1:]}"
        return _("Nothing is being sent: %(problem)s") % {"problem": words}
    if problem.code == "late":
        return _("Work is leaving, late: %(problem)s") % {"problem": problem.text}
    return problem.text


def problem_lines(
    site: str, found: list[Problem], cause: str
) -> Iterator[tuple[Problem, str, str, list[tuple[str, str, str]]]]:
    """Yield each problem, its text, its link, and its subjects, each with name, reason and link.

    What the headline has said, the text of the first problem and the cause, is left out.
    """
    for place, problem in enumerate(found):
        known = cause if place == 0 else ""
        subjects = [
            _subject(site, problem.code, replace(each, why="") if each.why == known else each)
            for each in problem.subjects
        ]
        text = problem.text if place else ""
        yield problem, text, _place(site, problem.code), subjects


def _subject(site: str, code: str, subject: Subject) -> tuple[str, str, str]:
    link = ""
    if subject.key or subject.filters:
        link = _place(site, code, subject.key or None, **subject.filters)
    return one_line(subject.name, 100), masked_line(subject.why, 300), link


def _place(site: str, code: str, key: str | None = None, **filters: str) -> str:
    place = kinds()[code].place
    if isinstance(place, str):
        return place
    model, own_filters = place
    return address(site, model, key, **({} if key else own_filters), **filters)


def figures(site: str, facts: OutboxStatus) -> Iterator[tuple[str, str, str, str]]:
    """Yield the figures at the top: name, value, note, and the address of the list behind them."""
    for each in facts.figures():
        if each.title:
            link = address(site, each.place[0], **each.place[1]) if each.place else ""
            yield each.title, each.shown, each.note, link
