"""Peers: the only rows that a form edits.

It refuses what ``manage.py check`` would refuse, such as a secret that is not a reference.
"""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext

from ..admin.base import DatabaseAdmin
from ..aliases import outbox_alias
from .models import Peer
from .peers import FIELDS, peer_faults


class PeerForm(forms.ModelForm):  # type: ignore[type-arg]
    def clean(self) -> None:
        super().clean()
        if not self.errors:
            values = {name: self.cleaned_data[name] for name in FIELDS}
            for fault in peer_faults(self.cleaned_data["name"], values):
                self.add_error(None, gettext("The peer %(fault)s.") % {"fault": fault})

    def validate_unique(self) -> None:
        """Check the name on the outbox's alias; Django would check it on the default alias."""
        others = Peer.objects.using(outbox_alias()).exclude(pk=self.instance.pk)
        if others.filter(name=self.instance.name).exists():
            self.add_error("name", gettext("A peer of this name exists."))


@admin.register(Peer)
class PeerAdmin(DatabaseAdmin):
    """The only rows that a form writes. Django's own permissions apply to them."""

    form = PeerForm
    list_display = ["name", "direction", "address", "database"]
    list_filter = ["direction"]
    ordering = ["name"]
    actions = None

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).using(outbox_alias())

    # A router may name another alias for instances: one of several outboxes.
    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: Any) -> None:
        obj.save(using=outbox_alias())

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        obj.delete(using=outbox_alias())
