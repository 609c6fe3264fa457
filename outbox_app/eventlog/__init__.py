"""The event log: the only place that reasons about order, ids, visibility and gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .window import Window as Window

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        ".window": ["Window"],
    },
)
