"""A job of one's own, which runs the pipelines that read an archive in its session.

``python -m tests.pipeline.cluster_job MASTER ARCHIVE PROJECTION PASSWORD_FILE``. In the end it says
where executors have found the package.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import django

if __name__ == "__main__":
    django.setup()

from django.core.management import call_command

from outbox_app.pipeline.session import spark_session
from tests.pipeline.rebuilt import declared


def main(master: str, archive: str, projection: str, password_file: str) -> None:
    declared(projection)
    settings = {"spark.executor.memory": "512m", "spark.sql.shuffle.partitions": "2"}
    session = spark_session(master=master, settings=settings)
    for pipeline in (("audit",), ("statistics", "--to", "figures"), ("rebuild", projection)):
        given = ("--archive", archive, "--password-file", password_file)
        call_command("outbox_pipeline", *pipeline, *given)
    print("executors", *session.sparkContext.parallelize(range(2), 2).map(_package).collect())
    session.stop()


def _package(_: Any) -> str | None:
    return importlib.import_module("outbox_app").__file__


if __name__ == "__main__":
    main(*sys.argv[1:])
