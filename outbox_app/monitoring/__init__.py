"""How the outbox is doing: the facts, and what is wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .diagnosis import Limits as Limits
    from .diagnosis import Problem as Problem
    from .diagnosis import problems as problems
    from .status import OutboxStatus as OutboxStatus
    from .status import outbox_status as outbox_status

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".diagnosis": ["Limits", "Problem", "problems"],
            ".status": ["OutboxStatus", "outbox_status"],
        },
    )
