"""Decisions of a person on rows of a list: asked first, with a reason, done by POST, logged.

An action answers with a question: what it does, to which rows, and what has to be filled in. Only
the answer to that does anything. Each needs its permission, and leaves one line in the admin's log
with the outcome and the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.core.exceptions import BadRequest
from django.db import models
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..exceptions import OutboxError
from ..log.logs import log_alias
from ..models import Event
from ..operations.status import LISTED
from ..operations.text import one_line, shown
from .base import OutboxAdmin


class Reason(forms.Form):
    """Why, for those who ask later."""

    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=1000, required=False)


class RequiredReason(Reason):
    """Why: without it nothing is done."""

    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=1000)


@dataclass(frozen=True, slots=True)
class Decision:
    """What can be done with rows, and how to speak of it."""

    action: str
    #: Codename of the permission that it takes.
    permission: str
    label: Any
    effect: Any
    #: Given the rows, the form's values and the name of the person. Returns what was done.
    operate: Callable[[Any, dict[str, Any], str], str]
    form: type[Reason] = Reason


class AskingAdmin(OutboxAdmin):
    """A list of the log's alias, with decisions for actions."""

    decisions: ClassVar[tuple[Decision, ...]] = ()
    change_form_template = "admin/outbox_app/decisions.html"

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Any]:
        """Rows on the alias of the log."""
        return super().get_queryset(request).using(log_alias(Event))

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        """Return the decisions that this person may take."""
        return {
            each.action: (_action(each), each.action, each.label)
            for each in self.decisions
            if may(request, each)
        }

    def response_action(
        self, request: HttpRequest, queryset: models.QuerySet[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Refuse ids that no row can have, where Django or the database would fail.

        Raises:
            BadRequest: The form was not ours.
        """
        for id in request.POST.getlist(ACTION_CHECKBOX_NAME):
            if not _possible(self.opts.pk, id):
                raise BadRequest(f"{id[:50]!r} is no id of a {self.opts.verbose_name}.")
        return super().response_action(request, queryset, *args, **kwargs)

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> Any:
        """Add the buttons of what this person may do."""
        offered = [each for each in self.decisions if may(request, each)]
        context = {**(extra_context or {}), "decisions": offered}
        return super().changeform_view(request, object_id, form_url, context)

    def decide(self, request: HttpRequest, rows: Any, decision: Decision) -> Any:
        """Ask, or do what was asked about."""
        confirmed = "confirmed" in request.POST
        form = decision.form(request.POST if confirmed else None)
        if not confirmed or not form.is_valid():
            return self._ask(request, rows, decision, form)
        level = messages.SUCCESS
        try:
            outcome = decision.operate(rows, form.cleaned_data, request.user.get_username())
        except OutboxError as error:
            level = messages.ERROR
            outcome = _("Not done: %(error)s") % {"error": shown(error, 1000)}
        self._log(request, rows, decision, outcome, form.cleaned_data["reason"])
        self.message_user(request, outcome, level)
        return None

    def _ask(
        self, request: HttpRequest, rows: Any, decision: Decision, form: forms.Form
    ) -> TemplateResponse:
        across = request.POST.get("select_across") == "1"
        selected = request.POST.getlist(ACTION_CHECKBOX_NAME)
        context = {
            **self.admin_site.each_context(request),
            "title": decision.label,
            "opts": self.opts,
            "media": self.media,
            "decision": decision,
            "form": form,
            "rows": [one_line(row, 200) for row in rows[:LISTED]],
            "selected": selected[:1] if across else selected,
            "select_across": across,
            "checkbox_name": ACTION_CHECKBOX_NAME,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/outbox_app/ask.html", context)

    def _log(
        self, request: HttpRequest, rows: Any, decision: Decision, outcome: str, reason: str
    ) -> None:
        selected = request.POST.getlist(ACTION_CHECKBOX_NAME)
        across = request.POST.get("select_across") == "1"
        which = (request.GET.urlencode() or "-") if across else ", ".join(selected)
        message = _("%(outcome)s Action: %(action)s. Rows: %(rows)s. Reason: %(reason)s") % {
            "outcome": outcome,
            "action": decision.action,
            "rows": which,
            "reason": reason or "-",
        }
        LogEntry.objects.create(
            user_id=request.user.pk,  # type: ignore[misc]
            content_type=get_content_type_for_model(rows.model),
            # The page of a row shows its history by this.
            object_id=selected[0] if len(selected) == 1 and not across else None,
            object_repr=outcome[:200],
            action_flag=CHANGE,
            change_message=shown(message),
        )


def may(request: HttpRequest, decision: Decision) -> bool:
    """Say whether this person may take a decision."""
    return request.user.has_perm(f"outbox_app.{decision.permission}")


def _action(decision: Decision) -> Callable[[Any, HttpRequest, Any], Any]:
    def act(model_admin: Any, request: HttpRequest, rows: Any) -> Any:
        return model_admin.decide(request, rows, decision)

    return act


def _possible(field: Any, id: str) -> bool:
    if isinstance(field, models.CharField):
        return 0 < len(id) <= (field.max_length or 0) and id.isprintable()
    # The length first: Python refuses to read thousands of digits.
    return id.isascii() and id.isdecimal() and len(id) <= 19 and int(id) < 2**63
