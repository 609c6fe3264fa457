"""The overview: is work leaving, how late is it, who owns what, what is dead and why, what blocks.

One page of a constant number of statements, all of them bounded. Figures of now are read from the
tables; those of the last hour and day come from what the processes have counted, minute by minute
(``monitoring.series``). It takes the permission to view drainers; jobs, subscriptions, gaps, dead
jobs and incidents are shown to those who may view them, queries of other sessions to those with a
permission of its own. ``?part=live`` answers with what changes only: the page asks for that.
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.translation import gettext as _

from ..aliases import log_alias, outbox_alias
from ..eventlog.long_transactions import long_transactions, open_writers
from ..jobs.dead_summary import dead_matrix
from ..jobs.drain import status
from ..models import DeadJob, Event, Gap, Incident, StagedJob, Subscription, counting
from ..monitoring import series
from ..subscriptions import lag
from . import sections
from .base import OutboxAdmin, escaped_copy
from .blocking import blocking
from .verdict import Seen, problems, verdict

#: Seconds between two looks of an open page.
REFRESH = 10
#: A transaction that is so old is told, whatever it does, in seconds.
OLD_SNAPSHOT = 300.0
#: Incidents and gaps that are listed here; their lists have the rest.
FEW = 10


def overview(request: HttpRequest, model_admin: OutboxAdmin) -> TemplateResponse:
    """Return the page, or the part of it that changes.

    Raises:
        PermissionDenied: This person may not view drainers.
    """
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    using = outbox_alias()
    seen = _look(request, using)
    context: dict[str, Any] = {
        "using": using,
        "many": counting.MANY,
        "refresh": REFRESH,
        "now": timezone.now(),
        "verdict": verdict(seen),
        "problems": sorted(problems(seen), key=lambda each: each.tone != "bad"),
        "figures": list(sections.figures(seen, using)),
        "blocking": blocking(request, seen),
        "drainers": sections.drainers(seen),
        "unowned": len(seen.unowned),
        "unowned_ranges": sections.ranges(seen.unowned),
        "may_view_subscriptions": seen.lags is not None,
    }
    if seen.backlog and seen.held:
        context["charts"] = sections.charts(using, now=seen.backlog.rows)
        context["held"] = sections.held(seen.held)
    if seen.lags:
        context["subscriptions"] = sections.subscriptions(seen.lags)
        context["charts"] = [*context.get("charts", []), sections.events_chart()]
    if seen.dead:
        context["dead"] = sections.dead(seen.dead)
    if may_view(request, Gap):
        open_gaps = Gap.objects.using(log_alias(Event)).filter(state=Gap.State.OPEN)
        context["gaps"] = [escaped_copy(row) for row in open_gaps.order_by("-seen_at")[:FEW]]
    if may_view(request, Incident):
        context["incidents"] = [escaped_copy(row) for row in status.incidents(using=using)[:FEW]]
    request.current_app = model_admin.admin_site.name
    if request.GET.get("part") == "live":
        return TemplateResponse(request, "admin/outbox_app/overview_live.html", context)
    context |= {
        **model_admin.admin_site.each_context(request),
        "title": _("Overview"),
        "opts": model_admin.opts,
        "media": model_admin.media,
    }
    return TemplateResponse(request, "admin/outbox_app/overview.html", context)


def may_view(request: HttpRequest, model: type[Model]) -> bool:
    """Say whether this person may view rows of the model, as the admin decides it."""
    return any(
        request.user.has_perm(f"{model._meta.app_label}.{get_permission_codename(a, model._meta)}")
        for a in ("view", "change")
    )


def _look(request: HttpRequest, using: str) -> Seen:
    drainers = status.drainers(using=using)
    seen = Seen(
        drainers=drainers,
        unowned=status.unowned_shards(drainers),
        rates=series.rates(using=using),
        snapshots=long_transactions(using=using, seconds=OLD_SNAPSHOT),
    )
    log = log_alias(Event)
    if may_view(request, StagedJob):
        seen.backlog = status.backlog(using=using)
        seen.held = status.held(using=using)
        seen.in_flight[StagedJob._meta.db_table] = open_writers(StagedJob, using=using)
    if may_view(request, DeadJob):
        seen.dead = dead_matrix(using=using)
    if may_view(request, Subscription):
        seen.lags = lag.lags(using=log)
        seen.in_flight |= lag.in_flight(using=log)
    if may_view(request, Gap):
        seen.gaps = counting.counted(Gap.objects.using(log).filter(state=Gap.State.OPEN))
    return seen
