"""A small shop that uses ``outbox_app``: orders, payments, receipts, stock.

It is configured by environment variables (``DATABASE_URL``, ``BROKER_URL``) and needs no server by
default. Read ``celery.py``, ``shop/services.py`` and ``shop/tasks.py`` to see how the package is
used.
"""

from .celery import app as celery_app

__all__ = ["celery_app"]
