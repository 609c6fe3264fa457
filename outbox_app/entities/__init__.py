"""Entities: JSON documents that callers change by commands, each answered once.

Import it in a module of models: it imports models itself.
"""

from ..models import EntityVersion
from .declaration import Rejected, command
from .entity import Entity
from .request import Outcome, Rejection

__all__ = ["Entity", "EntityVersion", "Outcome", "Rejected", "Rejection", "command"]
