"""The keys of ``OUTBOX`` for the backend of ``django.tasks``."""

from __future__ import annotations

from dataclasses import dataclass

from ..conf import read


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """They have the defaults that the documentation names."""

    #: Days for which results of ``django.tasks`` are kept.
    TASK_RESULT_RETENTION_DAYS: int = 30


def task_settings() -> TaskSettings:
    """Return the settings of the backend of ``django.tasks``."""
    return read(TaskSettings)
