"""One writer process: places orders, rolls back a third of them, and keeps a ledger.

Of six orders four are committed. One is rolled back with its whole transaction, and one with a
savepoint, inside a transaction that commits the order before it. The writer always calls the shop's
own ``place_order``; no line here says that its tasks are to be staged.
"""

import argparse
import itertools
import random
import time
import traceback
from contextlib import contextmanager, suppress
from pathlib import Path

import django
from django.db import DatabaseError, connection, transaction

from .ledger import COMMITTED, ROLLED_BACK, Entry, Ledger

#: Seconds between two transactions. Without it four writers keep SQLite's lock to themselves.
PAUSE = 0.01


class ChangedMyMind(Exception):
    """Raised inside a transaction to roll it back."""


def main():
    """Place as many orders as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    options = parser.parse_args()
    django.setup()
    customer = Customer(Ledger(options.ledger))
    transactions = [
        customer.commits,
        customer.rolls_back,
        customer.commits,
        customer.rolls_back_to_a_savepoint,
        customer.commits,
    ]
    for transact in itertools.cycle(transactions):
        if customer.placed >= options.orders:
            break
        transact()
        time.sleep(PAUSE)


class Customer:
    """Places orders. Each public method is one transaction."""

    def __init__(self, ledger):
        from example_project.shop.models import Stock
        from outbox_app.models import StagedJob
        from outbox_app.signals import jobs_staged

        self.placed = 0
        self._ledger = ledger
        self._articles = list(Stock.objects.all())
        self._staged = {}
        self._rows = StagedJob.objects
        jobs_staged.connect(self._remember_rows)

    def commits(self):
        with self._noting() as entries:
            with transaction.atomic():
                entries.append(self._place())
            entries[0].outcome = COMMITTED

    def rolls_back(self):
        with self._noting() as entries:
            with suppress(ChangedMyMind), transaction.atomic():
                entries.append(self._place())
                raise ChangedMyMind
            entries[0].outcome = ROLLED_BACK

    def rolls_back_to_a_savepoint(self):
        with self._noting() as entries:
            with transaction.atomic():
                entries.append(self._place())
                with suppress(ChangedMyMind), transaction.atomic():
                    entries.append(self._place())
                    raise ChangedMyMind
            entries[0].outcome = COMMITTED
            entries[1].outcome = ROLLED_BACK
            entries[1].by_savepoint = True

    def _place(self):
        from example_project.shop.services import place_order

        self._staged = {}
        order = place_order("demo@example.com", random.choice(self._articles))
        return Entry(order=str(order.pk), staged=self._staged)

    def _remember_rows(self, using, jobs, **kwargs):
        for job in jobs:
            # A job of the signal need not have a pk: staging does not read it back. The query names
            # app and shard so that it can use the index.
            row = self._rows.using(using).only("pk")
            row = row.get(app=job.app, shard=job.shard, task_id=job.task_id)
            self._staged[job.task.rpartition(".")[2]] = {"row": row.pk, "shard": job.shard}

    @contextmanager
    def _noting(self):
        """Write a transaction's orders to the ledger after its end, committed or not."""
        entries = []
        try:
            yield entries
        except DatabaseError:
            # After an error at COMMIT the outcome is not known: the entries stay "unknown".
            traceback.print_exc()
            connection.close()
        for entry in entries:
            self._ledger.note(entry)
        self.placed += max(1, len(entries))


if __name__ == "__main__":
    main()
