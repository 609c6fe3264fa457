"""``celery -A benchmarks.soak.worker:app worker``: the soak's app, after Django's setup."""

from __future__ import annotations

import django

django.setup()

from .subscribers import app  # noqa: E402

__all__ = ["app"]
