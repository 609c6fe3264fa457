"""Subscriptions and their parked streams: their positions, what holds them up, and actions.

The figures of a list are read for all of its rows at once (``subscriptions.lag``).
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ...admin.actions import BulkAction, Reason, each_row
from ...admin.base import column
from ...admin.blocking import in_flight_table
from ...admin.filters import column_filter
from ...admin.masking import masked_line, masked_text
from ...admin.tables import SHORT, WORDS, Group, Table
from ...aliases import model_alias
from ...capability import kinds
from ...text import duration, one_line, shown
from ..exceptions import ReplayRefused
from ..models import Cursor, Event, ParkedStream, Subscription
from ..subscriptions import control, lag
from ..subscriptions.skips import discard_stream, skip_event
from ..subscriptions.start_point import parse_start_point
from .base import LogAdmin
from .tables import failed_event, traceback_of


class ReplayForm(Reason):
    place = forms.CharField(
        label=_("From"),
        max_length=40,
        help_text=_("beginning, now, a position, or a time such as 2026-01-31T12:00"),
    )
    skip_ahead = forms.BooleanField(
        label=_("Skip events not yet handled"),
        required=False,
        help_text=_(
            "Without this, a move that passes over events is refused; the error names them."
        ),
    )
    field_order = ("place", "skip_ahead", "reason")

    def clean_place(self) -> Any:
        try:
            return parse_start_point(self.cleaned_data["place"])
        except ReplayRefused as error:
            raise ValidationError(shown(error, 300)) from error


class Position(Reason):
    position = forms.IntegerField(
        label=_("Position"),
        min_value=1,
        max_value=2**63 - 1,
        help_text=_("The position at which the subscription fails, as its page shows."),
    )
    field_order = ("position", "reason")


def _replay(row: Any, values: Any, options: Any) -> str:
    place, ahead = values["place"], values["skip_ahead"]
    moves = control.replay(row.name, place, skip_ahead=ahead, **options)
    return f"{row.name} {'; '.join(map(str, moves))}"


def _skip(row: Any, values: Any, options: Any) -> None:
    skip_event(row.name, values["position"], **options)


def _skip_first(row: Any, values: Any, options: Any) -> str:
    return shown(skip_event(row.subscription, row.position, log=row.log, **options), 300)


def _discard(row: Any, values: Any, options: Any) -> str:
    return shown(discard_stream(row.subscription, row.stream, log=row.log, **options), 300)


RELEASED = ngettext_lazy("%d stream was released.", "%d streams were released.")
RELEASE = _(
    "The events of each stream are handled in order, from the event that failed on. If the handler "
    "fails again, the stream stays parked, with the new error."
)


@admin.register(Subscription)
class SubscriptionAdmin(LogAdmin):
    list_display = ["name", "state", "error", "behind", "late", "parked", "gaps"]
    ordering = ("name",)
    fields = ["name", "state", "what", "behind", "late", "partitions", "created_at", "error"]
    state = column(_("state"), lambda row: row.lag.state)
    what = column(_("reads"), lambda row: _reads(row))
    behind = column(_("behind"), lambda row: row.lag.shown)
    late = column(
        _("oldest"), lambda row: duration(row.lag.oldest_seconds) if row.lag.behind else "-"
    )
    parked = column(_("parked"), lambda row: row.lag.parked)
    gaps = column(_("gaps"), lambda row: row.lag.gaps)
    error = column(_("error"), lambda row: masked_line(row.lag.error, 200) or "-")
    change_form_template = "admin/outbox_events/subscription.html"
    bulk_actions = (
        BulkAction(
            "pause_selected",
            "pause_subscription",
            _("Pause subscriptions"),
            _("Pause the subscription"),
            _("They handle no event until they are resumed; no event is lost."),
            each_row(
                lambda row, *_: control.pause(row.name, using=row._state.db), _("Paused: %s.")
            ),
        ),
        BulkAction(
            "resume_selected",
            "pause_subscription",
            _("Resume subscriptions"),
            _("Resume the subscription"),
            _("The subscriptions continue from their positions."),
            each_row(
                lambda row, *_: control.resume(row.name, using=row._state.db), _("Resumed: %s.")
            ),
        ),
        BulkAction(
            "replay_selected",
            "replay_subscription",
            _("Replay subscriptions"),
            _("Replay the subscription"),
            _(
                "The handlers receive the events from a place in the log on, even those that they "
                "have handled. Their effects are not undone: a view that counts would count twice; "
                "rebuild such a view with manage.py outbox_rebuild. A place ahead of the current "
                "position may pass over events, which are then recorded as a gap."
            ),
            each_row(_replay, _("Moved: %s."), between=" | "),
            form=ReplayForm,
        ),
        BulkAction(
            "release_selected",
            "replay_subscription",
            _("Release all parked streams"),
            _("Release all parked streams"),
            RELEASE,
            lambda rows, values, by: sum(control.release(row.name, using=rows.db) for row in rows),
            outcome=RELEASED,
        ),
        BulkAction(
            "skip_selected",
            "skip_event",
            _("Skip the event that fails"),
            _("Skip the event that fails"),
            _("The handler never receives this event; it continues with the next one."),
            each_row(_skip, _("Skips the event: %s.")),
            form=Position,
            destroys=True,
        ),
        BulkAction(
            "forget_selected",
            "forget_subscription",
            _("Forget subscriptions"),
            _("Forget the subscription"),
            _(
                "Their cursors, parked streams and gaps are deleted, so that pruning no longer "
                "waits for them. What their handlers have done stays. A subscription that this "
                "code declares, or that a process runs, is not forgotten. If other code declares "
                "one, it begins again there as a new one."
            ),
            each_row(
                lambda row, *_: control.delete_subscription(row.name, using=row._state.db),
                _("Forgotten: %s."),
            ),
            destroys=True,
        ),
    )

    def applies(self, action: BulkAction, row: Any) -> bool:
        """Return whether an action can help: nothing but to forget it helps an undeclared one."""
        if action.name == "release_selected" and not row.lag.parked:
            return False
        is_undeclared: bool = row.lag.state == "undeclared"
        return is_undeclared == (action.name == "forget_selected")

    def measure(self, rows: list[Any]) -> None:
        names = [row.name for row in rows]
        lags = {each.name: each for each in lag.lags(using=model_alias(Event), names=names)}
        for row in rows:
            # A name that was escaped is not found. Only a row written by hand has such a name.
            row.lag = lags.get(row.name) or lag.SubscriptionLag(row.name)

    def render_change_form(self, request: HttpRequest, context: Any, *args: Any, **kw: Any) -> Any:
        cursors = self._cursors(context["original"].lag.cursors)
        in_flight = in_flight_table(request, lag.in_flight(using=model_alias(Event)))
        context["tables"] = [cursors, in_flight]
        if context["original"].lag.state == "undeclared":
            context["note"] = kinds()["undeclared"].action
        return super().render_change_form(request, context, *args, **kw)

    def _cursors(self, lags: list[lag.CursorLag]) -> Table:
        columns = {gettext("Log"): "", gettext("Partition"): "", gettext("Position"): "",
                   gettext("Handled"): "", gettext("Behind"): "", gettext("Moved at"): SHORT,
                   gettext("Error"): WORDS}  # fmt: skip
        rows = [
            (
                one_line(each.cursor.log, 100),
                each.cursor.partition,
                each.cursor.position,
                each.cursor.handled,
                f"{each.behind.rows}{'' if each.behind.complete else '+'}" if each.behind else "?",
                each.cursor.moved_at,
                self._error(each.cursor),
            )
            for each in lags
        ]
        return Table(gettext("Cursors"), [Group(columns, rows)], empty=gettext("Has never run."))

    def _error(self, cursor: Cursor) -> SafeString:
        error = shown(masked_text(cursor.error[:4000]), 1000) or "-"
        event = failed_event(cursor, self.admin_site.name)
        return format_html("{}<br>{}{}", error, event, traceback_of(cursor))


@admin.register(ParkedStream)
class ParkedStreamAdmin(LogAdmin):
    list_display = ["stream", "subscription", "short_reason", "parked", "released"]
    list_filter = [column_filter("subscription", _("subscription"))]
    sortable_by = ["parked"]
    parked = column(_("parked at"), lambda row: row.parked_at, ordering="id")
    bulk_actions = (
        BulkAction(
            "release_selected",
            "replay_subscription",
            _("Release streams"),
            _("Release the stream"),
            RELEASE,
            lambda rows, values, by: rows.update(released=True),
            outcome=RELEASED,
        ),
        BulkAction(
            "skip_selected",
            "skip_event",
            _("Skip the first event"),
            _("Skip the first event"),
            _("The event that failed is never handled; the events after it are."),
            each_row(_skip_first, _("Skipped: %s."), between="; "),
            destroys=True,
            listed_only=True,
        ),
        BulkAction(
            "discard_selected",
            "skip_event",
            _("Discard streams"),
            _("Discard the stream"),
            _("The parked events are never handled; later events of the streams are."),
            each_row(_discard, _("Discarded: %s."), between="; "),
            destroys=True,
            listed_only=True,
        ),
    )
    fields = ["subscription", "partition", "log", "stream", "version", "position", "parked_at",
              "released", "event", "error", "traceback"]  # fmt: skip
    short_reason = column(_("error"), lambda row: shown(row.error, 120))
    traceback = column(_("traceback"), lambda row: traceback_of(row) or "-")

    def applies(self, action: BulkAction, row: Any) -> bool:
        return action.name != "release_selected" or not row.released

    @admin.display(description=_("event"))
    def event(self, row: ParkedStream) -> str:
        return failed_event(row, self.admin_site.name) or "-"


def _reads(row: Any) -> str:
    """Return logs, topics and types as declared by the process that ran the subscription last."""
    if not row.reads:
        return "-"
    every = [gettext("all")]
    return "; ".join(
        f"{label}: {masked_line(', '.join(row.reads.get(key) or every), 300)}"
        for key, label in (("logs", _("logs")), ("topics", _("topics")), ("types", _("types")))
    )
