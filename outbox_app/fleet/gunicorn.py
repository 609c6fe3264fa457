"""For gunicorn's configuration file: ``post_worker_init = outbox_app.fleet.gunicorn.announce``.

Each worker registers when it has loaded the application, and leaves when it ends. A master that
has preloaded the application registers nothing. The file is read before gevent patches a worker, so
nothing of Django is imported until then: it would have connections that greenlets share.
"""

from __future__ import annotations

from typing import Any


def announce(worker: Any) -> None:
    from .announcing import join

    join()
