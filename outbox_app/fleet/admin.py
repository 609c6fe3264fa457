"""Servers in the database's registry, and how many calls they receive.

Two actions change rows: they drain servers, and set their weight. ``manage.py outbox_fleet
servers`` lists those of other registries, too.
"""

from __future__ import annotations

from django import forms
from django.contrib import admin
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from ..admin.actions import BulkAction, ConfirmedActionsAdmin, Reason
from ..admin.filters import column_filter
from .models import Server
from .registries.database import change


class Weight(Reason):
    weight = forms.IntegerField(label=_("Weight"), min_value=0, max_value=100)
    field_order = ("weight", "reason")


CHANGED = ngettext_lazy("%d server was changed.", "%d servers were changed.")


@admin.register(Server)
class ServerAdmin(ConfirmedActionsAdmin):
    list_display = ["node", "service", "weight", "draining", "heartbeat_at", "address"]
    list_filter = [column_filter("service", _("service")), column_filter("kind", _("kind"))]
    ordering = ("service", "-kind", "node", "id")
    bulk_actions = (
        BulkAction(
            "drain_selected",
            "change_server",
            _("Drain servers"),
            _("Drain the server"),
            _(
                "The servers receive no more calls, and finish the calls that they have. This "
                "lasts until their processes end, or a weight is set."
            ),
            lambda rows, values, by: change(rows, draining=True),
            outcome=CHANGED,
        ),
        BulkAction(
            "weight_selected",
            "change_server",
            _("Set the weight of servers"),
            _("Set the weight of the server"),
            _("Each server receives this share of the calls, drained or not; 0: none."),
            lambda rows, values, by: change(rows, draining=False, weight=values["weight"]),
            outcome=CHANGED,
            form=Weight,
        ),
    )
