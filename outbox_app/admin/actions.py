"""Actions on rows of a list: confirmed first, with a reason, done by POST, logged.

An action answers with a question: what it does, to which rows, and why. Only the answer to that
does anything. Each needs its permission, and leaves one line in the admin's log.

An action on any number of rows is batched, as a web server waits for 30 seconds: each POST works
for ``SECONDS``, rewrites its line, and answers with a page whose form posts the rest. How far
it is travels in that form, signed: it holds for one person, one action and one selection. A
form that is posted twice does nothing twice, and leaves a line of its own where it did something.
Only rows that were there when the question was asked are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core import signing
from django.core.exceptions import BadRequest
from django.db import models
from django.db.models import Max, Min
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..exceptions import OutboxError
from ..jobs.bulk import START, BulkResult, up_to
from ..models import DatabaseNow, counting
from ..text import one_line, shown
from .action_log import Selection, log, log_anew
from .base import OutboxAdmin, is_few
from .row_range import id_in, number, row_range

#: How long a POST works.
SECONDS = 3.0
#: How old the form of a page may be, in seconds.
MAX_AGE = 24 * 3600
SALT = "outbox_app.admin.progress"


def _reason(*, required: bool) -> forms.CharField:
    wide = forms.TextInput({"class": "outbox-reason"})
    return forms.CharField(
        label=gettext_lazy("Reason"), max_length=1000, required=required, widget=wide
    )


class Reason(forms.Form):
    reason = _reason(required=False)


class RequiredReason(Reason):
    """Why: without it nothing is done."""

    reason = _reason(required=True)


@dataclass(frozen=True, slots=True)
class BulkAction:
    name: str
    #: Codename of the permission that it takes.
    permission: str
    #: Of its button for several rows, and for one.
    label: Any
    single: Any
    effect: Any
    #: Given the rows, the form's values and the name of the person; returns the outcome, or the
    #: number of rows for ``outcome``.
    run: Callable[[Any, dict[str, Any], str], Any] | None = None
    #: Instead of ``run``, where there may be many rows. As ``jobs.dead.requeue_for``; takes
    #: ``reason`` besides.
    run_for: Callable[..., BulkResult] | None = None
    #: The outcome for a number of rows: ``ngettext_lazy`` without its number.
    outcome: Any = "%s"
    form: type[Reason] = RequiredReason
    #: Whether it takes something away for good.
    destroys: bool = False
    #: Whether it is about the rows that the question lists, as they were then, and no others.
    listed_only: bool = False


class ConfirmedActionsAdmin(OutboxAdmin):
    bulk_actions: ClassVar[tuple[BulkAction, ...]] = ()
    #: The column in whose order batched actions go through the rows.
    batch_order: ClassVar[str] = "id"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.actions = [_django_action(each) for each in self.bulk_actions]

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        # Django 6.1 asks for those of a place. Before it there is one place, and no argument.
        place = {"action_location": action_location} if action_location else {}
        allowed = {each.name for each in self._permitted(request)}
        found = super().get_actions(request, **place).items()
        return {name: action for name, action in found if name in allowed}

    def response_action(
        self, request: HttpRequest, queryset: models.QuerySet[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Refuse ids that no row can have, where Django or the database would fail."""
        for id in request.POST.getlist(ACTION_CHECKBOX_NAME):
            if not _possible(self.opts.pk, id):
                raise BadRequest(f"{id[:50]!r} is no id of a {self.opts.verbose_name}.")
        return super().response_action(request, queryset, *args, **kwargs)

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> Any:
        """Offer batched actions on all rows that match: Django knows those of the page only."""
        offered = [each for each in self._permitted(request) if each.run_for]
        context = {**(extra_context or {}), "bulk_actions": offered}
        return super().changelist_view(request, context)

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kw: Any) -> Any:
        context["bulk_actions"] = self._permitted(request)
        return super().render_change_form(request, context, *args, **kw)

    def answer(self, request: HttpRequest, rows: Any, action: BulkAction) -> Any:
        if action.run_for and "state" in request.POST:
            return self.resume(request, rows, action)
        form = action.form(request.POST if "confirmed" in request.POST else None)
        if not form.is_valid():  # or not sent yet
            return self.ask(request, rows, action, form)
        if action.run_for:
            return self.begin(request, rows, action, form.cleaned_data["reason"])
        return self.run(request, rows, action, form.cleaned_data)

    def ask(
        self, request: HttpRequest, rows: Any, action: BulkAction, form: forms.Form
    ) -> TemplateResponse:
        preview, complete = rows, True
        if Selection.of(request).across and self.row_range(request) is not None:
            newest = row_range(self.get_queryset(request))
            preview, complete = newest.rows(rows.order_by("-id")), newest.is_all
        listed = list(preview[: counting.LISTED])
        context = {
            "form": form,
            "most": counting.LISTED,
            "rows": list(map(_line, listed)),
            "table": self.summary(preview),
        }
        if action.listed_only:
            context |= {"selected": [str(row.pk) for row in listed], "select_across": False}
        if action.run_for:
            last = self.get_queryset(request).order_by("-id").annotate(now=DatabaseNow())
            until, now = last.values_list("id", "now").first() or (0, None)
            count = counting.shown_count(counting.counted(preview))
            context |= {
                "count": count if complete else f"{count}+",
                "many": None if complete else counting.MANY,
                "until": until,
                "asked": now.isoformat() if now else "",
            }
        return self._page(request, "ask", action, context)

    def summary(self, preview: Any) -> Any:
        """Return the table that a question shows instead of the rows, for ``table.html``."""
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
            level, words = messages.ERROR, _("Not done, as it is not so any more: %(rows)s.")
            outcome = f"{outcome} {words % {'rows': '; '.join(changed)}}"
        log(request, rows, action, outcome, values["reason"])
        self.message_user(request, outcome, level)

    def begin(self, request: HttpRequest, rows: Any, action: BulkAction, reason: str) -> Any:
        until = number(request.POST.get("until", ""))
        if until is None:
            raise BadRequest("The form has no id up to which rows are meant.")
        outcome = _("Begun, and not finished.")
        entry = log(request, rows, action, outcome, reason)
        order = self.batch_order
        ends = self.get_queryset(request).aggregate(first=Min(order), last=Max(order))
        state = State(
            *_owner(request, action), reason, until, entry, outcome,
            ends["first"] or 0, ends["last"] or 0,
        )  # fmt: skip
        return self._run_batches(request, rows, action, state)

    def resume(self, request: HttpRequest, rows: Any, action: BulkAction) -> Any:
        try:
            given = signing.loads(request.POST["state"], salt=SALT, max_age=MAX_AGE)
        except signing.BadSignature as error:
            raise BadRequest("This form was not made by this page, or it is too old.") from error
        state = State(**given)
        if (state.user, state.action, state.selection) != _owner(request, action):
            raise BadRequest("This form was made for another person or other rows.")
        return self._run_batches(request, rows, action, state)

    def _run_batches(
        self, request: HttpRequest, rows: Any, action: BulkAction, state: State
    ) -> Any:
        assert action.run_for
        found = action.run_for(
            rows,
            reason=state.reason,
            until=state.until,
            asked=asked_at(request),
            by=request.user.get_username(),
            after=state.after,
            seconds=SECONDS,
            whole=is_few(request) or not Selection.of(request).across,
        )
        state = replace(state, done=state.done + found.done, after=found.after or 0)
        outcome, note = _outcome(action, found, state.done)
        before, reason = state.noted, state.reason
        if not log_anew(request, action, note, reason, entry=state.entry, before=before):
            # Another post of this form has written there: both count what they did themselves.
            outcome, note = _outcome(action, found, found.done)
            state = replace(state, done=found.done)
            if found.done or found.error:
                state = replace(state, entry=log(request, rows, action, note, reason))
        if _is_over(found):
            self.message_user(request, outcome, messages.ERROR if found.error else messages.SUCCESS)
            return None
        state = replace(state, noted=note)
        context = {
            "outcome": outcome,
            "left": left(rows, self.batch_order, state),
            "percent": state.percent,
            "state": signing.dumps(asdict(state), salt=SALT, compress=True),
            "asked": request.POST.get("asked", ""),
        }
        return self._page(request, "progress", action, context)

    def _page(
        self, request: HttpRequest, template: str, action: BulkAction, context: dict[str, Any]
    ) -> TemplateResponse:
        selection = Selection.of(request)
        request.current_app = self.admin_site.name
        return TemplateResponse(
            request,
            f"admin/outbox_app/{template}.html",
            {
                **self.admin_site.each_context(request),
                "title": action.label,
                "opts": self.opts,
                "media": self.media,
                "action": action,
                "selected": selection.ids,
                "select_across": selection.across,
                "by_id": getattr(request, "outbox_by_id", False),
                **context,
            },
        )

    def _permitted(self, request: HttpRequest) -> list[BulkAction]:
        may = request.user.has_perm
        return [each for each in self.bulk_actions if may(f"outbox_app.{each.permission}")]


@dataclass(frozen=True, slots=True)
class State:
    """How far a batched action is, and whose it is."""

    user: str
    action: str
    selection: str
    reason: str
    #: The highest id that it is about.
    until: int
    #: The line in the admin's log, and what its outcome is by now.
    entry: int
    noted: str
    #: Lowest and highest value of the column when it began.
    first: int = 0
    last: int = 0
    after: int = START
    done: int = 0

    @property
    def percent(self) -> int:
        """How far it is through the table, as the values of the column tell."""
        part = (self.after - self.first) / max(1, self.last - self.first)
        return int(100 * min(1.0, max(0.0, part)))


def left(rows: Any, order: str, state: State) -> str:
    """Return how many rows are left, as far as ``counting.MANY`` rows of the table tell."""
    after = {f"{order}__gt": state.after}
    table = rows.model._default_manager.using(rows.db).filter(**after)
    values = table.order_by(order).values_list(order, flat=True)
    beyond = list(values[counting.MANY : counting.MANY + 1])
    part = up_to(state.until, rows, order).filter(**after)
    if beyond:
        part = part.filter(**{f"{order}__lt": beyond[0]})
    count = counting.counted(part)
    return f"{min(count, counting.MANY)}+" if beyond else counting.shown_count(count)


def asked_at(request: HttpRequest) -> datetime | DatabaseNow:
    """Return the time that a filter by age counts from: when an action was asked about, or now.

    Without it, rows would leave the filter while a long action is running.
    """
    try:
        moment = parse_datetime(request.POST.get("asked", ""))
    except ValueError:
        moment = None
    # Not at the end of time, where no zone can be taken off.
    if moment and timezone.is_aware(moment) == settings.USE_TZ and 2000 < moment.year < 9999:
        return moment
    return DatabaseNow()


def _owner(request: HttpRequest, action: BulkAction) -> tuple[str, str, str]:
    return str(request.user.pk), action.name, repr(Selection.of(request))


def _is_over(found: BulkResult) -> bool:
    return found.after is None or found.error is not None


def _outcome(action: BulkAction, found: BulkResult, done: int) -> tuple[str, str]:
    """Return the outcome so far for the page, and for the admin's log."""
    outcome = action.outcome % done
    if found.error:
        error = shown(found.error, 1000)
        outcome = _("%(done)s Stopped half-way: %(error)s") % {"done": outcome, "error": error}
    return outcome, outcome if _is_over(found) else _("%(done)s Not finished.") % {"done": outcome}


def _django_action(action: BulkAction) -> Callable[[Any, HttpRequest, Any], Any]:
    def run(model_admin: Any, request: HttpRequest, rows: Any) -> Any:
        return model_admin.answer(request, rows, action)

    # As Django asks of an action.
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
