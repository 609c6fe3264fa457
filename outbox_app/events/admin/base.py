"""What pages of rows beside the log have in common: they are on the alias of the log."""

from __future__ import annotations

from ...admin.actions import ConfirmedActionsAdmin
from ...aliases import model_alias
from ..models import Event


class LogAdmin(ConfirmedActionsAdmin):
    def alias(self) -> str:
        return model_alias(Event)
