"""Entities: JSON documents that callers change by commands, each answered once.

Import it in a module of models: it imports models itself.
"""

from ..models import EntityVersion
from .declaration import Rejected, command, rule
from .entity import Entity
from .request import Command, Outcome, Rejection

__all__ = [
    "Command",
    "Entity",
    "EntityVersion",
    "Outcome",
    "Rejected",
    "Rejection",
    "command",
    "rule",
]
