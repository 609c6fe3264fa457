"""The overview: is work leaving, how late is it, who owns what, what is dead and why, what blocks.

One page of a constant number of statements, all of them bounded. Figures of now are read from the
tables; those of the last hour and day come from what the processes have counted, minute by minute
(``monitoring.series``). It takes the permission to view drainers; jobs, subscriptions, entities,
prepared events, gaps, dead jobs and incidents are shown to those who may view them, queries of
other sessions to those with a permission of its own. ``?part=live`` answers with what changes only:
the page asks for that.
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

from ..aliases import log_alias
from ..entities.operations import entity_types
from ..jobs.drain import status
from ..models import (
    DeadJob,
    Event,
    Gap,
    Incident,
    PreparedEvent,
    Server,
    StagedJob,
    Subscription,
    counting,
)
from ..monitoring.diagnosis import problems
from ..monitoring.status import outbox_status
from . import sections
from .base import OutboxAdmin, escaped_copy
from .blocking import blocking

#: Seconds between two looks of an open page.
REFRESH = 10
#: The parts of the status, and whose rows they tell.
PARTS = {"jobs": StagedJob, "dead": DeadJob, "subscriptions": Subscription, "gaps": Gap,
         "prepared": PreparedEvent, "servers": Server}  # fmt: skip
#: Incidents and gaps that are shown here; their lists have the rest.
FEW = 10


def overview(request: HttpRequest, model_admin: OutboxAdmin) -> TemplateResponse:
    """Return the page, or the part of it that changes.

    Raises:
        PermissionDenied: This person may not view drainers.
    """
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    parts = {name for name, model in PARTS.items() if may_view(request, model)}
    types = {each._meta.label for each in entity_types() if may_view(request, each)}
    facts = outbox_status(parts=parts | {"entities"} if types else parts)
    using = facts.database
    found = problems(facts)
    context: dict[str, Any] = {
        "using": using,
        "many": counting.MANY,
        "refresh": REFRESH,
        "now": timezone.now(),
        "headline": sections.headline(facts, found, parts),
        "problems": sections.lines(found),
        "figures": list(sections.figures(facts, parts)),
        "blocking": blocking(request, facts, found),
        "drainers": sections.drainers(facts),
        "unowned": len(facts.unowned_shards),
        "unowned_ranges": sections.ranges(facts.unowned_shards),
        "tables": [],
        "may_view_subscriptions": "subscriptions" in parts,
    }
    if "jobs" in parts:
        context["charts"] = sections.charts(using, now=facts.backlog.rows)
        context["held"] = sections.held(facts.held)
        context["flows"] = sections.flows(using)
        context["sample"] = status.SAMPLE
    if facts.subscriptions:
        context["subscriptions"] = sections.subscriptions(facts.subscriptions)
        context["charts"] = [*context.get("charts", []), sections.events_chart()]
    if facts.commands:
        entities = sections.entities(facts, facts.commands, types)
        context["tables"].append(("entities", _("Entities"), entities))
    if facts.sinks:
        context["tables"].append(("sinks", _("Logs that sink"), sections.sinks(facts.sinks)))
    if facts.prepared:
        prepared = sections.prepared(facts.prepared, facts.decisions)
        context["tables"].append(("prepared", _("Prepared events"), prepared))
    if "dead" in parts:
        context["dead"] = sections.dead(facts.dead)
    if "gaps" in parts:
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
    return any(
        request.user.has_perm(f"{model._meta.app_label}.{get_permission_codename(a, model._meta)}")
        for a in ("view", "change")
    )
