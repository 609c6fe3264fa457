"""Pays orders; each payment is a process of its own, which ends as it has to.

``python -m example_project.prepared_demo.payer ORDER=OUTCOME …``: run by the demo.
"""

import gc
import os
import sys
from importlib import import_module

import django

from .outcomes import OUTCOMES, DeclinedError


def main(*payments):
    """Pay orders, one after the other."""
    import_module("outbox_app.door.signing")  # here, and not in each process
    gc.freeze()  # or each process would look at all that Django has loaded before it ends
    for payment in payments:
        order, name = payment.split("=")
        in_a_process_of_its_own(lambda order=order, name=name: pay(order, OUTCOMES[name]))


def in_a_process_of_its_own(work):
    """Fork, and wait for its end, which is a violent one at times."""
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        # Not os._exit(): calls to the shop that are under way get their time at exit.
        sys.exit(work())


def pay(order, outcome):
    """Pay an order, and say what the code that has called ``pay()`` sees."""
    from django.db import OperationalError

    from example_project.payments import services
    from outbox_app.exceptions import PreparedError

    print(f"{order}: {outcome.name}", flush=True)
    try:
        services.pay(order, 30, meanwhile=outcome.happens)
    except (DeclinedError, OperationalError, PreparedError) as error:
        print(f"{order}: {error!r}", flush=True)


if __name__ == "__main__":
    django.setup()
    main(*sys.argv[1:])
