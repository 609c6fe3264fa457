"""The table of prepared events on the overview.

The table names the senders that do not answer. In their last answers it masks what looks sensitive.
"""

from __future__ import annotations

from django.utils.translation import gettext as _

from ..admin.masking import masked_line
from ..admin.tables import WORDS, Table, durations, numbers, pairs
from ..models.counting import shown_count
from ..text import duration, one_line
from .models import PreparedEvent
from .series import Decisions
from .status import PreparedStatus


def prepared(facts: PreparedStatus, decisions: Decisions) -> Table:
    times = durations([decisions.p50, decisions.p95])
    figures = [
        (_("Prepared"), shown_count(facts.prepared)),
        (_("Oldest prepared"), duration(facts.oldest_seconds) if facts.prepared else "-"),
        (_("Undecided"), shown_count(facts.undecided)),
        (_("Processes that ask senders"), str(facts.processes)),
        (_("Time to decide, p50 and p95"), times),
        (_("Contradictions in the last day"), shown_count(facts.contradictions)),
    ]
    routes = {"call": _("by a call"), "answer": _("by an answer"), "policy": _("by its policy"),
              "person": _("by a person")}  # fmt: skip
    states = dict(PreparedEvent.State.choices)
    decided = {
        f"{states.get(outcome, outcome)} {routes.get(route, route)}": count
        for (outcome, route), count in decisions.per_minute.items()
    }
    silent = [
        (one_line(each.sender, 100), masked_line(each.last_answer, 200)) for each in facts.silent
    ]
    groups = [
        pairs(_("Figure"), _("Value"), figures),
        pairs(_("Decided"), _("Per minute"), numbers(decided)),
        pairs(_("Sender that does not answer"), _("Why"), silent, WORDS),
    ]
    return Table(_("Prepared events"), groups, anchor="prepared")
