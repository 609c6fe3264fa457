"""The overview: is work leaving, how late is it, who drains, what died and why.

One page, made of ``operations.status``: a constant number of statements, all of them bounded. It
takes the permission to view drainers; staged jobs, subscriptions, dead jobs and incidents are shown
to those who may view them.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..intake.rows import outbox_alias
from ..log.logs import log_alias
from ..models import DeadJob, Event, Incident, StagedJob, Subscription
from ..operations import lag, status
from ..operations.text import one_line
from .base import OutboxAdmin, harmless
from .durations import duration
from .subscription import in_flight


def overview(request: HttpRequest, model_admin: OutboxAdmin) -> TemplateResponse:
    """Return the page.

    Raises:
        PermissionDenied: This person may not view drainers.
    """
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    using = outbox_alias()
    drainers = status.drainers(using=using)
    context: dict[str, Any] = {
        **model_admin.admin_site.each_context(request),
        "title": _("Overview"),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "using": using,
        "many": status.MANY,
        "drainers": drainers,
        "unowned": status.unowned_shards(drainers),
    }
    if may_view(request, StagedJob):
        backlog = status.backlog(using=using)
        held = status.held(using=using)
        context |= {
            "backlog": backlog,
            "oldest": duration(backlog.oldest_seconds) if backlog.rows else "-",
            "held": [
                (_("due now"), status.shown_count(held.due)),
                (_("due within the hour"), status.shown_count(held.within_the_hour)),
                (_("due later"), status.shown_count(held.later)),
            ],
        }
    context["warnings"] = list(_warnings(drainers, context["unowned"]))
    if may_view(request, Incident):
        context["incidents"] = [harmless(row) for row in status.incidents(using=using)]
    if may_view(request, DeadJob):
        context["dead"] = listed(status.dead_groups(DeadJob.objects.using(using)))
    if may_view(request, Subscription):
        lags = lag.lags(using=log_alias(Event))
        context["subscriptions"] = [
            {
                "name": one_line(each.name, 80),
                "state": each.state,
                "behind": each.shown,
                "late": duration(each.seconds) if each.behind else "-",
                "parked": each.parked,
                "gaps": each.gaps,
                "error": one_line(each.error, 200),
            }
            for each in lags
        ]
        context["warnings"] += _warnings_of_subscriptions(lags)
        context["in_flight"] = in_flight()
    for row in drainers:
        harmless(row.drainer)
    request.current_app = model_admin.admin_site.name
    return TemplateResponse(request, "admin/outbox_app/overview.html", context)


def may_view(request: HttpRequest, model: type[Model]) -> bool:
    """Say whether this person may view rows of the model, as the admin decides it."""
    return any(
        request.user.has_perm(f"{model._meta.app_label}.{get_permission_codename(a, model._meta)}")
        for a in ("view", "change")
    )


def listed(dead: status.DeadGroups) -> dict[str, Any]:
    """Return dead jobs by task and error for the template ``dead_groups.html``."""
    rows = [
        {
            "count": group.count,
            "task": one_line(group.task, 100),
            "error": one_line(group.error, 100),
            "reason": one_line(group.reason, 200),
            "newest": group.newest,
            "query": urlencode({"task": group.task, "error": group.error}),
        }
        for group in dead.groups
    ]
    return {"rows": rows, "complete": dead.complete}


def _warnings(drainers: list[status.DrainerStatus], unowned: int) -> Any:
    if not drainers:
        yield _("No drainer is running: nothing leaves. Start manage.py drain_outbox.")
    elif unowned:
        yield (
            ngettext(
                "%d shard has no owner: its jobs do not leave until a drainer takes it.",
                "%d shards have no owner: their jobs do not leave until a drainer takes them.",
                unowned,
            )
            % unowned
        )
    for row in drainers:
        name = one_line(row.drainer, 100)
        if row.is_silent:
            yield _("%(drainer)s is silent beyond its lease.") % {"drainer": name}
        if row.drainer.trouble:
            yield _("%(drainer)s is in trouble: %(trouble)s") % {
                "drainer": name,
                "trouble": one_line(row.drainer.trouble, 300),
            }


def _warnings_of_subscriptions(lags: list[lag.SubscriptionLag]) -> Any:
    unserved = [each for each in lags if each.declared and not each.served]
    names = ", ".join(each.name for each in unserved if not each.row.paused)
    if names:
        yield _("No process runs %(names)s. Start manage.py run_subscriptions.") % {
            "names": one_line(names, 300)
        }
    for each in lags:
        if each.state == "failing":
            yield _("%(name)s stands still: %(error)s") % {
                "name": one_line(each.name, 80),
                "error": one_line(each.error, 300),
            }
