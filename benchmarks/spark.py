"""The log on Spark: our source and the archive beside Spark's JDBC, the audit beside PostgreSQL.

All contestants are warm and read the same rows of the same tables, in turns, in one session of
``local[2]``. JDBC reads with as many partitions, over the same ranges of positions; its drivers are
Debian's, installed if they are missing. The archive also counts the rows of a batch once more and
sums their hashes; JDBC's copy to Parquet does neither (``archive`` measures just that). An archive
is read with ``read()``, which also looks for newer events in the log, beside the same files as
plain Parquet: once the largest archive, and once an archive of a million rows (``small``). A quick
run has one archive, and times no audit of two sizes.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import django

JARS = {
    "postgres": ("libpostgresql-jdbc-java", Path("/usr/share/java/postgresql.jar")),
    "mariadb": ("libmariadb-java", Path("/usr/share/java/mariadb-java-client.jar")),
}
ASKED = {
    "source_vs_jdbc": "at least 1.0 (PostgreSQL)",
    "source_vs_jdbc_mariadb": "at least 0.85",
    "archive_vs_jdbc_parquet": "at least 0.9",
    "archived_read_vs_parquet": "at least 0.9",
    "audit_vs_postgres": "at least 0.5",
    "growth_archive": "at least 0.85",
    "lost": "0",
    "duplicated": "0",
}
PARTITIONS = 2
#: Events of a stream.
VERSIONS = 10

Times = dict[str, float]

_COLUMNS = "id, topic, stream, version, type, {data}, slice, {message_id}, recorded_at"
_JDBC = {
    "postgres": _COLUMNS.format(
        data="data::text AS data", message_id="message_id::text AS message_id"
    ),
    "mariadb": _COLUMNS.format(data="data", message_id="CAST(message_id AS CHAR) AS message_id"),
}
_READ = (
    "id long, topic string, stream string, version long, type string, data string, slice int, "
    "message_id string, recorded_at timestamp"
)
_FILL = {
    "postgres": (
        "INSERT INTO outbox_event (topic, stream, version, type, data, metadata, slice, message_id)"
        " SELECT '', 'order-' || (i % {streams}), i / {streams} + 1, 'order.placed',"
        " jsonb_build_object('item', i, 'note', repeat('x', 120)), '{{}}', i % 1024,"
        " gen_random_uuid() FROM generate_series({first}::bigint, {last}) i"
    ),
    "mariadb": (
        "INSERT INTO outbox_event (txid, topic, stream, version, type, data, metadata, slice,"
        " message_id, recorded_at) SELECT 0, '', CONCAT('order-', seq % {streams}),"
        " seq DIV {streams} + 1, 'order.placed',"
        " JSON_OBJECT('item', seq, 'note', REPEAT('x', 120)), '{{}}', seq % 1024, UUID(),"
        " UTC_TIMESTAMP(6) FROM seq_{first}_to_{last}"
    ),
}
_HEADS = (
    "INSERT INTO outbox_stream (log, stream, version) "
    "SELECT 'outbox_event', stream, MAX(version) FROM outbox_event GROUP BY stream"
)
#: The audit's checks of the log, as one statement of PostgreSQL.
_AUDIT = """
    SELECT count(*) FROM (
        SELECT version, id,
               lag(version) OVER w AS before, lag(id) OVER w AS before_id
        FROM outbox_event WINDOW w AS (PARTITION BY stream ORDER BY version, id)
    ) v WHERE version <> coalesce(before, 0) + 1 OR id < before_id
"""


def run(*, quick: bool) -> dict[str, Any]:
    """Run the rounds.

    Returns:
        ``ratios`` (medians over the rounds; above 1 means faster than the comparison),
        ``asked``, ``rounds`` (seconds each), ``growth`` (seconds by number of rows), ``lost`` and
        ``duplicated`` (events of the archive against the log).
    """
    django.setup()
    events, audited, rounds = (150_000, 150_000, 2) if quick else (1_000_000, 2_200_000, 5)
    sizes = (50_000, 150_000) if quick else (1_000_000, 3_000_000, 10_000_000)
    measured: dict[str, list[Times]] = {}
    with _databases() as aliases, _session() as session, tempfile.TemporaryDirectory() as folder:
        for alias in aliases:
            _fill(alias, events)
            measured[alias] = _in_turns(rounds, _readers(session, alias, Path(folder)), alias)
        archive = _in_turns(rounds, _archives(session, Path(folder)), "archive")
        exact = _compare(Path(folder) / "archive")
        if audited != events:
            _fill("postgres", audited)
        audit = _in_turns(1 if quick else rounds, _audits(session), "audit")
        growth = {}
        for size in sizes:
            _fill("postgres", size)
            work = {"archive": _archive(session, Path(folder))}
            if not quick:
                work |= _audits(session)
            growth[str(size)] = {name: _timed(each) for name, each in work.items()}
            print(f"growth {size}: {_told(growth[str(size)])}", flush=True)
        large = archive
        if not quick:
            large = _in_turns(rounds, _archive_readers(session, Path(folder)), f"archive of {size}")
    ratios = {
        "source_vs_jdbc": _lowest(measured["postgres"]),
        "source_vs_jdbc_mariadb": _lowest(measured["mariadb"]),
        "archive_vs_jdbc_parquet": _ratio(archive, "jdbc_all_parquet", "archive"),
        "archived_read_vs_parquet": _ratio(large, "plain_files", "archived_read"),
        "archived_read_vs_parquet_small": _ratio(archive, "plain_files", "archived_read"),
        "audit_vs_postgres": _ratio(audit, "postgres", "audit"),
        **exact,
    }
    for alias, turns in measured.items():
        for what in ("aggregate", "parquet"):
            ratios[f"{what}_vs_jdbc_{alias}"] = _ratio(turns, f"jdbc_{what}", f"source_{what}")
    first, last = str(sizes[0]), str(sizes[-1])
    for name in growth[first]:
        ratios[f"growth_{name}"] = (growth[first][name] / sizes[0]) / (
            growth[last][name] / sizes[-1]
        )
    return {
        "ratios": ratios,
        "asked": ASKED,
        **exact,
        "rounds": {**measured, "archive": archive, "audit": audit, "large": large},
        "growth": growth,
    }


def _readers(session: Any, alias: str, folder: Path) -> dict[str, Callable[[], None]]:
    """Return the readers of an alias's log. The aggregate depends on the bytes of every column."""
    output = str(folder / "written")

    def parquet(frame: Any) -> None:
        frame.write.mode("overwrite").parquet(output)

    def source() -> Any:
        return _log(session.read, alias).schema(_READ).load()

    def jdbc() -> Any:
        return _jdbc(session, alias)

    return {
        "source_aggregate": lambda: _aggregate(source()),
        "jdbc_aggregate": lambda: _aggregate(jdbc()),
        "source_parquet": lambda: parquet(source()),
        "jdbc_parquet": lambda: parquet(jdbc()),
    }


def _archives(session: Any, folder: Path) -> dict[str, Callable[[], None]]:
    """Return the archiver, JDBC's copy of the same columns, and the readers of the archive."""

    def copied() -> None:
        frame = _jdbc(session, "postgres", beside=", txid, metadata::text AS metadata")
        frame.write.mode("overwrite").parquet(str(folder / "copied"))

    return {
        "archive": _archive(session, folder),
        "jdbc_all_parquet": copied,
        **_archive_readers(session, folder),
    }


def _archive_readers(session: Any, folder: Path) -> dict[str, Callable[[], None]]:
    """Return the readers of the archive: ``read()``, called anew each time, and Spark's Parquet."""
    from outbox_app.pipeline import read

    def archived() -> None:
        log = _options("postgres")
        _aggregate(read(session, log=log, archive=str(folder / "archive"), schema=_READ))

    def plain() -> None:
        files = map(str, (folder / "archive").glob("recorded_date=*/*.parquet"))
        _aggregate(session.read.parquet(*files))

    return {"archived_read": archived, "plain_files": plain}


def _archive(session: Any, folder: Path) -> Callable[[], None]:
    from outbox_app.events.models import Event
    from outbox_app.pipeline.archiver import Archiver
    from outbox_app.pipeline.driver.pipeline import log_options

    def archive() -> None:
        shutil.rmtree(folder / "archive", ignore_errors=True)
        options = log_options(Event, using="postgres")
        to = str(folder / "archive")
        Archiver(session, options, to, write=lambda line: None).run()

    return archive


def _audits(session: Any) -> dict[str, Callable[[], None]]:
    """Return the audit, and the same checks as one statement of PostgreSQL."""
    from django.db import connections

    from outbox_app.pipeline.audit import audit
    from outbox_app.pipeline.audit_checks import EVENTS_SCHEMA

    def ours() -> None:
        # ``outbox_pipeline audit`` reads the events in this way.
        events = _log(session.read, "postgres").schema(EVENTS_SCHEMA).load()
        heads = _log(session.read, "postgres").option("read", "heads").load()
        assert not audit(events, log="outbox_event", heads=heads).counts

    def postgres() -> None:
        with connections["postgres"].cursor() as cursor:
            cursor.execute(_AUDIT)
            assert cursor.fetchone() == (0,)

    return {"audit": ours, "postgres": postgres}


def _compare(folder: Path) -> dict[str, int]:
    """Compare the archive with the log, by position."""
    from deltalake import DeltaTable
    from django.db import connections

    found = DeltaTable(folder).to_pyarrow_dataset().to_table(columns=["id"])
    archived = found["id"].to_pylist()
    with connections["postgres"].cursor() as cursor:
        cursor.execute("SELECT id FROM outbox_event")
        written = {id for (id,) in cursor.fetchall()}
    return {
        "lost": len(written - set(archived)),
        "duplicated": len(archived) - len(set(archived)),
    }


def _aggregate(frame: Any) -> None:
    frame.selectExpr(
        "count(*)", "sum(id + version + slice)", "max(recorded_at)",
        "sum(length(concat(topic, stream, type, data, message_id)))",
    ).collect()  # fmt: skip


def _log(reader: Any, alias: str) -> Any:
    return reader.format("outbox").options(**_options(alias))


def _options(alias: str) -> dict[str, str]:
    from outbox_app.pipeline.driver.pipeline import PASSWORD, database_url

    given = {"url": database_url(alias), "partitions": PARTITIONS, "passwordEnv": PASSWORD}
    return {name: str(value) for name, value in given.items()}


def _jdbc(session: Any, alias: str, beside: str = "") -> Any:
    from django.db import connections

    given = connections[alias].settings_dict
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT min(id), max(id) + 1 FROM outbox_event")
        first, last = cursor.fetchone()
    vendor = "postgresql" if alias == "postgres" else "mysql"
    return (
        session.read.format("jdbc")
        # Under jdbc:mariadb Spark puts names in double quotes, which MariaDB takes for strings.
        .option("url", f"jdbc:{vendor}://{given['HOST']}:{given['PORT']}/{given['NAME']}"
                + ("" if alias == "postgres" else "?permitMysqlScheme&useSsl=false"))
        .option("driver", {"postgres": "org.postgresql.Driver",
                           "mariadb": "org.mariadb.jdbc.Driver"}[alias])
        .option("dbtable", f"(SELECT {_JDBC[alias]}{beside} FROM outbox_event) log")
        .option("user", given["USER"]).option("password", given["PASSWORD"])
        .option("fetchsize", 10_000)
        .option("partitionColumn", "id").option("lowerBound", first).option("upperBound", last)
        .option("numPartitions", PARTITIONS)
        .load()
    )  # fmt: skip


def _fill(alias: str, events: int) -> None:
    from django.db import connections

    streams = max(1, events // VERSIONS)
    with connections[alias].cursor() as cursor:
        for table in ("outbox_event", "outbox_stream"):
            cursor.execute(f"TRUNCATE TABLE {table}")
        for first in range(0, events, 1_000_000):
            last = min(first + 1_000_000, events) - 1
            cursor.execute(_FILL[alias].format(streams=streams, first=first, last=last))
        cursor.execute(_HEADS)
        cursor.execute(
            "ANALYZE TABLE outbox_event" if alias == "mariadb" else "VACUUM ANALYZE outbox_event"
        )


def _in_turns(rounds: int, contestants: dict[str, Callable[[], None]], what: str) -> list[Times]:
    """Time every contestant in each round; a first turn warms up and does not count."""
    turns = []
    for number in range(rounds + 1):
        turn = {name: _timed(each) for name, each in contestants.items()}
        if number:
            turns.append(turn)
            print(f"{what} {number}/{rounds}: {_told(turn)}", flush=True)
    return turns


def _timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _told(times: Times) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items())


def _ratio(turns: list[Times], other: str, ours: str) -> float:
    return statistics.median(turn[other] / turn[ours] for turn in turns)


def _lowest(turns: list[Times]) -> float:
    return min(_ratio(turns, f"jdbc_{what}", f"source_{what}") for what in ("aggregate", "parquet"))


@contextmanager
def _databases() -> Iterator[list[str]]:
    """Work in new scratch databases."""
    from django.db import connections

    made = []
    try:
        for alias in ("postgres", "mariadb"):
            name = connections[alias].settings_dict["NAME"]
            connections[alias].creation.create_test_db(verbosity=0, autoclobber=True)
            made.append((alias, name))
        yield [alias for alias, _ in made]
    finally:
        for alias, name in made:
            connections[alias].creation.destroy_test_db(name, verbosity=0)


@contextmanager
def _session() -> Iterator[Any]:
    from django.db import connections

    from outbox_app.pipeline.driver.pipeline import PASSWORD
    from outbox_app.pipeline.session import spark_session

    os.environ[PASSWORD] = str(connections["mariadb"].settings_dict["PASSWORD"])
    session = spark_session(
        master="local[2]",
        settings={"spark.jars": ",".join(map(str, _jars())), "spark.driver.memory": "4g"},
    )
    try:
        yield session
    finally:
        session.stop()


def _jars() -> list[Path]:
    missing = [package for package, jar in JARS.values() if not jar.exists()]
    if missing:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        command = ["apt-get", "-y", "-q", "install", "--no-install-recommends", *missing]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return [jar for _, jar in JARS.values()]
