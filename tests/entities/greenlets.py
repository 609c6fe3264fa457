"""A server under gevent, whose greenlets ask it for commands that it passes on: to itself.

``python -m tests.entities.greenlets COUNT`` prints the versions that were answered, how many
commands have arrived, which addresses it avoids, and how often other greenlets had a running loop.
"""

from gevent import monkey, pool, pywsgi, sleep, spawn

monkey.patch_all()

import asyncio  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

import django  # noqa: E402
from django.conf import settings  # noqa: E402
from django.core.wsgi import get_wsgi_application  # noqa: E402
from django.db import connections  # noqa: E402


def main(count: int) -> None:
    server = pywsgi.WSGIServer("127.0.0.1:0", _door, log=None)
    server.start()
    address = f"http://localhost:{server.server_port}/outbox/"
    os.environ["FLEET_KEY"] = "s" * 32
    keys = [{"id": "f", "secret": "env:FLEET_KEY"}]
    settings.ROOT_URLCONF, settings.ALLOWED_HOSTS = "tests.door.urls", ["localhost"]
    settings.OUTBOX |= {
        "FLEET": {"SERVICE": "shop", "TOPOLOGY": [address]},
        "PEERS": {"shop": {"direction": "both", "address": address, "keys": keys}},
    }
    django.setup()

    from outbox_app.entities import forwarding, views
    from outbox_app.fleet import topology
    from tests.entities.models import Account

    Account.routed, Account.timeout, forwarding.SECONDS = True, 120, 60
    arrived: list[int] = []
    answered_here = views.answered_here

    def answered(entity, calls, seconds, **options):
        arrived.append(len(calls))
        return answered_here(entity, calls, 60, **options)

    views.answered_here = answered

    def ask(number: int) -> int:
        try:
            id, options = f"a-{number % 3}", {"command_id": f"c-{number}"}
            return Account.execute(id, "withdraw", {"amount": 0}, **options).version
        finally:
            connections.close_all()

    loops: list[bool] = []

    def look() -> None:
        while True:
            loops.append(asyncio._get_running_loop() is not None)
            sleep(0)

    spawn(look)
    versions = sorted(pool.Pool(20).imap_unordered(ask, range(count)))
    print(json.dumps([versions, sum(arrived), list(topology._avoided), sum(loops)]))


def _door(environ, start_response):
    return get_wsgi_application()(environ, start_response)


if __name__ == "__main__":
    main(int(sys.argv[1]))
