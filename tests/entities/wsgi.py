"""The application that gunicorn serves in ``test_gunicorn``: ``/ALIAS/COMMAND_ID`` takes 1."""

from __future__ import annotations

import asyncio
import json
import os

import django

django.setup()

from django.db import connections  # noqa: E402

from tests.entities.models import Account  # noqa: E402


def _warm_up() -> None:
    """What a project does at import: with ``--preload`` in the parent of all workers.

    Its queue has a thread then, which no worker has.
    """

    async def ask() -> None:
        await Account.aexecute("a", "date", command_id="preloaded", using=os.environ["ALIAS"])

    asyncio.run(ask())
    connections.close_all()


_warm_up()


def application(environ, start_response):
    _, alias, command_id = environ["PATH_INFO"].split("/")
    try:
        outcome = Account.execute(
            "a", "withdraw", {"amount": 0}, command_id=command_id, using=alias, timeout=60
        )
        answer = {"version": outcome.version, "pid": os.getpid(), "replayed": outcome.replayed}
    finally:
        for connection in connections.all():
            connection.close_if_unusable_or_obsolete()
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(answer).encode()]
