"""Payments in processes of their own, each told at which point it dies.

``python -m tests.prepared.payer`` reads lines "NUMBER SENDER POINT" and forks for each one: the
child runs the block and is killed there, or not. The point "failed" raises inside the block. It
answers each line with how the child has ended.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import django
from django.db import transaction


def pay(number: str, sender: str, point: str) -> None:
    from django.contrib.auth.models import Group

    from outbox_app.failpoints import set_failpoint
    from outbox_app.prepared import prepared

    kill = partial(os.kill, os.getpid(), signal.SIGKILL)
    set_failpoint(point, kill)
    with prepared(f"order-{number}", "order.paid", {}, using=sender, immune=0, wait=True):
        Group.objects.using(sender).create(name=f"order-{number}")
        if point == "written":
            kill()
        if point == "committed":
            transaction.on_commit(kill, using=sender)
        if point == "failed":
            raise ValueError("no money")


def main() -> None:
    django.setup()
    for line in sys.stdin:
        if not (child := os.fork()):
            code = 1
            try:
                pay(*line.split())
                code = 0
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
