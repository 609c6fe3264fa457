"""Dead jobs: why they died, and the two things a person can do about it.

Requeue and discard are actions on the selected rows or on all that match the filter. Each has its
own permission, asks first (how many, of what), takes what it has asked about and nothing that died
since, and leaves a line in the admin's log. By GET nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.core.exceptions import BadRequest
from django.db.models import BigIntegerField, Max, QuerySet
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.text import Truncator
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..exceptions import OutboxError
from ..intake.rows import outbox_alias
from ..models import DeadJob
from ..operations import dead
from ..operations.status import MANY, counted, dead_groups, shown_count
from ..operations.text import shown
from .filters import AgeFilter, column_filter
from .job import MESSAGE_FIELDS, MessageFields
from .overview import listed


@dataclass(frozen=True, slots=True)
class Decision:
    """What can be done with dead jobs, and how to speak of it."""

    action: str
    operate: Callable[..., int]
    log_flag: int
    question: Any
    effect: Any
    button: Any
    done: Callable[[int], str]


REQUEUE = Decision(
    action="requeue_selected",
    operate=dead.requeue,
    log_flag=CHANGE,
    question=gettext_lazy("Requeue dead jobs?"),
    effect=gettext_lazy(
        "They are staged again with the same task ids, in the order in which they were staged "
        "first. A worker may get a job that it had already."
    ),
    button=gettext_lazy("Yes, requeue"),
    done=lambda n: ngettext("%d dead job was requeued.", "%d dead jobs were requeued.", n) % n,
)
DISCARD = Decision(
    action="discard_selected",
    operate=dead.discard,
    log_flag=DELETION,
    question=gettext_lazy("Discard dead jobs for good?"),
    effect=gettext_lazy("They are deleted and never sent. This cannot be undone."),
    button=gettext_lazy("Yes, discard"),
    done=lambda n: ngettext("%d dead job was discarded.", "%d dead jobs were discarded.", n) % n,
)


class DeadJobAdmin(MessageFields):
    """Jobs that the drain has given up on."""

    list_display = ["id", "task", "error", "short_reason", "died_at", "queue", "task_id"]
    list_filter = [
        AgeFilter,
        column_filter("error", gettext_lazy("error")),
        column_filter("task", gettext_lazy("task")),
        column_filter("queue", gettext_lazy("queue")),
    ]
    sortable_by = ["id", "died_at"]
    actions = ["requeue_selected", "discard_selected"]
    fieldsets = [
        (gettext_lazy("Why it is dead"), {"fields": ["error", "reason", "died_at"]}),
        (
            gettext_lazy("Job"),
            {
                "fields": [
                    "task",
                    "task_id",
                    "queue",
                    "ordering_key",
                    "app",
                    "shard",
                    "staged_id",
                    "staged_at",
                ]
            },
        ),
        (gettext_lazy("Message"), {"fields": MESSAGE_FIELDS}),
    ]

    @admin.display(description=gettext_lazy("reason"))
    def short_reason(self, job: DeadJob) -> str:
        """The beginning of the reason."""
        return Truncator(job.reason).chars(120)

    @admin.action(description=gettext_lazy("Requeue selected dead jobs"), permissions=["requeue"])
    def requeue_selected(self, request: HttpRequest, jobs: QuerySet[DeadJob]) -> Any:
        """Ask, then requeue."""
        return self._decide(request, jobs, REQUEUE)

    @admin.action(description=gettext_lazy("Discard selected dead jobs"), permissions=["discard"])
    def discard_selected(self, request: HttpRequest, jobs: QuerySet[DeadJob]) -> Any:
        """Ask, then discard."""
        return self._decide(request, jobs, DISCARD)

    def has_requeue_permission(self, request: HttpRequest) -> bool:
        """Who may requeue."""
        return request.user.has_perm("outbox_app.requeue_deadjob")

    def has_discard_permission(self, request: HttpRequest) -> bool:
        """Who may discard."""
        return request.user.has_perm("outbox_app.discard_deadjob")

    def response_action(
        self, request: HttpRequest, queryset: QuerySet[DeadJob], *args: Any, **kwargs: Any
    ) -> Any:
        """Refuse ids that no row can have, where Django would fail.

        Raises:
            BadRequest: The form was not ours.
        """
        for id in request.POST.getlist(ACTION_CHECKBOX_NAME):
            _identifier(id)
        return super().response_action(request, queryset, *args, **kwargs)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        """Add the buttons of what this person may do."""
        may = {
            REQUEUE.action: self.has_requeue_permission(request),
            DISCARD.action: self.has_discard_permission(request),
        }
        context = {**(extra_context or {}), "may": may}
        return super().changeform_view(request, object_id, form_url, context)

    def _decide(
        self, request: HttpRequest, jobs: QuerySet[DeadJob], decision: Decision
    ) -> TemplateResponse | None:
        if "confirmed" not in request.POST:
            return self._ask(request, jobs, decision)
        # What has died since the question was asked was not in the answer.
        asked_about = jobs.filter(id__lte=_identifier(request.POST.get("until", "")))
        level = messages.SUCCESS
        try:
            done = decision.operate(
                asked_about, using=outbox_alias(), by=request.user.get_username()
            )
            outcome = decision.done(done)
        except OutboxError as error:
            level = messages.ERROR
            outcome = _("Stopped half-way: %(error)s") % {"error": shown(error, 1000)}
        self._log(request, decision, outcome)
        self.message_user(request, outcome, level)
        return None

    def _ask(
        self, request: HttpRequest, jobs: QuerySet[DeadJob], decision: Decision
    ) -> TemplateResponse:
        selected = request.POST.getlist(ACTION_CHECKBOX_NAME)
        across = request.POST.get("select_across") == "1"
        until = DeadJob.objects.using(outbox_alias()).aggregate(last=Max("id"))["last"] or 0
        context = {
            **self.admin_site.each_context(request),
            "title": decision.question,
            "opts": self.opts,
            "media": self.media,
            "decision": decision,
            "count": shown_count(counted(jobs)),
            "dead": listed(dead_groups(jobs)),
            "many": MANY,
            "until": until,
            "selected": selected[:1] if across else selected,
            "select_across": across,
            "checkbox_name": ACTION_CHECKBOX_NAME,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/outbox_app/deadjob/decide.html", context)

    def _log(self, request: HttpRequest, decision: Decision, outcome: str) -> None:
        # One line for the whole decision, as there may be a million rows.
        if request.POST.get("select_across") == "1":
            which = _("All that matched the filter: %(filter)s") % {
                "filter": request.GET.urlencode() or "-"
            }
        else:
            ids = request.POST.getlist(ACTION_CHECKBOX_NAME)
            which = _("Ids: %(ids)s") % {"ids": ", ".join(ids)}
        LogEntry.objects.create(
            user_id=request.user.pk,  # type: ignore[misc]
            content_type=get_content_type_for_model(DeadJob),
            object_repr=outcome[:200],
            action_flag=decision.log_flag,
            change_message=f"{outcome} {which}",
        )


def _identifier(text: str) -> int:
    # The length first: Python refuses to read thousands of digits.
    if text.isascii() and text.isdecimal() and len(text) <= 19:
        id = int(text)
        if id <= BigIntegerField.MAX_BIGINT:
            return id
    raise BadRequest(f"{text[:50]!r} is no id of a dead job.")
