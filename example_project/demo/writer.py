"""One writer process: places orders, rolls back a third of them, and keeps a ledger.

Of six orders four commit. One is rolled back with its whole transaction, one with a savepoint
inside a transaction that commits the order before it. The call is always the shop's own
``place_order``; no line here says that its tasks are to be staged.
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

#: Seconds between two transactions. Without it four writers leave SQLite's lock to nobody else.
PAUSE = 0.01


class ChangedMyMind(Exception):
    """Raised to roll back."""


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
            # The jobs of the signal need not have a pk: staging does not ask for it. The first two
            # conditions are there for the index.
            row = self._rows.using(using).only("pk")
            row = row.get(app=job.app, shard=job.shard, task_id=job.task_id)
            self._staged[job.task.rpartition(".")[2]] = {"row": row.pk, "shard": job.shard}

    @contextmanager
    def _noting(self):
        """Write the orders of one transaction to the ledger once it has ended, however it ended."""
        entries = []
        try:
            yield entries
        except DatabaseError:
            # Where the error came at COMMIT nobody knows the outcome: the entries stay "unknown".
            traceback.print_exc()
            connection.close()
        for entry in entries:
            self._ledger.note(entry)
        self.placed += max(1, len(entries))


if __name__ == "__main__":
    main()
