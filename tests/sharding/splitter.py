"""Splits the table of the tests' orders, killed at each point, and makes an index of its keys.

Run as ``python -m tests.sharding.splitter ALIAS``; each run is a child that is forked from here.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings

import django
from django.db import connections, models
from django.db.models import F, Q

SHARDS = 4
POINTS = ("split_created", "split_watched", "split_copied", "split_synced")
LAST = {"postgres": ["split_swapped"], "mariadb": ["split_mirrored", "split_swapped"]}


def order_model():
    from django.apps.registry import Apps

    class Order(models.Model):  # noqa: DJ008
        shop = models.CharField(max_length=20)
        number = models.CharField(max_length=20, unique=True)
        place = models.IntegerField()
        note = models.TextField(db_default="")
        double = models.GeneratedField(
            expression=F("place") * 2, output_field=models.IntegerField(), db_persist=True
        )

        class Meta:
            apps = Apps()
            app_label = "shop"
            db_table = "split_order"
            indexes = (models.Index(fields=["place"], name="split_order_place"),)
            constraints = (
                models.UniqueConstraint(fields=["shop", "place"], name="split_order_once"),
                models.CheckConstraint(condition=Q(place__gt=0), name="split_order_positive"),
            )

    return Order


def main(alias: str) -> None:
    from outbox_app.failpoints import set_failpoint
    from outbox_app.sharding import KeyIndex, ShardedTable, table_copy
    from tests.splitting import run_operation

    table_copy.BATCH, table_copy.FEW = 300, 30
    order = order_model()
    steps = [
        (ShardedTable("Order", by="shop", shards=SHARDS, giving_up=["number"]), LAST[alias]),
        (KeyIndex("Order", key="number", by="shop"), []),
    ]
    for operation, last in steps:
        for point in (*POINTS, *last, None):
            if not (child := os.fork()):
                if point:
                    passes = iter(range(2 if point == "split_copied" else 1, 0, -1))

                    def kill(left=passes):
                        if next(left) == 1:
                            os.kill(os.getpid(), signal.SIGKILL)

                    set_failpoint(point, kill)
                run_operation(operation, order, alias)
                connections.close_all()
                os._exit(0)
            _, status = os.waitpid(child, 0)
            expected = signal.SIGKILL if point else 0
            if status != expected:
                sys.exit(f"{operation.describe()} at {point}: {status}")
            print(operation.describe(), point, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    django.setup()
    main(sys.argv[1])
