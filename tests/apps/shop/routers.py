"""The alias ``jobs`` has the tables of jobs, and no others."""

from __future__ import annotations

from typing import Any


class JobsAlone:
    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return app_label == "outbox_app" if db == "jobs" else None
