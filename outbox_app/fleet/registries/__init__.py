"""The registries there are, by the names that ``OUTBOX["FLEET"]["REGISTRY"]`` takes."""

from .database import DatabaseRegistry
from .static import StaticRegistry

__all__ = ["DatabaseRegistry", "StaticRegistry"]
