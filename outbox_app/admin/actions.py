"""Actions on rows of a list: each needs its permission, asks first, and writes a line to the log.

An action on any number of rows is batched, as a web server waits for 30 seconds only: each POST
works for ``SECONDS``, writes a line to the log, and asks again about the rows that remain. If a
form is posted twice, no row is changed twice. Such an action changes only rows that existed when
its question was first asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import BadRequest
from django.db import OperationalError, models
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..database.clock import DatabaseNow
from ..exceptions import OutboxError
from ..jobs.bulk import START, BulkResult
from ..models import counting
from ..text import one_line, shown
from .action_log import Selection, log
from .base import OutboxAdmin, is_few
from .row_range import id_in, number, row_range

#: How long one POST works, in seconds.
SECONDS = 10.0


class Reason(forms.Form):
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=1000,
        widget=forms.TextInput({"class": "outbox-reason"}),
    )


def _hidden(lowest: int) -> forms.IntegerField:
    return forms.IntegerField(min_value=lowest, max_value=2**63 - 1, widget=forms.HiddenInput)


class BatchForm(Reason):
    """The form of a batched action."""

    #: The highest id that the action may change.
    until = _hidden(0)
    #: The place at which the action resumes, and how many rows it has changed.
    after = _hidden(START)
    done = _hidden(0)


@dataclass(frozen=True, slots=True)
class BulkAction:
    name: str
    #: Codename of the permission that it needs.
    permission: str
    #: Text of its button for several rows, and for one row.
    label: Any
    single: Any
    effect: Any
    #: Called with the rows, the form's values and the user's name. Returns the text of the outcome,
    #: or the number of rows for ``outcome``.
    run: Callable[[Any, dict[str, Any], str], Any] | None = None
    #: Replaces ``run`` if there may be many rows. It takes the arguments of
    #: ``jobs.dead.requeue_dead``.
    run_for: Callable[..., BulkResult] | None = None
    #: Text of the outcome, with a place for the number of rows: an ``ngettext_lazy``, for example.
    outcome: Any = "%s"
    form: type[Reason] = Reason
    #: Whether it removes something for good: its button and log line show it as a deletion.
    destroys: bool = False
    #: Whether it changes only the rows that the question listed, and only if they look the same.
    listed_only: bool = False


class ConfirmedActionsAdmin(OutboxAdmin):
    bulk_actions: ClassVar[tuple[BulkAction, ...]] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.actions = [_django_action(each) for each in self.bulk_actions]

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        # Django 6.1 asks for the actions of one location. Earlier versions have no such argument.
        place = {"action_location": action_location} if action_location else {}
        allowed = {each.name for each in self._permitted(request)}
        found = super().get_actions(request, **place).items()
        return {name: action for name, action in found if name in allowed}

    def response_action(
        self, request: HttpRequest, queryset: models.QuerySet[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Refuse ids that no row can have: Django or the database would fail on them."""
        for id in request.POST.getlist(ACTION_CHECKBOX_NAME):
            if not _possible(self.opts.pk, id):
                raise BadRequest(f"{id[:50]!r} is not the id of a {self.opts.verbose_name}.")
        return super().response_action(request, queryset, *args, **kwargs)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> Any:
        """Offer batched actions on all rows that match: Django's own know the page only."""
        offered = [each for each in self._permitted(request) if each.run_for]
        context = {**(extra_context or {}), "bulk_actions": offered}
        return super().changelist_view(request, context)

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kw: Any) -> Any:
        row = context.get("original")
        context["bulk_actions"] = [e for e in self._permitted(request) if self.applies(e, row)]
        return super().render_change_form(request, context, *args, **kw)

    def applies(self, action: BulkAction, row: Any) -> bool:
        """Return whether the page of a row offers an action, if the user is permitted to use it."""
        return True

    def answer(self, request: HttpRequest, rows: Any, action: BulkAction) -> Any:
        kind, act = (BatchForm, self.run_batches) if action.run_for else (action.form, self.run)
        if "confirmed" not in request.POST:
            form, asked = kind(), ""
            if action.run_for:
                last = self.get_queryset(request).order_by("-id").annotate(now=DatabaseNow())
                until, now = last.values_list("id", "now").first() or (0, None)
                form.initial = {"until": until, "after": START, "done": 0}
                asked = now.isoformat() if now else ""
            return self.ask(request, rows, action, form, asked=asked)
        form = kind(request.POST)
        if not form.is_valid():
            return self.ask(request, rows, action, form)
        return act(request, rows, action, form.cleaned_data)

    def ask(
        self,
        request: HttpRequest,
        rows: Any,
        action: BulkAction,
        form: forms.Form,
        **context: Any,
    ) -> TemplateResponse:
        """Return the question. ``outcome`` is what was done before it about the other rows."""
        preview, complete = rows, True
        if Selection.of(request).across and self.row_range(request) is not None:
            newest = row_range(self.get_queryset(request))
            preview, complete = newest.rows(rows.order_by("-id")), newest.is_all
        listed = list(preview[: counting.LISTED])
        context |= {
            "form": form,
            "most": counting.LISTED,
            "rows": list(map(_line, listed)),
            "table": self.summary(preview),
        }
        if action.listed_only:
            context |= {"selected": [str(row.pk) for row in listed], "select_across": False}
        if action.run_for:
            count = counting.shown_count(counting.counted(preview))
            context |= {
                "count": count if complete else f"{count}+",
                "many": None if complete else counting.MANY,
            }
        selection = Selection.of(request)
        request.current_app = self.admin_site.name
        return TemplateResponse(
            request,
            "admin/outbox_app/ask.html",
            {
                **self.admin_site.each_context(request),
                "title": action.label,
                "opts": self.opts,
                "media": self.media,
                "action": action,
                "selected": selection.ids,
                "select_across": selection.across,
                "by_id": getattr(request, "outbox_by_id", False),
                "asked": request.POST.get("asked", ""),
                **context,
            },
        )

    def summary(self, preview: Any) -> Any:
        """Return a table for ``table.html``, if the question shows one instead of the rows."""
        return None

    def run(self, request: HttpRequest, rows: Any, action: BulkAction, values: Any) -> None:
        level, changed = messages.SUCCESS, list[str]()
        if action.listed_only:
            now = {row.pk: _line(row) for row in rows[: counting.LISTED]}
            asked = request.POST.getlist("listed", list(now.values()))
            changed = [line for line in asked if line not in now.values()]
            ids = [pk for pk, line in now.items() if line in asked]
            rows = self.get_queryset(request).filter(pk__in=ids)
        try:
            assert action.run, "neither run nor run_for"
            outcome = action.outcome % action.run(rows, values, request.user.get_username())
        except OutboxError as error:
            level = messages.ERROR
            outcome = _("Not done: %(error)s") % {"error": shown(error, 1000)}
        if changed:
            level, words = messages.ERROR, _("Not done, because it has changed: %(rows)s.")
            outcome = f"{outcome} {words % {'rows': '; '.join(changed)}}"
        log(request, rows, action, outcome, values["reason"])
        self.message_user(request, outcome, level)

    def run_batches(self, request: HttpRequest, rows: Any, action: BulkAction, values: Any) -> Any:
        assert action.run_for
        found = action.run_for(
            rows,
            reason=values["reason"],
            until=values["until"],
            asked=asked_at(request),
            by=request.user.get_username(),
            after=values["after"],
            seconds=SECONDS,
            whole=is_few(request) or not Selection.of(request).across,
        )
        done = values["done"] + found.done
        is_over = found.after is None or found.error is not None
        if found.done or found.error or (is_over and not done):
            note = _outcome(action, found.done, found.error)
            log(request, rows, action, note, values["reason"])
        if found.error and not isinstance(found.error, (OutboxError, OperationalError)):
            raise found.error
        outcome = _outcome(action, done, found.error)
        if is_over:
            self.message_user(request, outcome, messages.ERROR if found.error else messages.SUCCESS)
            return None
        form = BatchForm(initial={**values, "after": found.after, "done": done})
        remain = rows.filter(pk__lte=values["until"])
        return self.ask(request, remain, action, form, outcome=outcome)

    def _permitted(self, request: HttpRequest) -> list[BulkAction]:
        may = request.user.has_perm
        return [
            each for each in self.bulk_actions if may(f"{self.opts.app_label}.{each.permission}")
        ]


def asked_at(request: HttpRequest) -> datetime | DatabaseNow:
    """Return the time from which a filter by age counts: when the question was shown, or now.

    With the time of each POST, rows would leave the filter while a long action is running.
    """
    try:
        moment = parse_datetime(request.POST.get("asked", ""))
    except ValueError:
        moment = None
    # Not near the last year of datetime, where converting to another zone would overflow.
    if moment and timezone.is_aware(moment) == settings.USE_TZ and 2000 < moment.year < 9999:
        return moment
    return DatabaseNow()


def _outcome(action: BulkAction, done: int, error: Exception | None) -> str:
    outcome = str(action.outcome % done)
    if error is None:
        return outcome
    words = _("%(done)s Stopped half-way: %(error)s")
    return words % {"done": outcome, "error": shown(error, 1000)}


def each_row(
    act: Callable[..., str | None], words: Any, *, between: str = ", "
) -> Callable[..., str]:
    """Return a function that acts on each row. A row that is refused does not undo the others."""

    def run(rows: Any, values: dict[str, Any], by: str) -> str:
        options = {"by": by, "reason": values["reason"], "using": rows.db}
        done, refused = [], []
        for row in rows:
            try:
                done.append(act(row, values, options) or row.name)
            except OutboxError as error:
                refused.append(error)
        if refused and not done:
            raise refused[0]
        return " ".join([words % between.join(done), *(shown(error, 300) for error in refused)])

    return run


def _django_action(action: BulkAction) -> Callable[[Any, HttpRequest, Any], Any]:
    def run(model_admin: Any, request: HttpRequest, rows: Any) -> Any:
        return model_admin.answer(request, rows, action)

    # Django reads these attributes of an action.
    run.__name__ = action.name
    run.short_description = action.label  # type: ignore[attr-defined]
    return run


def _line(row: Any) -> str:
    return one_line(row, 200)


def _possible(field: Any, id: str) -> bool:
    if isinstance(field, models.CharField):
        return 0 < len(id) <= (field.max_length or 0) and id.isprintable()
    if isinstance(field, models.UUIDField):
        return id_in(id) is not None
    return number(id) is not None
