"""Spark sessions: a light one on this machine, or the one that runs already.

A light session has no web UI, no Hive, as many shuffle partitions as cores, and only the loopback
interface. A session that is running already, or that of ``spark-submit``, is used as it is.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .exceptions import NoSpark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The oldest Java that Spark 4 runs on.
JAVA = 17
#: The setting with the number of tasks after a shuffle.
SHUFFLE = "spark.sql.shuffle.partitions"

_LOGGING = Path(__file__).with_name("log4j2.properties").as_uri()

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.session.timeZone": "UTC",
    # INT96, the default, has no statistics that other readers could use.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Frames are kept for a few readings: compressing them takes longer than it saves.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_LOGGING}",
}
_LOCAL_SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.sql.warehouse.dir": os.path.join(tempfile.gettempdir(), "outbox-warehouse"),
}

#: The last line of a Python traceback: one of our exceptions, or another one, and its message.
_RAISED = [
    re.compile(r"^outbox_app\.(?:\w+\.)+(\w+): (.+)$", re.MULTILINE),
    re.compile(r"^(?!py4j)(?:\w+\.)*(\w*(?:Error|Exception)): (.+)$", re.MULTILINE),
    # An exception of Spark itself, as py4j writes it.
    re.compile(r"^: (?:\w+\.)+(\w+): (.+)$", re.MULTILINE),
]


def spark_session(
    *,
    master: str | None = None,
    name: str = "outbox_pipeline",
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a session that knows the data source ``outbox``.

    Args:
        master: Where Spark runs, as in ``--master``. Default: this machine, all cores; under
            ``spark-submit``, or with an active session, the master that is set there.
        name: The name of the application.
        settings: Settings of Spark, which override ours. Never put a password there: they are
            written to Spark's event log, and to arguments of processes.

    Raises:
        NoSpark: PySpark, pyarrow or deltalake is missing, or Spark has not started, as without a
            Java of at least version 17.
    """
    try:
        import deltalake  # noqa: F401 (for archives)
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql import SparkSession

        from .source import register
    except ImportError as error:
        raise NoSpark(
            f"Pipelines need PySpark, pyarrow and deltalake, and {error.name} cannot be imported: "
            "pip install 'outbox-app[spark]'. Everything else of outbox_app works without."
        ) from error
    if is_running():  # the active session may be another thread's
        session = SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
    else:
        builder = SparkSession.builder.appName(name)
        conf: dict[str, Any] = {}
        if not _is_submitted():
            # The 4 lets tasks be retried, as on a cluster.
            master = master or "local[*,4]"
            progress = str(sys.stderr.isatty()).lower()
            conf = {**_SETTINGS, "spark.ui.showConsoleProgress": progress}
            if master.startswith("local"):
                # PySpark would take any python3 on the PATH. A cluster has its own.
                os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
                conf |= _LOCAL_SETTINGS
        if master:
            builder = builder.master(master)
        conf |= settings or {}
        try:
            session = builder.config(map=conf).getOrCreate()
        except PySparkRuntimeError as error:
            raise NoSpark(
                f"Spark has not started: {reason(error).rstrip('.')}. It needs Java {JAVA} or "
                "later. Install it (Debian and Ubuntu: apt-get install openjdk-17-jre-headless), "
                "or let JAVA_HOME name one. Everything else of outbox_app works without."
            ) from error
        if is_local(master) and SHUFFLE not in conf:
            session.conf.set(SHUFFLE, session.sparkContext.defaultParallelism)
    register(session)
    return session


def is_running() -> bool:
    """Return whether Spark runs in this process already."""
    try:
        from pyspark import SparkContext
    except ImportError:
        return False
    return SparkContext._active_spark_context is not None


def is_local(master: str | None) -> bool:
    """Return whether this process would start the executors of a session with this master."""
    return not _is_submitted() and (master is None or master.startswith("local"))


def _is_submitted() -> bool:
    return "PYSPARK_GATEWAY_PORT" in os.environ


def reason(error: BaseException) -> str:
    """Return the error of a task or of Spark in one line; the tracebacks are in Spark's log."""
    text = str(error)
    for pattern in _RAISED:
        if raised := pattern.search(text):
            return f"{raised[1]}: {raised[2]}"
    line = text.strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
