"""For gunicorn's configuration file: ``post_worker_init = outbox_app.fleet.gunicorn.register``.

Each worker registers when it has loaded the application, and leaves when it ends. A master that
has preloaded the application does not register. gunicorn reads the file before gevent patches the
worker: if Django were imported then, greenlets would share connections. ``register`` imports it.
"""

from __future__ import annotations

from typing import Any


def register(worker: Any) -> None:
    from .registration import join

    join()
