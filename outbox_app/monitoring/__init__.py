"""How the outbox is doing: the facts, and what is wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from ..operations.facts import outbox_status as outbox_status
    from ..operations.problems import Limits as Limits
    from ..operations.problems import problems as problems

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Limits": "outbox_app.operations.problems",
        "outbox_status": "outbox_app.operations.facts",
        "problems": "outbox_app.operations.problems",
    },
)
