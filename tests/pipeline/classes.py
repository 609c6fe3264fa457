"""What Java loads for Spark, loaded once for all tests: ``python -m tests.pipeline.classes``.

A Java that ends leaves an archive of the classes that it had loaded (class-data sharing); those
that begin later map the file. A Spark of the tests takes half of the processor time to start.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from sqlite3 import connect
from tempfile import TemporaryDirectory
from typing import Any

from outbox_app.pipeline.session import NoSpark, spark_session

#: Java goes on without it where it is missing, or was made of other jars or by another Java.
ARCHIVE = Path(sys.prefix) / "spark.jsa"
#: Each Spark of the tests ends before code that is compiled well has paid for it. What is compiled
#: quickly has a fifth of the usual room by default, and Spark ends where that is full: the session
#: of the tests runs hundreds of queries.
OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m -XX:+UseSerialGC "
    "-Xlog:disable -Xlog:all=error:stderr"
)


def options() -> str:
    """Return the options of each Java of Spark, as ``SPARK_SUBMIT_OPTS`` has them."""
    return f'{OPTIONS} -XX:SharedArchiveFile="{ARCHIVE}"'


def make() -> None:
    """Write the archive; without a Java for Spark there is none."""
    ARCHIVE.unlink(missing_ok=True)
    os.environ["SPARK_SUBMIT_OPTS"] = f'{OPTIONS} -XX:ArchiveClassesAtExit="{ARCHIVE}"'
    try:
        session = spark_session(master="local[2]", name="classes")
    except NoSpark:
        return
    from outbox_app.pipeline.audit import audit
    from outbox_app.pipeline.schema import COLUMNS

    from .planted import LOG, plant

    with TemporaryDirectory() as folder, session as spark:
        # A shuffle, files, a stream, a log, an audit: what the pipelines have.
        spark.range(100).groupBy("id").count().write.parquet(f"{folder}/rows")
        stream = spark.readStream.schema("id long, count long").parquet(f"{folder}/rows")
        written = stream.writeStream.format("noop").option("checkpointLocation", f"{folder}/seen")
        written.trigger(availableNow=True).start().awaitTermination()
        with closing(connect(f"{folder}/log")) as file:
            columns = ("id INTEGER PRIMARY KEY AUTOINCREMENT", *COLUMNS[1:])
            file.execute(f"CREATE TABLE {LOG} ({', '.join(columns)})")
        spark.read.format("outbox").option("url", f"sqlite:///{folder}/log").load().count()
        log = plant(spark, 2000)
        audit(
            log.events, log=LOG, heads=log.heads, archived=log.archived, lowest=lambda: log.lowest
        )
        gateway: Any = spark.sparkContext._gateway
    gateway.proc.stdin.close()  # with it, Java ends
    gateway.proc.wait()


if __name__ == "__main__":
    make()
