"""Projections that Spark rebuilds in tests. Import it in a test, which forgets what is declared.

Executors are other processes, which have no projection that a test makes: they import this module.
As a program: ``python -m tests.pipeline.rebuilt NAME`` rebuilds one, in a process to be killed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import django

if __name__ == "__main__":
    django.setup()

from tests.events.projections.declared import SoldOf, StatusOf


class SparkSold(SoldOf):
    """Rows that many streams feed; some events are not asked for, and some rows go."""

    name = "spark_sold"
    topics = ("shop", "bob's % \\ shop")
    batch_size = 10


class SparkStatus(StatusOf):
    """Rows with versions, and deleted ones."""

    name = "spark_status"
    types = ("made", "gone", "bad", "x*")
    push = True
    batch_size = 10


PROJECTIONS = {each.name: each for each in (SparkSold, SparkStatus)}


def declared(name: str) -> Any:
    """Declare one anew: tests forget what was declared."""
    PROJECTIONS[name].__init_subclass__()
    return PROJECTIONS[name]


if __name__ == "__main__":
    from outbox_app.pipeline.driver.pipeline import log_options
    from outbox_app.pipeline.driver.rebuild import log_of, rebuild_on_spark
    from tests.pipeline.local_context import LocalContext

    log, using = log_of(sys.argv[1])
    options = log_options(log, using=using, password=os.environ.get("PASSWORD", ""))
    rebuild_on_spark(LocalContext(), options, sys.argv[1], write=print)
