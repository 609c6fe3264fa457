"""Decisions of a person on rows of a list: asked first, with a reason, done by POST, logged.

An action answers with a question: what it does, to which rows, and what has to be filled in. Only
the answer to that does anything. Each needs its permission, and leaves one line in the admin's log
with the outcome and the reason. What may take longer than a web server waits is done in slices:
see ``progress``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.core.exceptions import BadRequest
from django.db import models
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..exceptions import OutboxError
from ..jobs.bulk import Slice
from ..jobs.drain.status import LISTED
from ..text import one_line, shown
from .base import OutboxAdmin
from .window import number, window


class _Wide(forms.TextInput):
    def __init__(self, attrs: Any = None) -> None:
        super().__init__({"class": "outbox-reason", **(attrs or {})})


class Reason(forms.Form):
    """Why, for those who ask later."""

    reason = forms.CharField(
        label=gettext_lazy("Reason"), max_length=1000, required=False, widget=_Wide
    )


class RequiredReason(Reason):
    """Why: without it nothing is done."""

    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=1000, widget=_Wide)


@dataclass(frozen=True, slots=True)
class Steps:
    """How a decision is carried out in slices."""

    #: As ``jobs.dead.requeue_slice``, with the form's values before the rest.
    act: Callable[..., Slice]
    #: The column in whose order it goes through the rows.
    order: str
    #: Speaks of so many rows.
    done: Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Decision:
    """What can be done with rows, and how to speak of it."""

    action: str
    #: Codename of the permission that it takes.
    permission: str
    label: Any
    effect: Any
    #: Given the rows, the form's values and the name of the person. Returns what was done.
    operate: Callable[[Any, dict[str, Any], str], str] | None = None
    form: type[Reason] = Reason
    #: Instead of ``operate``, where there may be many rows.
    steps: Steps | None = None
    #: Whether it takes something away for good.
    destroys: bool = False

    @property
    def log_flag(self) -> int:
        """What the admin's log calls it."""
        return DELETION if self.destroys else CHANGE


class AskingAdmin(OutboxAdmin):
    """A list with decisions for actions."""

    decisions: ClassVar[tuple[Decision, ...]] = ()
    change_form_template = "admin/outbox_app/decisions.html"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.actions = [_action(each) for each in self.decisions]

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        """Return the decisions that this person may take.

        Args:
            request: Whose.
            action_location: Where they are offered, from Django 6.1 on.
        """
        where = {} if action_location is None else {"action_location": action_location}
        allowed = {each.action for each in self.decisions if may(request, each)}
        found = super().get_actions(request, **where).items()
        return {name: action for name, action in found if name in allowed}

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
            return self.ask(request, rows, decision, form)
        return self.carry_out(request, rows, decision, form.cleaned_data)

    def carry_out(self, request: HttpRequest, rows: Any, decision: Decision, values: Any) -> Any:
        """Do what was asked about, and say what was done."""
        level = messages.SUCCESS
        try:
            assert decision.operate, "a decision without steps"
            outcome = decision.operate(rows, values, request.user.get_username())
        except OutboxError as error:
            level = messages.ERROR
            outcome = _("Not done: %(error)s") % {"error": shown(error, 1000)}
        log(request, rows, decision, outcome, values["reason"])
        self.message_user(request, outcome, level)
        return None

    def about(self, request: HttpRequest, preview: Preview, decision: Decision) -> dict[str, Any]:
        """Return what a question says besides the rows, for its template."""
        return {}

    def ask(
        self, request: HttpRequest, rows: Any, decision: Decision, form: forms.Form
    ) -> TemplateResponse:
        """Return the question."""
        selection = Selection.of(request)
        preview = self.preview(request, rows)
        context = {
            **self.admin_site.each_context(request),
            "title": decision.label,
            "opts": self.opts,
            "media": self.media,
            "decision": decision,
            "form": form,
            "rows": [one_line(row, 200) for row in preview.rows[:LISTED]],
            **selection.context,
            **self.about(request, preview, decision),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/outbox_app/ask.html", context)

    def preview(self, request: HttpRequest, rows: Any) -> Preview:
        """Return those of the rows that a question looks at: all selected, or those in a window."""
        if not Selection.of(request).across or self.window(request) is None:
            return Preview(rows, complete=True)
        newest = window(self.get_queryset(request))
        return Preview(newest.rows(rows.order_by("-id")), complete=newest.is_all)


@dataclass(frozen=True, slots=True)
class Preview:
    """What a question looks at."""

    rows: Any
    #: False: there are older rows, which may match too.
    complete: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows a decision is about."""

    ids: list[str]
    #: All that match the filter; the ids say nothing then.
    across: bool
    #: The filter.
    query: str

    @classmethod
    def of(cls, request: HttpRequest) -> Selection:
        """Return what a form has posted."""
        across = request.POST.get("select_across") == "1"
        ids = request.POST.getlist(ACTION_CHECKBOX_NAME)
        return cls(ids[:1] if across else ids, across, request.GET.urlencode())

    @property
    def context(self) -> dict[str, Any]:
        """What a template needs to post it again."""
        return {
            "selected": self.ids,
            "select_across": self.across,
            "checkbox_name": ACTION_CHECKBOX_NAME,
        }

    def __str__(self) -> str:
        return (self.query or "-") if self.across else ", ".join(self.ids)


def log(request: HttpRequest, rows: Any, decision: Decision, outcome: str, reason: str) -> int:
    """Write a line of the admin's log; return its id."""
    selection = Selection.of(request)
    single = len(selection.ids) == 1 and not selection.across
    written = LogEntry.objects.create(
        user_id=request.user.pk,  # type: ignore[misc]
        content_type=get_content_type_for_model(rows.model),
        # The page of a row shows its history by this.
        object_id=selection.ids[0] if single else None,
        action_flag=decision.log_flag,
        **_words(request, decision, outcome, reason),
    )
    return int(written.pk)


def log_anew(
    request: HttpRequest, decision: Decision, outcome: str, reason: str, *, entry: int, before: str
) -> bool:
    """Write the line ``entry`` anew, if it still has the outcome ``before``; say whether it had."""
    lines = LogEntry.objects.filter(
        pk=entry,
        user_id=request.user.pk,  # type: ignore[misc]
        object_repr=before[:200],
    )
    return bool(lines.update(**_words(request, decision, outcome, reason)))


def _words(request: HttpRequest, decision: Decision, outcome: str, reason: str) -> dict[str, str]:
    message = _("%(outcome)s Action: %(action)s. Rows: %(rows)s. Reason: %(reason)s") % {
        "outcome": outcome,
        "action": decision.action,
        "rows": Selection.of(request),
        "reason": reason or "-",
    }
    return {"object_repr": outcome[:200], "change_message": shown(message)}


def may(request: HttpRequest, decision: Decision) -> bool:
    """Say whether this person may take a decision."""
    return request.user.has_perm(f"outbox_app.{decision.permission}")


def _action(decision: Decision) -> Callable[[Any, HttpRequest, Any], Any]:
    def act(model_admin: Any, request: HttpRequest, rows: Any) -> Any:
        return model_admin.decide(request, rows, decision)

    # As Django asks of an action.
    act.__name__ = decision.action
    act.short_description = decision.label  # type: ignore[attr-defined]
    return act


def _possible(field: Any, id: str) -> bool:
    if isinstance(field, models.CharField):
        return 0 < len(id) <= (field.max_length or 0) and id.isprintable()
    return number(id) is not None
