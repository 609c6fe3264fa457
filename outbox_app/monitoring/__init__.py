"""How the outbox is doing: the facts, and what is wrong with them."""

from ..capability import Problem
from .diagnosis import Limits, problems
from .status import OutboxStatus, outbox_status

__all__ = ["Limits", "OutboxStatus", "Problem", "outbox_status", "problems"]
