"""For gunicorn's configuration file: ``post_worker_init = outbox_app.fleet.gunicorn.announce``.

Each worker registers when it has loaded the application, and leaves when it ends. A master that
has preloaded the application registers nothing.
"""

from __future__ import annotations

from typing import Any

from .announcing import join


def announce(worker: Any) -> None:
    """Announce a worker."""
    join()
