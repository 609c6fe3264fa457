"""Entities: JSON documents that callers change by commands, each answered once.

``service`` needs the extra ``door``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .declaration import Rejected as Rejected
    from .declaration import command as command
    from .declaration import rule as rule
    from .entity import Entity as Entity
    from .models import EntityVersion as EntityVersion
    from .remote import CommandService as CommandService
    from .remote import service as service
    from .request import Command as Command
    from .request import Outcome as Outcome
    from .request import Rejection as Rejection

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".models": ["EntityVersion"],
            ".declaration": ["Rejected", "command", "rule"],
            ".entity": ["Entity"],
            ".remote": ["CommandService", "service"],
            ".request": ["Command", "Outcome", "Rejection"],
        },
    )
