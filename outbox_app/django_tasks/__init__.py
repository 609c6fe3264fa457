"""``OutboxBackend`` for the setting TASKS of Django 6, or of the package ``django-tasks``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .backend import OutboxBackend as OutboxBackend
else:
    __getattr__, __dir__, __all__ = lazy(__name__, {".backend": ["OutboxBackend"]})
