"""The fleet: which processes serve a service, and which of them takes a call.

No correctness depends on the list of servers: a wrong list only makes calls slower. ``servers``
needs the extra ``door``; ``outbox_app.entities.service`` calls a service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .cluster import KnownServer as KnownServer
    from .cluster import Service as Service
    from .cluster import servers as servers
    from .registration import register as register
    from .registry import Member as Member
    from .registry import Registry as Registry

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".registration": ["register"],
            ".cluster": ["KnownServer", "Service", "servers"],
            ".registry": ["Member", "Registry"],
        },
    )
