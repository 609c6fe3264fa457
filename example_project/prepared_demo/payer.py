"""Pays orders, each in a process of its own, which ends as its outcome says.

The demo runs it as ``python -m example_project.prepared_demo.payer ORDER=OUTCOME …``.
"""

import gc
import os
import sys
from importlib import import_module

import django

from .outcomes import OUTCOMES, DeclinedError


def main(*payments):
    """Pay orders, one after the other."""
    import_module("outbox_app.door.signing")  # once here, rather than in each forked process
    gc.freeze()  # or the garbage collection at the exit of each process would scan all of Django
    for payment in payments:
        order, name = payment.split("=")
        in_a_process_of_its_own(lambda order=order, name=name: pay(order, OUTCOMES[name]))


def in_a_process_of_its_own(work):
    """Fork a process for the work, and wait until it ends or is killed."""
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        # Not os._exit(): at exit, calls to the shop that are in progress get time to finish.
        sys.exit(work())


def pay(order, outcome):
    """Pay an order, and print the error that the caller of ``services.pay()`` sees, if any."""
    from django.db import OperationalError

    from example_project.payments import services
    from outbox_app.prepared.exceptions import PreparedError

    print(f"{order}: {outcome.name}", flush=True)
    try:
        services.pay(order, 30, meanwhile=outcome.happens)
    except (DeclinedError, OperationalError, PreparedError) as error:
        print(f"{order}: {error!r}", flush=True)


if __name__ == "__main__":
    django.setup()
    main(*sys.argv[1:])
