"""Splits the table of the tests' orders, and makes an index of its keys, killed at each statement.

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
    from outbox_app.sharding import KeyIndex, ShardedTable
    from tests.splitting import run_operation

    order = order_model()
    rows = order._default_manager.using(alias)
    expected = list(rows.order_by("pk").values_list())
    for operation in (
        ShardedTable("Order", by="shop", shards=SHARDS, giving_up=["number"]),
        KeyIndex("Order", key="number", by="shop"),
    ):
        kills, status = 0, signal.SIGKILL
        while status == signal.SIGKILL:
            connections.close_all()
            if not (child := os.fork()):
                left = iter(range(kills + 1, 0, -1))

                def kill(execute, *args, left=left):
                    if next(left, None) == 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return execute(*args)

                with connections[alias].execute_wrapper(kill):
                    run_operation(operation, order, alias)
                connections.close_all()
                os._exit(0)
            _, status = os.waitpid(child, 0)
            kills += status == signal.SIGKILL
            # All rows are there, and each can be written.
            if list(rows.order_by("pk").values_list()) != expected:
                sys.exit(f"{operation.describe()} at {kills}: rows are missing")
            rows.create(shop="new", number="new", place=1)
            rows.filter(number="new").update(shop="newer", number="newer")
            rows.filter(number="newer").delete()
        if status:
            sys.exit(f"{operation.describe()} at {kills}: {status}")
        print(operation.describe(), kills, flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    django.setup()
    main(sys.argv[1])
