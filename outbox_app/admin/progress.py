"""A decision on any number of rows, through a web server that waits for 30 seconds.

Each POST works for ``SECONDS`` and answers with a page that says how far it is; its form posts the
next slice, by itself where there is JavaScript. How far it is travels in the form, signed: it holds
for one person, one decision and one selection. The line in the admin's log is written before the
first slice and again after each, so whoever stops half-way leaves a line that says so. A form that
is posted twice does nothing twice, and leaves a line of its own where it did something. Only rows
that were there when the question was asked are taken.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core import signing
from django.core.exceptions import BadRequest
from django.db.models import Max, Min
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _

from ..jobs.bulk import START, Slice, up_to
from ..jobs.drain import status
from ..models import DatabaseNow
from ..text import shown
from .asking import AskingAdmin, Decision, Preview, Selection, log, log_anew, may
from .window import number

#: How long a POST works.
SECONDS = 3.0
#: How old the form of a page may be, in seconds.
MAX_AGE = 24 * 3600
SALT = "outbox_app.admin.progress"


@dataclass(frozen=True, slots=True)
class State:
    """How far a decision is, and whose it is."""

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

    def signed(self) -> str:
        """Return it for a form."""
        return signing.dumps(asdict(self), salt=SALT, compress=True)


class ProgressAdmin(AskingAdmin):
    """A list of jobs, with decisions that are carried out in slices."""

    def is_few(self, request: HttpRequest) -> bool:
        """Say whether the rows are few, and found by an index."""
        return not Selection.of(request).across

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> Any:
        """Offer the decisions on all rows that match: Django does so for rows on the page only."""
        offered = [each for each in self.decisions if may(request, each)]
        context = {**(extra_context or {}), "decisions": offered, "any": ACTION_CHECKBOX_NAME}
        return super().changelist_view(request, context)

    def about(self, request: HttpRequest, preview: Preview, decision: Decision) -> dict[str, Any]:
        """Count the rows, and note which are there now."""
        last = self.get_queryset(request).order_by("-id").annotate(now=DatabaseNow())
        until, now = last.values_list("id", "now").first() or (0, None)
        count = status.shown_count(status.counted(preview.rows))
        return {
            "count": count if preview.complete else f"{count}+",
            "many": None if preview.complete else status.MANY,
            "until": until,
            "asked": now.isoformat() if now else "",
        }

    def decide(self, request: HttpRequest, rows: Any, decision: Decision) -> Any:
        """Ask, begin, or go on."""
        if "state" in request.POST:
            return self.go_on(request, rows, decision)
        return super().decide(request, rows, decision)

    def carry_out(self, request: HttpRequest, rows: Any, decision: Decision, values: Any) -> Any:
        """Carry out the first slice.

        Raises:
            BadRequest: The form was not ours.
        """
        assert decision.steps
        until = number(request.POST.get("until", ""))
        if until is None:
            raise BadRequest("The form has no id up to which rows are meant.")
        reason = values["reason"]
        outcome = _("Begun, and not finished.")
        entry = log(request, rows, decision, outcome, reason)
        user, selection = str(request.user.pk), repr(Selection.of(request))
        order = decision.steps.order
        ends = self.get_queryset(request).aggregate(first=Min(order), last=Max(order))
        span = (ends["first"] or 0, ends["last"] or 0)
        state = State(user, decision.action, selection, reason, until, entry, outcome, *span)
        return self._slice(request, rows, decision, state)

    def go_on(self, request: HttpRequest, rows: Any, decision: Decision) -> Any:
        """Carry out the next slice.

        Raises:
            BadRequest: The form was not ours, or not this person's, or is too old.
        """
        try:
            given = signing.loads(request.POST["state"], salt=SALT, max_age=MAX_AGE)
        except signing.BadSignature as error:
            raise BadRequest("This form was not made by this page, or it is too old.") from error
        state = State(**given)
        mine = (str(request.user.pk), decision.action, repr(Selection.of(request)))
        if (state.user, state.action, state.selection) != mine:
            raise BadRequest("This form was made for another person or other rows.")
        return self._slice(request, rows, decision, state)

    def _slice(self, request: HttpRequest, rows: Any, decision: Decision, state: State) -> Any:
        steps = decision.steps
        assert steps
        found = steps.act(
            rows,
            {"reason": state.reason},
            until=state.until,
            asked=asked_at(request),
            by=request.user.get_username(),
            after=state.after,
            seconds=SECONDS,
            whole=self.is_few(request),
        )
        state = replace(state, done=state.done + found.done, after=found.after or 0)
        outcome, note = _said(decision, found, state.done)
        before, reason = state.noted, state.reason
        if not log_anew(request, decision, note, reason, entry=state.entry, before=before):
            # Another post of this form has written there: both count what they did themselves.
            outcome, note = _said(decision, found, found.done)
            state = replace(state, done=found.done)
            if found.done or found.error:
                entry = log(request, rows, decision, note, reason)
                state = replace(state, entry=entry)
        if _goes_on(found):
            return self._page(request, rows, decision, replace(state, noted=note), outcome)
        self.message_user(request, outcome, messages.ERROR if found.error else messages.SUCCESS)
        return None

    def _page(
        self, request: HttpRequest, rows: Any, decision: Decision, state: State, outcome: str
    ) -> TemplateResponse:
        assert decision.steps
        order = decision.steps.order
        context = {
            **self.admin_site.each_context(request),
            "title": decision.label,
            "opts": self.opts,
            "media": self.media,
            "decision": decision,
            "outcome": outcome,
            "left": left(rows, order, state),
            "percent": state.percent,
            "state": state.signed(),
            "asked": request.POST.get("asked", ""),
            **Selection.of(request).context,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/outbox_app/progress.html", context)


def _goes_on(found: Slice) -> bool:
    return found.after is not None and not found.error


def _said(decision: Decision, found: Slice, done: int) -> tuple[str, str]:
    """Return what is said of a decision after a slice, and what the admin's log says."""
    assert decision.steps
    outcome = decision.steps.done(done)
    if found.error:
        error = shown(found.error, 1000)
        outcome = _("%(done)s Stopped half-way: %(error)s") % {"done": outcome, "error": error}
    return outcome, _("%(done)s Not finished.") % {"done": outcome} if _goes_on(found) else outcome


def left(rows: Any, order: str, state: State) -> str:
    """Return how many rows are left, as far as ``status.MANY`` rows of the table tell."""
    after = {f"{order}__gt": state.after}
    table = rows.model._default_manager.using(rows.db).filter(**after)
    values = table.order_by(order).values_list(order, flat=True)
    beyond = list(values[status.MANY : status.MANY + 1])
    part = up_to(state.until, rows, order).filter(**after)
    if beyond:
        part = part.filter(**{f"{order}__lt": beyond[0]})
    count = status.counted(part)
    return f"{min(count, status.MANY)}+" if beyond else status.shown_count(count)


def asked_at(request: HttpRequest) -> datetime | DatabaseNow:
    """Return the time that a filter by age counts from: when a decision was asked about, or now.

    Without it, rows would leave the filter while a long decision goes on.
    """
    try:
        moment = parse_datetime(request.POST.get("asked", ""))
    except ValueError:
        moment = None
    # Not at the end of time, where no zone can be taken off.
    if moment and timezone.is_aware(moment) == settings.USE_TZ and 2000 < moment.year < 9999:
        return moment
    return DatabaseNow()
